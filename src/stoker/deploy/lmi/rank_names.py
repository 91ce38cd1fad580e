"""Names of the rank files in LMI's layout for prebuilt engines."""

from __future__ import annotations

from stoker.base.config import Mapping


def rank_names(dtype: str, mapping: Mapping) -> list[str]:
    """The names of the rank files in order, as TensorRT-LLM writes them.

    Examples are trt_llm_model_float16_tp2_rank0 and, with pipeline stages, trt_llm_model_float16_tp2_pp2_rank0.
    """
    stages = f"_pp{mapping.pipeline_parallel}" if mapping.pipeline_parallel > 1 else ""
    return [f"trt_llm_model_{dtype}_tp{mapping.tensor_parallel}{stages}_rank{rank}" for rank in range(mapping.world_size)]
