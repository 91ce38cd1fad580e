"""guaranteed_no_evict: admitted sequences are never preempted."""

from __future__ import annotations

from stoker.runtime.schedule.policies.policy import Demand, Policy


class GuaranteedNoEvict(Policy):
    """Admits a sequence only if all admitted ones can reach max_tokens. Steady latency; memory is unused when answers end early."""

    def admits(self, demand: Demand) -> bool:
        return demand.fits_to_the_end


POLICY = GuaranteedNoEvict
