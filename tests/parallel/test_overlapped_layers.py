"""Long steps on several ranks in two halves, whose sums overlap with products, have the values of the step as a whole."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import GROUPED
from oracles import hf_model
from rank_executors import generate, load
from torch import Tensor

from stoker.base.config import Limits, Mapping
from stoker.base.errors import RankError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.core.forward_batch import ForwardBatch, KVCache, VerifiedRows
from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from stoker.core.specs import LinearSpec
from stoker.distributed.collectives import ProcessGroup
from stoker.distributed.group import Finish, Group
from stoker.distributed.inbox import Inboxes
from stoker.distributed.world import join
from stoker.layers import overlapped_layers
from stoker.layers.decoder import Decoder, declare
from stoker.layers.loader import Loader
from stoker.layers.low_rank import Adapters, LowRankDelta
from stoker.layers.overlapped_layers import OverlappedLayers
from stoker.layers.shard import Sharding
from stoker.quant.format import TensorSource
from stoker.quant.recipe import Recipe

CPU = torch.device("cpu")
NORM = NormConfig()
ATTENTION, DENSE = AttentionConfig(num_heads=4, num_kv_heads=4, head_size=16), MLPConfig(size=96)
MODEL = ModelConfig(
    architecture="Stub", vocab_size=64, hidden_size=64, max_positions=512, norm=NORM,
    layers=(LayerConfig(attention=ATTENTION, mlp=DENSE, norm=NORM),) * 3,
)  # fmt: skip
BLOCK, BLOCKS = 16, 64
MIN_TOKENS = 200
# Tokens of each row: even and odd numbers, decodes beside prompts, and one below the smallest number of tokens.
STEPS = {
    "even": [256],
    "odd": [255, 2],
    "prompts and decodes": [1, 1, 1, 101, 150, 44],
    "smallest": [MIN_TOKENS],
    "short": [MIN_TOKENS - 1],
}


class RandomTensors(TensorSource):
    """Random weights by name. Those of linears in the layers differ between ranks, as shards do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(
            zlib.crc32(name.encode()) + (self.rank if name.startswith("layers.") and "norm" not in name else 0)
        )
        return (torch.randn(shape, generator=generator) / 4).to(dtype)


def batch_of(lengths: list[int], adapters: bool = False) -> ForwardBatch:
    """A step of rows of these lengths, without earlier tokens. Each token has one of three adapters, or none."""
    generator = torch.Generator().manual_seed(7)
    ints: Callable[[Any], Tensor] = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    blocks = iter(range(BLOCKS))
    rows = [[next(blocks) for _ in range(-(-length // BLOCK))] for length in lengths]
    slots = [row[t // BLOCK] * BLOCK + t % BLOCK for row, length in zip(rows, lengths, strict=True) for t in range(length)]
    total, longest = sum(lengths), max(map(len, rows))
    return ForwardBatch(
        torch.randint(0, 64, (total,), generator=generator).int(),
        ints([t for length in lengths for t in range(length)]),
        ints(slots),
        ints([sum(lengths[:i]) for i in range(len(lengths) + 1)]),
        ints(lengths),
        ints([row + [0] * (longest - len(row)) for row in rows]),
        lengths.count(1),
        max(lengths),
        max(lengths),
        adapter_ids=torch.randint(-1, 3, (total,), generator=generator).int() if adapters else None,
    )


class CountingGroup(ProcessGroup):
    """Counts sums that begin, and checks the order that `Group.begin_sum` requires."""

    num_begun = num_pending = 0

    def begin_sum(self, x: Tensor) -> Finish:
        self.num_begun += 1
        self.num_pending += 1
        number = self.num_begun
        assert self.num_pending <= 2
        finish = super().begin_sum(x)

        def counted() -> tuple[Tensor, ...]:
            assert number == self.num_begun - self.num_pending + 1, "sums finish in another order than they began"
            self.num_pending -= 1
            return finish()

        return counted


def decoder_of(group: Group, adapted: bool) -> Decoder:
    generator, adapters = torch.Generator().manual_seed(5), None
    if adapted:
        specs = [spec for spec in declare(MODEL).values() if isinstance(spec, LinearSpec) and spec.name.startswith("layers.")]
        draw: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=generator) / 8  # noqa: E731
        adapters = Adapters({s.name: LowRankDelta(draw(3, 2, s.in_features), draw(3, s.out_features, 2), torch.ones(3)) for s in specs})
    sharding = Sharding(size=group.size)
    return Decoder(MODEL, Loader(RandomTensors(group.rank), Recipe(), torch.float32, CPU, group, sharding, adapters=adapters), 512)


def on_ranks(num_ranks: int, run: Callable[[CountingGroup], Any]) -> list[Any]:
    """The results of `run` in one thread for each rank, with gloo groups."""
    store = dist.HashStore()

    def rank_main(rank: int) -> Any:
        world = join(store, rank, Mapping(tensor_parallel=num_ranks), CPU)
        assert isinstance(world.tensor, ProcessGroup)
        try:
            with torch.inference_mode():
                found = run(CountingGroup(world.tensor.inner, CPU))
            world.everyone.smallest(0)
            return found
        finally:
            world.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank_main, range(num_ranks)))


def result_of(decoder: Decoder, batch: ForwardBatch) -> tuple[Tensor, list[Tensor], list[KVCache], int]:
    """(logits, the residual stream before each layer and after the last, caches, the number of layers reported as complete)."""
    states: list[Tensor] = []
    ended: list[None] = []
    decoder.observe_layers = lambda number, x: states.append(x.clone())
    decoder.after_layer = lambda: ended.append(None)
    shape = BLOCKS, 4 // decoder.layers[0].attention.group.size, BLOCK, 16
    caches = [KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in MODEL.layers]
    return decoder(batch, caches), states, caches, len(ended)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("num_ranks", "adapted"), [(2, False), (2, True), (4, False)])
def test_halves_of_a_step_have_the_values_of_the_whole(name: str, num_ranks: int, adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, the residual stream of every layer, keys and values; on all ranks the same bits of the residual stream."""
    monkeypatch.setattr(overlapped_layers, "MIN_TOKENS", MIN_TOKENS)
    batch = batch_of(STEPS[name], adapted)

    def run(group: CountingGroup) -> tuple[Any, Any, int]:
        decoder = decoder_of(group, adapted)
        halves = result_of(decoder, batch)
        begun = group.num_begun
        decoder.overlapped_layers = None
        return halves, result_of(decoder, batch), begun

    results = on_ranks(num_ranks, run)
    for (logits, states, caches, ended), (expected, expected_states, expected_caches, _), begun in results:
        assert begun == (0 if name == "short" else 4 * len(MODEL.layers))
        assert ended == len(MODEL.layers) and len(states) == len(expected_states) == len(MODEL.layers) + 1
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for found, wanted in zip(states, expected_states, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for cache, other in zip(caches, expected_caches, strict=True):
            torch.testing.assert_close(cache.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(cache.values, other.values, rtol=1e-4, atol=1e-4)
        assert expected.std() > 0.1
    first = results[0][0][1]
    for (_, states, _, _), _, _ in results[1:]:
        assert all(torch.equal(state, other) for state, other in zip(states, first, strict=True)), (
            "the residual stream differs between ranks"
        )


def test_the_choice_depends_on_the_step_the_message_and_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_layers, "MIN_TOKENS", MIN_TOKENS)
    single, group = Group(), Group()
    assert decoder_of(single, False).overlapped_layers is None
    group.size = 2
    layers = decoder_of(group, False).overlapped_layers
    assert layers is not None and OverlappedLayers.for_layers([], None, 64, CPU) is None
    on_gpus = [OverlappedLayers(layers.layers, None, width, torch.device("meta")).min_tokens for width in (8192, 4096, 16384)]
    assert on_gpus == [4096, 16384, 1024]  # smaller models need longer steps
    row_bytes = 256
    assert layers.supports(batch_of([255]), row_bytes) and layers.supports(batch_of([1] * 10 + [200]), row_bytes)
    assert not layers.supports(batch_of([MIN_TOKENS - 1]), row_bytes)
    verified = batch_of([255])
    verified.verified = VerifiedRows(1, 255, 255)
    assert not layers.supports(verified, row_bytes)
    decodes = batch_of([255])
    decodes.num_decodes = 1
    assert not layers.supports(decodes, row_bytes)
    # The first half of 255 tokens has 128 rows: 32 KiB, which fit into an inbox of this size, and not into a smaller one.
    group.inboxes = Inboxes([0, 0], 0, CPU, max_bytes=32 << 10)
    assert not layers.supports(batch_of([255]), row_bytes)
    group.inboxes = Inboxes([0, 0], 0, CPU, max_bytes=30 << 10)
    assert layers.supports(batch_of([255]), row_bytes)


def test_a_sum_ends_with_an_error_when_a_rank_has_failed() -> None:
    """The check that a CPU calls while it waits ends the wait for a rank that never begins the sum."""
    store, ended = dist.HashStore(), threading.Event()

    def check() -> None:
        raise RankError("rank 1 has ended")

    def rank_main(rank: int) -> None:
        world = join(store, rank, Mapping(tensor_parallel=2), CPU)
        try:
            if rank == 1:
                assert ended.wait(60)
                return
            assert isinstance(world.tensor, ProcessGroup)
            finish = ProcessGroup(world.tensor.inner, CPU, check).begin_sum(torch.ones(1 << 18))
            with pytest.raises(RankError, match="rank 1 has ended"):
                finish()
        finally:
            ended.set()
            world.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank_main, range(2)))


def test_memory_for_sums_is_reserved_for_the_larger_half(monkeypatch: pytest.MonkeyPatch) -> None:
    group, reserved = Group(), []
    group.size = 2
    monkeypatch.setattr(Group, "reserve", lambda self, num_bytes: reserved.append(num_bytes))
    decoder = decoder_of(group, False)
    decoder.reserve_sums(overlapped_layers.MIN_TOKENS - 1)
    assert not reserved
    for tokens in (4096, 4097, 8191, 8192, 9999):
        decoder.reserve_sums(tokens)
        halves = [overlapped_layers._half(count) for count in range(overlapped_layers.MIN_TOKENS, tokens + 1)]
        largest = max(max(half, count - half) for count, half in enumerate(halves, overlapped_layers.MIN_TOKENS))
        assert largest * 256 <= reserved[-1] <= (largest + 2 * overlapped_layers.ROW_TILE) * 256


@pytest.mark.parametrize(
    ("quantization", "mapping", "agreement"),
    [("NO_QUANT", Mapping(tensor_parallel=2), 1.0), ("NO_QUANT", Mapping(tensor_parallel=2, pipeline_parallel=2), 1.0),
     ("FP8_KV", Mapping(tensor_parallel=2), 0.95), ("WEIGHTS_ONLY_INT4", Mapping(tensor_parallel=2), 0.95)],
)  # fmt: skip
def test_executors_generate_the_tokens_of_shorter_steps(
    quantization: str, mapping: Mapping, agreement: float, tmp_path: Path, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in processes: the prompts in one step, which is computed in halves, and in several steps, which are not."""
    lengths: list[int] = []
    compute = OverlappedLayers.__call__

    def recorded(self: OverlappedLayers, x: Tensor, *args: Any) -> Tensor:
        lengths.append(x.shape[0])
        return compute(self, x, *args)

    monkeypatch.setattr(OverlappedLayers, "__call__", recorded)
    model = GROUPED | {"hidden_size": 96, "head_dim": 16, "intermediate_size": 160, "num_hidden_layers": 2}
    hf_model("Llama", **model).save_pretrained(tmp_path / "hf")
    draw = random.Random(9)
    prompts = [[draw.randrange(3, 90) for _ in range(draw.randrange(150, 240))] for _ in range(28 * mapping.pipeline_parallel)]
    limits = Limits(max_batch_size=64, max_input_len=240, max_output_len=8, max_num_tokens=8192)
    config = BuildConfig(
        tokenizer=str(letters), device="cpu", dtype="float32", limits=limits, mapping=mapping, quantization=quantization,
        calibration_size=4, calibration_seq_len=64, quantization_settings={"group_size": 16} if "INT4" in quantization else {},
    )  # fmt: skip
    build(tmp_path / "hf", tmp_path / "engine", config, verify="none")
    found = []
    for max_num_tokens in (2048, 8192):
        executor = load(tmp_path / "engine", kv_cache_tokens=32768, max_num_tokens=max_num_tokens, prefix_reuse=False)
        try:
            assert not lengths
            found.append(generate(executor, prompts, 3))
        finally:
            executor.close()
    # Two stages divide the prompts among two steps.
    assert lengths and min(lengths) >= overlapped_layers.MIN_TOKENS
    tokens = [pair for one, other in zip(*found, strict=True) for pair in zip(one, other, strict=True)]
    assert sum(one == other for one, other in tokens) >= agreement * len(tokens)
