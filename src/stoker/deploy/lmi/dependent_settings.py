"""Settings of an LMI folder that depend on each other: lengths, quantization, rotary scaling, ranks and devices."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from stoker.deploy.collected_settings import CollectedSettings, invalid_value
from stoker.deploy.deployment import DEFAULT
from stoker.deploy.devices import check_world
from stoker.deploy.lmi.model_settings import OTHER_LENGTHS

BATCH_SIZE = 32
KV_CACHE_FRACTION = 0.95
_QUANTIZATION_DEFAULTS: dict[str, dict[str, Any]] = {
    "SMOOTH_QUANT": {"alpha": 0.8, "per_token": False, "per_channel": False},
    "AWQ": {"calibration_size": 32, "group_size": 128},
}
# Sections of the field table for settings of one quantization format, or of any.
_QUANTIZATION_SECTIONS = ("SMOOTH_QUANT", "AWQ", "any")


def apply_dependent_settings(settings: CollectedSettings, folder: Path, gpus: int) -> None:
    """Add defaults and convert keys that have a meaning only together with others. `gpus` is the number of visible GPUs."""
    _set_lengths(settings)
    _select_quantization_settings(settings)
    _check_rotary_scaling(settings)
    _set_ranks(settings, gpus)
    _set_devices(settings, gpus)
    settings.set_default("runtime.policy", "max_utilization")
    settings.set_default("runtime.max_queue_size", 1000)
    if gpus:
        settings.set_default("runtime.kv_cache_fraction", KV_CACHE_FRACTION)
    _set_checkpoint(settings, folder)


def _set_checkpoint(settings: CollectedSettings, folder: Path) -> None:
    """Set the checkpoint from option.model_dir, if option.model_id is not set. The default is the model folder."""
    directory = settings.pop("model_dir")
    if directory and settings.get("build.checkpoint") is None:
        settings.set("build.checkpoint", directory.value, directory.origin, directory.key)
    elif directory:
        settings.note(directory.key, f"{settings.setting('build.checkpoint').key} names the model", directory.origin)
    settings.set_default("build.checkpoint", str(folder))


def _set_lengths(settings: CollectedSettings) -> None:
    """Set default lengths and the default batch size."""
    total = settings.get("limits.max_total_len")
    max_input_len, max_output_len = OTHER_LENGTHS if total is None else (total - 1, total - 1)
    settings.set_default("limits.max_batch_size", BATCH_SIZE)
    settings.set_default("limits.max_input_len", max_input_len)
    settings.set_default("limits.max_output_len", max_output_len)


def _select_quantization_settings(settings: CollectedSettings) -> None:
    """Convert AWQ.X, SMOOTH_QUANT.X and any.X to settings of the selected quantization. Settings of other formats get a note."""
    selected = settings.get("build.quantization")
    for target in sorted(settings.targets(), key=lambda target: target.startswith("any.")):
        owner, _, name = target.partition(".")
        if owner not in _QUANTIZATION_SECTIONS:
            continue
        setting = settings.setting(target)
        settings.pop(target)
        if owner not in (selected, "any") or selected is None:
            text = f"it is a setting of {'option.quantize' if owner == 'any' else owner}, and option.quantize is {selected or 'not set'}"
            settings.note(setting.key, text, setting.origin, "warning")
        else:
            settings.set(f"quantization.{name}", setting.value, setting.origin, setting.key)
    for name, value in _QUANTIZATION_DEFAULTS.get(selected, {}).items():
        settings.set_default(f"quantization.{name}", value)


def _check_rotary_scaling(settings: CollectedSettings) -> None:
    """Raise ConfigError if only one of the two settings of rotary scaling is set."""
    pair = ("extra.rotary_scaling_type", "extra.rotary_scaling_factor")
    present = [target for target in pair if settings.get(target) is not None]
    if len(present) == 1:
        alone = settings.setting(present[0])
        limit = "rotary_scaling_type and rotary_scaling_factor must be set together"
        raise invalid_value(alone.origin, alone.key, alone.value, limit, "Set both, or neither.")


def _set_ranks(settings: CollectedSettings, gpus: int) -> None:
    """Convert tensor_parallel_degree=max (0, the default) to visible GPUs ÷ the other degrees, or to 1 without a GPU."""
    others = settings.get("mapping.pipeline_parallel", 1) * settings.get("mapping.data_parallel", 1)
    if settings.get("mapping.tensor_parallel", 0) == 0:
        present = settings.pop("mapping.tensor_parallel")
        origin, key = (present.origin, present.key) if present else (DEFAULT, "option.tensor_parallel_degree")
        settings.set("mapping.tensor_parallel", max(1, gpus // others), origin, key)
    setting = settings.setting("mapping.tensor_parallel")
    world_size = setting.value * others
    check_world(world_size, gpus, str(setting.origin), setting.key)
    if world_size > 1 and not gpus:
        settings.note(setting.key, f"no GPU is visible: {world_size} ranks share the CPU", setting.origin, "warning")
    _set_attention_dp(settings)


def _set_attention_dp(settings: CollectedSettings) -> None:
    """Convert enable_attention_dp: the tensor-parallel ranks become data-parallel ones with expert parallelism."""
    setting, ranks = settings.pop("attention_dp"), settings.setting("mapping.tensor_parallel")
    if setting is None or not setting.value:
        return
    if ranks.value == 1:
        settings.note(setting.key, "there is one rank", setting.origin)
        return
    settings.pop("mapping.tensor_parallel")
    settings.set("mapping.tensor_parallel", 1, setting.origin, setting.key)
    settings.set("mapping.data_parallel", ranks.value, setting.origin, setting.key)
    settings.set("mapping.expert_parallel", True, setting.origin, setting.key)


def _set_devices(settings: CollectedSettings, gpus: int) -> None:
    """Convert load_on_devices: indices separated by ; or , or * for all devices."""
    setting = settings.pop("runtime.devices")
    if setting is None or setting.value in ("", "*"):
        return
    parts = [part.strip().removeprefix("gpu") for part in re.split("[;,]", setting.value)]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        limit = "it must be device indices separated by ;, or *"
        raise invalid_value(setting.origin, setting.key, setting.value, limit, "Write 0;1, or *.")
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel")
    world_size = math.prod(settings.get(f"mapping.{name}", 1) for name in names)
    if len(parts) != world_size:
        limit = f"it names {len(parts)} devices for {world_size} ranks"
        cure = "Name one device per rank, or set option.tensor_parallel_degree."
        raise invalid_value(setting.origin, setting.key, setting.value, limit, cure)
    if gpus:
        settings.set("runtime.devices", tuple(map(int, parts)), setting.origin, setting.key)
    else:
        settings.note(setting.key, "no GPU is visible; all ranks run on the CPU", setting.origin, "warning")
