"""Runs steps on one device: inputs → model → sampler, without waiting for the result."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stoker.base.types import TokenLogprobs
from stoker.layers.batch import KVCache
from stoker.layers.decoder import Decoder
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.prompt import PromptScores
from stoker.runtime.sampling.sampler import Logprobs, Sampler
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker.inputs import InputBuilder, StepInputs


@dataclass(slots=True)
class StepResult:
    """What a finished step gives the host, for the rows that sampled."""

    sequences: list[Sequence]
    token_ids: list[int]  # -1: the logits were not numbers
    logprobs: list[TokenLogprobs | None]  # empty when nobody asked
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)  # by seq_id, when complete


class StepHandle:
    """A launched step. `wait` blocks until its tokens are on the host."""

    __slots__ = ("_event", "_inputs", "_prompt", "_scores", "_token_ids")

    def __init__(
        self, inputs: StepInputs, token_ids: Tensor, scores: Logprobs | None, prompt: dict[int, list[TokenLogprobs | None]]
    ) -> None:
        self._inputs = inputs
        self._scores = scores
        self._prompt = prompt
        self._event: torch.cuda.Event | None = None
        self._token_ids = token_ids
        if token_ids.is_cuda:
            self._token_ids = token_ids.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        token_ids = self._token_ids.tolist()
        sequences = self._inputs.sampled
        logprobs = _unpack(self._scores, token_ids, sequences) if self._scores is not None else []
        return StepResult(sequences, token_ids, logprobs, self._prompt)


class ModelRunner:
    """One device's model, cache and buffers."""

    def __init__(
        self, model: Decoder, caches: list[KVCache], *, num_rows: int, max_seq_len: int, block_size: int, device: torch.device
    ) -> None:
        self.model = model
        self.caches = caches
        self.device = device
        max_blocks = -(-max_seq_len // block_size)
        self.inputs = InputBuilder(num_rows, max_blocks, block_size, device)
        self.sampler = Sampler(num_rows, model.config.vocab_size, device)
        self.prompt_scores = PromptScores()
        self.last_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)  # each row's newest token

    def add(self, seq: Sequence) -> None:
        """A sequence begins; called once, before its first step."""
        self.sampler.add(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence ended."""
        self.sampler.remove(seq.seq_id)
        self.prompt_scores.remove(seq.seq_id)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. Its rows' tokens go to `last_ids`, so that the next step can start before this one is read."""
        inputs = self.inputs.build(plan)
        batch = inputs.batch
        if inputs.pending:
            waiting = batch.token_ids < 0
            batch.token_ids = torch.where(waiting, self.last_ids[(-1 - batch.token_ids).clamp(min=0)], batch.token_ids)
        logits = self.model(batch, self.caches)
        num_sampled = len(inputs.sampled)
        token_ids, scores = self.sampler.sample(logits[:num_sampled], inputs.rows, inputs.counters, inputs.sampled)
        self.last_ids.index_copy_(0, inputs.rows.long(), token_ids.clamp(min=0))
        prompt = self.prompt_scores.collect(plan, logits[num_sampled:]) if logits.shape[0] > num_sampled else {}
        return StepHandle(inputs, token_ids, scores, prompt)

    def forget_cache(self, blocks: list[int]) -> None:
        """Zero blocks that may hold values that are not numbers, before others reuse them."""
        index = torch.tensor(blocks, device=self.device)
        for cache in self.caches:
            cache.keys.index_fill_(0, index, 0)
            if cache.values is not None:
                cache.values.index_fill_(0, index, 0)


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
