"""guaranteed_no_evict: admitted sequences are never preempted."""

from __future__ import annotations

from stoker.runtime.schedule.policies.policy import Demand, Policy


class GuaranteedNoEvict(Policy):
    """Admits a sequence only if all admitted ones can reach max_tokens. Steady latency; memory is unused when answers end early."""

    def admits(self, demand: Demand) -> bool:
        """Whether memory suffices for this sequence and all running ones up to their max_tokens."""
        return demand.fits_to_the_end


POLICY = GuaranteedNoEvict
