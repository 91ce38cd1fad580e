"""Runs steps on one device: inputs → model → sampler. A launch does not wait for the result."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.base.errors import RankError, RequestError
from stoker.base.logging import get_logger
from stoker.core.forward_batch import ForwardBatch, KVCache, RankCounts
from stoker.core.prefix_lm import find_bidirectional_prefix
from stoker.distributed.world import ALONE_WORLD, World
from stoker.kernels import ops
from stoker.layers.decoder import Decoder
from stoker.layers.state_cache import StateCache
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.sampling.grammar_compiler import Grammars
from stoker.runtime.sampling.logprobs import score
from stoker.runtime.sampling.prompt_logprobs import PromptScores, prompt_chunks
from stoker.runtime.sampling.sampler import DraftedRows, Sampler
from stoker.runtime.sampling.verification import StepDrafts, Verified, verify
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.transfer.progress import StepProgress
from stoker.runtime.worker.cuda_graphs import Graphs, PlainStep
from stoker.runtime.worker.draft_runner import DraftRunner
from stoker.runtime.worker.drafter import Drafter
from stoker.runtime.worker.dummy_step import Bounds, allocate_dummy_step, pack_dummy_step
from stoker.runtime.worker.inputs import InputBuilder, PackedStep, Shape, StepInputs
from stoker.runtime.worker.parallel_inputs import AllRows, pack_parts, sampled_first, uniform_counts, with_counts
from stoker.runtime.worker.row_tracker import RowTracker
from stoker.runtime.worker.split_length import num_resident_rows
from stoker.runtime.worker.step_handle import LazyHandle, StepHandle

log = get_logger(__name__)

_NOTHING = contextlib.nullcontext()


class StepPublisher(Protocol):
    """Sends the leader's commands to the followers."""

    def publish_step(self, packed: list[PackedStep], all_greedy: bool) -> None:
        """Make the followers run a step, whose inputs are the same for all or one for each data-parallel rank. `all_greedy`: no row draws
        at random."""

    def publish_zero_blocks(self, blocks: list[int]) -> None:
        """Make the followers zero blocks of their KV cache."""

    def publish_capture(self, shape: Shape) -> None:
        """Make the followers perform the next part of the capture of a shape."""


class ModelRunner:
    """The model, cache and buffers of one device. With several ranks, the leader has the sequences and samples; the others follow it.

    It performs no block transfers: an executor has no host tier.
    """

    def __init__(
        self, model: Decoder, caches: list[KVCache], *,
        num_rows: int, max_batch_size: int, max_num_tokens: int, max_seq_len: int, block_size: int, device: torch.device, use_graphs: bool,
        world: World = ALONE_WORLD, publisher: StepPublisher | None = None, grammars: Grammars | None = None,
        drafter: Drafter | None = None, max_drafts: int = 0, has_trees: bool = False, states: StateCache | None = None,
        tracker: RowTracker | None = None, representatives: list[int] | None = None,
    ) -> None:  # fmt: skip
        """`max_drafts`: the largest number of drafts of a row, for which steps are captured. `has_trees`: they may be trees.

        `tracker`: with it, steps with drafts are planned before the results of earlier ones are known. Without ranks and trees only.

        `states`: the storage of recurrent states. `representatives`: indices of layers that stand for all (`representative_layers`).
        """
        self.states, self.tracker = states, tracker
        self.model = model
        self.caches = caches
        self._representatives = representatives
        self.device = device
        self._num_threads = torch.get_num_threads() if device.type == "cpu" else 0
        self.max_batch_size, self.max_num_tokens, self.max_seq_len = max_batch_size, max_num_tokens, max_seq_len
        self.world, self.publisher = world, publisher
        num_stages, data_parallel = world.stage.num_stages, world.data_parallel
        in_flight, num_blocks = max(num_stages, 2), -(-max_seq_len // block_size)
        # One buffer for each rank and step, and one for a drafter that catches up. The rows of all ranks are numbered together.
        self.inputs = InputBuilder(
            num_rows, num_blocks, block_size, device, in_flight * (data_parallel + 1),
            has_trees=has_trees, resident_rows=num_resident_rows(model.config, world.tensor.size, device),
        )  # fmt: skip
        self.sampler = Sampler(num_rows, model.config.vocab_size, device, grammars, in_flight)
        self.all_rows = AllRows(max_batch_size * data_parallel, device, in_flight) if data_parallel > 1 and world.is_leader else None
        self.prompt_scores = PromptScores()
        # The newest token of each row, then for each draft of `drafter` that of each row. Padding writes to the last element of each part.
        num_drafts = drafter.num_drafts if drafter is not None else 0
        self.last_ids = torch.zeros((1 + num_drafts) * (num_rows + 1), dtype=torch.int32, device=device)
        self.draft_runner: DraftRunner | None = None
        if drafter is not None:
            self.draft_runner = DraftRunner(drafter, self.sampler.table, self.last_ids, self.inputs)
        # Steps are planned before the ids of earlier ones are known only on a GPU without stages. Then each rank needs the sampled ids.
        self._broadcasts_ids = device.type != "cpu" and num_stages == 1 and world.size > 1
        # On a CPU, the last stage computes in `wait`, so that later steps are published to the other stages before.
        self._is_lazy = device.type == "cpu" and num_stages > 1
        self.progress: StepProgress | None = None  # of the layers, if other engines read them
        self.graphs: Graphs | None = None
        if use_graphs and device.type != "cpu":
            self.graphs = Graphs(
                self._forward,
                self._launch_all,
                self.inputs,
                max_rows=max_batch_size,
                max_seq_len=max_seq_len,
                max_tokens=max_num_tokens,
                max_drafts=max_drafts,
                device=device,
                states=states,
            )

    def prepare(self, request: TokenRequest) -> Future[Any] | None:
        """Start to compile the guide of the request in another process; None without a guide. Raises DependencyError or RequestError."""
        return self.sampler.prepare(request)

    def close(self) -> None:
        """End the compilation of grammars, and delete the captured steps: NCCL closes no communicator that a graph uses."""
        self.sampler.close()
        self.graphs = None

    def add(self, seq: Sequence) -> None:
        """Add a sequence, once, before its first step. Raises RequestError for a feature that the model does not support."""
        if (prefix := self.model.config.prefix) is not None:
            seq.bidirectional_prefix = find_bidirectional_prefix(prefix, seq.request.prompt_ids)
            if seq.params.prompt_logprobs is not None:
                limit = "prompt tokens of this model attend to later tokens, so they have no log-probabilities"
                raise RequestError("prompt_logprobs", seq.params.prompt_logprobs, limit)
        self.prompt_scores.add(seq)
        self.sampler.add(seq)
        seq.drafts_ahead = self.tracker is not None and not seq.request.draft_ids and self.sampler.draws_on_device(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that ended. Unknown sequences are ignored."""
        self.sampler.remove(seq.seq_id)
        self.prompt_scores.remove(seq.seq_id)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the steps of the first requests, so that none of them waits for it."""
        if self.inputs.has_trees:  # compile the kernel
            ops.move_tokens(self.caches, torch.zeros(0, 2, dtype=torch.int32, device=self.device))
        if self.graphs is not None:
            self.graphs.warm_up()

    @torch.inference_mode()
    def graph_footprint(self) -> int:
        """An estimate of the bytes that all graphs will allocate; 0 without graphs."""
        return 0 if self.graphs is None else self.graphs.footprint()

    @property
    def capture_is_due(self) -> bool:
        """Whether steps have lost as much without a graph of their shape as its capture costs."""
        return self.graphs is not None and self.graphs.is_due

    def capture_next(self) -> bool:
        """Perform a part of the capture of a further step, on all ranks. Returns whether there was one to capture. Raises RankError."""
        shape = self.graphs.next_shape() if self.graphs is not None else None
        if shape is None:
            return False
        if self.publisher is not None:
            self.publisher.publish_capture(shape)
        self.capture(shape)
        return True

    @torch.inference_mode()
    def capture(self, shape: Shape) -> None:
        """Perform the next part of the capture of a shape, at the same time as all other ranks. After a failure, none is captured any more.

        Raises RankError if other ranks wait for this one.
        """
        assert self.graphs is not None
        self.model.after_layer = None  # no layer of a request
        try:
            with self._fatal_error(self.world.size > 1):
                self.graphs.advance(shape)
        except RankError:
            raise
        except Exception as error:
            log.warning("no more steps are captured as CUDA graphs, because the capture of %s failed: %r", shape, error)
            self.graphs.give_up()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle | LazyHandle:
        """Start a step, and return a handle to wait for it.

        The sampled ids are stored in `last_ids` on the device, so that the next step can start before they are copied to the host.
        """
        assert not plan.transfers
        table = self.sampler.table
        table.update(plan.sequences)
        if self.tracker is not None:
            self.tracker.update(plan.sequences)
        is_plain = self.graphs is not None and plan.adapters is None and self.sampler.is_plain(plan.sequences)
        shape = self.graphs.shape_for(plan) if self.graphs is not None and is_plain else None
        parts = pack_parts(self.inputs, plan, shape) if plan.parts else [self.inputs.pack(plan, shape)]
        packed, all_greedy = parts[0], table.all_greedy(plan.sequences)
        if self.publisher is not None:
            self.publisher.publish_step(parts, all_greedy)
        if self.all_rows is not None:
            self.all_rows.update(parts)
            packed.sampled = [seq for part in parts for seq in part.sampled]
            packed.num_extra = sum(part.num_extra for part in parts)
        if self.progress is not None:
            self.progress.num_planned += 1
        return LazyHandle(lambda: self._start(plan, packed, all_greedy)) if self._is_lazy else self._start(plan, packed, all_greedy)

    def _start(self, plan: StepPlan, packed: PackedStep, all_greedy: bool) -> StepHandle:
        """Launch the model and the sampler, or replay the graph."""
        self._move(packed)
        if packed.is_padded:
            assert self.graphs is not None
            with self._fatal_error(self.world.size > 1), self._observed(by_layer=False):
                if self.draft_runner is not None:
                    self.draft_runner.catch_up(plan)
                yielded, drafted, _ = self.graphs.run(packed, all_greedy, plan.num_wanted)
            if isinstance(yielded, Tensor):
                return StepHandle(packed.sampled, self._without_padding(plan, packed, yielded), drafts=drafted)
            return StepHandle(packed.sampled, yielded.newest, verified=yielded, drafts=drafted)
        with self._fatal_error(self.world.size > 1), self._observed():
            inputs = self.inputs.unpack(packed)
            batch = self._resolve(inputs)
            logits = self._compute(inputs, batch)
        rows, counters = self._rows_to_sample(inputs, packed.ranks)
        prompt = [chunk for part in plan.parts or (plan,) for chunk in prompt_chunks(part)] if packed.num_extra else []
        drafts = None
        if packed.max_drafts:
            drafts = DraftedRows(packed.draft_ids, packed.draft_parents, drafts_of(inputs, batch, packed.max_drafts))
        with self._fatal_error(self._broadcasts_ids or (self.states is not None and self.world.size > 1)):
            sampled = self.sampler.sample(logits, rows, counters, packed.sampled, prompt, drafts)
            self._accept_states(inputs, batch, sampled.verified)
            self._store_last_ids(inputs, sampled.newest, packed.ranks, sampled.verified)
            drafted = None
            if self.draft_runner is not None:
                self.draft_runner.catch_up(plan)
                drafted = self.draft_runner.run(batch, inputs, sampled.newest, sampled.verified, plan.num_wanted, all_greedy)
        scored = [(chunk, scores.to_host()) for chunk, scores in sampled.prompt]
        return StepHandle(
            packed.sampled,
            sampled.token_ids,
            sampled.logprobs,
            lambda: self.prompt_scores.collect(scored, packed.sampled),
            sampled.verified,
            [1 + len(ids) for ids in packed.draft_ids],
            drafted,
        )

    def _observed(self, *, by_layer: bool = True) -> AbstractContextManager[None]:
        """Report the step that the block runs, for transfers, and its layers.

        `by_layer=False`: for a graph, whose layers are complete with the step.
        """
        return _NOTHING if self.progress is None else self._reported(self.progress, by_layer)

    @contextlib.contextmanager
    def _reported(self, progress: StepProgress, by_layer: bool) -> Iterator[None]:
        """`_observed` with progress to report."""
        progress.begin_step()
        self.model.after_layer = progress.end_layer if by_layer else None
        yield
        progress.end_step()

    def _fatal_error(self, is_fatal: bool) -> AbstractContextManager[None]:
        """Convert errors in the block to RankError if `is_fatal`: if other ranks wait in a collective of the step.

        They would otherwise match the collectives of the next step with those of this one, and results would be wrong.
        """
        return self._rank_error() if is_fatal else _NOTHING

    @contextlib.contextmanager
    def _rank_error(self) -> Iterator[None]:
        """Convert errors in the block to RankError."""
        try:
            yield
        except Exception as error:
            raise RankError(
                f"rank {self.world.rank} on {self.device} failed within a step ({error!r}), and the other ranks wait for it."
            ) from error

    @torch.inference_mode()
    def follow(self, packed: PackedStep, all_greedy: bool) -> None:
        """Run a step that the leader published, without using its results."""
        self._move(packed)
        if self.progress is not None:
            self.progress.num_planned += 1
        if packed.is_padded:
            assert self.graphs is not None
            with self._observed(by_layer=False):
                self.graphs.run(packed, all_greedy)
            return
        with self._observed():
            inputs = self.inputs.unpack(packed)
            self._compute(inputs, self._resolve(inputs))
        self._accept_states(inputs, inputs.batch, None)
        self._store_last_ids(inputs, self._unknown_ids(inputs, packed.ranks), packed.ranks)

    @torch.inference_mode()
    def run_dummy_step(self, shape: Shape) -> None:
        """Run a dummy step without a graph and without sampling, also on the followers.

        On a CPU with stages, where steps run in `wait`, no step may be in flight.
        """
        is_prefix_lm = self.model.config.prefix is not None
        packed = [pack_dummy_step(self.inputs, shape, is_prefix_lm=is_prefix_lm) for _ in range(self.world.data_parallel)]
        if len(packed) > 1:
            with_counts(packed)
        if self.publisher is not None:
            self.publisher.publish_step(packed, True)
        self.follow(packed[0], True)

    @torch.inference_mode()
    def run_dummy_step_with_sampling(self, shape: Shape, bounds: Bounds, *, all_layers: bool = True) -> None:
        """Run a dummy step without a graph, with all variants of sampling and all drafts, to measure memory or to trace kernels.

        Every rank calls it at the same time, before followers wait for published steps. Without `all_layers`, a few stand for all.
        """
        width = -(-self.max_seq_len // self.inputs.block_size)
        step = allocate_dummy_step(
            shape, bounds, width, self.inputs.num_rows, self.device, is_prefix_lm=self.model.config.prefix is not None
        )
        ranks = self._set_uniform_counts(step)
        batch = self._resolve(step)
        states = self.model.hidden_states(batch, self.caches) if all_layers else self._run_representatives(batch)
        logits = None if states is None else self.model.logits(states)
        if logits is None or not self.world.is_leader:
            self._store_last_ids(step, self._unknown_ids(step, ranks), ranks)
            return
        rows, counters = self._rows_to_sample(step, ranks)
        for variant, all_greedy in itertools.product((logits, logits.float()), (True, False)):
            token_ids = ops.sample(variant, self.sampler.table.gather(rows, counters, all_greedy))
        score(logits, token_ids, 1)
        self._store_last_ids(step, token_ids, ranks)
        if self.draft_runner is not None:
            self.draft_runner.run(batch, step, token_ids, None, self.draft_runner.drafter.num_drafts, False)

    def _run_representatives(self, batch: ForwardBatch) -> Tensor | None:
        """The states after the layers that stand for all: the same kernels and as much memory, in less time."""
        if self._representatives is None:
            return self.model.hidden_states(batch, self.caches)
        with self.model.only_layers(self._representatives):
            return self.model.hidden_states(batch, [self.caches[i] for i in self._representatives])

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zero blocks that may contain NaN on all ranks, before other sequences use them.

        With data-parallel ranks, `blocks` are rank × blocks per rank + the id within the rank.
        """
        if self.publisher is not None:
            self.publisher.publish_zero_blocks(blocks)
        if self.world.data_parallel > 1:
            per_rank = self.caches[0].keys.shape[0]
            blocks = [block % per_rank for block in blocks if block // per_rank == self.world.rank]
        index = torch.tensor(blocks, dtype=torch.int64, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        for cache in (*self.caches, *(self.draft_runner.drafter.caches if self.draft_runner is not None else ())):
            for pages in (cache.keys, cache.values):
                if pages is not None:
                    pages.view(torch.uint8).index_fill_(0, index, 0)  # index_fill_ does not support float8
        if self.progress is not None:
            self.progress.end_zeroing(len(blocks))

    def _forward(self, inputs: StepInputs, max_drafts: int, all_greedy: bool) -> Iterator[PlainStep]:
        """Run the model and the sampler without features, then the drafter: the parts of a step that graphs capture.

        Yields the results after each part.
        """
        ranks = self._set_uniform_counts(inputs)
        batch = self._resolve(inputs)
        states = self.model.hidden_states(batch, self.caches)
        yield from self._after_layers(inputs, batch, states, ranks, max_drafts, all_greedy)

    def _launch_all(self, inputs: StepInputs, max_drafts: int) -> None:
        """Launch the kernels of all parts of a step, those of greedy sampling and those of any sampling.

        The model runs once, with the layers that stand for all, on all ranks, whose collectives must match.
        """
        ranks = self._set_uniform_counts(inputs)
        batch = self._resolve(inputs)
        with contextlib.nullcontext() if self.draft_runner is None else self.draft_runner.drafter.retained_states():
            states = self._run_representatives(batch)
            for all_greedy in (True, False):
                for _ in self._after_layers(inputs, batch, states, ranks, max_drafts, all_greedy):
                    pass

    def _after_layers(
        self, inputs: StepInputs, batch: ForwardBatch, states: Tensor | None, ranks: RankCounts | None, max_drafts: int, all_greedy: bool
    ) -> Iterator[PlainStep]:
        """The head and the sampler, then the drafter. Yields the results after each part of the step.

        `states`: a result of `Decoder.hidden_states`.
        """
        verified: Verified | None = None
        token_ids = newest = self._sample_plain(inputs, states, ranks, all_greedy)
        is_known = self._samples_shards and all_greedy and not max_drafts
        if max_drafts:
            verified = verify(token_ids, drafts_of(inputs, batch, max_drafts)) if self.world.is_leader else None
            newest = self._unknown_ids(inputs, ranks) if verified is None else verified.newest
        self._accept_states(inputs, batch, verified)
        self._store_last_ids(inputs, newest, ranks, verified, is_known=is_known)
        drafts = self.draft_runner.buffer(newest) if self.draft_runner is not None else None
        num_parts = 2 + self.draft_runner.drafter.num_parts if self.draft_runner is not None else 1
        result = PlainStep(token_ids if verified is None else verified, drafts, num_parts)
        yield result
        if self.draft_runner is not None and drafts is not None:
            for _ in self.draft_runner.parts(batch, inputs, newest, verified, drafts, all_greedy):
                yield result

    def _sample_plain(self, inputs: StepInputs, states: Tensor | None, ranks: RankCounts | None, all_greedy: bool) -> Tensor:
        """The ids of the next tokens without features, on the leader or, where `_samples_shards`, on all ranks. Others return zeros."""
        if states is not None and all_greedy and self._samples_shards:
            return self.model.greedy(states)
        logits = None if states is None else self.model.logits(states)  # on all ranks, which exchange them
        if logits is None or not self.world.is_leader:
            return self._unknown_ids(inputs, ranks)
        return ops.sample(logits, self.sampler.table.gather(*self._rows_to_sample(inputs, ranks), all_greedy))

    def _move(self, packed: PackedStep) -> None:
        """Copy the keys and values that accepted drafts of trees have in other slots than those of their positions."""
        if (moves := packed.moves) is not None:
            ops.move_tokens(self.caches, moves.to(self.device, non_blocking=True))

    def _compute(self, inputs: StepInputs, batch: ForwardBatch) -> Tensor:
        """The logits [L, V] of a step whose ids were resolved, with the copies of recurrent states before and after it."""
        if self._num_threads:
            ops.limit_threads(self._num_threads)
        with _NOTHING if self.states is None else self.states.around_step(*inputs.states):
            logits = self.model(batch, self.caches)
        return logits if self.all_rows is None or batch.ranks is None else sampled_first(logits, batch.ranks)

    def _accept_states(self, inputs: StepInputs, batch: ForwardBatch, verified: Verified | None) -> None:
        """Keep the recurrent states after the accepted drafts of each row, which only the leader knows (`verified`)."""
        if self.states is None or batch.verified is None:
            return
        assert inputs.starts is not None and inputs.sequence_rows is not None
        accepted = torch.zeros_like(inputs.sequence_rows) if verified is None else verified.num_accepted
        if self.world.size > 1:
            accepted = self.world.tensor.broadcast(accepted.clone())
        # Rows with one token and rows with drafts come first, and have logits for all of their tokens.
        rows = slice(batch.num_decodes, batch.num_decodes + batch.verified.num_rows)
        tokens = (inputs.starts[:-1][rows] + accepted[rows]).clamp(max=batch.num_tokens)
        self.states.accept(tokens, inputs.sequence_rows[rows])

    @property
    def _resolves_ids(self) -> bool:
        """Whether steps read ids that only the device has. On a CPU, where steps do not overlap, these are the drafts of a drafter."""
        return self.device.type != "cpu" or self._broadcasts_ids or self.tracker is not None or self.draft_runner is not None

    @property
    def _samples_shards(self) -> bool:
        """Whether captured steps sample greedily on every rank, each from the logits that it computes, without those of the others."""
        return self._broadcasts_ids and self.world.data_parallel == 1

    def _resolve(self, inputs: StepInputs) -> ForwardBatch:
        """The batch with the positions and ids that only the device has."""
        batch = inputs.batch
        if not self._resolves_ids:
            return batch
        if self.tracker is not None:
            self.tracker.correct(inputs)
        return dataclasses.replace(batch, token_ids=ops.resolve(batch.token_ids, self.last_ids))

    def _store_last_ids(
        self, inputs: StepInputs, token_ids: Tensor, ranks: RankCounts | None, verified: Verified | None = None, *, is_known: bool = False
    ) -> None:
        """Store the sampled ids of all data-parallel ranks for the next step, on every rank that needs them.

        `token_ids`: int32 [S], the newest one of each sequence; `verified`: all that a step with drafts yields, for the tracker.
        `is_known`: every rank has sampled the same ids.
        """
        if self.tracker is not None:
            self.tracker.append(inputs, token_ids, verified)
        if not self._resolves_ids:
            return
        if self._broadcasts_ids and not is_known:
            token_ids = (self.world.tensor if ranks is None else self.world.everyone).broadcast(token_ids)
        if ranks is not None:
            token_ids = token_ids.split(ranks.sampled)[self.world.rank]
        ops.remember(self.last_ids, inputs.newest_rows, token_ids)

    def _unknown_ids(self, inputs: StepInputs, ranks: RankCounts | None) -> Tensor:
        """A tensor for the ids that the leader samples."""
        return torch.zeros_like(inputs.newest_rows) if ranks is None else inputs.newest_rows.new_zeros(sum(ranks.sampled))

    def _set_uniform_counts(self, inputs: StepInputs) -> RankCounts | None:
        """Set the sizes of a step of which each data-parallel rank has a part of the same shape. None with one rank."""
        if self.world.data_parallel > 1:
            inputs.batch.ranks = uniform_counts(self.world.data_parallel, inputs.batch.num_tokens, len(inputs.rows))
        return inputs.batch.ranks

    def _rows_to_sample(self, inputs: StepInputs, ranks: RankCounts | None) -> tuple[Tensor, Tensor]:
        """The rows and counters of the tokens that this rank, the leader, samples."""
        if self.all_rows is None or ranks is None:
            return inputs.rows, inputs.counters
        return self.all_rows.first(sum(ranks.sampled))

    def _without_padding(self, plan: StepPlan, packed: PackedStep, token_ids: Tensor) -> Tensor:
        """The ids of the sequences that sample, from those of all rows of a captured step."""
        if packed.ranks is None:
            return token_ids[: len(packed.sampled)]
        parts = zip(token_ids.split(packed.ranks.sampled), plan.parts, strict=True)
        return torch.cat([ids[: sum(part.samples)] for ids, part in parts])


def drafts_of(inputs: StepInputs, batch: ForwardBatch, max_drafts: int) -> StepDrafts:
    """The drafts of a step whose ids were resolved."""
    starts, owners, parents, masks, logits_idx = inputs.starts, inputs.owners, inputs.parents, inputs.masks, batch.logits_idx
    assert starts is not None and owners is not None and parents is not None and masks is not None and logits_idx is not None
    return StepDrafts(batch.token_ids, logits_idx[: len(owners)], starts, owners, parents, masks, max_drafts)
