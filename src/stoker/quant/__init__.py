"""One file per weight format; importing the package imports each, which fills FORMATS."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
