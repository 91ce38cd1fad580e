"""The tensor maps of the three steps of the ensemble, with the tensor names of v0.18."""

from __future__ import annotations

from stoker.server.protocols.kserve.model_config import Step, tensors

# Tensor of preprocessing → input of the ensemble.
_PREPROCESSING_INPUTS = {
    "QUERY": "text_input",
    "DECODER_QUERY": "decoder_text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
# (Tensor of preprocessing, internal tensor of the ensemble, tensor of tensorrt_llm).
_BETWEEN = (
    ("INPUT_ID", "_INPUT_ID", "input_ids"),
    ("REQUEST_INPUT_LEN", "_REQUEST_INPUT_LEN", "input_lengths"),
    ("DECODER_INPUT_ID", "_DECODER_INPUT_ID", "decoder_input_ids"),
    ("REQUEST_DECODER_INPUT_LEN", "_REQUEST_DECODER_INPUT_LEN", "decoder_input_lengths"),
    ("REQUEST_OUTPUT_LEN", "_REQUEST_OUTPUT_LEN", "request_output_len"),
    ("STOP_WORDS_IDS", "_STOP_WORDS_IDS", "stop_words_list"),
    ("BAD_WORDS_IDS", "_BAD_WORDS_IDS", "bad_words_list"),
    ("EMBEDDING_BIAS", "_EMBEDDING_BIAS", "embedding_bias"),
    ("OUT_END_ID", "_PREPROCESSOR_END_ID", "end_id"),
    ("OUT_PAD_ID", "_PREPROCESSOR_PAD_ID", "pad_id"),
    ("OUT_PROMPT_TABLE_EXTRA_IDS", "_OUT_PROMPT_TABLE_EXTRA_IDS", "prompt_table_extra_ids"),
)
# Input of the ensemble → tensor of tensorrt_llm, where the names differ.
_RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty", "stream": "streaming"}
_TOKENS = {"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH"}


def role(side: str, step_tensor: str) -> str:
    """The v0.18 name of the ensemble's input or output that is connected to this tensor of a step."""
    if side == "output":
        return "text_output" if step_tensor == "OUTPUT" else step_tensor
    direct = {target: name for name, target in _RENAMED.items()}
    return _PREPROCESSING_INPUTS.get(step_tensor) or direct.get(step_tensor, step_tensor)


def steps() -> tuple[Step, ...]:
    """The three steps. Every input of the ensemble is an input of a step, and every output is an output of a step."""
    inputs, outputs = tensors("ensemble")
    direct = [tensor.name for tensor in inputs if tensor.name not in _PREPROCESSING_INPUTS.values()]
    results = {tensor.name: tensor.name for tensor in outputs if tensor.name != "text_output"}
    return (
        Step(
            model_name="preprocessing",
            input_map=dict(_PREPROCESSING_INPUTS),
            output_map={source: private for source, private, _ in _BETWEEN},
        ),
        Step(
            model_name="tensorrt_llm",
            input_map={target: private for _, private, target in _BETWEEN} | {_RENAMED.get(name, name): name for name in direct},
            output_map=_TOKENS | results,
        ),
        Step(
            model_name="postprocessing",
            input_map={"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"},
            output_map={"OUTPUT": "text_output"},
        ),
    )
