"""A fleet that is split into replicas that compute prompts and replicas that generate answers: the time of transfers between them."""

from __future__ import annotations

import msgspec

from stoker.base.errors import ConfigError
from stoker.router.core.router import Lease
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import StepPlan
from stoker.simulation.replica import SimulatedReplica


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of moving KV cache blocks from one replica to another one."""

    kv_bytes_per_token: int = 131_072
    """Bytes of keys and values of one token in all layers: 131,072 for an 8B model in bfloat16."""

    transfer_gb_per_s: float = 50.0
    """Bandwidth with which the blocks of one prefill replica are read, in 10⁹ bytes per second."""

    transfer_latency_ms: float = 1.0
    """Time of a transfer in addition to that of its bytes."""

    def __post_init__(self) -> None:
        if not 1 <= self.kv_bytes_per_token <= 1 << 30:
            raise ConfigError(f"kv_bytes_per_token={self.kv_bytes_per_token} is refused.", cure="Use bytes, from 1 to 1073741824.")
        if not 0.001 <= self.transfer_gb_per_s <= 1e6:
            raise ConfigError(f"transfer_gb_per_s={self.transfer_gb_per_s} is refused.", cure="Use 10⁹ bytes per second, from 0.001.")
        if not 0 <= self.transfer_latency_ms <= 1e6:
            raise ConfigError(f"transfer_latency_ms={self.transfer_latency_ms} is refused.", cure="Use milliseconds, from 0 to 1000000.")


class SimulatedTransfer:
    """A prompt that `prompt` computes on one replica, and whose blocks move to `target`, where `seq` continues."""

    def __init__(self, prompt: Sequence, seq: Sequence, target: SimulatedReplica, lease: Lease, num_cached: int) -> None:
        """`lease`: of the replica that computes. `num_cached`: tokens of the prompt that the target holds already."""
        self.prompt, self.seq, self.target, self.lease, self.num_cached = prompt, seq, target, lease, num_cached
        self.computed_s = 0.0  # when the prompt was computed

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the blocks that the target does not hold."""
        size = self.target.scheduler.kv_cache.tokens_per_block
        return max(0, (self.seq.num_prompt - 1) // size * size - self.num_cached)


class TransferLinks:
    """The links of the replicas that compute prompts. A link carries one transfer after the other, and starts with the first chunk."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._free_s: dict[str, float] = {}  # by the name of the replica: when its link has sent everything
        self._transfers: dict[int, SimulatedTransfer] = {}  # by the seq_id of the prompt

    def add(self, transfer: SimulatedTransfer) -> None:
        """The prompt of a transfer will be computed."""
        self._transfers[transfer.prompt.seq_id] = transfer

    def end_step(self, replica: SimulatedReplica, plan: StepPlan, now_s: float) -> list[tuple[float, SimulatedTransfer]]:
        """A step has ended: send what it has computed. Returns (arrival of the last block, transfer) for each complete prompt."""
        complete: list[tuple[float, SimulatedTransfer]] = []
        if not self._transfers:
            return complete
        name = replica.replica.name
        for seq, start, count, samples in zip(plan.sequences, plan.starts, plan.num_new, plan.samples, strict=True):
            if (transfer := self._transfers.get(seq.seq_id)) is None:
                continue
            first = (
                transfer.num_cached if start == seq.num_cached else max(start, transfer.num_cached)
            )  # with its first step, reused blocks
            num_tokens = max(0, start + count - first)
            seconds = num_tokens * self._settings.kv_bytes_per_token / (1e9 * self._settings.transfer_gb_per_s)
            self._free_s[name] = max(self._free_s.get(name, 0.0), now_s) + seconds
            if samples:
                del self._transfers[seq.seq_id]
                transfer.computed_s = now_s
                complete.append((self._free_s[name] + self._settings.transfer_latency_ms / 1000, transfer))
        return complete
