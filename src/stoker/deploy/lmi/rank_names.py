"""Names of the rank files in LMI's layout for prebuilt engines."""

from __future__ import annotations

from stoker.base.config import Mapping


def rank_names(dtype: str, mapping: Mapping) -> list[str]:
    """One name per rank, in order, as TensorRT-LLM writes them: trt_llm_model_float16_tp2_rank0, or tp2_pp2_rank0 with pipeline stages."""
    stages = f"_pp{mapping.pipeline_parallel}" if mapping.pipeline_parallel > 1 else ""
    return [f"trt_llm_model_{dtype}_tp{mapping.tensor_parallel}{stages}_rank{rank}" for rank in range(mapping.world_size)]
