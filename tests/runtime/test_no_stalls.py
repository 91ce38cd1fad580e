"""No step waits for the device: all request options on the meta device, which has no values to wait for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from drive import request, wait_for_a_grammar
from no_stalls import META, NoStalls, StallError
from torch import Tensor

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.types import FinishReason, Guide
from stoker.core.forward_batch import ForwardBatch
from stoker.kernels import ops
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime import staging
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.executor import Executor
from stoker.runtime.sampling import logprobs
from stoker.runtime.sampling.grammar_compiler import Grammars
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.staging import StagingBuffers
from stoker.runtime.worker import step_handle
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.row_tracker import RowTracker

LIMITS = Limits(max_batch_size=8, max_input_len=128, max_output_len=64, max_num_tokens=48, tokens_per_block=16)

STALLS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool((x > 0).any()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "torch.tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "to": lambda x: torch.ones(2).to(x.device),
    "copy_": lambda x: x.copy_(torch.ones(4, 8)),
    "list index": lambda x: x[[0, 1]],
    "list index stored": lambda x: x.__setitem__((0, [1, 2]), 0.0),
    "number stored": lambda x: x.__setitem__(torch.empty(2, dtype=torch.long, device=META), 0.0),
    "host tensor": lambda x: x.index_select(0, torch.ones(1, dtype=torch.long)),
}


@pytest.mark.parametrize("name", STALLS)
def test_stalls_are_detected(name: str) -> None:
    with torch.inference_mode(), pytest.raises((StallError, NotImplementedError, RuntimeError)), NoStalls():
        STALLS[name](torch.empty(4, 8, device=META))


class StubModel:
    """Returns logits without values."""

    def __init__(self, vocab_size: int) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size, prefix=None)

    def __call__(self, batch: ForwardBatch, caches: list[Any]) -> Tensor:
        assert batch.logits_idx is not None
        return torch.empty(len(batch.logits_idx), self.config.vocab_size, dtype=torch.bfloat16, device=META)


class CheckedExecutor:
    """An executor with overlap and a model on the meta device whose tokens are all `token`. Every launch is checked for stalls."""

    def __init__(self, engine: Path, token: int, monkeypatch: pytest.MonkeyPatch, tracker: RowTracker | None = None) -> None:
        """With `tracker`, steps have up to three drafts, which the device looks up."""
        vocab = json.loads((engine / "config.json").read_text())["model"]["vocab_size"]
        monkeypatch.setattr(ops, "sample", lambda logits, params: torch.empty(len(logits), dtype=torch.int32, device=META))
        for module in (logprobs, step_handle):  # results are separate copies on the host, as on a GPU
            monkeypatch.setattr(module, "copy_to_host", lambda tensor: torch.full(tensor.shape, token, dtype=tensor.dtype))
        self.runner = ModelRunner(
            StubModel(vocab), [], num_rows=8, max_batch_size=8, max_num_tokens=48, max_seq_len=192, block_size=16, device=META,
            use_graphs=False, grammars=Grammars(engine, vocab), max_drafts=3 if tracker is not None else 0, tracker=tracker,
        )  # fmt: skip
        info = ExecutorInfo(limits=LIMITS, max_seq_len=192, vocab_size=vocab, device="cuda", kv_cache_tokens=16 * 16, model="stub")
        scheduler = Scheduler(num_blocks=16, tokens_per_block=16, max_batch_size=8, max_num_tokens=48, max_seq_len=192,
                              policy="max_utilization", proposer="ngram" if tracker is not None else "none", draft_tokens=3)  # fmt: skip
        self.mailbox = SynchronousMailbox(info)
        self.executor = Executor(self.runner, scheduler, self.mailbox, info, RuntimeConfig())
        self.copies: list[int] = []
        self.max_in_flight = self.num_ahead = 0
        launch = self.runner.launch

        def checked(plan: StepPlan) -> Any:
            before = checker.num_copies
            handle = launch(plan)
            self.copies.append(checker.num_copies - before)
            self.num_ahead += any(-1 in drafts for drafts in plan.drafts)
            self.max_in_flight = max(self.max_in_flight, len(self.executor._in_flight) + 1)
            return handle

        checker = self.checker = NoStalls()
        monkeypatch.setattr(self.runner, "launch", checked)

    def run(self, *requests: Any) -> dict[str, list[Any]]:
        outputs: dict[str, list[Any]] = {each.request_id: [] for each in requests}
        self.mailbox.submit(list(requests))
        for _ in range(2000):
            with self.checker:  # including the begin and end of sequences
                self.executor.turn(0.0)
            wait_for_a_grammar(self.executor)
            for output in self.mailbox.pop_outputs():
                outputs[output.request_id].append(output)
            if all(found and found[-1].finish_reason for found in outputs.values()):
                return outputs
        raise AssertionError("the requests do not end")


ALL_OPTIONS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 15, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": 0.2, "logit_bias": {20: 2.0, 21: -100.0}, "min_tokens": 4, "logprobs": 2, "prompt_logprobs": 3,
    "allowed_token_ids": tuple(range(300)),
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 3}, {"logit_bias": {5: 1.0}}, {"repetition_penalty": 1.3}, {"min_tokens": 8}, {"logprobs": 4},
    {"bad_words": ((40,), (41, 42))}, {"prompt_logprobs": 0}, {"guide": Guide("regex", "a+")}, {"allowed_token_ids": (5, 9)}, ALL_OPTIONS,
    ALL_OPTIONS | {"bad_words": ((40, 41),), "guide": Guide("regex", "a+")},
]  # fmt: skip


def test_no_step_stalls_and_each_has_one_copy_of_inputs_and_one_for_features(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tokenizers.Tokenizer.from_file(str(tiny_engine / "tokenizer.json")).token_to_id("a")
    executor = CheckedExecutor(tiny_engine, token, monkeypatch)
    prompts = [[(7 * i + 3 * j) % 300 + 10 for j in range(5 + 9 * i)] for i in range(len(OPTIONS))]
    requests = [
        request(prompt, max_tokens=24, end_ids=(2,) if "guide" in params else (2, 10**6), **params)
        for prompt, params in zip(prompts, OPTIONS, strict=True)
    ]
    outputs = executor.run(*requests)
    for prompt, one in zip(prompts, requests, strict=True):
        answer = outputs[one.request_id]
        assert answer[-1].finish_reason is FinishReason.LENGTH and sum(len(output.token_ids) for output in answer) == 24
        assert (sum(len(output.logprobs) for output in answer) == 24) is (one.params.logprobs is not None)
        if one.params.prompt_logprobs is not None:
            scores = answer[0].prompt_logprobs
            assert scores[0] is None and [entry.token_id for entry in scores[1:]] == prompt[1:]
            assert all(len(entry.top) == one.params.prompt_logprobs for entry in scores[1:])
    assert executor.max_in_flight == 2 and executor.executor.snapshot().num_preemptions > 0
    # A third copy has the sampling parameters, when rows that sample belong to other sequences than before.
    assert set(executor.copies) <= {1, 2, 3} and executor.copies.count(3) <= 2 * len(OPTIONS) < len(executor.copies)
    assert not executor.runner.prompt_scores._partial and not executor.runner.sampler._users


def test_a_step_without_features_has_one_copy(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = CheckedExecutor(tiny_engine, 7, monkeypatch)
    executor.run(*(request([5, 6, 7 + i], max_tokens=9) for i in range(4)))
    assert set(executor.copies) == {1}


def test_steps_with_drafts_are_planned_without_waiting(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are accepted. The copies of new sequences to the device are the only ones beside the inputs, and those of features."""
    for name in ("continue_rows", "append_tokens"):  # kernels on a GPU
        monkeypatch.setattr(ops, name, lambda *_: None)
    executor = CheckedExecutor(tiny_engine, 3, monkeypatch, RowTracker(8, 192, 16, META, looks_up=True))
    executor.run(*(request([5, 3, 3, 3, 3 + i], max_tokens=40) for i in range(4)))
    assert executor.num_ahead > 5 and executor.max_in_flight == 2
    assert set(executor.copies) <= {1, 2} and executor.copies.count(2) <= 4
    num_ahead = executor.num_ahead
    features = [{"repetition_penalty": 1.3, "frequency_penalty": 0.1}, {"logit_bias": {5: 1.0}}, {"allowed_token_ids": (3, 9)}]
    executor.run(*(request([5, 3, 3, 3, 3 + i], max_tokens=40, **params) for i, params in enumerate(features)))
    assert executor.num_ahead > num_ahead + 5


def test_buffers_for_a_gpu_are_pinned_and_reused_after_the_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
        pinned.extend([size] if pin_memory else [])
        return real(size, dtype=dtype)

    real = torch.empty
    monkeypatch.setattr(staging.torch, "empty", empty)
    buffers = StagingBuffers(torch.device("cuda"), num_in_flight=2)
    addresses = [buffers.next_buffer(size).data_ptr() for size in (100, 5000, 7, 100, 90, 5000, 8, 64)]
    assert len(set(addresses[:4])) == 4 and addresses[4:] == addresses[:4] and len(pinned) == 4
    larger = max(pinned) + 1
    assert len(buffers.next_buffer(larger)) == larger and len(pinned) == 5
