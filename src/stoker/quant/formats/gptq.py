"""GPTQ (arXiv 2210.17323): int4 weights with error compensation."""

from __future__ import annotations

from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.specs import LinearSpec
from stoker.quant.calibration.error_compensation import ErrorCompensation
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.format import FORMATS
from stoker.quant.formats.awq import search_factors
from stoker.quant.formats.int4 import Int4


class GPTQ(Int4, frozen=True, kw_only=True, tag="gptq"):
    """int4 weights with error compensation, stored like `Int4`.

    With `act_order`, columns are rounded in the order of the size of their inputs, largest first. With `scales`, AWQ's scale folding comes
    first: with groups of 128, SmolLM2's perplexity grows by 16 % with it and by 21 % without.
    """

    act_order: bool = True
    scales: bool = True
    damp: float = 0.01  # damping: this fraction of the mean diagonal is added to the diagonal

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.damp <= 1:
            raise ConfigError(f"damp={self.damp} is not above 0 and at most 1.", cure="Use a fraction such as 0.01.")

    @property
    def needs_calibration(self) -> bool:
        """Whether `quantize` needs measured inputs."""
        return True

    def folding_factors(self, weight: Tensor, spec: LinearSpec, stats: InputStats) -> Tensor | None:
        """Factors for scale folding, or None, as `Format.folding_factors` requires."""
        return search_factors(self, weight, stats, ErrorCompensation(stats, self.damp, self.act_order)) if self.scales else None

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: InputStats | None = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires. Raises ConfigError without `stats` if it needs them."""
        if stats is None:
            raise ConfigError(f"{spec.name}: GPTQ needs measured inputs.", cure="Build with calibration, or use WEIGHTS_ONLY_INT4.")
        return self.compensated(weight, stats, self.damp, self.act_order)


FORMATS.add("gptq", GPTQ)
