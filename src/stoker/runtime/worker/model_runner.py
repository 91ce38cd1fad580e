"""Runs steps on one device: inputs → model → sampler, without waiting for the result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stoker.base.types import TokenLogprobs
from stoker.kernels import ops
from stoker.layers.batch import ForwardBatch, KVCache
from stoker.layers.decoder import Decoder
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.prompt import PromptScores
from stoker.runtime.sampling.sampler import Logprobs, Sampler
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker.graphs import Graphs
from stoker.runtime.worker.inputs import InputBuilder

PromptLogprobs = dict[int, list[TokenLogprobs | None]]  # by seq_id


@dataclass(slots=True)
class StepResult:
    """What a finished step gives the host, for the rows that sampled."""

    sequences: list[Sequence]
    token_ids: list[int]  # -1: the logits were not numbers
    logprobs: list[TokenLogprobs | None]  # empty when nobody asked
    prompt_logprobs: PromptLogprobs = field(default_factory=dict)  # the lists that this step completed


class StepHandle:
    """A launched step. `wait` blocks until its tokens are on the host."""

    __slots__ = ("_event", "_prompt", "_scores", "_sequences", "_token_ids")

    def __init__(self, sequences: list[Sequence], token_ids: Tensor, scores: Logprobs | None, prompt: PromptLogprobs) -> None:
        self._sequences = sequences
        self._scores = scores
        self._prompt = prompt
        self._event: torch.cuda.Event | None = None
        self._token_ids = token_ids
        if token_ids.is_cuda:
            self._token_ids = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        token_ids = self._token_ids.tolist()
        logprobs = _unpack(self._scores, token_ids, self._sequences) if self._scores is not None else []
        return StepResult(self._sequences, token_ids, logprobs, self._prompt)


class ModelRunner:
    """One device's model, cache and buffers."""

    def __init__(
        self, model: Decoder, caches: list[KVCache], *,
        num_rows: int, max_batch_size: int, max_num_tokens: int, max_seq_len: int, block_size: int, device: torch.device, use_graphs: bool,
    ) -> None:  # fmt: skip
        self.model = model
        self.caches = caches
        self.device = device
        self.inputs = InputBuilder(num_rows, -(-max_seq_len // block_size), block_size, device)
        self.sampler = Sampler(num_rows, model.config.vocab_size, device)
        self.prompt_scores = PromptScores()
        # Each row's newest token; padding writes the last place.
        self.last_ids = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.graphs: Graphs | None = None
        if use_graphs and device.type == "cuda":
            self.graphs = Graphs(
                self._forward, self.inputs, max_rows=max_batch_size, max_seq_len=max_seq_len, max_tokens=max_num_tokens, device=device
            )

    def add(self, seq: Sequence) -> None:
        """A sequence begins; called once, before its first step."""
        self.sampler.add(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence ended."""
        self.sampler.remove(seq.seq_id)
        self.prompt_scores.remove(seq.seq_id)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the usual steps, so that no request waits for it."""
        if self.graphs is not None:
            self.graphs.warm_up()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. Its rows' tokens go to `last_ids`, so that the next step can start before this one is read."""
        self.sampler.table.update(plan.sequences)
        if self.graphs is not None and (shape := self.graphs.shape_for(plan)) is not None and self.sampler.is_plain(plan.sequences):
            inputs, token_ids = self.graphs.run(plan, shape, self.sampler.table.all_greedy(plan.sequences))
            return StepHandle(inputs.sampled, token_ids, None, {})
        inputs = self.inputs.build(plan)
        logits = self._logits(inputs.batch)
        num_sampled = len(inputs.sampled)
        token_ids, scores = self.sampler.sample(logits[:num_sampled], inputs.rows, inputs.counters, inputs.sampled)
        self._remember(inputs.rows, token_ids)
        prompt = self.prompt_scores.collect(plan, logits[num_sampled:]) if inputs.num_extra else {}
        return StepHandle(inputs.sampled, token_ids, scores, prompt)

    def forget_cache(self, blocks: list[int]) -> None:
        """Zero blocks that may hold values that are not numbers, before others reuse them."""
        index = torch.tensor(blocks, device=self.device)
        for cache in self.caches:
            for pages in (cache.keys, cache.values):
                if pages is not None:
                    pages.view(torch.uint8).index_fill_(0, index, 0)  # index_fill_ knows no float8

    def _forward(self, batch: ForwardBatch, rows: Tensor, counters: Tensor, all_greedy: bool) -> Tensor:
        """A plain step, as a graph captures it."""
        token_ids = ops.sample(self._logits(batch), self.sampler.table.gather(rows, counters, all_greedy))
        self._remember(rows, token_ids)
        return token_ids

    def _logits(self, batch: ForwardBatch) -> Tensor:
        if self.device.type == "cuda":
            batch = dataclasses.replace(batch, token_ids=ops.resolve(batch.token_ids, self.last_ids))
        return self.model(batch, self.caches)

    def _remember(self, rows: Tensor, token_ids: Tensor) -> None:
        # A row without a number has -1; the step that may already be planned for it reads some token that exists.
        self.last_ids.index_copy_(0, rows.long(), token_ids.clamp(min=0))


def _unpack(scores: Logprobs, token_ids: list[int], sequences: list[Sequence]) -> list[TokenLogprobs | None]:
    chosen, best, ids = scores.chosen.tolist(), scores.best.tolist(), scores.ids.tolist()
    unpacked: list[TokenLogprobs | None] = []
    for i, seq in enumerate(sequences):
        wanted = seq.params.logprobs
        if wanted is None:
            unpacked.append(None)
        else:
            unpacked.append(TokenLogprobs(token_ids[i], chosen[i], list(zip(ids[i][:wanted], best[i][:wanted], strict=True))))
    return unpacked
