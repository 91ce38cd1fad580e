"""static: TensorRT-LLM's V1 batching."""

from __future__ import annotations

from stoker.runtime.schedule.policies.policy import Demand, Policy


class Static(Policy):
    """Admit a batch when nothing runs, and run it to its end; later arrivals wait for the next batch."""

    whole_batches = True

    def admits(self, demand: Demand) -> bool:
        return demand.num_holding == 0 and demand.fits_to_the_end
