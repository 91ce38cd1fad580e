"""The autoscaling policy of an engine: the number of replicas for its sequences, its requests that wait, and its KV cache.

Ray Serve calls the policy in its controller, applies the delays and the limits of the deployment, and starts the first replica when a
request waits while there is none.
"""

from __future__ import annotations

import math
from typing import Any

SEQUENCES, KV_USAGE, INGRESS_WAITING = "stoker_sequences", "stoker_kv_usage", "stoker_ingress_waiting"


class EnginePolicy:
    """`target_requests` and `target_kv_usage` are those of EngineSettings."""

    def __init__(self, target_requests: int, target_kv_usage: float) -> None:
        self.target_requests, self.target_kv_usage = target_requests, target_kv_usage

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas, from what the replicas have reported (`EngineReplica.record_autoscaling_stats`)."""
        metrics = context.aggregated_metrics or {}
        sequences = list(metrics.get(SEQUENCES, {}).values())
        if not sequences:  # no replica has reported yet
            return context.target_num_replicas, {}
        usage = list(metrics.get(KV_USAGE, {}).values())
        waiting = max(metrics.get(INGRESS_WAITING, {}).values(), default=0.0)  # every replica reports the same
        return desired_replicas(sum(sequences) + waiting, sum(usage), self.target_requests, self.target_kv_usage), {}


def desired_replicas(num_sequences: float, kv_usage: float, target_requests: int, target_kv_usage: float) -> int:
    """The replicas for this many sequences, and for KV caches whose used fractions have the sum `kv_usage`. 0 without a sequence."""
    if num_sequences <= 0:
        return 0
    return max(1, math.ceil(num_sequences / target_requests - 1e-9), math.ceil(kv_usage / target_kv_usage - 1e-9))
