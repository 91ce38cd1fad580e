"""Breakdowns: the assignment of kernels to products, rooflines and step times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.cli.benchmark.breakdown import min_prefill_steps
from stoker.cli.benchmark.executor import ExecutorBenchmark
from stoker.core.specs import LinearSpec
from stoker.distributed.world import ALONE_WORLD
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.kernels.tuning.devices import tuning_for
from stoker.kernels.tuning.table import Ceiling
from stoker.layers.decoder import declare
from stoker.profiling.batch_run import random_requests, run_batch
from stoker.profiling.breakdown import Event, break_down, busy_us, kernel_shares, size_of
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.profiling.roofline import Product, StepSize, Work, attention_work, products_of
from stoker.runtime.load import load_executor
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker.rank import load_rank

LIMIT = Ceiling(bytes_per_s=1e12, flops_per_s={2: 1e15, 1: 2e15})


def test_busy_time_is_the_union() -> None:
    assert busy_us([Event("a", 0, 10), Event("b", 5, 8), Event("c", 9, 12), Event("d", 20, 21)]) == 13


def test_each_kernel_is_assigned_its_product_and_roofline() -> None:
    """Two steps of two products and attention. The larger product takes twice its floor, the smaller one four times."""
    products = [
        Product("linear 4 × 2", 1_000_000, 8, 0, False, 2),  # 1 µs at 1 TB/s
        Product("linear 8 × 2", 3_000_000, 16, 0, True, 2),
    ]
    step = (("void small_linear<int>(float)", 4.0), ("attention_kernel", 5.0), ("nvjet_tst", 6.0), ("splitKreduce_gemm", 1.0))
    events, at = [], 0.0
    for _ in range(2):
        for name, duration in step:
            events.append(Event(name, at, at + duration))
            at += duration
    shares = kernel_shares(events, [StepSize(1, 1, 10, 10)] * 2, products, Work(bytes=4_000_000), LIMIT)
    found = {share.name: share for share in shares}
    order = ["nvjet_tst: linear 8 × 2", "attention_kernel", "small_linear: linear 4 × 2", "splitKreduce_gemm"]
    assert [share.name for share in shares] == order
    assert found["small_linear: linear 4 × 2"].roofline == pytest.approx(0.25)
    assert found["nvjet_tst: linear 8 × 2"].roofline == pytest.approx(0.5)
    assert found["attention_kernel"].roofline == pytest.approx(0.4)
    assert found["splitKreduce_gemm"].roofline is None
    assert [share.count for share in shares] == [1, 1, 1, 1]
    assert sum(share.share for share in shares) == pytest.approx(1)


def test_kernels_that_match_no_product_have_no_roofline() -> None:
    shares = kernel_shares([Event("gemv", 0, 2), Event("gemv", 2, 5)], [StepSize(1, 1, 1, 1)], [], Work(), LIMIT)
    assert [(share.name, share.count, share.roofline) for share in shares] == [("gemv", 2, None)]


@pytest.mark.parametrize("kernel", ["gemv_kernel", "small_gemm_kernel", "expert_linear_kernel", "router_kernel"])
def test_kernels_that_compute_products(kernel: str) -> None:
    shares = kernel_shares([Event(kernel, 0, 2)], [StepSize(1, 1, 1, 1)], [Product("product", 1_000, 8, 0, False, 2)], Work(), LIMIT)
    assert [share.name for share in shares] == [f"{kernel}: product"]


def test_work_is_bound_by_memory_or_by_arithmetic() -> None:
    product = Product("linear", weight_bytes=2_000_000, params=1_000_000, row_bytes=0, of_rows=False, operand=2)
    assert product.work(StepSize(1, 1, 0, 0)).seconds(LIMIT) == pytest.approx(2e-6)
    assert product.work(StepSize(10_000, 1, 0, 0)).seconds(LIMIT) == pytest.approx(2e-5)
    experts = Product("experts", 8_000_000, 1_000_000, 0, False, 2, num_experts=4, top_k=2)
    one_token, all_experts = experts.work(StepSize(1, 1, 0, 0)), experts.work(StepSize(1000, 1, 0, 0))
    assert one_token.bytes == pytest.approx(8_000_000 * (1 - 0.75**2)) and all_experts.bytes == pytest.approx(8_000_000)
    assert one_token.flops == 4_000_000


def test_only_measured_devices_have_a_ceiling() -> None:
    assert tuning_for("NVIDIA H200", 90).ceiling is not None and tuning_for("NVIDIA H200 NVL", 90).ceiling is not None
    assert tuning_for("NVIDIA H100 80GB HBM3", 90).ceiling is None and tuning_for("Some GPU", 70).ceiling is None


def test_a_plan_has_a_size() -> None:
    plan = StepPlan()
    plan.sequences = [None, None]  # type: ignore[list-item]
    plan.starts, plan.num_new, plan.num_tokens = [9, 2], [1, 3], 4
    assert size_of(plan) == StepSize(tokens=4, rows=2, keys=15, pairs=10 + 3 + 4 + 5)


def test_the_products_of_a_step_are_the_linears_of_the_model(tiny_engine: Path) -> None:
    """Compared with the declared weights."""
    engine = Engine.open(tiny_engine)
    loaded = load_rank(engine, RuntimeConfig(), torch.device("cpu"), ALONE_WORLD)
    with torch.inference_mode():
        products = products_of(loaded.runner(4))
    specs = [spec for spec in declare(engine.config.model).values() if isinstance(spec, LinearSpec)]
    layers = [spec for spec in specs if spec.name.startswith("layers.")]
    head = engine.config.model.vocab_size, engine.config.model.hidden_size
    expected = [f"linear {sum(spec.parts)} × {spec.in_features}" for spec in layers] + [f"linear {head[0]} × {head[1]}"]
    assert [product.label for product in products] == expected
    assert [product.of_rows for product in products] == [False] * len(layers) + [True]
    assert products[0].weight_bytes == 4 * products[0].params  # float32


def test_ops_are_observed_within_the_context_only() -> None:
    x, weight, calls = torch.ones(2, 4), torch.ones(3, 4), []
    with ops.observe_ops(lambda name, args, result: calls.append((name, args[0] is x, result.shape))):
        ops.linear(x, weight)
        with pytest.raises(ZeroDivisionError), ops.observe_ops(lambda *_: 1 // 0):
            ops.linear(x, weight)
        ops.linear(x=x, weight=weight)
    ops.linear(x, weight)
    assert calls == [("linear", True, (2, 3))] * 2


def test_attention_reads_every_key_and_value_once(tiny_engine: Path) -> None:
    model = Engine.open(tiny_engine).config.model
    work = attention_work(model, range(model.num_layers), 1, 2, StepSize(1, 1, keys=100, pairs=100))
    attention = model.layers[0].attention
    assert work.bytes == model.num_layers * 100 * 2 * attention.num_kv_heads * attention.head_size * 2
    assert work.flops == model.num_layers * 100 * 4 * attention.num_heads * attention.head_size


def test_a_cpu_has_no_breakdown(tiny_engine: Path) -> None:
    executor = load_executor(tiny_engine, RuntimeConfig(kv_cache_tokens=256), SynchronousMailbox)
    with pytest.raises(ConfigError, match="GPU"):
        break_down(executor, 4)


def test_steps_are_timed(tiny_engine: Path) -> None:
    executor = load_executor(tiny_engine, RuntimeConfig(kv_cache_tokens=512), SynchronousMailbox)
    result = run_batch(executor, random_requests(3, 20, 6, executor.info.vocab_size), 6)
    times = list(executor.step_history.steps())
    assert len(times) == executor.stats.num_steps
    assert [step.is_decode for step in times] == [False, *[True] * 5] and times[0].tokens == 60
    assert sum(step.duration_s for step in times) == pytest.approx(executor.snapshot().busy_time_s)
    assert 0 < executor.snapshot().busy_time_s <= result.total_s
    assert not executor.is_busy


def test_a_benchmark_cancels_its_requests(tiny_engine: Path) -> None:
    bench = ExecutorBenchmark(tiny_engine, RuntimeConfig(kv_cache_tokens=1024))
    bench.submit(4, 20, 40)
    for _ in range(5):
        bench.executor.turn(0.0)
    assert bench.executor.is_busy
    bench.cancel_submitted()
    pool = bench.executor.scheduler.kv_cache.pool
    assert not bench.executor.is_busy and pool.num_free == pool.num_blocks
    assert bench.run(2, 8, 4).num_requests == 2


def test_the_number_of_prefill_steps_depends_on_the_tokens(tiny_engine: Path) -> None:
    executor = load_executor(tiny_engine, RuntimeConfig(kv_cache_tokens=256), SynchronousMailbox)
    assert min_prefill_steps(executor, 1) == 1
    assert min_prefill_steps(executor, 128 - 8) == 1 and min_prefill_steps(executor, 128 - 7) == 2  # 128 tokens a step, 8 of them decodes
