"""The names under which LMI's model repositories hold the engine of each rank."""

from __future__ import annotations

from stoker.base.config import Mapping


def rank_names(dtype: str, mapping: Mapping) -> list[str]:
    """One a rank, in their order: trt_llm_model_float16_tp2_rank0, …; with stages as TensorRT-LLM has it, tp2_pp2_rank0."""
    stages = f"_pp{mapping.pipeline_parallel}" if mapping.pipeline_parallel > 1 else ""
    return [f"trt_llm_model_{dtype}_tp{mapping.tensor_parallel}{stages}_rank{rank}" for rank in range(mapping.world_size)]
