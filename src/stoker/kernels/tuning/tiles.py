"""The tile of each op: the choices that a tuning file may set, with their limits.

Every field that a file may set has a type with bounds, so that a wrong or hostile file is refused when it is read. `TILE_OPS` lists the ops
and says what their rows are keyed by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

# Fields of these names must also be powers of two (`POWERS_OF_2`).
Warps = Annotated[int, Meta(ge=1, le=16)]
Stages = Annotated[int, Meta(ge=1, le=8)]
Splits = Annotated[int, Meta(ge=1, le=64)]
BlockN = Annotated[int, Meta(ge=1, le=256)]
BlockK = Annotated[int, Meta(ge=16, le=2048)]
POWERS_OF_2 = ("block_n", "block_k", "num_warps", "columns", "m_tiles")


@dataclass(frozen=True, slots=True)
class LinearTile:
    """The part of a dense weight that one CTA multiplies at a time, and how Triton compiles the kernel."""

    block_n: BlockN  # rows of the weight
    block_k: BlockK  # input features
    splits: Splits = 1  # split-K: CTAs that share the input features
    num_warps: Warps = 4
    num_stages: Stages = 4
    fuse_norm: bool = True  # False: a separate kernel applies the norm once, which is cheaper for many rows than doing it in every CTA


@dataclass(frozen=True, slots=True)
class QuantTile:
    """The part of a quantized weight that one CTA multiplies at a time, and how Triton compiles the kernel."""

    block_n: BlockN  # rows of the weight
    block_k: BlockK  # input features; int4: a multiple of two groups
    splits: Splits = 1
    num_warps: Warps = 4
    num_stages: Stages = 4
    columns: Annotated[int, Meta(ge=8, le=64)] = 8  # of the product, at least; 8 use mma.sync, which widens e4m3, 16 use wgmma
    encode: bool = False  # one row only: each CTA quantizes the activations that it reads, which saves a launch


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """The part of a weight that one CTA of the skinny GEMM (1 to 8 tokens) multiplies."""

    m_tiles: Annotated[int, Meta(ge=1, le=4)] = 2  # of 16 weight rows; half of the rows of a gated weight are gates
    splits: Splits = 1
    num_warps: Warps = 8
    num_stages: Stages = 2  # chunks of 64 bytes that a warp loads ahead


@dataclass(frozen=True, slots=True)
class SkinnyInt4Tile:
    """The part of an int4 weight that one CTA of the skinny GEMM for 1 to 64 tokens multiplies."""

    m_tiles: Annotated[int, Meta(ge=1, le=2)] = 2  # of 16 weight rows per warp; half of the rows of a gated weight are gates
    splits: Splits = 1
    num_warps: Warps = 4
    num_stages: Stages = 1  # chunks of 64 bytes that a warp loads ahead of the one that it multiplies


@dataclass(frozen=True, slots=True)
class SmallBatchTile:
    """How the warps of a CTA of the fused layer kernel (1 to 8 tokens) share a tile of 16 rows, and how far ahead they prefetch."""

    num_warps: Warps
    blocks_per_stage: Annotated[int, Meta(ge=1, le=4)]  # of 128 bytes of each row
    pipeline_bytes: Annotated[int, Meta(ge=1 << 14, le=227 << 10)]  # of the pipelines of all warps, at most
    registers: Annotated[int, Meta(ge=64, le=255)]  # per thread; the others are for attention, which still runs while the pipelines fill
    max_tokens: Annotated[int, Meta(ge=1, le=8)]  # with more, quantizing their activations takes longer than the fusion saves


Tile = LinearTile | QuantTile | SkinnyTile | SkinnyInt4Tile | SmallBatchTile


@dataclass(frozen=True, slots=True)
class TileOp:
    """One op of the `tiles` section: the type of its tiles, the dtypes of its weights, and the names of its shape fields, in order."""

    tile: type[Tile]
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]

    def conflict(self, shape: dict[str, int], tile: Tile) -> str | None:
        """The reason why a kernel cannot run with `tile`, although each field is within its bounds; None if it can."""
        for name in POWERS_OF_2:
            value = getattr(tile, name, 1)
            if value & (value - 1):
                return f"{name}={value} is refused: it must be a power of two"
        if isinstance(tile, (LinearTile, QuantTile)):
            lines = tile.block_n * (2 if shape.get("gated") else 1)
            if shape["rows"] > 1 and tile.block_n < 16:
                return f"block_n={tile.block_n} is refused: the matrix instructions of more than one row need at least 16"
            itemsize = 2 if isinstance(tile, LinearTile) else 1
            stages = tile.num_stages if shape["rows"] > 1 or isinstance(tile, QuantTile) else 1
            if (num_bytes := stages * tile.block_k * (lines + shape["rows"]) * itemsize) > MAX_TILE_BYTES:
                return f"block_n × block_k × num_stages is refused: the stages take {num_bytes} bytes, and {MAX_TILE_BYTES} are the limit"
        if shape.get("gated") and isinstance(tile, (SkinnyTile, SkinnyInt4Tile)) and tile.m_tiles == 1:
            return "m_tiles=1 is refused: a gated weight needs at least 2, of which half are gates"
        return None


MAX_TILE_BYTES = 227 << 10  # shared memory of one CTA on sm_90 and sm_100

TILE_OPS = {
    "dense_linear": TileOp(LinearTile, ("16-bit",), ("rows", "n", "k", "gated")),
    "quantized_linear": TileOp(QuantTile, ("fp8", "int8", "w8a8"), ("rows", "n", "k", "gated")),
    "skinny_linear": TileOp(SkinnyTile, ("int4", "int8", "fp8"), ("token_tiles", "n", "chunks", "gated")),
    "skinny_int4_linear": TileOp(SkinnyInt4Tile, ("int4",), ("group", "token_tiles", "n", "chunks", "gated")),
    "fused_layer_small_batch": TileOp(SmallBatchTile, ("bfloat16", "float16", "fp8", "int8", "int4"), ()),
}
