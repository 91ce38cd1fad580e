"""The first Truss generation keeps its engine's run-time settings in packages/…/tensorrt_llm/config.pbtxt; these are read from there."""

from __future__ import annotations

from pathlib import Path

from stoker.deploy.deployment import Origin
from stoker.deploy.fields import Collected
from stoker.deploy.triton import repository
from stoker.deploy.triton.keys import KEYS, LLM

_ELSEWHERE = "Stoker reads this when the repository itself is served"


def read(folder: Path, asked: Collected) -> None:
    """Take the settings of packages/*/tensorrt_llm/config.pbtxt, where there is one. Unfilled and empty ones count as unset.

    Raises ConfigError for a file that cannot be parsed and for a value of the wrong kind.
    """
    for file in sorted(folder.glob("packages/*/tensorrt_llm/config.pbtxt"))[:1]:
        for name, scalar in repository.read_model(file).parameters:
            origin, key = Origin(str(file), scalar.line), KEYS.get((LLM, name))
            if key is None or not key.to.startswith("runtime."):
                asked.note(name, _ELSEWHERE, origin)
            elif scalar.text and not scalar.unfilled:
                asked.set(key.to, key.value(scalar.text), origin, name)
