"""Stoker builds LLM engines from Hugging Face checkpoints and keeps them fed."""

from typing import TYPE_CHECKING

from stoker.base.types import SamplingParams

if TYPE_CHECKING:
    from stoker.frontend.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    # LLM pulls in torch (seconds); `import stoker` stays under 0.3 s.
    if name == "LLM":
        from stoker.frontend.llm import LLM

        return LLM
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
