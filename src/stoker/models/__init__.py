"""One file per family; importing the package fills ARCHITECTURES."""

from stoker.models import llama
from stoker.models.architecture import ARCHITECTURES, Architecture

__all__ = ["ARCHITECTURES", "Architecture", "llama"]
