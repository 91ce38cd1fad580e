"""The scheduling policies, by name."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.runtime.schedule.policies.guaranteed_no_evict import GuaranteedNoEvict
from stoker.runtime.schedule.policies.max_utilization import MaxUtilization
from stoker.runtime.schedule.policies.policy import Policy
from stoker.runtime.schedule.policies.static import Static

POLICIES: Registry[type[Policy]] = Registry("policy")
POLICIES.add("guaranteed_no_evict", GuaranteedNoEvict)
POLICIES.add("max_utilization", MaxUtilization)
POLICIES.add("static", Static)
