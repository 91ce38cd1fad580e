"""Loads an engine directory and creates its executor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from stoker.base.config import RuntimeConfig
from stoker.base.draft_settings import uses_drafter
from stoker.base.errors import StokerError
from stoker.base.logging import get_logger, log_event
from stoker.base.nodes import NodeSettings, leader
from stoker.base.start_times import StartTimes
from stoker.distributed.world import ALONE_WORLD
from stoker.engine.reader import Engine
from stoker.runtime.client import ExecutorInfo, Mailbox
from stoker.runtime.executor import Executor
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.kv.events.publisher import EventPublisher
from stoker.runtime.kv.snapshots import StateSnapshots
from stoker.runtime.schedule.data_parallel import AnyScheduler, DataParallelScheduler
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.start_checks import check_start
from stoker.runtime.transfer.transfers import RankTransfers, Transfers, transfer_address
from stoker.runtime.worker.capacity import Capacity
from stoker.runtime.worker.rank import captures_steps, load_rank, use_device
from stoker.runtime.worker_group.follower_process import WaitingFollowers
from stoker.runtime.worker_group.leader import ONE_NODE, WorkerGroup

log = get_logger(__name__)

STEP_TIMEOUT_S = {"cuda": 30.0, "cpu": 120.0}  # a prompt of 8192 tokens takes about 35 s on a CPU


def load_executor(
    path: str | Path,
    config: RuntimeConfig,
    make_mailbox: Callable[[ExecutorInfo], Mailbox],
    nodes: NodeSettings = ONE_NODE,
    *,
    waiting: WaitingFollowers | None = None,
    times: StartTimes | None = None,
) -> Executor:
    """Load the engine at `path` and return its executor, ready to run.

    For an engine of several ranks, this process is the leader and starts a process for each other rank on this node. With several `nodes`,
    it first waits for the others (`load_node`). `make_mailbox` is called when the limits are known. `waiting`: processes of the other ranks
    that are running already. `times` records the stages of the start, which are logged. Raises EngineError, ConfigError or RankError.
    """
    started, times = time.monotonic(), times or StartTimes()
    engine = Engine.open(path)
    devices = check_start(engine, config, nodes)
    capacity = Capacity.of(engine.config.limits, engine.config.model.max_positions, config)
    events, transfers = _open_events(engine, config), None
    ranks = None
    try:
        if config.transfer is not None:
            first = leader(engine.config.mapping)
            transfers = RankTransfers(config, engine.config, first, first)
        ranks = WorkerGroup(engine, config, capacity, devices, nodes, waiting) if engine.world_size > 1 else None
        executor = _load(engine, config, devices[leader(engine.config.mapping)], ranks, events, transfers, make_mailbox, times)
    except BaseException as error:
        if events is not None:
            events.close()
        if transfers is not None:
            transfers.close()
        if ranks is not None:
            _close_after_error(ranks, error)
        raise
    log.info(
        "%s is ready on %s after %.1f s",
        engine.config.checkpoint.name,
        ", ".join(dict.fromkeys(map(str, devices.values()))),
        time.monotonic() - started,
    )
    for report in (times.report(f"rank {leader(engine.config.mapping)}"), *(ranks.start_reports() if ranks is not None else [])):
        log_event(log, logging.INFO, report)
    return executor


def load_node(path: str | Path, config: RuntimeConfig, nodes: NodeSettings, joined: Callable[[list[int]], None]) -> None:
    """Run the ranks of a node other than node 0, until node 0 ends the engine.

    `joined` is called with the ranks of this node when all nodes have joined. Raises EngineError, ConfigError or RankError.
    """
    from stoker.runtime.worker_group.hosts.node import run_node

    engine = Engine.open(path)
    run_node(engine, config, check_start(engine, config, nodes), nodes, joined)


def _close_after_error(ranks: WorkerGroup, error: BaseException) -> None:
    """End the follower processes after a failed start. Raises RankError if the failure of a rank caused an error of another type."""
    try:
        if isinstance(error, Exception) and not isinstance(error, StokerError):
            ranks.check_after_error()
    finally:
        ranks.close(str(error) or repr(error))


def _open_events(engine: Engine, config: RuntimeConfig) -> EventPublisher | None:
    """The publisher of block events, if the settings have one. Its ports are bound before anything is loaded. Raises ConfigError."""
    if config.kv_events is None:
        return None
    return EventPublisher(config.kv_events, config.kv_events_replay, config.kv_events_topic, engine.config.limits.tokens_per_block)


def _load(
    engine: Engine,
    config: RuntimeConfig,
    device: torch.device,
    ranks: WorkerGroup | None,
    events: EventPublisher | None,
    rank_transfers: RankTransfers | None,
    make_mailbox: Callable[[ExecutorInfo], Mailbox],
    times: StartTimes,
) -> Executor:
    """Load this rank's weights, allocate the KV cache, and create the executor."""
    model_config, limits = engine.config.model, engine.config.limits
    use_device(device, config, engine.world_size)
    world = ALONE_WORLD
    if ranks is not None:
        ranks.wait()
        times.reached("all ranks joining")
        world = ranks.join(times)
    loaded = load_rank(engine, config, device, world, times)
    if ranks is not None:
        ranks.wait()
    loaded.forward_states()
    capacity, size = loaded.capacity, limits.tokens_per_block
    num_blocks = world.everyone.smallest(loaded.num_blocks())
    max_seq_len = min(capacity.max_seq_len, num_blocks * size)
    requires_whole_prompt = model_config.requires_whole_prompt
    if requires_whole_prompt:
        log.info("this model computes a prompt in one step: chunked prefill, prefix reuse and CUDA graphs are disabled")
    snapshots = StateSnapshots(capacity.max_num_sequences + 1, loaded.num_snapshots) if model_config.has_state else None
    make_scheduler = partial(
        Scheduler,
        num_blocks=num_blocks,
        tokens_per_block=size,
        max_batch_size=capacity.max_batch_size,
        max_num_tokens=capacity.max_num_tokens,
        max_seq_len=max_seq_len,
        max_num_sequences=capacity.max_num_sequences,
        policy=config.policy,
        chunked_prefill=config.chunked_prefill and not requires_whole_prompt,
        prefix_reuse=config.prefix_reuse and not requires_whole_prompt and (snapshots is None or snapshots.num_slots > 0),
        snapshots=snapshots,
        num_stages=world.stage.num_stages,
        event_log=BlockEventLog() if events is not None else None,
        proposer="drafter" if uses_drafter(config) else config.speculate,
        draft_tokens=loaded.max_drafts or None,
        tree=config.tree,
        adaptive_drafts=config.adaptive_drafts,
        target_itl_s=config.target_itl_ms / 1000 if config.target_itl_ms is not None else None,
        target_ttft_s=config.target_ttft_ms / 1000 if config.target_ttft_ms is not None else None,
        drafter_has_state=loaded.draft_source is not None and loaded.draft_source.has_state,
        drafter_catches_up=loaded.draft_source is not None and loaded.draft_source.catches_up,
        draft_share=loaded.draft_share,
        drafts_beside_prefill=not captures_steps(config, model_config) or device.type == "cpu",  # such steps are not captured
    )
    rows, data_parallel = capacity.max_num_sequences, world.data_parallel
    scheduler: AnyScheduler = make_scheduler()
    if data_parallel > 1:
        scheduler = DataParallelScheduler(lambda first: make_scheduler(first_row=first), data_parallel, rows, config.policy)
    runner = loaded.runner(num_blocks, ranks)
    times.reached("cache")
    runner.warm_up()
    times.reached("warm-up")
    budget = loaded.budget(num_blocks)
    log.info("%s", budget.table())
    _log_kernels(device)
    if rank_transfers is not None:
        rank_transfers.attach(runner)
    world.everyone.smallest(0)  # wait until all ranks are ready
    times.reached("all ranks ready")
    info = ExecutorInfo(
        limits=limits,
        max_seq_len=max_seq_len,
        vocab_size=model_config.vocab_size,
        device=device.type,
        kv_cache_tokens=num_blocks * size * data_parallel,
        data_parallel=data_parallel,
        model=model_config.architecture,
        memory=budget.purposes,
        speculate=config.speculate,
        step_timeout_s=config.step_timeout_s or STEP_TIMEOUT_S[device.type],
        kv_events=events.address if events is not None else None,
        transfer=transfer_address(config, rank_transfers) if rank_transfers is not None else None,
    )
    transfers = None
    if rank_transfers is not None:
        assert isinstance(scheduler, Scheduler)
        others = ranks.transfer_layouts() if ranks is not None else []
        transfers = Transfers(rank_transfers, others, scheduler, engine.config)
    executor = Executor(runner, scheduler, make_mailbox(info), info, config, ranks, events, transfers)
    executor.stats.proposer = loaded.draft_source.name if loaded.draft_source is not None else config.speculate
    executor.stats.weight_bytes, executor.stats.kv_bytes = loaded.weights, budget.kv
    return executor


def _log_kernels(device: torch.device) -> None:
    """Log how many kernels were cached and compiled, on a GPU."""
    if device.type == "cuda":
        from stoker.kernels.triton.aot.kernel_cache import counts

        log.info("kernels: %s", counts)
