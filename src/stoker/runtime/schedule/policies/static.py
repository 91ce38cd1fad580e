"""static: the V1 batching of TensorRT-LLM."""

from __future__ import annotations

from stoker.runtime.schedule.policies.policy import Demand, Policy


class Static(Policy):
    """Admits a batch when nothing runs, and runs it to its end. Later arrivals wait for the next batch."""

    whole_batches = True

    def admits(self, demand: Demand) -> bool:
        """Whether no sequence holds blocks of an earlier batch, and memory suffices for this batch up to max_tokens."""
        return demand.num_holding == 0 and demand.fits_to_the_end


POLICY = Static
