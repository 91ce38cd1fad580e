import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Bytes as token ids."""

    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flat[0]
            ids = np.frombuffer(text, np.uint8).astype(np.int32)[None]
            length = pb_utils.get_input_tensor_by_name(request, "max_tokens")
            outputs = [pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("request_output_len", length.as_numpy())]
            answers.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return answers
