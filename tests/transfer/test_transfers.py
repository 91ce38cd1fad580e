"""One executor computes prompts for another one: equal tokens, and no block is left on either side."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from pairs import Pair, Side, request, run
from torch import Tensor

from stoker.base.config import Limits
from stoker.base.types import FinishReason
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.core.forward_batch import KVCache
from stoker.runtime.transfer import exports
from stoker.runtime.transfer.pages import RankPages
from stoker.runtime.worker.model_runner import ModelRunner

BYTES_PER_TOKEN = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, features, float32


def prompt(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 300) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "params"),
    [
        (150, {}),  # two chunks
        (150, {"temperature": 0.9, "seed": 7, "n": 2}),
        (49, {"temperature": 1.0, "seed": 3}),
        (9, {}),  # no full block: nothing to transfer
    ],
)
def test_the_answer_is_that_of_one_executor(tiny_engine: Path, pair: type[Pair], count: int, params: dict[str, Any]) -> None:
    both = pair(tiny_engine)
    wanted = request(prompt(count, count), **params)
    found = both.generate(wanted)
    num_blocks = (count - 1) // 16
    assert both.cached == 16 * num_blocks
    stats = both.decode.stats
    assert (stats.num_imports, stats.num_failed_imports) == (bool(num_blocks), 0)
    assert stats.imported_bytes == num_blocks * 16 * BYTES_PER_TOKEN
    assert found == pair(tiny_engine).prefill.generate(wanted)


def build_tiny(folder: Path, **settings: Any) -> Path:
    """The tiny engine, built with other settings from the same checkpoint."""
    import tiny

    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        tiny.save(tiny.model(), checkpoint)
    limits = Limits(max_batch_size=8, max_input_len=180, max_output_len=64, max_num_tokens=128, tokens_per_block=16)
    name = f"engine{len(list(folder.iterdir()))}"
    return build(checkpoint, folder / name, BuildConfig(device="cpu", limits=limits, **settings), verify="files").path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transfers")


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_cached_prefixes_are_neither_computed_nor_transferred(tiny_engine: Path, pair: type[Pair], backend: str) -> None:
    """The decoding executor has two blocks already, and the other one four; both read and write only what is missing."""
    if backend == "nixl":
        pytest.importorskip("nixl")
    both = pair(tiny_engine, transfer_backend=backend)
    tokens = prompt(5, 100)
    both.prefill.generate(request(tokens[:65], 1))
    both.decode.generate(request(tokens[:33], 1))
    wanted = request(tokens)
    found = both.generate(wanted)
    assert both.cached == 96 and both.prefill.stats.num_reused_tokens == 64
    assert both.decode.stats.imported_bytes == 4 * 16 * BYTES_PER_TOKEN
    assert found == pair(tiny_engine).prefill.generate(wanted)
    both.generate(wanted)  # all blocks are here now, and nothing is held for them
    run(both.sides, lambda: not both.prefill.executor.is_busy)
    assert (both.decode.stats.num_imports, both.prefill.stats.num_failed_exports) == (1, 0)


def test_a_sequence_that_is_cancelled_during_its_transfer_leaves_no_block(tiny_engine: Path, pair: type[Pair]) -> None:
    both = pair(tiny_engine)
    _, decoded = both.submit(request(prompt(6, 150)))
    run(both.sides, lambda: both.prefill.stats.num_held_exports == 1 and both.decode.stats.num_running_imports == 1)
    both.decode.cancel(decoded)
    both.decode.turn()
    assert both.decode.reasons[decoded.request_id, 0] is FinishReason.CANCELLED
    run(both.sides, lambda: not any(side.executor.is_busy for side in both.sides))
    assert (both.decode.stats.num_imports, both.decode.stats.num_failed_imports) == (0, 0)


def test_a_prompt_that_is_cancelled_where_it_is_computed_is_computed_by_the_other_executor(tiny_engine: Path, pair: type[Pair]) -> None:
    both = pair(tiny_engine)
    wanted = request(prompt(7, 150))
    computed, decoded = both.submit(wanted)
    both.prefill.cancel(computed)
    run(both.sides, lambda: both.decode.has_answered(decoded))
    assert both.decode.stats.num_failed_imports == 1
    assert both.decode.answer(decoded) == pair(tiny_engine).prefill.generate(wanted)


@pytest.mark.parametrize("address", [("127.0.0.1", 9), None])
def test_a_transfer_without_a_source_fails_and_the_prompt_is_computed(
    tiny_engine: Path, pair: type[Pair], address: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at the address; or the executor there never receives the request."""
    monkeypatch.setattr(exports, "OPEN_WAIT_S", 0.2)
    both = pair(tiny_engine)
    wanted = request(prompt(8, 60))
    _, decoded = both.submit(wanted, address)
    both.prefill.mailbox.messages.clear()
    run(both.sides, lambda: both.decode.has_answered(decoded))
    assert both.decode.stats.num_failed_imports == 1
    assert both.decode.answer(decoded) == pair(tiny_engine).prefill.generate(wanted)


def test_blocks_that_are_never_read_are_released_when_the_lease_expires(tiny_engine: Path, pair: type[Pair]) -> None:
    both = pair(tiny_engine, transfer_timeout_s=0.2)
    both.submit(request(prompt(12, 60)))
    both.decode.mailbox.messages.clear()
    run([both.prefill], lambda: both.prefill.stats.num_held_exports == 1)
    run([both.prefill], lambda: not both.prefill.executor.is_busy)
    assert both.prefill.stats.num_failed_exports == 1


def test_blocks_of_a_failed_transfer_are_zeroed(tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks after one layer was written. NaN in the blocks reaches no other sequence."""
    both = pair(tiny_engine)
    write = RankPages.write

    def failing(self: RankPages, layer: int, heads: list[int], blocks: list[int], *args: Any) -> None:
        write(self, layer, heads, blocks, *args)
        self.caches[layer].keys[blocks] = float("nan")
        raise ValueError("a layer that breaks off")

    monkeypatch.setattr(RankPages, "write", failing)
    wanted = request(prompt(9, 150))
    found = both.generate(wanted)
    assert both.decode.stats.num_failed_imports == 1 and both.cached == 0
    caches = cast(ModelRunner, both.decode.executor.runner).caches
    both.decode.generate(request(prompt(10, 170)))
    assert not any(torch.isnan(cache.keys).any() for cache in caches)
    assert found == pair(tiny_engine).prefill.generate(wanted)


def test_running_sequences_keep_their_blocks(tiny_engine: Path, pair: type[Pair]) -> None:
    """Transfers wait until blocks are free on both sides, or end, and all sequences are answered."""
    both = pair(tiny_engine, kv_cache_tokens=256, transfer_timeout_s=1.0)
    wanted = [request(prompt(20 + i, 120), 30) for i in range(5)]
    decoded = [both.submit(each)[1] for each in wanted]
    run(both.sides, lambda: all(both.decode.has_answered(each) for each in decoded))
    alone = pair(tiny_engine).prefill
    assert [both.decode.answer(each) for each in decoded] == [alone.generate(each) for each in wanted]


def test_engines_of_other_checkpoints_share_nothing(tiny_engine: Path, pair: type[Pair]) -> None:
    both = pair(tiny_engine)
    transfers = both.prefill.executor._transfers
    assert transfers is not None
    transfers.exports._layout = msgspec.structs.replace(transfers.exports._layout, checkpoint="another")
    both.generate(request(prompt(11, 60)))
    assert both.decode.stats.num_failed_imports == 1 and both.cached == 0


@pytest.mark.parametrize(
    ("kv_cache", "other"), [("int8", None), ("float8_e4m3fn", None), (None, "float8_e4m3fn"), ("float8_e4m3fn", "int8")]
)
def test_cache_dtypes_may_differ(engines: Callable[[str | None], Path], pair: type[Pair], kv_cache: str | None, other: str | None) -> None:
    """Blocks are converted: the contents of the cache are close to those that the executor itself computes."""
    both = pair(engines(kv_cache), engines(other))
    wanted = request(prompt(2, 100))
    both.generate(wanted)
    assert (both.cached, both.decode.stats.num_failed_imports) == (96, 0)
    alone = pair(engines(other)).decode
    alone.generate(wanted)
    worst = max(relative_errors(both.decode, alone, wanted.prompt_ids, 6))
    assert 0 < worst < 0.1


def relative_errors(one: Side, other: Side, token_ids: list[int], num_blocks: int) -> list[float]:
    """For each layer and keys and values: the error of the values that attention reads, relative to their mean magnitude."""
    errors = []
    caches = [cast(ModelRunner, side.executor.runner).caches for side in (one, other)]
    blocks = [side.blocks_of(token_ids)[:num_blocks] for side in (one, other)]
    for layers in zip(*caches, strict=True):
        for name in ("keys", "values"):
            found, expected = (stored(cache, name)[index] for cache, index in zip(layers, blocks, strict=True))
            errors.append(float((found - expected).abs().mean() / expected.abs().mean()))
    return errors


def stored(cache: KVCache, name: str) -> Tensor:
    """Keys or values as they are stored, times their scale."""
    scale = getattr(cache, name[:-1] + "_scale")
    pages: Tensor = getattr(cache, name).float()
    return pages if scale is None else pages * scale[:, None, None]


@pytest.fixture(scope="module")
def engines(folder: Path, tiny_engine: Path) -> Callable[[str | None], Path]:
    """The tiny engine by the dtype of its KV cache."""

    @cache
    def find(kv_cache: str | None) -> Path:
        if kv_cache is None:
            return build_tiny(folder)
        return build_tiny(folder, kv_cache_dtype=kv_cache, calibration_size=4, calibration_seq_len=32)

    return find


def test_a_cache_that_several_layers_read_is_transferred_once(pair: type[Pair], tokenizer: Path, tmp_path: Path) -> None:
    """Gemma 3n, whose last layers read the keys and values of earlier ones."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=40, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=320, laurel_rank=4, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3nForCausalLM._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "hf")
    limits = Limits(max_input_len=256, max_output_len=64, max_num_tokens=64, max_batch_size=4, tokens_per_block=16)
    settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits)
    engine = build(tmp_path / "hf", tmp_path / "engine", settings, verify="none").path
    both, wanted = pair(engine), request(prompt(1, 150))
    found = both.generate(wanted)
    assert both.decode.stats.imported_bytes == 9 * 16 * 2 * (2 * 2 * 8 * 4)  # two layers
    assert found == pair(engine).prefill.generate(wanted) and len(set(found[0])) > 3
