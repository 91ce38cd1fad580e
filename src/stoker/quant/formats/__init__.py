"""The weight formats, one file each. Importing the package imports each file, which adds its row to `format.FORMATS`."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
