"""Breaks down the time of a GPU while an executor runs: idle time, and each kernel's time and fraction of the roofline."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import torch

from stoker.base.errors import ConfigError
from stoker.kernels.tuning.devices import tuning_for
from stoker.kernels.tuning.table import Ceiling
from stoker.profiling.roofline import Product, StepSize, Work, attention_work, products_of
from stoker.runtime.executor import Executor
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker.inputs import PackedStep
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.step_handle import StepHandle

# Names of kernels that compute products, from Stoker and from libraries, without those that combine split-K slices.
_PRODUCT = re.compile(r"gemv|gemm|linear|router|nvjet|cutlass|xmma|cublas", re.IGNORECASE)
_COMBINE = re.compile(r"split_?k|reduce", re.IGNORECASE)
_ATTENTION = re.compile(r"attention")


class KernelShare(msgspec.Struct):
    """The times of one kernel. Kernels of different products have separate rows.

    With PDL, kernels overlap, and shares may exceed 1 in sum.
    """

    name: str
    count: float  # launches per step
    mean_us: float
    step_us: float
    share: float  # of the busy time of the device
    roofline: float | None  # theoretical floor ÷ measured time; None: unknown


class Breakdown(msgspec.Struct):
    """The result for consecutive steps. Times are in milliseconds per step."""

    num_steps: int
    rows: float  # mean per step
    tokens: float
    step_ms: float  # device time between the starts of two steps, median
    gap_ms: float  # idle time of the device between two steps, mean
    gap_share: float  # of step_ms
    busy_ms: float  # time in which at least one kernel ran
    kernels: list[KernelShare]


@dataclass(slots=True)
class Event:
    """One execution of a kernel. Times are in µs."""

    name: str
    start: float
    end: float


class _StepEvents:
    """Records CUDA events before and after the device's work of each step of a runner, inside its `with` block."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.sizes: list[StepSize] = []

    def __enter__(self) -> _StepEvents:
        start_step = self.runner._start

        def recorded(plan: StepPlan, packed: PackedStep, all_greedy: bool) -> StepHandle:
            """Start the step between two CUDA events."""
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            handle = start_step(plan, packed, all_greedy)
            end.record()
            self.events.append((start, end))
            self.sizes.append(size_of(plan))
            return handle

        self.runner._start = recorded  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        del self.runner._start


def size_of(plan: StepPlan) -> StepSize:
    """The sizes of a step that determine its work."""
    keys = sum(start + new for start, new in zip(plan.starts, plan.num_new, strict=True))
    pairs = sum(new * start + new * (new + 1) // 2 for start, new in zip(plan.starts, plan.num_new, strict=True))
    return StepSize(plan.num_tokens, len(plan), keys, pairs)


def break_down(executor: Executor, num_steps: int) -> Breakdown:
    """Run `num_steps` steps of the submitted requests twice: first to time them, then with the profiler of torch.

    With several ranks, the device of the leader is measured. The requests must last for 2 × num_steps steps. Raises ConfigError without a
    GPU, or if the requests end earlier.
    """
    if executor.info.device != "cuda":
        raise ConfigError("a breakdown measures a GPU, and this engine runs on the CPU.", cure="Leave --breakdown out.")
    runner = executor.runner
    assert isinstance(runner, ModelRunner)
    products = products_of(runner)
    timed = _run_steps(executor, runner, num_steps)
    steps, gaps = _times(timed.events)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        profiled = _run_steps(executor, runner, num_steps)
    events = sorted(
        (
            Event(event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ),
        key=lambda event: event.start,
    )
    name, (major, minor) = torch.cuda.get_device_name(runner.device), torch.cuda.get_device_capability(runner.device)
    ceiling = tuning_for(name, 10 * major + minor).ceiling
    shares = kernel_shares(events, profiled.sizes, products, _attention(runner, profiled.sizes), ceiling)
    return Breakdown(
        num_steps=num_steps,
        rows=statistics.mean(size.rows for size in timed.sizes),
        tokens=statistics.mean(size.tokens for size in timed.sizes),
        step_ms=statistics.median(steps),
        gap_ms=statistics.mean(gaps),
        gap_share=sum(gaps) / sum(steps),
        busy_ms=busy_us(events) / num_steps / 1e3,
        kernels=shares,
    )


def _run_steps(executor: Executor, runner: ModelRunner, num_steps: int) -> _StepEvents:
    """Run `num_steps` steps, with an idle device before and after. Raises ConfigError if the requests end earlier.

    With stages, an iteration of the loop may launch no step.
    """
    torch.cuda.synchronize()
    with _StepEvents(runner) as steps:
        while len(steps.events) < num_steps:
            if not executor.is_busy:
                raise ConfigError(f"only {len(steps.events)} of {num_steps} steps could be run.", cure="Use longer answers.")
            executor.turn(0.0)
    torch.cuda.synchronize()
    return steps


def _times(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> tuple[list[float], list[float]]:
    """(milliseconds between the starts of consecutive steps, idle milliseconds between them), from the events of each step."""
    pairs = list(pairwise(events))
    steps = [this[0].elapsed_time(following[0]) for this, following in pairs]
    gaps = [max(this[1].elapsed_time(following[0]), 0.0) for this, following in pairs]
    return steps, gaps


def _attention(runner: ModelRunner, sizes: Iterable[StepSize]) -> Work:
    """The sum of the work of attention in all steps."""
    config, stage, world = runner.model.config, runner.world.stage, runner.world.tensor.size
    itemsize = runner.caches[0].keys.element_size()
    works = [attention_work(config, stage.layers(config.num_layers), world, itemsize, size) for size in sizes]
    return Work(sum(work.bytes for work in works), sum(work.flops for work in works))


def busy_us(events: list[Event]) -> float:
    """The time in µs in which at least one of `events` ran. They are sorted by start."""
    total, until = 0.0, float("-inf")
    for event in events:
        total += max(event.end - max(event.start, until), 0.0)
        until = max(until, event.end)
    return total


def kernel_shares(
    events: list[Event], sizes: list[StepSize], products: list[Product], attention: Work, limit: Ceiling | None
) -> list[KernelShare]:
    """The shares of all kernels in steps of the given sizes, sorted by time, longest first.

    If there are as many kernels that compute products as there are products, the n-th kernel is assigned to the n-th product. Otherwise
    kernels are grouped only by name, and have no roofline. `limit` are the device's measured limits, if known.
    """
    computing = [event for event in events if _PRODUCT.search(event.name) and not _COMBINE.search(event.name)]
    expected = [(product.label, product.work(size)) for size in sizes for product in products]
    known = len(computing) == len(expected)
    labels = {id(event): label for event, (label, _) in zip(computing, expected, strict=True)} if known else {}
    durations: dict[str, list[float]] = defaultdict(list)
    floors: dict[str, float] = defaultdict(float)
    for event in events:
        durations[_name(event, labels)].append(event.end - event.start)
    if limit is not None:
        if known:
            for event, (_, work) in zip(computing, expected, strict=True):
                floors[_name(event, labels)] += work.seconds(limit) * 1e6
        _add_attention_floor(durations, floors, attention.seconds(limit) * 1e6)
    busy, count = busy_us(events), len(sizes)
    shares = [
        KernelShare(
            name, len(times) / count, statistics.mean(times), sum(times) / count, sum(times) / busy,
            floors[name] / sum(times) if name in floors else None,
        )
        for name, times in durations.items()
    ]  # fmt: skip
    return sorted(shares, key=lambda share: -share.step_us)


def _add_attention_floor(durations: dict[str, list[float]], floors: dict[str, float], floor_us: float) -> None:
    """Divide the floor of attention among its kernels in proportion to their times, so that all have the same fraction."""
    names = [name for name in durations if _ATTENTION.search(name)]
    total = sum(sum(durations[name]) for name in names)
    for name in names:
        floors[name] = floor_us * sum(durations[name]) / total


def _name(event: Event, labels: dict[int, str]) -> str:
    """The short name of a kernel, with the label of its product if it is known."""
    short = re.sub(r"^void |<.*|\(.*", "", event.name)[:60]
    label = labels.get(id(event))
    return short if label is None else f"{short}: {label}"
