"""Where a GPU's time goes while an executor runs: busy or idle, kernel by kernel, and how near each is to its roofline."""

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
from stoker.runtime.worker.inputs import Packed
from stoker.runtime.worker.model_runner import ModelRunner, StepHandle

# Kernels that compute a product, ours and the library's; not those that gather a split one's parts.
_PRODUCT = re.compile(r"gemv|gemm|linear|nvjet|cutlass|xmma|cublas", re.IGNORECASE)
_PART = re.compile(r"split_?k|reduce", re.IGNORECASE)
_ATTENTION = re.compile(r"attention")


class KernelShare(msgspec.Struct):
    """One kernel, for one product where it computes products. Chained kernels overlap, so shares may sum to more than 1."""

    name: str
    count: float  # launches a step
    mean_us: float
    step_us: float
    share: float  # of the device's busy time
    roofline: float | None  # the shortest time its bytes or operations take ÷ the time it takes; None: not known


class Breakdown(msgspec.Struct):
    """Steps in a row. Times in milliseconds a step."""

    num_steps: int
    rows: float  # a step, mean
    tokens: float
    step_ms: float  # device time from one step's begin to the next's, median
    gap_ms: float  # the device had nothing to do between two steps, mean
    gap_share: float  # of step_ms
    busy_ms: float  # some kernel ran
    kernels: list[KernelShare]


@dataclass(slots=True)
class Event:
    """A kernel that ran. Times in µs."""

    name: str
    start: float
    end: float


class _Marks:
    """Events of the device before and after each step of a runner, set once the host has its numbers ready."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.sizes: list[StepSize] = []

    def __enter__(self) -> _Marks:
        begin = self.runner._start

        def marked(plan: StepPlan, packed: Packed, all_greedy: bool) -> StepHandle:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            handle = begin(plan, packed, all_greedy)
            end.record()
            self.events.append((start, end))
            self.sizes.append(size_of(plan))
            return handle

        self.runner._start = marked  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        del self.runner._start


def size_of(plan: StepPlan) -> StepSize:
    keys = sum(start + new for start, new in zip(plan.starts, plan.num_new, strict=True))
    pairs = sum(new * start + new * (new + 1) // 2 for start, new in zip(plan.starts, plan.num_new, strict=True))
    return StepSize(plan.num_tokens, len(plan), keys, pairs)


def break_down(executor: Executor, num_steps: int) -> Breakdown:
    """Run `num_steps` steps of what is in the executor, twice: once to time them, once under torch's profiler.

    On several ranks, the leader's device is looked at. Requests must last for twice as many steps. Raises ConfigError without a GPU, or
    when the steps run out.
    """
    if executor.info.device != "cuda":
        raise ConfigError("a breakdown looks at a GPU, and this engine runs on the CPU.", cure="Leave --breakdown out.")
    runner = executor.runner
    assert isinstance(runner, ModelRunner)
    products = products_of(runner)
    marks = _turn(executor, runner, num_steps)
    steps, gaps = _times(marks.events)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        seen = _turn(executor, runner, num_steps)
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
    shares = kernel_shares(events, seen.sizes, products, _attention(runner, seen.sizes), ceiling)
    return Breakdown(
        num_steps=num_steps,
        rows=statistics.mean(size.rows for size in marks.sizes),
        tokens=statistics.mean(size.tokens for size in marks.sizes),
        step_ms=statistics.median(steps),
        gap_ms=statistics.mean(gaps),
        gap_share=sum(gaps) / sum(steps),
        busy_ms=busy_us(events) / num_steps / 1e3,
        kernels=shares,
    )


def _turn(executor: Executor, runner: ModelRunner, num_steps: int) -> _Marks:
    """Exactly `num_steps` launches, on a device that is idle before and after. With stages, some turns launch none."""
    torch.cuda.synchronize()
    with _Marks(runner) as marks:
        while len(marks.events) < num_steps:
            if not executor.is_busy:
                raise ConfigError(f"{len(marks.events)} steps ran where {num_steps} are looked at.", cure="Use longer answers.")
            executor.turn(0.0)
    torch.cuda.synchronize()
    return marks


def _times(marks: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> tuple[list[float], list[float]]:
    """Milliseconds from each step's begin to the next's, and of these without work."""
    pairs = list(pairwise(marks))
    steps = [this[0].elapsed_time(following[0]) for this, following in pairs]
    gaps = [max(this[1].elapsed_time(following[0]), 0.0) for this, following in pairs]
    return steps, gaps


def _attention(runner: ModelRunner, sizes: Iterable[StepSize]) -> Work:
    """What the attention of all steps must do."""
    config, stage, world = runner.model.config, runner.world.stage, runner.world.tensor.size
    itemsize = runner.caches[0].keys.element_size()
    works = [attention_work(config, stage.layers(config.num_layers), world, itemsize, size) for size in sizes]
    return Work(sum(work.bytes for work in works), sum(work.flops for work in works))


def busy_us(events: list[Event]) -> float:
    """Time in which at least one of `events`, sorted by their start, ran."""
    total, until = 0.0, float("-inf")
    for event in events:
        total += max(event.end - max(event.start, until), 0.0)
        until = max(until, event.end)
    return total


def kernel_shares(
    events: list[Event], sizes: list[StepSize], products: list[Product], attention: Work, limit: Ceiling | None
) -> list[KernelShare]:
    """The kernels of the steps `sizes`, the most costly first.

    The n-th kernel that computes a product belongs to the n-th product of the steps, when there are as many; else products are
    taken together, by kernel.
    """
    computing = [event for event in events if _PRODUCT.search(event.name) and not _PART.search(event.name)]
    wanted = [(product.label, product.work(size)) for size in sizes for product in products]
    known = len(computing) == len(wanted)
    labels = {id(event): label for event, (label, _) in zip(computing, wanted, strict=True)} if known else {}
    taken: dict[str, list[float]] = defaultdict(list)
    least: dict[str, float] = defaultdict(float)
    for event in events:
        taken[_name(event, labels)].append(event.end - event.start)
    if limit is not None:
        if known:
            for event, (_, work) in zip(computing, wanted, strict=True):
                least[_name(event, labels)] += work.seconds(limit) * 1e6
        _share_attention(taken, least, attention.seconds(limit) * 1e6)
    busy, count = busy_us(events), len(sizes)
    shares = [
        KernelShare(
            name, len(times) / count, statistics.mean(times), sum(times) / count, sum(times) / busy,
            least[name] / sum(times) if name in least else None,
        )
        for name, times in taken.items()
    ]  # fmt: skip
    return sorted(shares, key=lambda share: -share.step_us)


def _share_attention(taken: dict[str, list[float]], least: dict[str, float], whole_us: float) -> None:
    """Kernels of attention are measured together."""
    names = [name for name in taken if _ATTENTION.search(name)]
    total = sum(sum(taken[name]) for name in names)
    for name in names:
        least[name] = whole_us * sum(taken[name]) / total


def _name(event: Event, labels: dict[int, str]) -> str:
    short = re.sub(r"^void |<.*|\(.*", "", event.name)[:60]
    label = labels.get(id(event))
    return short if label is None else f"{short}: {label}"
