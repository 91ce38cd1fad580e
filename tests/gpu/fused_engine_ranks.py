"""Decode with fused layers on two tensor-parallel ranks: `fused_engine_ranks.py DEVICE FOLDER STEPS...`.

`STEPS` is `captured` or `eager`. With several of them, the process loads the engine again for each. Its ranks share memory the first time
only, without which they have no fused layers. Log-probabilities of decoded tokens equal those of the same tokens in a prompt, whose linears
and all-reduces are separate kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("builder", "parallel")]

import tiny
from rank_executors import generate, load, outputs

from stoker.base.config import Limits, Mapping
from stoker.base.types import SamplingParams
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.aot import compile_kernels
from stoker.runtime.client import Cancel
from stoker.runtime.executor import Executor
from stoker.runtime.request import TokenRequest
from stoker.runtime.worker.model_runner import ModelRunner

PROMPTS = [[7, 3, 11, 5, 2], [9, 4, 8], [5] * 20, [6, 13, 12, 10]]
NUM_NEW = 48
MEAN, MAXIMUM = 0.08, 0.5  # of the differences of log-probabilities: logits are rounded to bfloat16


def scored(executor: Executor, requests: list[TokenRequest]) -> list[tuple[list[int], list[float]]]:
    """(token ids, log-probabilities) of each request; of a request with prompt_logprobs, those of its prompt from the second token on."""
    found = []
    for each in outputs(executor, requests):
        scores = [output.logprobs if output.prompt_logprobs is None else output.prompt_logprobs for output in each]
        logprobs = [entry.logprob for entries in scores for entry in entries if entry is not None]
        found.append(([token for output in each for token in output.token_ids], logprobs))
    return found


def check_logprobs(executor: Executor, prompts: list[list[int]], name: str) -> None:
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
    requests = [TokenRequest(request_id=f"{name}-{i}", prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)]
    for prompt, (tokens, decoded) in zip(prompts, scored(executor, requests), strict=True):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        repeated = TokenRequest(request_id=f"{name}-{prompt}", prompt_ids=prompt + tokens, params=params)
        [(_, of_prompt)] = scored(executor, [repeated])
        expected = of_prompt[len(prompt) - 1 : len(prompt) - 1 + NUM_NEW]
        assert len(decoded) == len(expected) == NUM_NEW
        differences = [abs(one - other) for one, other in zip(decoded, expected, strict=True)]
        assert sum(differences) / NUM_NEW < MEAN and max(differences) < MAXIMUM, differences


def check_cancellation(executor: Executor) -> None:
    """Requests that are cancelled in the middle leave ranks in the same state."""
    mailbox = executor.mailbox
    assert isinstance(mailbox, SynchronousMailbox)
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    mailbox.submit([TokenRequest(request_id=f"cancelled-{i}", prompt_ids=prompt, params=params) for i, prompt in enumerate(PROMPTS)])
    for _ in range(10):
        executor.turn(0.0)
    mailbox.messages += [Cancel(f"cancelled-{i}") for i in range(len(PROMPTS))]
    executor.turn(0.0)
    while executor.is_busy:
        executor.turn(0.0)
    mailbox.pop_outputs()


def main(device: str, folder: str, *steps: str) -> None:
    model = tiny.model(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    limits = Limits(max_batch_size=8, max_input_len=128, max_output_len=64, max_num_tokens=256)
    config = BuildConfig(device=device, dtype="bfloat16", limits=limits, mapping=Mapping(tensor_parallel=2))
    kernels = None if device == "cpu" else compile_kernels  # in parallel, where the start of an engine compiles one after the other
    engine = build(tiny.save(model, Path(folder, "checkpoint")), Path(folder, "engine"), config, verify="none", kernels=kernels)
    for number, kind in enumerate(steps):
        executor = load(engine.path, kv_cache_tokens=2048, cuda_graphs=kind == "captured", prefix_reuse=False)
        try:
            assert isinstance(executor.runner, ModelRunner)
            fused_layers = executor.runner.model.fused_layers
            is_fused = fused_layers is not None and fused_layers.supports(len(PROMPTS))
            assert device == "cpu" or is_fused is (number == 0)
            alone = [generate(executor, [prompt], NUM_NEW)[0] for prompt in PROMPTS]
            check_logprobs(executor, PROMPTS[:1], "alone")
            check_logprobs(executor, PROMPTS, "together")
            check_cancellation(executor)
            assert [generate(executor, [prompt], NUM_NEW)[0] for prompt in PROMPTS] == alone
        finally:
            executor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
