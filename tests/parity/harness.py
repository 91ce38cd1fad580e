"""An engine driven by hand: steps of chosen chunks over shuffled blocks, so that a test decides what shares a step with what."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.core.prefix_lm import BidirectionalPrefix, find_bidirectional_prefix
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.runtime.worker.memory import make_caches

BLOCK = 16
CPU = torch.device("cpu")


@dataclass
class Sequence:
    """A sequence and the logits that were computed for each of its tokens."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    prefix: BidirectionalPrefix | None = None


class Harness:
    """One engine with a pool of blocks in random order, on the CPU unless `device` is another."""

    def __init__(self, engine: Path, num_positions: int, num_blocks: int = 96, device: torch.device = CPU) -> None:
        self.config, self.device = Engine.open(engine).config.model, device
        with torch.inference_mode():
            self.load(Engine.open(engine), num_positions, num_blocks)
        self.free = list(range(num_blocks))
        random.Random(7).shuffle(self.free)

    def load(self, engine: Engine, num_positions: int, num_blocks: int) -> None:
        self.model = Decoder(self.config, engine.loader(0, self.device), num_positions)
        self.caches = make_caches(self.config, num_blocks, BLOCK, engine.kv_dtype, self.device)
        self.model.complete_caches(self.caches)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [T, vocab]."""
        return self.model(batch, self.caches)

    def start(self, prompt: list[int], share: Sequence | None = None) -> Sequence:
        """A new sequence; its whole blocks in common with `share` are taken over."""
        sequence = Sequence(list(prompt))
        if self.config.prefix is not None:
            sequence.prefix = find_bidirectional_prefix(self.config.prefix, prompt)
        elif share is not None:
            same = next((i for i, pair in enumerate(zip(prompt, share.tokens, strict=False)) if pair[0] != pair[1]), len(prompt))
            whole = min(same, share.computed, len(prompt) - 1) // BLOCK
            sequence.blocks, sequence.computed = share.blocks[:whole], whole * BLOCK
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks away; everything is to be computed again, into other blocks."""
        self.free = self.free + sequence.blocks[::-1]
        sequence.blocks, sequence.computed = [], 0

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute so many tokens of each sequence, and append the likeliest token to those that are caught up."""
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
            logits_idx=ints(range(starts[-1])),
            prefix_lens=ints([p.length for p in prefixes]) if prefixes else None,
            block_positions=ints([s.prefix.block_position(i) for s, span in spans for i in span if s.prefix]) if prefixes else None,
        )


def alone(harness: Harness, prompt: list[int]) -> Tensor:
    """Logits [len(prompt), vocab] of one whole prefill."""
    sequence = harness.start(prompt)
    harness.step([(sequence, len(prompt))])
    harness.preempt(sequence)
    return torch.stack([sequence.logits[i] for i in range(len(prompt))])


def crowded(harness: Harness, prompt: list[int], strangers: list[list[int]], num_new: int) -> Sequence:
    """`num_new` greedy tokens after `prompt`, prefilled in chunks among strangers, preempted half way, and computed again."""
    whole = harness.config.requires_whole_prompt
    others = [harness.start(stranger) for stranger in strangers]
    for other in others:
        harness.step([(other, len(other.tokens))])
    main = harness.start(prompt)
    for count in _chunks(len(prompt), whole):
        harness.step([(main, count), *((other, 1) for other in others)])
    half = len(prompt) + num_new // 2
    while len(main.tokens) < half:
        harness.step([(main, 1), *((other, 1) for other in others if len(other.tokens) < 90)])
    harness.preempt(main)
    for count in _chunks(len(main.tokens), whole):
        harness.step([(others[0], 1), (main, count)])
    while len(main.tokens) < len(prompt) + num_new:
        harness.step([(main, 1)])
    return main


def _chunks(total: int, whole: bool) -> list[int]:
    if whole:
        return [total]
    sizes: list[int] = []
    for size in (1, 5, 9, total):
        sizes.append(min(size, total - sum(sizes)))
    return [size for size in sizes if size]
