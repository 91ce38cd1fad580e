"""Runs steps on one device: inputs → model → sampler, without waiting for the result."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.base.errors import RankError, RequestError
from stoker.base.types import TokenLogprobs
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.prefix_lm import find_bidirectional_prefix
from stoker.distributed.world import ALONE_WORLD, World
from stoker.kernels import ops
from stoker.layers.decoder import Decoder
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.sampling.grammar_compiler import Grammars
from stoker.runtime.sampling.logprobs import Logprobs, score
from stoker.runtime.sampling.prompt_logprobs import PromptLogprobs, PromptScores, pieces
from stoker.runtime.sampling.sampler import Sampler
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.staging import fetch
from stoker.runtime.worker.cuda_graphs import Graphs
from stoker.runtime.worker.dummy_step import Bounds, allocate_dummy_step, pack_dummy_step
from stoker.runtime.worker.inputs import InputBuilder, Packed, Shape


@dataclass(slots=True)
class StepResult:
    """The results of a finished step for the rows that sampled."""

    sequences: list[Sequence]
    token_ids: list[list[int]]  # ids that each row yielded; the last is -1 where the logits were not finite
    logprobs: list[list[TokenLogprobs] | None]  # of each row's ids, or None; empty when no row requests them
    prompt_logprobs: PromptLogprobs = field(default_factory=dict)  # of rows that sampled for the first time


class StepHandle:
    """A launched step. `wait` blocks until its tokens are on the host."""

    __slots__ = ("_event", "_prompt", "_scores", "_sequences", "_token_ids")

    def __init__(
        self, sequences: list[Sequence], token_ids: Tensor, scores: Logprobs | None = None, prompt: Callable[[], PromptLogprobs] = dict
    ) -> None:
        """`prompt` is called when the step has ended."""
        self._sequences = sequences
        self._token_ids = fetch(token_ids)
        self._scores = scores.fetch() if scores is not None else None
        self._prompt = prompt
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        logprobs: list[list[TokenLogprobs] | None] = []
        if self._scores is not None:
            scores = self._scores.read(self._token_ids.tolist(), [seq.params.logprobs for seq in self._sequences])
            logprobs = [None if score is None else [score] for score in scores]
        return StepResult(self._sequences, self._token_ids.unsqueeze(1).tolist(), logprobs, self._prompt())


class LazyHandle:
    """A step that runs when it is waited for."""

    __slots__ = ("_start",)

    def __init__(self, start: Callable[[], StepHandle]) -> None:
        self._start = start

    @torch.inference_mode()
    def wait(self) -> StepResult:
        return self._start().wait()


class Tell(Protocol):
    """How the leader's decisions reach the other ranks."""

    def step(self, packed: Packed, all_greedy: bool) -> None: ...
    def forget(self, blocks: list[int]) -> None: ...


class ModelRunner:
    """One device's model, cache and buffers. On several ranks one leads: it alone knows sequences and samples, and tells the others."""

    def __init__(
        self, model: Decoder, caches: list[KVCache], *,
        num_rows: int, max_batch_size: int, max_num_tokens: int, max_seq_len: int, block_size: int, device: torch.device, use_graphs: bool,
        world: World = ALONE_WORLD, tell: Tell | None = None, grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.caches = caches
        self.device = device
        self.max_batch_size, self.max_num_tokens, self.max_seq_len = max_batch_size, max_num_tokens, max_seq_len
        self.world, self.tell = world, tell
        num_stages = world.stage.num_stages
        self.inputs = InputBuilder(num_rows, -(-max_seq_len // block_size), block_size, device, max(num_stages, 2))
        self.sampler = Sampler(num_rows, model.config.vocab_size, device, grammars, max(num_stages, 2))
        self.prompt_scores = PromptScores()
        # Each row's newest token; padding writes the last place.
        self.last_ids = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        # Steps are planned before their tokens are known only on a GPU without stages: there each rank needs the leader's choice.
        self._shares_ids = device.type != "cpu" and num_stages == 1 and world.size > 1
        # On a CPU a stage computes when its result is asked for, so that the steps after it are on their way through the others.
        self._is_lazy = device.type == "cpu" and num_stages > 1
        self.graphs: Graphs | None = None
        if use_graphs and device.type != "cpu":
            self.graphs = Graphs(
                self._forward, self.inputs, max_rows=max_batch_size, max_seq_len=max_seq_len, max_tokens=max_num_tokens, device=device
            )

    def prepare(self, request: TokenRequest) -> Future[Any] | None:
        """The compilation of the request's guide, in another thread. Raises DependencyError."""
        return self.sampler.prepare(request)

    def add(self, seq: Sequence) -> None:
        """A sequence begins; called once, before its first step. Raises RequestError for what the model cannot do."""
        if (prefix := self.model.config.prefix) is not None:
            seq.bidirectional_prefix = find_bidirectional_prefix(prefix, seq.request.prompt_ids)
            if seq.params.prompt_logprobs is not None:
                limit = "this model's prompt tokens see those that follow them, so they have no probabilities"
                raise RequestError("prompt_logprobs", seq.params.prompt_logprobs, limit)
        self.prompt_scores.add(seq)
        self.sampler.add(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence ended."""
        self.sampler.remove(seq.seq_id)
        self.prompt_scores.remove(seq.seq_id)

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Capture the usual steps, so that no request waits for it. Returns the bytes that the graphs take."""
        return 0 if self.graphs is None else self.graphs.warm_up()

    @torch.inference_mode()
    def graph_footprint(self) -> int:
        """Bytes that `warm_up` is going to take."""
        return 0 if self.graphs is None else self.graphs.footprint()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle | LazyHandle:
        """Start a step. Its rows' tokens go to `last_ids`, so that the next step can start before this one is read."""
        table = self.sampler.table
        table.update(plan.sequences)
        is_plain = self.graphs is not None and self.sampler.is_plain(plan.sequences)
        packed = self.inputs.pack(plan, self.graphs.shape_for(plan) if self.graphs is not None and is_plain else None)
        all_greedy = table.all_greedy(plan.sequences)
        if self.tell is not None:
            self.tell.step(packed, all_greedy)
        return LazyHandle(lambda: self._start(plan, packed, all_greedy)) if self._is_lazy else self._start(plan, packed, all_greedy)

    def _start(self, plan: StepPlan, packed: Packed, all_greedy: bool) -> StepHandle:
        if packed.is_padded:
            assert self.graphs is not None
            with self._together(self.world.size > 1):
                token_ids = self.graphs.run(packed, all_greedy)
            return StepHandle(packed.sampled, token_ids[: len(packed.sampled)])
        with self._together(self.world.size > 1):
            inputs = self.inputs.unpack(packed)
            logits = self._logits(inputs.batch)
        prompt = pieces(plan) if packed.num_extra else []
        with self._together(self._shares_ids):
            sampled = self.sampler.sample(logits, inputs.rows, inputs.counters, packed.sampled, prompt)
            self._remember(inputs.rows, sampled.token_ids)
        scored = [(piece, scores.fetch()) for piece, scores in sampled.prompt]
        return StepHandle(packed.sampled, sampled.token_ids, sampled.logprobs, lambda: self.prompt_scores.collect(scored, packed.sampled))

    @contextlib.contextmanager
    def _together(self, others_wait: bool) -> Iterator[None]:
        """Around what ends when all ranks have done their part. A leader that fails alone can't go on: the others would take its next
        step for the rest of this one, and answers would be wrong."""
        try:
            yield
        except Exception as error:
            if not others_wait:
                raise
            raise RankError(f"rank {self.world.rank} on {self.device} failed within a step ({error!r}), and the others wait.") from error

    @torch.inference_mode()
    def follow(self, packed: Packed, all_greedy: bool) -> None:
        """Run a step that the leader planned."""
        if packed.is_padded:
            assert self.graphs is not None
            self.graphs.run(packed, all_greedy)
            return
        inputs = self.inputs.unpack(packed)
        self._logits(inputs.batch)
        self._remember(inputs.rows, torch.zeros_like(inputs.rows))

    @torch.inference_mode()
    def run_dummy_step(self, shape: Shape) -> None:
        """A step of padding without a graph or a sampler, between others: the leader tells the other ranks of it, too.

        On a CPU with stages, where a step begins when it is waited for, none may be on its way.
        """
        packed = pack_dummy_step(self.inputs, shape, is_prefix_lm=self.model.config.prefix is not None)
        if self.tell is not None:
            self.tell.step(packed, True)
        self.follow(packed, True)

    @torch.inference_mode()
    def run_dummy_step_with_sampling(self, shape: Shape, bounds: Bounds) -> None:
        """A step of padding without a graph, with all that its rows may ask of the sampler: for what it launches and allocates.

        Every rank runs it at the same time: it is not for a leader whose ranks already follow.
        """
        width = -(-self.max_seq_len // self.inputs.block_size)
        step = allocate_dummy_step(
            shape, bounds, width, self.inputs.num_rows, self.device, is_prefix_lm=self.model.config.prefix is not None
        )
        logits = self._logits(step.batch)
        if not self.world.is_leader:
            self._remember(step.rows, torch.zeros_like(step.rows))
            return
        for seen, all_greedy in itertools.product((logits, logits.float()), (True, False)):
            token_ids = ops.sample(seen, self.sampler.table.gather(step.rows, step.counters, all_greedy))
        score(logits, token_ids, 1)
        self._remember(step.rows, token_ids)

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zero blocks that may hold values that are not numbers, before others reuse them."""
        if self.tell is not None:
            self.tell.forget(blocks)
        index = torch.tensor(blocks, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        for cache in self.caches:
            for pages in (cache.keys, cache.values):
                if pages is not None:
                    pages.view(torch.uint8).index_fill_(0, index, 0)  # index_fill_ knows no float8

    def _forward(self, batch: ForwardBatch, rows: Tensor, counters: Tensor, all_greedy: bool) -> Tensor:
        """A plain step, as a graph captures it."""
        logits = self._logits(batch)
        if self.world.is_leader:
            token_ids = ops.sample(logits, self.sampler.table.gather(rows, counters, all_greedy))
        else:
            token_ids = torch.zeros_like(rows)
        self._remember(rows, token_ids)
        return token_ids

    def _logits(self, batch: ForwardBatch) -> Tensor:
        if self.device.type != "cpu":
            batch = dataclasses.replace(batch, token_ids=ops.resolve(batch.token_ids, self.last_ids))
        return self.model(batch, self.caches)

    def _remember(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep the leader's choice for the next step."""
        if self._shares_ids:
            token_ids = self.world.tensor.broadcast(token_ids)
        ops.remember(self.last_ids, rows, token_ids)
