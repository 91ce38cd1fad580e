"""The tuning table of one device, and the JSON file that it is read from.

A file (`tuning/<device>.json`, or `tuning.json` in an engine directory) is one object:

    format        1
    device        the name of the device that was measured
    device_names  prefixes of the device names that the file is for (files of this package only)
    capability    the compute capability, such as 90
    shared_bytes  shared memory of one CTA, by which tiles without a measurement are limited; 101376 (sm_89) when absent
    same_as       the name of another file of this package, whose tiles, attention rows and costs are used (this file then has none)
    ceiling       measured limits of the device, for rooflines
    costs         constants of the estimates that choose a launch plan
    attention     rows of `AttentionRow`
    tiles         [{"op", "dtype", "shape": {…}, "tile": {…}}], see `TILE_OPS`
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stoker.base.errors import ConfigError
from stoker.kernels.tuning.attention import AttentionRow
from stoker.kernels.tuning.tiles import TILE_OPS, Tile

FORMAT = 1
MIN_SHARED_BYTES = 99 << 10  # of one CTA on sm_89, the least of all devices from sm_80 on
MAX_FILE_BYTES = 8 << 20
MAX_ROWS = 20_000
CURE = "Correct the file, or delete it and run: stoker tune ENGINE."

TileKey = tuple[str, str, tuple[int, ...]]  # op, dtype, shape in the order of `TILE_OPS`


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device achieves at most, measured."""

    bytes_per_s: Annotated[float, Meta(gt=0, le=1e16)]
    """Bandwidth of a stream that only reads."""

    flops_per_s: Annotated[dict[int, Annotated[float, Meta(gt=0, le=1e19)]], Meta(max_length=8)]
    """Rate of the library's GEMM, by the bytes of an operand's element; those of 2 bytes are required."""


class LargeBatchCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of the time estimate that chooses the split-K of the fused layer kernel for large batches."""

    block_us: Annotated[float, Meta(gt=0, le=1e3)]
    """Time of a CTA for one block of each of its four warpgroups."""

    bytes_per_us: Annotated[float, Meta(gt=0, le=1e9)]
    """Rate at which a CTA reads operands and partial sums."""

    first_operand_factor: Annotated[float, Meta(gt=0, le=100)]
    """Cost of the first linear's operand, whose conversion overlaps with nothing, relative to the others'."""

    partial_sums_factor: Annotated[float, Meta(gt=0, le=100)]
    """Cost of a byte of partial sums, which are written, read and evicted to memory, relative to a byte that is only read."""


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `costs` section."""

    fused_layer_large_batch: LargeBatchCosts | None = None


class TileRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the `tiles` section, before it is checked against `TILE_OPS`."""

    op: str
    dtype: str
    shape: dict[str, Annotated[int, Meta(ge=1, le=1 << 24)] | bool]
    tile: dict[str, Any]


class TuningFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file as it is stored."""

    format: Literal[1]
    device: Annotated[str, Meta(max_length=200)]
    device_names: tuple[Annotated[str, Meta(min_length=3, max_length=200)], ...] = ()
    capability: Annotated[int, Meta(ge=70, le=999)]
    source: str = ""
    shared_bytes: Annotated[int, Meta(ge=48 << 10, le=256 << 10)] = MIN_SHARED_BYTES
    same_as: Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,60}$")] | None = None
    ceiling: Ceiling | None = None
    costs: Costs | None = None
    attention: Annotated[tuple[AttentionRow, ...], Meta(max_length=1000)] = ()
    tiles: Annotated[tuple[TileRow, ...], Meta(max_length=MAX_ROWS)] = ()


_requested: dict[TileKey, None] | None = None  # an ordered set, while `requested_tiles` runs


@contextlib.contextmanager
def requested_tiles() -> Iterator[dict[TileKey, None]]:
    """Yield a dict whose keys are all tiles that launchers look up in the block, in order."""
    global _requested
    _requested = {}
    try:
        yield _requested
    finally:
        _requested = None


@dataclass(frozen=True)
class TuningTable:
    """All measured choices for a device."""

    device: str
    tiles: dict[TileKey, Tile] = field(default_factory=dict)
    attention: tuple[AttentionRow, ...] = ()
    ceiling: Ceiling | None = None
    costs: Costs = field(default_factory=Costs)
    shared_bytes: int = MIN_SHARED_BYTES

    def tile(self, op: str, dtype: str, *shape: int) -> Any:
        """The measured tile (of the type in `TILE_OPS`) for an op, dtype and shape, or None. `shape`: the op's shape fields in order."""
        if _requested is not None:
            _requested[op, dtype, tuple(map(int, shape))] = None
        return self.tiles.get((op, dtype, shape))

    def fitting_stages(self, num_stages: int, stage_bytes: int) -> int:
        """The number of pipeline stages, between 2 and `num_stages`, that fit into the shared memory of a CTA."""
        return max(2, min(num_stages, self.shared_bytes // stage_bytes))

    def override(self, other: TuningTable) -> TuningTable:
        """A copy of this table in which the tiles of `other` replace equal keys."""
        return dataclasses.replace(self, tiles=self.tiles | other.tiles)


def parse_tuning_file(path: Path) -> tuple[TuningFile, TuningTable]:
    """Read and check a file. Raises ConfigError naming the file, the key and the value."""
    try:
        with path.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}.", cure=CURE) from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes.", cure=CURE)
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is not JSON: {problem}.", cure=CURE) from None
    file: TuningFile = _convert(plain, TuningFile, path, "$")
    if file.ceiling is not None and 2 not in file.ceiling.flops_per_s:
        raise ConfigError(f"{path}: $.ceiling.flops_per_s has no rate for operands of 2 bytes.", cure=CURE)
    tiles: dict[TileKey, Tile] = {}
    for index, row in enumerate(file.tiles):
        key, tile = _parse_row(row, path, f"$.tiles[{index}]")
        if key in tiles:
            raise ConfigError(f"{path}: $.tiles[{index}] repeats the op, dtype and shape of an earlier row, {key}.", cure=CURE)
        tiles[key] = tile
    return file, TuningTable(file.device, tiles, file.attention, file.ceiling, file.costs or Costs(), file.shared_bytes)


def encode_tuning_file(device: str, capability: int, tiles: dict[TileKey, Tile], source: str) -> str:
    """The JSON text of a tuning file with measured tiles, one row per line."""
    rows = []
    for (op, dtype, shape), tile in tiles.items():
        fields = {name: bool(size) if name == "gated" else size for name, size in zip(TILE_OPS[op].shape, shape, strict=True)}
        rows.append(json.dumps({"op": op, "dtype": dtype, "shape": fields, "tile": dataclasses.asdict(tile)}))
    head = {"format": FORMAT, "device": device, "capability": capability, "source": source}
    return json.dumps(head, indent=1)[:-2] + ',\n "tiles": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def _parse_row(row: TileRow, path: Path, where: str) -> tuple[TileKey, Tile]:
    """The key and the tile of one row. Raises ConfigError naming the file, the key and the value."""
    op = TILE_OPS.get(row.op)
    if op is None:
        raise ConfigError(f"{path}: {where}.op={row.op[:40]!r} is refused: use one of {', '.join(TILE_OPS)}.", cure=CURE)
    if row.dtype not in op.dtypes:
        raise ConfigError(f"{path}: {where}.dtype={row.dtype[:40]!r} is refused: {row.op} has {', '.join(op.dtypes)}.", cure=CURE)
    if set(row.shape) != set(op.shape):
        names = ", ".join(sorted(row.shape))[:200]
        raise ConfigError(f"{path}: {where}.shape has {names or 'nothing'}; {row.op} has {', '.join(op.shape) or 'no fields'}.", cure=CURE)
    for name, size in row.shape.items():
        if isinstance(size, bool) != (name == "gated"):
            kind = "true or false" if name == "gated" else "a number"
            raise ConfigError(f"{path}: {where}.shape.{name}={size!r} is refused: it must be {kind}.", cure=CURE)
    if unknown := sorted(set(row.tile) - {one.name for one in dataclasses.fields(op.tile)}):
        raise ConfigError(f"{path}: {where}.tile.{unknown[0][:40]} is not a field of {op.tile.__name__}.", cure=CURE)
    tile: Tile = _convert(row.tile, op.tile, path, f"{where}.tile")
    if problem := op.conflict({name: int(size) for name, size in row.shape.items()}, tile):
        raise ConfigError(f"{path}: {where}.tile.{problem}.", cure=CURE)
    return (row.op, row.dtype, tuple(int(row.shape[name]) for name in op.shape)), tile


def _convert(plain: Any, kind: Any, path: Path, where: str) -> Any:
    """Convert parsed JSON to a msgspec type. Raises ConfigError naming the file, the key and the value; `where` is the key's prefix."""
    try:
        return msgspec.convert(plain, kind, str_keys=True)
    except msgspec.ValidationError as problem:
        reason, _, found = str(problem).partition(" - at `$")
        inner = found.rstrip("`")
        value = repr(_value_at(plain, inner))[:80]
        raise ConfigError(f"{path}: {where}{inner}={value} is refused: {reason}.", cure=CURE) from None


def _value_at(plain: Any, inner: str) -> Any:
    """The value at a path such as `.tiles[3].op`; the innermost value that exists if the path ends in a missing or unknown key."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", inner):
        try:
            plain = plain[name] if name else plain[int(index)]
        except (KeyError, IndexError, TypeError):
            return plain
    return plain
