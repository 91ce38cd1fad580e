"""One file per family; importing the package imports each, which fills ARCHITECTURES."""

import importlib
import pkgutil

from stoker.models.architecture import ARCHITECTURES, Architecture
from stoker.models.resolve import check_version, resolve, rows

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = ["ARCHITECTURES", "Architecture", "check_version", "resolve", "rows"]
