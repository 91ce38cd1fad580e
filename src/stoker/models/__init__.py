"""The table of architectures: which checkpoints can be built, how their config.json is read, and what their weights are called.

`architectures/` holds the rows, one file per model family. The other modules are shared: `architecture.py` defines a row, `registry.py`
collects the rows and finds the one for a config.json, `config_reader.py` reads and checks a config.json, `config_fields.py` and
`tensor_transforms.py` are the helpers that rows are written with, and `rotary_override.py` applies the rotary settings of a build.
"""

from stoker.models.architecture import Architecture
from stoker.models.registry import all_architectures, check_version, get_architecture, resolve_architecture

__all__ = ["Architecture", "all_architectures", "check_version", "get_architecture", "resolve_architecture"]
