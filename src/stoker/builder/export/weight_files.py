"""Weight files of an exported checkpoint, with the names that transformers uses."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 4 << 30  # of one weight file, about


class WeightFiles:
    """Writes tensors to files of about FILE_BYTES, and an index if there are several."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._files: list[tuple[Path, list[str]]] = []
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, and write a file if there are enough."""
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.numel() * tensor.itemsize
        if self._pending_bytes > FILE_BYTES:
            self._write()

    def finish(self) -> None:
        """Write what remains, and name the files."""
        self._write()
        if len(self._files) == 1:
            self._files[0][0].rename(self._work / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, (file, names) in enumerate(self._files):
            new = f"model-{i + 1:05}-of-{len(self._files):05}.safetensors"
            file.rename(self._work / new)
            weight_map |= dict.fromkeys(names, new)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        (self._work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        """Write the pending tensors under a temporary name."""
        if not self._pending:
            return
        file = self._work / f"part-{len(self._files)}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        self._files.append((file, list(self._pending)))
        self._num_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0
