"""Stoker builds LLM engines from Hugging Face checkpoints and keeps them fed.

`LLM` runs an engine in this process; `SamplingParams` says how tokens are chosen, `Completion` and `Delta` are results. Errors that Stoker
raises on purpose are subclasses of `StokerError`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from stoker.base.config import RuntimeConfig
from stoker.base.errors import (
    CheckpointError,
    ConfigError,
    ConfigTypeError,
    DependencyError,
    EngineError,
    GuideCostError,
    NotFoundError,
    QueueFullError,
    RankError,
    RequestError,
    RequestTypeError,
    StokerError,
    UnavailableError,
    UnsupportedVersionError,
)
from stoker.base.types import AdmissionRecord, Delta, FinishReason, Guide, SamplingParams, Timings, TokenLogprobs, Usage

if TYPE_CHECKING:
    from stoker.api.llm import LLM
    from stoker.api.settings import LLMSettings
    from stoker.frontend.service import Choice, Completion

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AdmissionRecord",
    "CheckpointError",
    "Choice",
    "Completion",
    "ConfigError",
    "ConfigTypeError",
    "Delta",
    "DependencyError",
    "EngineError",
    "FinishReason",
    "Guide",
    "GuideCostError",
    "LLMSettings",
    "NotFoundError",
    "QueueFullError",
    "RankError",
    "RequestError",
    "RequestTypeError",
    "RuntimeConfig",
    "SamplingParams",
    "StokerError",
    "Timings",
    "TokenLogprobs",
    "UnavailableError",
    "UnsupportedVersionError",
    "Usage",
    "__version__",
]

# Imported when they are first used: LLM needs torch, which takes seconds, and `import stoker` stays under 0.3 s.
_LATER = {
    "LLM": "stoker.api.llm",
    "LLMSettings": "stoker.api.settings",
    "Choice": "stoker.frontend.service",
    "Completion": "stoker.frontend.service",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
