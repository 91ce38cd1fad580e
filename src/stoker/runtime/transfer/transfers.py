"""The transfers of an executor: what its step loop calls, and how they are started on the leader and on the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec
import torch

from stoker.base import env
from stoker.base.config import PROPOSERS, RuntimeConfig
from stoker.base.draft_settings import uses_drafter
from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.core.forward_batch import KVCache
from stoker.engine.config import EngineConfig
from stoker.runtime.request import ExecutorStats, Sequence, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.transfer.address import TransferAddress, parse_transfer
from stoker.runtime.transfer.exports import Exports
from stoker.runtime.transfer.imports import Imports
from stoker.runtime.transfer.layout import EngineLayout, RankLayout, local_layers
from stoker.runtime.transfer.nixl_agent import NixlAgent
from stoker.runtime.transfer.nixl_library import check_backend, has_nixl
from stoker.runtime.transfer.pages import RankPages
from stoker.runtime.transfer.progress import StepProgress
from stoker.runtime.transfer.puller import Rank
from stoker.runtime.transfer.rank_server import RankServer, listen
from stoker.runtime.transfer.ticket import MIN_SECRET_BYTES, transfer_key

if TYPE_CHECKING:
    from stoker.runtime.worker.model_runner import ModelRunner

log = get_logger(__name__)

STALL_S = 0.5  # after which an idle engine gives up an import that waits for blocks while other engines do not read those held for them


class RankTransfers:
    """The server, the pages and the progress of one rank. It is created before the model is loaded, so that a used port is found early."""

    def __init__(self, config: RuntimeConfig, engine: EngineConfig, rank: int, leader: int) -> None:
        """Bind the port: that of the settings for the leader, any free one for other ranks. Raises ConfigError."""
        assert config.transfer is not None
        self._config, self._engine, self._number = config, engine, rank
        self.key = _required_key()
        host, port = parse_transfer(config.transfer)
        self.server = RankServer(listen(host, port if rank == leader else 0), self.key)
        self.layout: RankLayout | None = None
        self.rank: Rank | None = None
        self._nixl: NixlAgent | None = None

    @property
    def plain_dtype(self) -> torch.dtype:
        """The dtype of values that the receiver converts: that of the cache, or of the activations if the cache is quantized."""
        dtype: torch.dtype = getattr(torch, self._engine.dtype)
        return dtype

    def attach(self, runner: ModelRunner) -> None:
        """Use the caches of the rank's runner."""
        caches, device = runner.caches, runner.device
        first, layers = local_layers(self._engine.model, self._engine.mapping, self._number)
        pages = RankPages(caches, self._engine.model, first, device)
        self._nixl = self._open_nixl(caches, device)
        self.progress = runner.progress = StepProgress(len(caches), device)
        self.layout = RankLayout(
            host="", port=self.server.address[1], first_layer=first,
            layers=[pages.layer_layout(i, *layer) for i, layer in enumerate(layers)],
            nixl=self._nixl.metadata if self._nixl is not None else b"",
            pages=self._nixl.pages if self._nixl is not None else [],
            device=self._nixl.device if self._nixl is not None else -1,
        )  # fmt: skip
        timeout_s = self._config.transfer_timeout_s
        self.rank = Rank(pages, self.layout, caches[0].keys.dtype, self.progress, self.key, timeout_s, self._nixl)

    def start(self, exports: Exports | None = None) -> None:
        """Accept connections: on the leader also for `exports`."""
        assert self.rank is not None
        if exports is not None:
            self.server.on_close = exports.on_close
        self.server.start(self.rank, self.progress, self.plain_dtype, exports.handle if exports is not None else None)

    def close(self) -> None:
        """Close the port and the connections."""
        self.server.close()

    def close_nixl(self) -> None:
        """Unregister the pages. Called when no thread reads any more."""
        if self._nixl is not None:
            self._nixl.close()

    def _open_nixl(self, caches: list[KVCache], device: torch.device) -> NixlAgent | None:
        """The NIXL agent that the setting transfer_backend requests. With `auto`, None if there is no NIXL."""
        backend = self._config.transfer_backend
        if backend == "tcp" or (backend == "auto" and not has_nixl()):
            return None
        try:
            return NixlAgent(caches, device)
        except Exception as error:
            if backend == "nixl":
                raise
            log.warning("transfers use TCP, because NIXL cannot be used: %s", error)
            return None


class Transfers:
    """All transfers of an executor. Its methods are called by the step loop."""

    def __init__(self, own: RankTransfers, others: list[RankLayout], scheduler: Scheduler, engine: EngineConfig) -> None:
        """`own`: those of the leader; `others`: the layouts of the other ranks, with their hosts."""
        assert own.rank is not None and own.layout is not None
        self._own, self._scheduler = own, scheduler
        kv_cache = scheduler.kv_cache
        self._progress = own.progress
        self._stalled_at: float | None = None  # since when no sequence runs while blocks are held for other engines
        self._num_stalls = 0  # iterations in a row in which sequences wait and none runs
        layout = EngineLayout(
            checkpoint=engine.checkpoint.fingerprint, tokens_per_block=engine.limits.tokens_per_block, num_layers=engine.model.num_layers,
            dtype=str(own.rank.dtype).removeprefix("torch."), plain_dtype=engine.dtype,
            ranks=[own.layout, *(msgspec.structs.replace(each, host="") for each in others)],
        )  # fmt: skip
        self.exports = Exports(kv_cache, layout, own.rank.timeout_s)
        self.imports = Imports(kv_cache, layout, own.rank, others)
        own.start(self.exports)

    @property
    def is_busy(self) -> bool:
        """Whether blocks are held for another engine, or are being written."""
        return bool(self.exports.num_held or self.imports.num_running)

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake` from now on, in other threads, when `advance` has something to do."""
        self.exports.on_change = self.imports.on_change = wake

    def begin_import(self, request: TokenRequest) -> Future[None] | None:
        """Start to read the prompt of a request with a ticket to import. None if there is nothing to read."""
        ticket = request.transfer
        if ticket is None or ticket.purpose != "import" or request.params.prompt_logprobs is not None:
            return None
        return self.imports.begin(ticket, request)

    def begin_export(self, seq: Sequence) -> None:
        """Hold the blocks of a sequence's prompt for another engine, if its request has a ticket to export."""
        ticket = seq.request.transfer
        if ticket is not None and ticket.purpose == "export" and not seq.index:
            self.exports.begin(ticket, seq)

    def refuse(self, request: TokenRequest) -> None:
        """A request was refused."""
        if request.transfer is not None and request.transfer.purpose == "export":
            self.exports.refuse(request.transfer)

    def on_launch(self, plan: StepPlan) -> None:
        """A step was launched."""
        self.exports.on_launch(plan, self._progress.num_planned)
        if len(self.imports.held):
            for seq in plan.sequences:
                self._release_import(seq)

    def on_commit(self, plan: StepPlan) -> None:
        """A step was committed."""
        self.exports.on_commit(plan)

    def on_end(self, seq: Sequence) -> None:
        """A sequence has ended."""
        self.exports.on_end(seq)
        self._release_import(seq)

    def advance(self, zero_blocks: Callable[[], None]) -> None:
        """Allocate, adopt and release blocks. Called in each iteration.

        `zero_blocks`: zeroes the poisoned blocks that are free. It is called before blocks are allocated for imports, whose threads write
        to them while no step is ordered after the zeroing.
        """
        num_free = self._scheduler.kv_cache.pool.num_free
        self.imports.end_read()
        zero_blocks()
        self.imports.allocate()
        now = time.monotonic()
        self.exports.advance(now)
        if self._scheduler.num_running or not self.exports.num_held:
            self._stalled_at = None
        elif self._stalled_at is None:
            self._stalled_at = now
        elif now > self._stalled_at + STALL_S:
            self.imports.give_way()
        if (self._scheduler.num_waiting or self._scheduler.num_preempted) and not self._scheduler.num_running:
            self._num_stalls += 1
            if self._num_stalls > 1:  # the first waiting sequence was not admitted
                self.imports.held.release_all()
        else:
            self._num_stalls = 0
        if self._scheduler.kv_cache.pool.num_free > num_free:
            self._scheduler.on_free_blocks()

    def count(self, stats: ExecutorStats) -> None:
        """Set the statistics of transfers."""
        exports, imports = self.exports, self.imports
        stats.num_imports, stats.num_failed_imports = imports.num_completed, imports.num_failed
        stats.num_running_imports, stats.imported_bytes, stats.import_time_s = imports.num_running, imports.num_bytes, imports.time_s
        stats.import_read_time_s = imports.read_time_s
        stats.num_exports, stats.num_failed_exports, stats.num_held_exports = exports.num_completed, exports.num_failed, exports.num_held

    def _release_import(self, seq: Sequence) -> None:
        """Release the imported prompt of a sequence that was admitted or has ended, if it is held."""
        ticket = seq.request.transfer
        if ticket is not None and ticket.purpose == "import":
            self.imports.held.release(ticket.transfer_id)

    def close(self) -> None:
        """Close all connections, and wait for threads that write to the cache."""
        self._own.close()
        self.imports.close()
        self._own.close_nixl()


def check_transfers(config: RuntimeConfig, requires_whole_prompt: bool, num_nodes: int) -> None:
    """Raise ConfigError for settings of transfers that cannot be used with this engine, and DependencyError without a chosen package."""
    if config.transfer is None:
        return
    parse_transfer(config.transfer)
    check_backend(config)
    if requires_whole_prompt:
        raise ConfigError(
            f"transfer={config.transfer} is refused: this model reuses no prefixes, so its blocks are not transferred.",
            cure="Leave it out.",
        )
    if uses_drafter(config):
        limit = f"the cache of the drafter speculate={config.speculate} is not transferred"
        raise ConfigError(f"transfer={config.transfer} is refused: {limit}.", cure=f"Use one of: speculate={', '.join(PROPOSERS)}.")
    if num_nodes > 1:
        raise ConfigError(f"transfer={config.transfer} is refused: the engine has {num_nodes} nodes.", cure="Use one node.")
    _required_key()


def _required_key() -> bytes:
    """The key of transfers. Raises ConfigError without a shared secret."""
    if (key := transfer_key()) is None:
        state = f"has fewer than {MIN_SECRET_BYTES} bytes" if env.cluster_token() else "is not set"
        raise ConfigError(
            f"transfer requires a shared secret, and STOKER_CLUSTER_TOKEN {state}.",
            cure="Set it to the same value for all replicas and routers, such as the output of: openssl rand -hex 32.",
        )
    return key


def transfer_address(config: RuntimeConfig, own: RankTransfers) -> TransferAddress:
    """What a router needs to know: the role of this executor, and its transfer address with the actual port."""
    assert config.transfer is not None
    return TransferAddress(config.role, parse_transfer(config.transfer)[0], own.server.address[1])
