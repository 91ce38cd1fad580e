"""The first Truss generation keeps its engine's run-time settings in packages/…/tensorrt_llm/config.pbtxt; these are read from there."""

from __future__ import annotations

from pathlib import Path

from stoker.deploy.deployment import Origin
from stoker.deploy.fields import Collected
from stoker.deploy.triton import repository, values

# parameter → the place it sets, how its text is read
_HONOURED = {
    "max_tokens_in_paged_kv_cache": ("runtime.kv_cache_tokens", values.whole),
    "kv_cache_free_gpu_mem_fraction": ("runtime.kv_cache_fraction", values.number),
    "max_num_sequences": ("runtime.max_num_sequences", values.whole),
    "enable_trt_overlap": ("runtime.overlap", values.boolean),
}
_ELSEWHERE = "Stoker reads this when the repository itself is served"


def read(folder: Path, asked: Collected) -> None:
    """Take the settings of packages/*/tensorrt_llm/config.pbtxt, where there is one. Unfilled and empty ones count as unset.

    Raises ConfigError for a file that cannot be parsed and for a value of the wrong kind.
    """
    for file in sorted(folder.glob("packages/*/tensorrt_llm/config.pbtxt"))[:1]:
        for key, scalar in repository.read_model(file).parameters:
            origin = Origin(str(file), scalar.line)
            if key not in _HONOURED:
                asked.note(key, _ELSEWHERE, origin)
            elif scalar.text and not scalar.unfilled:
                place, as_value = _HONOURED[key]
                asked.set(place, as_value(key, scalar.text), origin, key)
