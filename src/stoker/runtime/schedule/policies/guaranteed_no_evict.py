"""guaranteed_no_evict: what was admitted is never preempted."""

from __future__ import annotations

from stoker.runtime.schedule.policies.policy import Demand, Policy


class GuaranteedNoEvict(Policy):
    """Admit only if every admitted sequence can run to its max_tokens. Steady latency; memory idles when answers end early."""

    def admits(self, demand: Demand) -> bool:
        return demand.fits_to_the_end
