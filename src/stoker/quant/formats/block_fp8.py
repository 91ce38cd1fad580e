"""Block-scaled FP8 (DeepSeek V3, arXiv 2412.19437, section 3.3): e4m3 weights with a scale for each block of rows and columns."""

from __future__ import annotations

import math

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant.format import FORMATS, Format, Layout
from stoker.quant.formats.fp8 import FP8_MAX, FP8_UNIT


class BlockFp8(Format, frozen=True, kw_only=True, tag="block_fp8"):
    """`weight` float8_e4m3fn [(experts,) out, in], `scale` float32 [(experts,) out / rows, in / columns], both rounded up.

    Activations are e4m3 with a scale for every `columns` features of a token. Blocks never cross the parts of a fused linear.
    """

    rows: int = 128
    columns: int = 128

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={value}: a block has at least 1.", cure="Use 128.")

    @property
    def rows_per_call(self) -> int | None:
        """The number of output rows that one call of `quantize` needs."""
        return self.rows

    def aligned_to(self, rows: int, columns: int) -> BlockFp8:
        """This format with blocks or groups that divide `rows` and `columns`, where possible."""
        return msgspec.structs.replace(self, rows=math.gcd(self.rows, rows), columns=math.gcd(self.columns, columns))

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, as `Format.layout` requires. Raises ConfigError for a shape that it cannot store."""
        *experts, rows, size = spec.weight_shape
        axis = len(experts)
        if any(part % self.rows for part in spec.parts[:-1]):
            sizes = ", ".join(map(str, spec.parts))
            problem = f"{spec.name}: parts of {sizes} rows do not consist of blocks of {self.rows} rows."
            raise ConfigError(problem, cure="Use FP8, or fewer rows per block.")
        scales = (*experts, -(-rows // self.rows), -(-size // self.columns))
        return {
            "weight": Layout(spec.weight_shape, torch.float8_e4m3fn, row_axis=axis, col_axis=axis + 1),
            "scale": Layout(scales, torch.float32, row_axis=axis, col_axis=axis + 1, row_unit=self.rows, col_unit=self.columns),
        }

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: object = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires."""
        rows, size = weight.shape[-2:]
        padded = F.pad(weight.float(), (0, -size % self.columns, 0, -rows % self.rows))
        blocks = padded.unflatten(-1, (-1, self.columns)).unflatten(-3, (-1, self.rows))  # [..., out blocks, rows, in blocks, columns]
        scale = (blocks.abs().amax(dim=(-3, -1), keepdim=True) * FP8_UNIT).clamp(min=1e-12)
        values = (blocks / scale).clamp_(-FP8_MAX, FP8_MAX).flatten(-2).flatten(-3, -2)[..., :rows, :size]
        return {"weight": values.to(torch.float8_e4m3fn).contiguous(), "scale": scale.squeeze(-1).squeeze(-2).contiguous()}

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, as `Format.pack` requires."""
        values, scale = tensors.pop("weight"), tensors.pop("scale")
        return PackedWeight("fp8", values, scale, group_size=self.columns, block_rows=self.rows, bias=bias, activations="group")


FORMATS.add("block_fp8", BlockFp8)
