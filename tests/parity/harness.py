"""Runs an engine step by step with chosen chunks and shuffled KV cache blocks, so that a test decides which sequences share a step."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from stoker.builder.build_plan import BuildPlan
from stoker.builder.conversion.shard_plan import specs_in_file_order
from stoker.core.forward_batch import ForwardBatch
from stoker.core.prefix_lm import BidirectionalPrefix, find_bidirectional_prefix
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.layers.state_cache import StateCache
from stoker.quant.format import TensorSource, TensorTable
from stoker.runtime.worker.memory import make_caches

BLOCK, NUM_SLOTS = 16, 16
CPU = torch.device("cpu")


@dataclass
class Sequence:
    """A sequence, its blocks, and the logits that were computed at each of its positions."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    prefix: BidirectionalPrefix | None = None
    slot: int = -1  # of its recurrent states


class PlannedEngine(Engine):
    """The engine of a build plan for one rank, with its weights in memory: what `build` would write and `Engine.open` would read."""

    def __init__(self, plan: BuildPlan) -> None:
        super().__init__(plan.checkpoint.path, plan.config)
        converter = plan.converter()
        self.tensors = TensorTable({name: tensor for spec in specs_in_file_order(plan.config) for name, tensor in converter.convert(spec)})

    def source(self, rank: int = 0, device: torch.device | str = CPU) -> TensorSource:
        return self.tensors


class Harness:
    """One engine on a device, and its free KV cache blocks in random order."""

    def __init__(self, engine: Path | Engine, num_positions: int, num_blocks: int = 96, device: torch.device = CPU) -> None:
        opened = engine if isinstance(engine, Engine) else Engine.open(engine)
        self.config, self.device = opened.config.model, device
        with torch.inference_mode():
            self.load(opened, num_positions, num_blocks)
        self.free = list(range(num_blocks))
        random.Random(7).shuffle(self.free)
        self.num_sequences = 0

    def load(self, engine: Engine, num_positions: int, num_blocks: int) -> None:
        self.model = Decoder(self.config, engine.loader(0, self.device), num_positions)
        states = StateCache(self.config, range(self.config.num_layers), 1, NUM_SLOTS, self.model.dtype, self.device)
        self.caches = make_caches(self.config, num_blocks, BLOCK, engine.kv_dtype, self.device, states=states)
        self.model.complete_caches(self.caches)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [tokens, vocab]."""
        return self.model(batch, self.caches)

    def start(self, prompt: list[int], share: Sequence | None = None) -> Sequence:
        """A new sequence, which shares the full blocks of its common prefix with sequence `share`."""
        sequence = Sequence(list(prompt), slot=self.num_sequences % NUM_SLOTS)
        self.num_sequences += 1
        if self.config.prefix is not None:
            sequence.prefix = find_bidirectional_prefix(self.config.prefix, prompt)
        elif share is not None:
            same = next((i for i, pair in enumerate(zip(prompt, share.tokens, strict=False)) if pair[0] != pair[1]), len(prompt))
            whole = min(same, share.computed, len(prompt) - 1) // BLOCK
            sequence.blocks, sequence.computed = share.blocks[:whole], whole * BLOCK
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence. Its tokens are computed again, into other blocks."""
        self.free = self.free + sequence.blocks[::-1]
        sequence.blocks, sequence.computed = [], 0

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute (sequence, number of tokens) pairs in one step. Sequences without tokens left to compute get the most likely next one."""
        work = sorted(work, key=lambda pair: pair[1] != 1)
        with torch.inference_mode():
            logits = self.forward(self._batch(work)).cpu()
        done = 0
        for sequence, count in work:
            for i in range(count):
                sequence.logits[sequence.computed + i] = logits[done + i]
            done += count
            sequence.computed += count
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(int(logits[done - 1].argmax()))

    def _batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        for sequence, count in work:
            while len(sequence.blocks) * BLOCK < sequence.computed + count:
                sequence.blocks.append(self.free.pop())
        spans = [(s, range(s.computed, s.computed + n)) for s, n in work]
        width = max(len(s.blocks) for s, _ in work)

        def ints(values: Iterable[int] | list[list[int]]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=self.device)

        starts = [0]
        for _, count in work:
            starts.append(starts[-1] + count)
        prefixes = [s.prefix for s, _ in work if s.prefix is not None]
        return ForwardBatch(
            token_ids=ints([s.tokens[i] for s, span in spans for i in span]),
            positions=ints([s.prefix.position(i) if s.prefix else i for s, span in spans for i in span]),
            slots=ints([s.blocks[i // BLOCK] * BLOCK + i % BLOCK for s, span in spans for i in span]),
            query_starts=ints(starts),
            seq_lens=ints([span.stop for _, span in spans]),
            block_tables=ints([[*s.blocks, *[1 << 20] * (width - len(s.blocks))] for s, _ in spans]),
            num_decodes=sum(count == 1 for _, count in work),
            max_query_len=max(count for _, count in work),
            max_seq_len=max(span.stop for _, span in spans),
            state_slots=ints([s.slot for s, _ in work]),
            logits_idx=ints(range(starts[-1])),
            prefix_lens=ints([p.length for p in prefixes]) if prefixes else None,
            block_positions=ints([s.prefix.block_position(i) for s, span in spans for i in span if s.prefix]) if prefixes else None,
        )


def prefill_logits(harness: Harness, prompt: list[int]) -> Tensor:
    """Logits [len(prompt), vocab] of a prefill of the prompt in one step."""
    sequence = harness.start(prompt)
    harness.step([(sequence, len(prompt))])
    harness.preempt(sequence)
    return torch.stack([sequence.logits[i] for i in range(len(prompt))])


def generate_in_batch(harness: Harness, prompt: list[int], others: list[list[int]], num_new: int) -> Sequence:
    """Generate `num_new` greedy tokens in steps shared with sequences of prompts `others`.

    The prompt is prefilled in chunks. Half way, the sequence is preempted and computed again.
    """
    in_one_step = harness.config.requires_whole_prompt
    other_sequences = [harness.start(other) for other in others]
    for other in other_sequences:
        harness.step([(other, len(other.tokens))])
    main = harness.start(prompt)
    for count in _chunk_sizes(len(prompt), in_one_step):
        harness.step([(main, count), *((other, 1) for other in other_sequences)])
    half = len(prompt) + num_new // 2
    while len(main.tokens) < half:
        harness.step([(main, 1), *((other, 1) for other in other_sequences if len(other.tokens) < 90)])
    harness.preempt(main)
    for count in _chunk_sizes(len(main.tokens), in_one_step):
        harness.step([(other_sequences[0], 1), (main, count)])
    while len(main.tokens) < len(prompt) + num_new:
        harness.step([(main, 1)])
    return main


def _chunk_sizes(total: int, in_one_step: bool) -> list[int]:
    if in_one_step:
        return [total]
    sizes: list[int] = []
    for size in (1, 5, 9, total):
        sizes.append(min(size, total - sum(sizes)))
    return [size for size in sizes if size]
