import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Token ids as bytes."""

    def execute(self, requests):
        answers = []
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "output_ids").as_numpy()
            text = np.array([[bytes(ids[0].astype(np.uint8))]], dtype=object)
            answers.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", text)]))
        return answers
