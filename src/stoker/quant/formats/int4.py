"""Weight-only int4 in groups of input features. Activations are not quantized. AWQ and GPTQ store the same tensors."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from stoker.base.config import check_choice
from stoker.base.errors import ConfigError
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant import groups
from stoker.quant.calibration.clip_search import search_clip
from stoker.quant.calibration.error_compensation import ErrorCompensation
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.format import FORMATS, Format, Layout
from stoker.quant.groups import SCALE_DTYPES, Zero

GROUP_SIZES = (16, 32, 64, 128, 256)


class Int4(Format, frozen=True, kw_only=True, tag="int4"):
    """`weight` uint8 [(experts,) out, in / 2], two values per byte; `scale` [(experts,) out, groups]; and by `zero`:

        none    real = (value − 8) × scale
        int     `zero` uint8 with the shape of `scale`; real = (value − zero) × scale
        float   `offset` with the shape of `scale`; real = value × scale + offset

    The last group of a row may be shorter. With `reorder`, `order` int32 [in] is the input feature of each column (GPTQ checkpoints with
    act_order).
    """

    group_size: int = 128
    zero: Zero = "int"
    scale_dtype: str = "float16"
    clip: bool = True  # clip search; otherwise a group represents its extremes
    reorder: bool = False

    def __post_init__(self) -> None:
        check_choice("group_size", self.group_size, GROUP_SIZES)
        check_choice("scale_dtype", self.scale_dtype, SCALE_DTYPES)

    @property
    def rows_per_call(self) -> int | None:
        """The number of output rows that one call of `quantize` needs."""
        return None if self.reorder else 1  # all rows have one order

    def aligned_to(self, rows: int, columns: int) -> Int4:
        """This format with blocks or groups that divide `rows` and `columns`, where possible."""
        return msgspec.structs.replace(self, group_size=groups.largest_group_size(GROUP_SIZES, self.group_size, columns))

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, as `Format.layout` requires. Raises ConfigError for a shape that it cannot store."""
        *experts, rows, size = spec.weight_shape
        if size % 2:
            problem = f"{spec.name}: int4 stores two input features per byte, which {size} features cannot fill."
            raise ConfigError(problem, cure="Use INT8.")
        axis, group = len(experts), self.group_size
        scales = (*experts, rows, -(-size // group))
        scale = Layout(scales, getattr(torch, self.scale_dtype), row_axis=axis, col_axis=axis + 1, col_unit=group)
        stored = {"weight": Layout((*experts, rows, size // 2), torch.uint8, row_axis=axis, col_axis=axis + 1, col_unit=2), "scale": scale}
        if self.zero == "int":
            stored["zero"] = Layout(scales, torch.uint8, row_axis=axis, col_axis=axis + 1, col_unit=group)
        if self.zero == "float":
            stored["offset"] = scale
        if self.reorder:
            stored["order"] = Layout((*experts, size), torch.int32)
        return stored

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: Any = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires."""
        split = groups.split(weight, self.group_size)
        scale, base = self.choose_grid(split, stats)
        return self.store(groups.quantize(split, scale, base, self.zero), scale, base, weight.shape[-1])

    def extreme_grid(self, split: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, base), each [..., out, groups, 1], with which groups [..., out, groups, group_size] represent their extremes."""
        return groups.grid(*groups.bounds(split, self.zero), self.zero, getattr(torch, self.scale_dtype))

    def choose_grid(self, split: Tensor, stats: InputStats | None) -> tuple[Tensor, Tensor]:
        """(scale, base) of the groups `split`: by clip search with `clip`, otherwise by `extreme_grid`."""
        if not self.clip:
            return self.extreme_grid(split)
        blocks = None if stats is None else stats.blocks(self.group_size)
        return search_clip(split, self.zero, getattr(torch, self.scale_dtype), blocks)

    def compensated(self, weight: Tensor, stats: InputStats, damping: float, act_order: bool) -> dict[str, Tensor]:
        """The stored tensors of `weight` [(experts,) out, in], quantized with error compensation."""
        compensation = ErrorCompensation(stats, damping, act_order)
        experts = [self._compensated_matrix(w, stats, compensation) for w in weight.reshape(-1, *weight.shape[-2:])]
        stored = {suffix: torch.stack([e[suffix] for e in experts]) for suffix in experts[0]}
        return stored if weight.dim() == 3 else {suffix: t[0] for suffix, t in stored.items()}

    def _compensated_matrix(self, weight: Tensor, stats: InputStats, compensation: ErrorCompensation) -> dict[str, Tensor]:
        """The stored tensors of one matrix [out, in]: the grids of plain rounding, then values that are chosen column by column."""
        scale, base = self.choose_grid(groups.split(weight, self.group_size), stats)
        column_scale, column_base = (t.squeeze(-1).repeat_interleave(self.group_size, dim=1) for t in (scale, base))

        def round_columns(values: Tensor, columns: Tensor) -> Tensor:
            """The values of these columns after they were rounded to int4 and back."""
            s, b = column_scale[:, columns], column_base[:, columns]
            return groups.dequantize(groups.quantize(values, s, b, self.zero), s, b, self.zero)

        rounded = groups.split(compensation.round(weight, round_columns), self.group_size)
        return self.store(groups.quantize(rounded, scale, base, self.zero), scale, base, weight.shape[-1])

    def store(self, quantized: Tensor, scale: Tensor, base: Tensor, in_features: int) -> dict[str, Tensor]:
        """The stored tensors by suffix, from quantized values [..., out, groups, group_size] and grids [..., out, groups, 1]."""
        dtype = getattr(torch, self.scale_dtype)
        stored = {"weight": groups.pack(groups.join(quantized, in_features)), "scale": scale.squeeze(-1).to(dtype)}
        if self.zero == "int":
            stored["zero"] = base.squeeze(-1).to(torch.uint8)
        if self.zero == "float":
            stored["offset"] = base.squeeze(-1).to(dtype)
        return stored

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, as `Format.pack` requires."""
        zero = tensors.pop("offset", None) if self.zero == "float" else tensors.pop("zero", None)
        values, scale, order = tensors.pop("weight"), tensors.pop("scale"), tensors.pop("order", None)
        return PackedWeight("int4", values, scale, zero, self.group_size, bias=bias, column_order=order)


FORMATS.add("int4", Int4)
