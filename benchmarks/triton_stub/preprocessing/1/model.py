import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Converts bytes to token ids."""

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flat[0]
            ids = np.frombuffer(text, np.uint8).astype(np.int32)[None]
            length = pb_utils.get_input_tensor_by_name(request, "max_tokens")
            outputs = [pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("request_output_len", length.as_numpy())]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
