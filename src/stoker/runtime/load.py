"""From an engine directory to an executor: open, load, size the cache, connect."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from stoker.base import env
from stoker.base.config import Limits, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.runtime.client import ExecutorInfo, Mailbox
from stoker.runtime.executor import Executor
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.memory import MemoryBudget, block_bytes, free_memory, make_caches, num_kv_blocks
from stoker.runtime.worker.model_runner import ModelRunner

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits a run keeps to: the engine's, lowered by the runtime settings."""

    max_batch_size: int
    max_num_sequences: int
    max_num_tokens: int
    max_seq_len: int

    @staticmethod
    def of(limits: Limits, max_positions: int, config: RuntimeConfig) -> Capacity:
        """Raises ConfigError for a runtime setting above the engine's limit."""
        for name in ("max_batch_size", "max_num_tokens"):
            asked, built = getattr(config, name), getattr(limits, name)
            if asked is not None and asked > built:
                cure = f"Build the engine with --{name.replace('_', '-')} {asked}."
                raise ConfigError(f"{name}={asked} is above the engine's {built}.", cure=cure)
        batch = config.max_batch_size or limits.max_batch_size
        return Capacity(
            max_batch_size=batch,
            max_num_sequences=config.max_num_sequences or batch,
            max_num_tokens=config.max_num_tokens or limits.max_num_tokens,
            max_seq_len=min(limits.max_seq_len, max_positions),
        )


def load_executor(path: str | Path, config: RuntimeConfig, make_mailbox: Callable[[ExecutorInfo], Mailbox]) -> Executor:
    """Load the engine at `path` on this process's device and return its executor, ready to run.

    `make_mailbox` is called once the limits are known. Raises EngineError or ConfigError.
    """
    started = time.monotonic()
    engine = Engine.open(path)
    device = torch.device(config.device or engine.config.target.device)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or env.num_threads())
    model_config, limits = engine.config.model, engine.config.limits
    capacity = Capacity.of(limits, model_config.max_positions, config)
    engine.check_world(1)
    if config.kv_cache_dtype not in (None, "auto", str(engine.kv_dtype).removeprefix("torch.")):
        asked, built = config.kv_cache_dtype, str(engine.kv_dtype).removeprefix("torch.")
        raise ConfigError(f"kv_cache_dtype={asked} is refused: the engine stores {built}.", cure=f"Build it with --kv-cache-dtype {asked}.")
    before = free_memory(device)[0]
    with torch.inference_mode():
        model = Decoder(model_config, engine.loader(0, device), capacity.max_seq_len)
    weights = sum(record.size for name, record in engine.config.files.items() if name.startswith("rank"))
    if device.type == "cuda":
        torch.cuda.synchronize()
        weights = before - free_memory(device)[0]

    size = limits.tokens_per_block
    dtype = engine.kv_dtype
    free, total = free_memory(device)
    bytes_per_block = block_bytes(model_config, size, dtype)
    num_blocks = num_kv_blocks(free, bytes_per_block, limits, config, device.type)
    budget = MemoryBudget(str(device), total, weights, 0, free, num_blocks * bytes_per_block, num_blocks, size)
    log.info("%s", budget.table())
    caches = make_caches(model_config, num_blocks, size, dtype, device)
    model.scale_caches(caches)
    max_seq_len = min(capacity.max_seq_len, num_blocks * size)
    scheduler = Scheduler(
        num_blocks=num_blocks,
        tokens_per_block=size,
        max_batch_size=capacity.max_batch_size,
        max_num_tokens=capacity.max_num_tokens,
        max_seq_len=max_seq_len,
        max_num_sequences=capacity.max_num_sequences,
        policy=config.policy,
        chunked_prefill=config.chunked_prefill,
        prefix_reuse=config.prefix_reuse,
    )
    runner = ModelRunner(
        model,
        caches,
        num_rows=capacity.max_num_sequences,
        max_batch_size=capacity.max_batch_size,
        max_num_tokens=capacity.max_num_tokens,
        max_seq_len=max_seq_len,
        block_size=size,
        device=device,
        use_graphs=config.cuda_graphs,
    )
    runner.warm_up()
    info = ExecutorInfo(
        limits=limits,
        max_seq_len=max_seq_len,
        vocab_size=model_config.vocab_size,
        device=device.type,
        kv_cache_tokens=num_blocks * size,
        model=model_config.architecture,
    )
    executor = Executor(runner, scheduler, make_mailbox(info), info, config)
    executor.stats.weight_bytes, executor.stats.kv_bytes = weights, num_blocks * bytes_per_block
    log.info("%s is ready on %s after %.1f s", Path(path).name, device, time.monotonic() - started)
    return executor
