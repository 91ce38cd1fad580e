import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends one token per step for every running request, like an in-flight batcher, without a pause between steps."""

    def initialize(self, args):
        self._arrived = threading.Condition()
        self._new = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def execute(self, requests):
        with self._arrived:
            for request in requests:
                count = int(pb_utils.get_input_tensor_by_name(request, "request_output_len").as_numpy().flat[0])
                self._new.append([request.get_response_sender(), count])
            self._arrived.notify()

    def _run(self):
        token = pb_utils.Tensor("output_ids", np.full((1, 1), 97, np.int32))
        running = []
        while not self._stopping:
            with self._arrived:
                while not running and not self._new and not self._stopping:
                    self._arrived.wait()
                running += self._new
                self._new = []
            for row in running:
                row[1] -= 1
                final = 0 if row[1] else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                row[0].send(pb_utils.InferenceResponse(output_tensors=[token]), flags=final)
            running = [row for row in running if row[1]]

    def finalize(self):
        with self._arrived:
            self._stopping = True
            self._arrived.notify()
        self._thread.join()
