import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Converts token ids to bytes."""

    def execute(self, requests):
        responses = []
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "output_ids").as_numpy()
            text = np.array([[bytes(ids[0].astype(np.uint8))]], dtype=object)
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", text)]))
        return responses
