"""Measures speculative decoding: on a GPU the cost of verification, on a CPU the speed of prompt lookup.

PYTHONPATH=src python benchmarks/speculation.py --config benchmarks/models/llama-3.1-8b --json results.json    # an H200, 6 minutes
PYTHONPATH=src python benchmarks/speculation.py --full-load 256 --json results.json    # prompt lookup that finds nothing, at full load
PYTHONPATH=src python benchmarks/speculation.py --cpu --json results.json    # the demo model on this CPU, 5 minutes

On a GPU the weights are random, so no draft would be accepted. Three of four drafts are then accepted (`forced`): before the verification,
the sampled tokens are replaced by these drafts, or by others after the third, by two small kernels more than with real drafts. Lookups, the
verification and the host's index of each sequence perform the same work as with real drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from stoker import LLM, SamplingParams
from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.draft_settings import without_unused_drafts
from stoker.builder.build import build, build_cached
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import provenance
from stoker.cli.default_model import default_checkpoint
from stoker.profiling.batch_run import random_requests, run_batch
from stoker.profiling.captured_step import capture_step, replay_ms
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.request import Sequence as TokenSequence
from stoker.runtime.sampling import verification
from stoker.runtime.schedule.proposers.ngram import NgramProposer
from stoker.runtime.worker import model_runner
from stoker.runtime.worker.cuda_graphs import Graphs

DRAFTS, ACCEPTED = 4, 3
FORMATS: dict[str, str | None] = {"bf16": None, "fp8": "FP8", "awq": "AWQ"}


# On a GPU.


@torch.inference_mode()
def step_ms(executor: Executor, rows: int, context: int, drafts: int) -> float:
    """Milliseconds of one captured decode step of `rows` rows with `drafts` draft tokens each."""
    return replay_ms(capture_step(executor, rows, context, drafts))


@lru_cache
def forced_changes(count: int, device: torch.device) -> torch.Tensor:
    """int32 [count]: 0 where the draft after a row of logits is accepted, otherwise 1. Created when the step runs before its capture."""
    return (torch.arange(count, device=device) % (1 + DRAFTS) >= ACCEPTED).int()


@contextmanager
def forced_acceptance() -> Iterator[None]:
    """Every decode has DRAFTS drafts, of which ACCEPTED are accepted. Graphs must be captured within this context.

    In a step in which some rows have fewer drafts, at the end of their answers, the acceptance is not changed.
    """
    look_up, verify = NgramProposer.propose, verification.verify

    def propose(self: NgramProposer, seq: TokenSequence, limit: int) -> Sequence[int]:
        look_up(self, seq, limit)
        return [11 + i for i in range(min(limit, DRAFTS))]

    def num_ahead(self: NgramProposer, seq: TokenSequence, limit: int) -> int:
        look_up(self, seq, limit)
        return min(limit, DRAFTS)

    def forced(sampled: torch.Tensor, drafts: verification.StepDrafts) -> verification.Verified:
        count = len(sampled)
        if count == (len(drafts.starts) - 1) * (1 + DRAFTS):
            sampled = drafts.token_ids.roll(-1) ^ forced_changes(count, sampled.device)
        return verify(sampled, drafts)

    with (
        mock.patch.object(NgramProposer, "propose", propose),
        mock.patch.object(NgramProposer, "num_ahead", num_ahead),
        mock.patch.object(NgramProposer, "waits", lambda *_: True),
        mock.patch.object(model_runner, "verify", forced),
    ):
        yield


def tokens_per_s(executor: Executor, batch: int, context: int, steps: int = 128) -> float:
    """Tokens per second of decodes: from two runs whose lengths differ by `steps` × (1 + ACCEPTED) tokens of each request."""
    vocab, new = executor.info.vocab_size, steps * (1 + ACCEPTED)
    run_batch(executor, random_requests(batch, context, 9, vocab, seed=1), 9)
    short = run_batch(executor, random_requests(batch, context, 33, vocab, seed=2), 33)
    long = run_batch(executor, random_requests(batch, context, 33 + new, vocab, seed=3), 33 + new)
    return batch * new / (long.total_s - short.total_s)


def on_gpu(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The cost of verification and the speed with forced acceptance, for one weight format."""
    mapping = Mapping(tensor_parallel=args.tensor_parallel)
    result: dict[str, Any] = {"format": name, "steps": [], "tokens_per_s": []}
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(max_batch_size=8, max_input_len=4096, max_output_len=4096)
        config = BuildConfig(
            dtype="bfloat16", dummy_weights=True, limits=limits, device="cuda", quantization=FORMATS[name], mapping=mapping
        )
        build(args.config, folder + "/engine", config, verify="none")
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:  # ranks share memory in one engine per process
            for speculate in ("none", "ngram"):
                part = pool.submit(on_gpu_with, args, name, folder + "/engine", speculate).result()
                result["steps"] += part["steps"]
                result["tokens_per_s"] += part["tokens_per_s"]
    return result


def on_gpu_with(args: argparse.Namespace, name: str, engine: str, speculate: str) -> dict[str, Any]:
    """The members `steps` and `tokens_per_s` of the result of `on_gpu` for one proposer. Each call needs a new process."""
    result: dict[str, Any] = {"steps": [], "tokens_per_s": []}
    # Ranks capture graphs together, so that one process cannot leave it out.
    with mock.patch.object(Graphs, "warm_up", lambda _: 0) if args.tensor_parallel == 1 else nullcontext():
        settings = RuntimeConfig(
            prefix_reuse=False, speculate=speculate, draft_tokens=DRAFTS, adaptive_drafts=False, kv_cache_tokens=1 << 16
        )
        with forced_acceptance():
            executor = load_executor(engine, without_unused_drafts(settings), SynchronousMailbox)
    if speculate == "ngram" and args.tensor_parallel == 1:
        for rows in args.rows:
            plain, drafted = (step_ms(executor, rows, args.context, drafts) for drafts in (0, DRAFTS))
            result["steps"].append({"rows": rows, "plain_ms": plain, "drafted_ms": drafted, "ratio": drafted / plain})
            print(name, result["steps"][-1], flush=True)
        executor.runner.graphs._captured.clear()  # type: ignore[attr-defined]
    if args.tensor_parallel == 1:
        executor.runner.warm_up()  # type: ignore[attr-defined]
    executor.capture_all()
    with forced_acceptance():
        for rows in args.rows:
            speed = tokens_per_s(executor, rows, args.context)
            result["tokens_per_s"].append({"rows": rows, "speculate": speculate, "value": speed})
            print(name, result["tokens_per_s"][-1], flush=True)
    executor.close()
    return result


def full_load(args: argparse.Namespace, name: str, repeats: int = 4) -> dict[str, Any]:
    """Output tokens per second of as many requests as rows, with and without prompt lookup of adaptive length, in turn."""
    rows, prompt, new = args.full_load, 128, 256
    result: dict[str, Any] = {"format": name, "rows": rows, "prompt": prompt, "new": new, "tokens_per_s": {"none": [], "ngram": []}}
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(max_batch_size=rows, max_input_len=prompt, max_output_len=new, max_num_tokens=8192)
        config = BuildConfig(dtype="bfloat16", dummy_weights=True, limits=limits, device="cuda", quantization=FORMATS[name])
        build(args.config, folder + "/engine", config, verify="none")
        executors = {
            speculate: load_executor(
                folder + "/engine",
                without_unused_drafts(
                    RuntimeConfig(prefix_reuse=False, speculate=speculate, draft_tokens=DRAFTS, kv_cache_tokens=rows * (prompt + new + 64))
                ),
                SynchronousMailbox,
            )
            for speculate in ("none", "ngram")
        }
        vocab = executors["none"].info.vocab_size
        for executor in executors.values():
            executor.capture_all()
        for seed in range(repeats + 1):
            for speculate, executor in executors.items():
                run = run_batch(executor, random_requests(rows, prompt, new, vocab, seed), new)
                if seed:
                    result["tokens_per_s"][speculate].append(run.output_tokens_per_s)
        stats = executors["ngram"].snapshot()
        result |= {"draft_tokens": stats.num_draft_tokens, "accepted_draft_tokens": stats.num_accepted_draft_tokens}
        for executor in executors.values():
            executor.close()
    plain, drafted = (statistics.median(values) for values in result["tokens_per_s"].values())
    result["speed"] = drafted / plain
    print(name, result, flush=True)
    return result


# On a CPU.

TEXT = """Mr. Smith has worked at the harbour for twenty years. Every mornnig Mr. Smith opens the gate, reads the list of ships, and calls
the pilots. On Mondays he checks the cranes with two enginers, and on Fridays he writes a report about the cargo. Mr. Smith says that the
work is never the same on two days, because the wether, the tides and the ships are always different."""
SHIPS = """{"name": "harbour", "ships": [{"name": "Anna", "length": 120, "flag": "NO"}, {"name": "Berta", "length": 95, "flag": "SE"},
{"name": "Clara", "length": 180, "flag": "DK"}, {"name": "Dora", "length": 60, "flag": "NO"}]}"""
TASKS = {  # the first three edit a given text
    "spelling": f"Correct the spelling mistakes in this text and repeat the whole text:\n\n{TEXT}",
    "name": f"Rewrite the following text, and change nothing except the name Smith, which becomes Jones:\n\n{TEXT}",
    "json": f"Change the flag of Berta to FI in this JSON, and answer with the whole JSON:\n\n{SHIPS}",
    "free": "Write a long story about a lighthouse keeper and a storm.",
}


def on_cpu(quantization: str, repeats: int) -> list[dict[str, Any]]:
    """Tokens per second of the demo model with and without prompt lookup, alternating, for tasks that copy and one that does not.

    The prompt is in the KV cache, so that the times are those of decoding.
    """
    limits = Limits(max_batch_size=4, max_input_len=1024, max_output_len=1024)
    config = BuildConfig(device="cpu", limits=limits, quantization=None if quantization == "AS_STORED" else quantization)
    engine = str(build_cached(str(default_checkpoint()), config, verify="none").path)
    models = {"none": LLM(engine), "ngram": LLM(engine, speculate="ngram")}
    return [cpu_task(models, quantization, task, repeats) for task in TASKS]


def cpu_task(models: dict[str, LLM], quantization: str, task: str, repeats: int) -> dict[str, Any]:
    """The fastest of `repeats` answers to one task, after one that is not timed, and that with the least CPU time."""
    seconds: dict[str, list[float]] = {speculate: [] for speculate in models}
    cpu_seconds: dict[str, list[float]] = {speculate: [] for speculate in models}
    answers, before = {}, models["ngram"].stats()
    for repeat in range(1 + repeats):
        for speculate, llm in models.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            (answer,) = llm.chat([[{"role": "user", "content": TASKS[task]}]], SamplingParams(max_tokens=160, temperature=0.0))
            if repeat:
                seconds[speculate].append(time.perf_counter() - started)
                cpu_seconds[speculate].append(time.process_time() - cpu_started)
            answers[speculate] = list(answer.choices[0].token_ids)
    after = models["ngram"].stats()
    tokens, fastest = len(answers["none"]), {speculate: min(values) for speculate, values in seconds.items()}
    least = {speculate: min(values) for speculate, values in cpu_seconds.items()}
    steps = (1 + repeats) * tokens - (after.num_accepted_draft_tokens - before.num_accepted_draft_tokens)
    result = {
        "format": quantization,
        "task": task,
        "tokens": tokens,
        "equal": answers["none"] == answers["ngram"],
        "tokens_per_step": (1 + repeats) * tokens / steps,
        **{f"{speculate}_tokens_per_s": tokens / value for speculate, value in fastest.items()},
        "speedup": fastest["none"] / fastest["ngram"],
        **{f"{speculate}_cpu_ms_per_token": 1e3 * value / tokens for speculate, value in least.items()},
        "cpu_speedup": least["none"] / least["ngram"],
    }
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the demo model on this CPU")
    parser.add_argument("--cpu-formats", default="AS_STORED,NO_QUANT", help="quantizations of the demo model")
    parser.add_argument("--repeats", type=int, default=5, help="timed answers to each task of --cpu")
    parser.add_argument("--config", default="benchmarks/models/llama-3.1-8b")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", type=lambda text: [int(rows) for rows in text.split(",")], default=[1, 8])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--full-load", type=int, metavar="ROWS", help="only compare throughputs with this number of rows")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.cpu:
        found: dict[str, Any] = {
            **provenance(device="cpu"),
            "cpu": [row for name in args.cpu_formats.split(",") for row in on_cpu(name, args.repeats)],
        }
    else:
        what = {"config": args.config, "context": args.context, "drafts": DRAFTS, "forced_accepted": ACCEPTED}
        measure = full_load if args.full_load else on_gpu
        found = {**provenance(device="cuda"), **what, "formats": [measure(args, name) for name in args.formats.split(",")]}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
