"""Loads one rank of an engine: the weights on its device and its shard of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from stoker.base import env
from stoker.base.config import RuntimeConfig
from stoker.base.draft_settings import uses_drafter
from stoker.base.logging import get_logger
from stoker.base.start_times import StartTimes
from stoker.core.model_config import ModelConfig
from stoker.distributed.world import World
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.layers.decoder import Decoder
from stoker.layers.state_cache import StateCache, state_bytes
from stoker.runtime.sampling.grammar_compiler import Grammars
from stoker.runtime.schedule.planner import max_sampled_tokens
from stoker.runtime.worker.capacity import Capacity
from stoker.runtime.worker.draft_sources import DraftTask, load_drafter
from stoker.runtime.worker.drafter import DraftSource
from stoker.runtime.worker.dummy_step import Bounds
from stoker.runtime.worker.inputs import Shape
from stoker.runtime.worker.layer_kinds import representative_layers
from stoker.runtime.worker.memory import (
    MemoryBudget,
    block_bytes,
    free_memory,
    make_caches,
    num_kv_blocks,
    num_snapshots,
    num_verified_slots,
)
from stoker.runtime.worker.model_runner import ModelRunner, StepPublisher
from stoker.runtime.worker.row_tracker import make_tracker

log = get_logger(__name__)


@dataclass(slots=True)
class LoadedRank:
    """A rank whose weights are loaded. `weights`, `free` and `activations` are in bytes."""

    engine: Engine
    config: RuntimeConfig
    capacity: Capacity
    device: torch.device
    world: World
    model: Decoder
    weights: int
    free: int = 0  # free memory after the weights and libraries were loaded; set by `num_blocks`
    activations: int | None = None
    graphs: int = 0  # bytes of all CUDA graphs; set by `num_blocks`
    num_snapshots: int = 0  # of recurrent states; set by `num_blocks`
    draft_source: DraftSource | None = None  # of the leader, if `config` names a draft engine
    times: StartTimes = field(default_factory=StartTimes)

    @property
    def max_drafts(self) -> int:
        """The largest number of drafts of a row; 0 without speculative decoding."""
        if self.config.speculate == "none":
            return 0
        return self.config.max_drafts if self.draft_source is None else self.draft_source.num_drafts

    @property
    def pads_prefills(self) -> bool:
        """Whether prompts of a step are padded to the longest one, by the ops of recurrent states."""
        return self.engine.config.model.has_state or (self.draft_source is not None and self.draft_source.has_state)

    @property
    def draft_share(self) -> float:
        """The size of the weights that one draft reads relative to those that a step of this rank reads: about the time of one draft.

        0 if unknown.
        """
        file = self.engine.config.files.get(f"rank{self.world.rank}.safetensors")
        num_read = file.size - self.model.lookup_bytes if file is not None else 0
        return self.draft_source.draft_bytes / num_read if self.draft_source is not None and num_read > 0 else 0.0

    def forward_states(self) -> None:
        """Make pipeline stages send the hidden states that the drafter of the leader reads. Every rank must call it at the same time."""
        if self.world.stage.num_stages == 1 or not uses_drafter(self.config):
            return
        wanted = torch.zeros(self.engine.config.model.num_layers + 1, dtype=torch.int32)
        if self.draft_source is not None:
            wanted[torch.tensor(self.draft_source.layers, dtype=torch.int64)] = 1
        layers = self.world.everyone.all_reduce(wanted.to(self.device)).nonzero().flatten()
        self.model.forward_states(layers.tolist())

    def num_blocks(self) -> int:
        """The number of KV cache blocks that fit beside the activations of the largest step, the graphs and recurrent states.

        Every rank must call it at the same time, because it runs steps.
        """
        slots = self.capacity.max_num_sequences, self._num_verified, self.config, self.device.type
        if self.engine.config.model.has_state:  # refuse too many sequences before the largest step allocates their states
            num_snapshots(self._free(), self._slot_bytes() or 1, *slots)
        if self.device.type == "cuda":
            self.activations = self._largest_step()
            self.times.reached("largest step")
            self.graphs = self._runner(1, self.capacity.max_seq_len, use_graphs=self._use_graphs).graph_footprint()
            torch.cuda.empty_cache()
            self.times.reached("size of graphs")
        self.free = self._free()
        room = self.free - (self.activations or 0) - self.graphs
        if self.draft_source is not None:
            room -= self.draft_source.spare_bytes(self.capacity.max_num_sequences)
        if self.engine.config.model.has_state:
            self.num_snapshots = self.world.everyone.smallest(num_snapshots(room, self._slot_bytes() or 1, *slots))
            room -= self._state_bytes()
        return num_kv_blocks(room, self._block_bytes(), self.engine.config.limits, self.config, self.device.type)

    def _free(self) -> int:
        """The free memory of this rank in bytes. Ranks on a CPU divide the memory of the machine."""
        free = free_memory(self.device)[0]
        return free // self.world.ranks_on_host if self.device.type == "cpu" else free

    def _largest_step(self) -> int:
        """The peak memory in bytes of steps at the limits, without weights and cache.

        Running these steps also loads kernels and allocates workspaces of libraries.
        """
        runner = self._runner(1, self.capacity.max_seq_len, use_graphs=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        pads = not self.world.everyone.smallest(not self.pads_prefills)  # the same steps on all ranks; only the leader has a draft engine
        for shape, bounds in largest_steps(self.capacity, speculates=self.config.speculate != "none", pads=pads):
            runner.run_dummy_step_with_sampling(shape, bounds, all_layers=shape.is_decode)  # prompts take long
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _block_bytes(self) -> int:
        """The number of bytes of one KV cache block on this rank."""
        config = self.engine.config
        layers = self.world.stage.layers(config.model.num_layers)
        model = block_bytes(config.model, config.limits.tokens_per_block, self.engine.kv_dtype, layers, config.mapping.tensor_parallel)
        return model if self.draft_source is None else model + self.draft_source.block_bytes()

    def _slot_bytes(self) -> int:
        """The number of bytes of the recurrent states of one sequence on this rank."""
        config = self.engine.config
        layers = self.world.stage.layers(config.model.num_layers)
        return state_bytes(config.model, layers, config.mapping.tensor_parallel, getattr(torch, config.dtype))

    @property
    def _num_slots(self) -> int:
        """The number of slots of recurrent states: of the rows, of padding, of snapshots, and of the tokens of a step with drafts."""
        return self.capacity.max_num_sequences + 1 + self.num_snapshots + self._num_verified

    @property
    def _num_verified(self) -> int:
        """The number of slots for the states after each token of a step that verifies drafts."""
        return num_verified_slots(self.capacity.max_batch_size, self.max_drafts)

    def _state_bytes(self) -> int:
        """The number of bytes of all slots."""
        return self._num_slots * self._slot_bytes()

    def budget(self, num_blocks: int) -> MemoryBudget:
        """The memory budget for a cache of `num_blocks` blocks."""
        size, total = self.engine.config.limits.tokens_per_block, free_memory(self.device)[1]
        kv = num_blocks * self._block_bytes()
        sizes = self.weights, self.free, self.activations, self.graphs, kv, num_blocks, size, self._state_bytes()
        return MemoryBudget(str(self.device), total, *sizes)

    def runner(self, num_blocks: int, publisher: StepPublisher | None = None) -> ModelRunner:
        """Allocate the cache with `num_blocks` blocks, and create the runner."""
        max_seq_len = min(self.capacity.max_seq_len, num_blocks * self.engine.config.limits.tokens_per_block)
        path, vocab_size, config = self.engine.path, self.engine.config.model.vocab_size, self.config
        grammars = None
        if self.world.is_leader:
            grammars = Grammars(path, vocab_size, timeout_s=config.guide_timeout_s, queue_size=config.guide_queue_size)
        return self._runner(num_blocks, max_seq_len, use_graphs=self._use_graphs, publisher=publisher, grammars=grammars)

    @property
    def _use_graphs(self) -> bool:
        """Whether the runner captures steps as CUDA graphs."""
        return captures_steps(self.config, self.engine.config.model)

    def _runner(
        self,
        num_blocks: int,
        max_seq_len: int,
        *,
        use_graphs: bool,
        publisher: StepPublisher | None = None,
        grammars: Grammars | None = None,
    ) -> ModelRunner:
        """Allocate a cache and create a runner, either the final one or one for measuring memory."""
        config, capacity = self.engine.config, self.capacity
        size, tensor = config.limits.tokens_per_block, config.mapping.tensor_parallel
        layers = self.world.stage.layers(config.model.num_layers)
        states = None
        if config.model.has_state:
            states = StateCache(config.model, layers, tensor, self._num_slots, getattr(torch, config.dtype), self.device)
        caches = make_caches(config.model, num_blocks, size, self.engine.kv_dtype, self.device, layers, tensor, states)
        self.model.complete_caches(caches)
        return ModelRunner(
            self.model,
            caches,
            num_rows=capacity.max_num_sequences * config.mapping.data_parallel,
            max_batch_size=capacity.max_batch_size,
            max_num_tokens=capacity.max_num_tokens,
            max_seq_len=max_seq_len,
            drafter=self.draft_source.drafter(num_blocks, capacity.max_num_sequences) if self.draft_source is not None else None,
            max_drafts=self.max_drafts,
            has_trees=self.config.tree is not None,
            block_size=size,
            device=self.device,
            use_graphs=use_graphs,
            world=self.world,
            publisher=publisher,
            grammars=grammars,
            states=states,
            representatives=None if uses_drafter(self.config) else representative_layers(self.engine, layers),
            tracker=make_tracker(
                self.config,
                config.model,
                self.draft_source,
                world_size=self.world.size,
                num_rows=capacity.max_num_sequences,
                max_seq_len=max_seq_len,
                block_size=size,
                device=self.device,
            ),
        )


def captures_steps(config: RuntimeConfig, model: ModelConfig) -> bool:
    """Whether steps are captured as CUDA graphs.

    Prefix LMs are excluded, because a captured step has no block positions.
    """
    return config.cuda_graphs and not model.requires_whole_prompt


def largest_steps(capacity: Capacity, *, speculates: bool = False, pads: bool = False) -> list[tuple[Shape, Bounds]]:
    """(shape, bounds) of the steps at the limits: only decodes, decodes with one prompt, and only prompts.

    With speculative decoding, also decodes with drafts; the steps then have logits for as many rows as these sample tokens. `pads`: prompts
    are padded to the longest one, and have no more places together than one prompt of the largest number of tokens.
    """
    rows, tokens, longest = capacity.max_batch_size, max(capacity.max_num_tokens, capacity.max_batch_size), capacity.max_seq_len
    if speculates:
        rows = max(rows, min(max_sampled_tokens(rows), tokens))
    steps = [(Shape(rows, rows, is_decode=True), Bounds(rows, 1, longest))]
    if tokens > rows:
        steps += [(Shape(tokens, rows, False), Bounds(rows - 1, tokens - rows + 1, longest))]
        steps += [(Shape(tokens, 1 if pads else rows, False), Bounds(0, tokens, longest))]
    return steps


def load_rank(engine: Engine, config: RuntimeConfig, device: torch.device, world: World, times: StartTimes | None = None) -> LoadedRank:
    """Load the weights of this rank, and record the stages in `times`. Raises EngineError or ConfigError."""
    times = times or StartTimes()
    use_device(device, config, world.ranks_on_host)
    if device.type == "cuda":
        _use_kernels(engine)
        times.reached("kernels")
    ops.check_inboxes(world.tensor)
    capacity = Capacity.of(engine.config.limits, engine.config.model.max_positions, config)
    before = free_memory(device)[0]
    with torch.inference_mode():
        model = Decoder(
            _windowed(engine.config.model, config, capacity),
            engine.loader(world.rank, device, world.tensor, world.dispatch),
            capacity.max_seq_len,
            world.stage,
        )
        source = None
        if world.is_leader and uses_drafter(config):
            source = load_drafter(draft_task(engine, config, device, capacity), model)
    found = engine.config.files.get(f"rank{world.rank}.safetensors")
    weights = (found.size if found is not None else 0) + (source.num_bytes if source is not None else 0)
    if device.type == "cuda":
        torch.cuda.synchronize()
        weights = before - free_memory(device)[0]
    model.reserve_sums(max(capacity.max_num_tokens, capacity.max_batch_size))
    times.reached("weights")
    return LoadedRank(engine, config, capacity, device, world, model, weights, draft_source=source, times=times)


def draft_task(engine: Engine, config: RuntimeConfig, device: torch.device, capacity: Capacity) -> DraftTask:
    """What the drafter that `config` names is loaded for."""
    window = config.attention_window
    window = None if window is None or window >= capacity.max_seq_len else window
    path, longest, rows = Path(config.speculate), capacity.max_seq_len, capacity.max_batch_size
    return DraftTask(path, engine, device, longest, config.max_drafts, window, rows, config.tree)


def _windowed(model: ModelConfig, config: RuntimeConfig, capacity: Capacity) -> ModelConfig:
    """The model with the `attention_window` of `config`, unless the window is at least as long as every sequence."""
    window = config.attention_window
    return model if window is None or window >= capacity.max_seq_len else model.windowed(window)


def _use_kernels(engine: Engine) -> None:
    """Install the engine's tuning file and compiled kernels, and use the cache with kernels that earlier starts compiled."""
    from stoker.kernels.triton.aot import kernel_cache as cache
    from stoker.kernels.tuning.devices import use_engine_tuning

    use_engine_tuning(engine.path, torch.cuda.get_device_name())
    folder, file = cache.use_kernel_cache(), engine.path / cache.ARCHIVE
    if cache.ARCHIVE in engine.config.files:
        log.info("installed %d compiled kernels of the engine", cache.install_archive(file, folder))


def use_device(device: torch.device, config: RuntimeConfig, num_ranks: int) -> None:
    """Make `device` the default device of this process. Ranks on a CPU divide its cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(config.num_threads or max(env.num_threads() // num_ranks, 1))
