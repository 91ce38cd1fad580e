"""GPTQ (arXiv 2210.17323): int4 weights rounded column by column, each column's error spread over those still to come."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.layers.specs import LinearSpec
from stoker.quant import groups
from stoker.quant.format import FORMATS
from stoker.quant.int4 import Int4
from stoker.quant.stats import InputStats

BLOCK = 128  # columns whose errors reach the rest of the matrix in one product


class GPTQ(Int4, frozen=True, kw_only=True, tag="gptq"):
    """Stored as `Int4`. With `act_order` columns are taken by the size of their inputs, largest first; groups stay where they are."""

    act_order: bool = True
    damp: float = 0.01  # of the mean diagonal is added to the diagonal

    @property
    def needs_calibration(self) -> bool:
        return True

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: InputStats | None = None) -> dict[str, Tensor]:
        if stats is None:
            raise ConfigError(f"{spec.name}: GPTQ rounds by measured inputs.", cure="Build with calibration, or use WEIGHTS_ONLY_INT4.")
        inverse, order = self._inverse(stats)
        experts = [self._columns(w, stats, inverse, order) for w in weight.reshape(-1, *weight.shape[-2:])]
        stored = {suffix: torch.stack([e[suffix] for e in experts]) for suffix in experts[0]}
        return stored if weight.dim() == 3 else {suffix: t[0] for suffix, t in stored.items()}

    def _inverse(self, stats: InputStats) -> tuple[Tensor, Tensor]:
        """(upper Cholesky factor of the inverse of the damped second moment [K, K], the order of columns it is in)."""
        gram = stats.gram / max(stats.count, 1)
        order = torch.arange(len(gram), device=gram.device)
        if self.act_order:
            order = gram.diagonal().argsort(descending=True)
        gram = gram[order][:, order]
        mean = gram.diagonal().mean().clamp(min=1e-12)
        for power in range(5):
            damped = gram + torch.eye(len(gram), device=gram.device) * mean * self.damp * 10**power
            factor, failed = torch.linalg.cholesky_ex(damped)
            if not int(failed):
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
                if not int(failed):
                    return upper, order
        raise ConfigError("GPTQ: the inputs' second moments have no inverse.", cure="Use more calibration data, or AWQ.")

    def _columns(self, weight: Tensor, stats: InputStats, inverse: Tensor, order: Tensor) -> dict[str, Tensor]:
        """Round one matrix [N, K]."""
        size, group = weight.shape[-1], self.group_size
        split = groups.split(weight, group)
        scale, base = self._clipped(split, stats) if self.clip else self.grid(split)
        column_scale, column_base = (t.squeeze(-1).repeat_interleave(group, dim=1)[:, order] for t in (scale, base))
        left = weight.float()[:, order]
        codes = torch.empty_like(left)
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            errors = torch.empty_like(left[:, start:stop])
            for i in range(start, stop):
                column, s, b = left[:, i], column_scale[:, i], column_base[:, i]
                codes[:, i] = groups.encode(column, s, b, self.zero)
                error = (column - groups.decode(codes[:, i], s, b, self.zero)) / inverse[i, i]
                left[:, i + 1 : stop] -= error[:, None] * inverse[i, i + 1 : stop]
                errors[:, i - start] = error
            left[:, stop:] -= errors @ inverse[start:stop, stop:]
        back = torch.empty_like(codes)
        back[:, order] = codes
        return self.store(groups.split(back, group), scale, base, size)


FORMATS.add("gptq", GPTQ)
