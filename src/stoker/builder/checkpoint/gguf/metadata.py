"""The metadata that describes the model in a GGUF file, which records the keys that are read, so that no other key is ignored silently.

Every key of the architecture, and every other key that changes a model (`_FILE_PREFIXES`), is one of three things: read by the row of the
architecture, known to have no effect on the model (`NO_EFFECT`, or `GGUFArchitecture.ignored_keys`), or rejected by name. Keys under
`general.` describe the file, or recommend settings of requests (`general.sampling`). The conversion of the tokenizer reads those under
`tokenizer.`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN

# Keys of an architecture without an effect on the logits, as fnmatch patterns.
NO_EFFECT = (
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",  # the one that the architecture does not have
    "vocab_size",  # the embedding has as many rows
    "rope.scaling.finetuned", "tensor_data_layout", "pooling_type", "attention.causal_mode", "quantize*", "imatrix*",
    "deepstack*", "rope.dimension_sections",  # the positions of images
)  # fmt: skip
# Prefixes of keys outside the architecture that change a model, or of files that hold something else.
_FILE_PREFIXES = ("xielu.", "diffusion.", "adapter.")
MAX_VECTOR = 1 << 16  # elements of a vector that is read as metadata, such as divisors of rotary frequencies


class Metadata:
    """The metadata keys of the architecture of a GGUF file, without their prefix, and the shapes of its tensors by GGUF name.

    `read` returns the content of a tensor.
    """

    def __init__(self, file: GGUFFile, architecture: str, read: Callable[[str], Tensor]) -> None:
        self.file = file
        self.architecture = architecture
        self._read = read
        self.tensors: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in file.tensors.items()}
        self.unused: list[str] = []  # tensors that are no weights of the model: read as metadata, or of blocks that are left out
        self._used: set[str] = set()
        self._used_of_file: set[str] = set()

    def get(self, key: str, kind: type | list[type], default: Any = None) -> Any:
        """The value of a key, or `default`. `[kind]` means an array. Raises CheckpointError for a value of another type."""
        self._used.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if kind is float and type(value) is int:
            return float(value)
        return self.file.get(f"{self.architecture}.{key}", kind, default)

    def get_of_file(self, key: str, kind: type | list[type], default: Any = None) -> Any:
        """The value of a key that does not begin with the name of the architecture, or `default`."""
        self._used_of_file.add(key)
        return self.file.get(key, kind, default)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key of any type, or `default`."""
        self._used.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        return default if value is None else value

    def require(self, key: str, kind: type) -> Any:
        """The value of a key. Raises CheckpointError when it is absent or of another type."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.file.path}: the metadata lacks {self.architecture}.{key}.", cure=DOWNLOAD_AGAIN)
        return value

    def require_value(self, key: str, *supported: Any) -> None:
        """Raise CheckpointError for a key whose value is not one of `supported`. An absent key is accepted."""
        value = self.value(key, supported[0])
        if value not in supported:
            raise self.unsupported(key, value, f"Only {' or '.join(map(str, supported))} is.")

    def unsupported(self, key: str, value: Any, cure: str) -> CheckpointError:
        """The error for a value of a key that is not supported."""
        return CheckpointError(f"{self.file.path}: {self.architecture}.{key}={str(value)[:80]} is not supported.", cure=cure)

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor with this GGUF name."""
        return name in self.tensors

    def read_vector(self, name: str) -> list[float]:
        """The elements of a tensor of one dimension. Raises CheckpointError when it is absent, or not small enough to be a vector."""
        if self.tensors.get(name, ()) == () or len(self.tensors[name]) != 1 or self.tensors[name][0] > MAX_VECTOR:
            raise CheckpointError(f"{self.file.path}: the tensor {name} is missing, or not a short vector.", cure=DOWNLOAD_AGAIN)
        self.unused.append(name)
        return [float(value) for value in self._read(name).tolist()]

    def leave_out_last_blocks(self, count: int) -> int:
        """Leave the tensors of the last `count` blocks out of the model: those of multi-token prediction. Returns `count`."""
        blocks = self.require("block_count", int)
        if not 0 <= count < blocks:
            raise self.unsupported("nextn_predict_layers", count, f"Less than the {blocks} blocks is.")
        for block in range(blocks - count, blocks):
            self.unused += [name for name in self.tensors if name.startswith(f"blk.{block}.")]
        return count

    def has_bias(self, *modules: str) -> bool:
        """Whether a module of layer 0, such as attn_q, has a bias."""
        return any(self.has_tensor(f"blk.0.{module}.bias") for module in modules)

    def check_all_used(self, ignored: tuple[str, ...]) -> None:
        """Raise CheckpointError naming each key that was not read and is not known to have no effect."""
        prefix, patterns = f"{self.architecture}.", (*NO_EFFECT, *ignored)
        keys = [key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)]
        unknown = [key for key in keys if key not in self._used and not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]
        unknown = [prefix + key for key in unknown]
        unknown += [key for key in self.file.metadata if key.startswith(_FILE_PREFIXES) and key not in self._used_of_file]
        if unknown:
            names = ", ".join(unknown[:5])
            raise CheckpointError(
                f"{self.file.path}: the metadata {names} {'is' if len(unknown) == 1 else 'are'} not supported.",
                cure="Build from the Hugging Face checkpoint that the file was converted from.",
            )
