"""Weight-only int4 in groups of input features, activations as they are. AWQ and GPTQ store the same tensors."""

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
from stoker.quant.compensate import Compensation
from stoker.quant.fit import fit
from stoker.quant.format import FORMATS, Format, Layout
from stoker.quant.groups import SCALE_DTYPES, Zero
from stoker.quant.stats import InputStats

GROUP_SIZES = (16, 32, 64, 128, 256)


class Int4(Format, frozen=True, kw_only=True, tag="int4"):
    """`weight` uint8 [(experts,) out, in / 2], two codes a byte; `scale` [(experts,) out, groups]; and by `zero`:

    none: real = (code - 8) × scale; int: `zero` uint8 like scale, real = (code - zero) × scale; float: `offset` like scale,
    real = code × scale + offset. The last group of a row may be shorter. With `reorder`, `order` int32 [in] lists the input features in
    the order in which the weight's columns follow (GPTQ's act-order checkpoints).
    """

    group_size: int = 128
    zero: Zero = "int"
    scale_dtype: str = "float16"
    clip: bool = True  # look for the clip of each group that leaves the least squared error; codes span the extremes otherwise
    reorder: bool = False

    def __post_init__(self) -> None:
        check_choice("group_size", self.group_size, GROUP_SIZES)
        check_choice("scale_dtype", self.scale_dtype, SCALE_DTYPES)

    @property
    def rows_together(self) -> int | None:
        return None if self.reorder else 1  # an order is of all rows

    def fitted(self, rows: int, columns: int) -> Int4:
        return msgspec.structs.replace(self, group_size=groups.largest(GROUP_SIZES, self.group_size, columns))

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        *lead, rows, size = spec.weight_shape
        if size % 2:
            raise ConfigError(f"{spec.name}: int4 packs two input features a byte, and it has {size}.", cure="Use INT8.")
        axis, group = len(lead), self.group_size
        scales = (*lead, rows, -(-size // group))
        scale = Layout(scales, getattr(torch, self.scale_dtype), row_axis=axis, col_axis=axis + 1, col_unit=group)
        stored = {"weight": Layout((*lead, rows, size // 2), torch.uint8, row_axis=axis, col_axis=axis + 1, col_unit=2), "scale": scale}
        if self.zero == "int":
            stored["zero"] = Layout(scales, torch.uint8, row_axis=axis, col_axis=axis + 1, col_unit=group)
        if self.zero == "float":
            stored["offset"] = scale
        if self.reorder:
            stored["order"] = Layout((*lead, size), torch.int32)
        return stored

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: Any = None) -> dict[str, Tensor]:
        split = groups.split(weight, self.group_size)
        scale, base = self.fit(split, stats)
        return self.store(groups.encode(split, scale, base, self.zero), scale, base, weight.shape[-1])

    def grid(self, split: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, base) of groups [..., out, groups, group_size] that span their extremes."""
        return groups.grid(*groups.bounds(split, self.zero), self.zero, getattr(torch, self.scale_dtype))

    def fit(self, split: Tensor, stats: InputStats | None) -> tuple[Tensor, Tensor]:
        """(scale, base) of groups: those with the least error with `clip`, else those that span the extremes."""
        if not self.clip:
            return self.grid(split)
        blocks = None if stats is None else stats.blocks(self.group_size)
        return fit(split, self.zero, getattr(torch, self.scale_dtype), blocks)

    def compensated(self, weight: Tensor, stats: InputStats, damp: float, act_order: bool) -> dict[str, Tensor]:
        """As `quantize`, but codes are chosen column by column, each making up for the errors of those before."""
        by = Compensation(stats, damp, act_order)
        experts = [self._matrix(w, stats, by) for w in weight.reshape(-1, *weight.shape[-2:])]
        stored = {suffix: torch.stack([e[suffix] for e in experts]) for suffix in experts[0]}
        return stored if weight.dim() == 3 else {suffix: t[0] for suffix, t in stored.items()}

    def _matrix(self, weight: Tensor, stats: InputStats, by: Compensation) -> dict[str, Tensor]:
        """One matrix [out, in]: the groups' grids as for plain rounding, then codes column by column."""
        scale, base = self.fit(groups.split(weight, self.group_size), stats)
        column_scale, column_base = (t.squeeze(-1).repeat_interleave(self.group_size, dim=1) for t in (scale, base))

        def rounded(values: Tensor, columns: Tensor) -> Tensor:
            s, b = column_scale[:, columns], column_base[:, columns]
            return groups.decode(groups.encode(values, s, b, self.zero), s, b, self.zero)

        found = groups.split(by.round(weight, rounded), self.group_size)
        return self.store(groups.encode(found, scale, base, self.zero), scale, base, weight.shape[-1])

    def store(self, codes: Tensor, scale: Tensor, base: Tensor, in_features: int) -> dict[str, Tensor]:
        """The tensors of codes [..., out, groups, group_size] and their grid [..., out, groups, 1]."""
        dtype = getattr(torch, self.scale_dtype)
        stored = {"weight": groups.pack(groups.join(codes, in_features)), "scale": scale.squeeze(-1).to(dtype)}
        if self.zero == "int":
            stored["zero"] = base.squeeze(-1).to(torch.uint8)
        if self.zero == "float":
            stored["offset"] = base.squeeze(-1).to(dtype)
        return stored

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        zero = tensors.pop("offset", None) if self.zero == "float" else tensors.pop("zero", None)
        values, scale, order = tensors.pop("weight"), tensors.pop("scale"), tensors.pop("order", None)
        return PackedWeight("int4", values, scale, zero, self.group_size, bias=bias, column_order=order)


FORMATS.add("int4", Int4)
