"""The Hugging Face keys of experts, from `moe` or the keys `moe_*` of a config.json of TensorRT-LLM."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.tensorrt_llm.families.family import Family
from stoker.builder.checkpoint.tensorrt_llm.tensors import Data

MIGRATION = "Build from the Hugging Face checkpoint that it was converted from."
_MAX_SIZE = 1 << 24
MAX_EXPERTS = 4096
_CURE = "Correct config.json."
_NORMALIZATIONS = ("NONE", "RENORMALIZE", "SPARSE_MIXER", "DEVICE_LIMITED", "DEVICE_LIMITED_RENORM")  # by number


def check_size(data: Data, key: str, where: str, least: int = 1) -> None:
    """Raise CheckpointError unless `key` is absent, or an integer from `least` to 2**24."""
    if data.get(key) is not None and (type(data[key]) is not int or not least <= data[key] <= _MAX_SIZE):
        raise CheckpointError(f"{where}: {key}={str(data[key])[:60]!r} is not a positive number.", cure=_CURE)


def expert_keys(data: Data, family: Family, where: str) -> dict[str, Any]:
    """The keys of experts of a checkpoint in the directory `where`.

    Raises CheckpointError for numbers out of range, and for a normalization that is not that of the architecture.
    """
    moe: Data = data.get("moe") or {key.removeprefix("moe_"): data[key] for key in data if key.startswith("moe_")}
    mode = _normalization(moe, family, where)
    for key in ("num_experts", "top_k"):
        if type(moe.get(key)) is not int or not 1 <= moe[key] <= MAX_EXPERTS:
            raise CheckpointError(f"{where}: moe.{key}={str(moe.get(key))[:60]!r} is not from 1 to {MAX_EXPERTS}.", cure=_CURE)
    found = {family.num_experts_key: moe["num_experts"], "num_experts_per_tok": moe["top_k"]}
    if family.num_experts_key == "num_local_experts":
        return found | ({"router_jitter_noise": moe.get("sparse_mixer_epsilon", 0.01)} if mode == 2 else {})
    for key in ("moe_intermediate_size", "moe_inter_size", "moe_shared_expert_intermediate_size"):
        check_size(data, key, where, least=0)
    width = data.get("moe_intermediate_size", data.get("moe_inter_size"))
    found |= {"moe_intermediate_size": width} | ({"norm_topk_prob": mode == 1} if mode < 2 else {})
    if family.num_experts_key == "n_routed_experts":
        shared = moe.get("shared_expert_intermediate_size")
        if type(shared) is not int or type(width) is not int or width < 1 or shared < 1 or shared % width:
            raise CheckpointError(
                f"{where}: moe.shared_expert_intermediate_size={str(shared)[:60]!r} is no multiple of moe_intermediate_size.", cure=_CURE
            )
        return found | {"n_shared_experts": shared // width}
    shared = data.get("moe_shared_expert_intermediate_size")
    return found | ({"shared_expert_intermediate_size": shared} if shared else {})


def _normalization(moe: Data, family: Family, where: str) -> int:
    """The number of moe.normalization_mode; by default the first one that the family supports. Raises CheckpointError for another one."""
    mode = moe.get("normalization_mode", family.normalizations[0])
    mode = 1 if mode is None else _NORMALIZATIONS.index(mode) if mode in _NORMALIZATIONS else mode
    if mode not in family.normalizations:
        supported = " and ".join(f"{number} ({_NORMALIZATIONS[number]})" for number in family.normalizations)
        raise CheckpointError(f"{where}: moe.normalization_mode={str(mode)[:60]!r} is not supported, only {supported}.", cure=MIGRATION)
    return int(mode)
