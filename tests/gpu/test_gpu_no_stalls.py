"""No step waits for the device, with any request option: torch.cuda.set_sync_debug_mode("error") makes torch raise where it waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.types import Guide, SamplingParams
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.request import SequenceOutput, TokenRequest

LIMITS = Limits(max_batch_size=16, max_input_len=160, max_output_len=64, max_num_tokens=64)
ALL: dict[str, Any] = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 15, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": 0.2, "logit_bias": {20: 2.0, 21: -100.0}, "min_tokens": 4, "logprobs": 2, "prompt_logprobs": 3,
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 3}, {"logit_bias": {5: 1.0}}, {"repetition_penalty": 1.3}, {"min_tokens": 8}, {"logprobs": 4},
    {"allowed_token_ids": (5, 9)}, {"bad_words": ((40,), (41, 42))}, {"prompt_logprobs": 0}, ALL, ALL | {"bad_words": ((40, 41),)},
]  # fmt: skip


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import sys

    sys.path.append(str(Path(__file__).parents[1] / "builder"))  # small random checkpoints
    import tiny

    folder = tmp_path_factory.mktemp("stalls")
    model = tiny.model(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    build(tiny.save(model, folder / "checkpoint"), folder / "engine", BuildConfig(device="cuda", limits=LIMITS), verify="files")
    # Without prefix reuse the second round has the shapes of the first.
    loaded = load_executor(folder / "engine", RuntimeConfig(kv_cache_tokens=4096, prefix_reuse=False), SynchronousMailbox)
    loaded.capture_all()
    yield loaded
    loaded.close()


def answers(executor: Executor, options: list[dict[str, Any]], begin: int) -> list[list[int]]:
    """The tokens of one request per entry of `options`. Request ids are numbered from `begin`."""
    mailbox = executor.mailbox
    assert isinstance(mailbox, SynchronousMailbox)
    requests = [
        TokenRequest(
            request_id=f"r{begin + i}", prompt_ids=[(7 * i + 3 * j) % 300 + 10 for j in range(5 + 9 * i)],
            params=SamplingParams(max_tokens=24, **params), end_ids=(2,),
        )
        for i, params in enumerate(options)
    ]  # fmt: skip
    found: dict[str, list[SequenceOutput]] = {one.request_id: [] for one in requests}
    mailbox.submit(requests)
    executor.turn(0.0)
    while executor.is_busy:
        executor.turn(0.0)
    for output in mailbox.pop_outputs():
        found[output.request_id].append(output)
    assert all(outputs[-1].error is None for outputs in found.values())
    return [[token for output in outputs for token in output.token_ids] for outputs in found.values()]


@pytest.mark.parametrize("guided", [False, True])
def test_no_launch_waits(executor: Executor, monkeypatch: pytest.MonkeyPatch, guided: bool) -> None:
    if guided:
        pytest.importorskip("xgrammar", reason="guided decoding needs xgrammar")
    options = [*OPTIONS, {"guide": Guide("choice", json.dumps(["fox", "dog"]))}] if guided else OPTIONS
    expected = answers(executor, options, begin=100 * guided)  # compiles kernels, captures graphs and allocates buffers
    runner: Any = executor.runner
    num_watched = 0

    def watched(method: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal num_watched
            num_watched += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for name in ("add", "launch", "remove"):
        monkeypatch.setattr(runner, name, watched(getattr(runner, name)))
    assert answers(executor, options, begin=50 + 100 * guided) == expected
    assert num_watched > 24 + 2 * len(options)
