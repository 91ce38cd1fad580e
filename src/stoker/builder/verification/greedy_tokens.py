"""Compares greedy tokens of an engine with those of transformers on the same checkpoint, both in float32 on the CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import EngineError, first_line
from stoker.builder.checkpoint.checkpoint import Checkpoint
from stoker.builder.verification.reference_model import load_reference_model
from stoker.core.forward_batch import ForwardBatch, KVCache, LayerState
from stoker.distributed.group import SINGLE
from stoker.engine.config import EngineConfig
from stoker.engine.config_file import rank_file_name
from stoker.engine.reader import Engine
from stoker.engine.tensor_source import FileTensorSource
from stoker.layers.decoder import Decoder, kv_shapes
from stoker.layers.loader import Loader
from stoker.layers.state_cache import StateCache
from stoker.quant.format import TensorSource

CPU = torch.device("cpu")
NUM_TOKENS = 16  # generated for each prompt
PROMPT_TOKENS = 12
REFERENCE_STEPS = 8  # of progress: loading the reference model, and one of its prompts, count as much as this number of tokens
MAX_FLOAT32_BYTES = 8 << 30  # size of a model that is compared by default; larger ones take minutes on a CPU
TOLERANCE = 0.02  # standard deviations of the logits; float32 rounding errors of SmolLM2 are below 0.0005


class GreedyComparison(msgspec.Struct, frozen=True):
    """The result of comparing the engine's greedy tokens with the checkpoint's."""

    tokens: int = 0  # number of compared tokens
    equal: int = 0
    max_error: float = 0.0  # largest error of a logit, in standard deviations of its row
    skipped: str = ""  # the reason when nothing was compared


def compare_greedy_tokens(
    path: Path, checkpoint: Checkpoint, *, even_if_slow: bool, trust_remote_code: bool, progress: Callable[[int, int], None]
) -> GreedyComparison:
    """Compare greedy tokens of the engine in `path` with those of its checkpoint.

    The weights of the reference are rounded to the engine's dtype, so all tokens of an engine without quantization must agree, except for
    ties. Raises EngineError when they do not. Large models are compared only if `even_if_slow`.
    """
    engine = Engine.open(path)
    if reason := _reason_to_skip(engine.config, checkpoint, even_if_slow):
        return GreedyComparison(skipped=reason)
    prompts = _make_prompts(engine.config, path)
    done, total = 0, len(prompts) * (NUM_TOKENS + REFERENCE_STEPS) + REFERENCE_STEPS

    def advance(steps: int = 1) -> None:
        """Report `steps` more steps."""
        nonlocal done
        done += steps
        progress(done, total)

    advance(0)
    with torch.inference_mode():
        generated = [_generate(engine, prompt, advance) for prompt in prompts]
        gc.collect()
        try:
            reference = load_reference_model(checkpoint, engine.config.dtype, trust_remote_code)
        except Exception as problem:  # transformers raises arbitrary exceptions for checkpoints that it does not support
            return GreedyComparison(skipped=f"transformers cannot load the checkpoint ({first_line(problem)})")
        advance(REFERENCE_STEPS)
        expected = []
        for prompt, (tokens, _) in zip(prompts, generated, strict=True):
            expected.append(reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :])
            advance(REFERENCE_STEPS)
    result = _compare(generated, expected)
    if engine.config.recipe.name == "NO_QUANT" and (result.equal < result.tokens or result.max_error > TOLERANCE):
        raise EngineError(
            f"the engine disagrees with the checkpoint: {result.equal} of {result.tokens} greedy tokens are equal, and logits differ by up "
            f"to {result.max_error:.3g} standard deviations.",
            cure="Report this with the checkpoint's name; --verify files builds without the comparison.",
        )
    return result


def _reason_to_skip(config: EngineConfig, checkpoint: Checkpoint, even_if_slow: bool) -> str:
    """The reason why nothing is compared; empty if a comparison is possible."""
    if config.weights == "dummy":
        return "the weights are random"
    if config.mapping.world_size > 1:
        return f"the engine is for {config.mapping.world_size} ranks, and the comparison runs in one process"
    num_values = sum(info.num_bytes // info.dtype.itemsize for info in checkpoint.weights.tensors.values())
    # The engine and the reference are in memory one after the other. The reference is largest while it converts 16-bit weights to float32.
    needed, available = num_values * 6, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        return f"it needs {needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are available"
    if num_values * 4 > MAX_FLOAT32_BYTES and not even_if_slow:
        return f"{num_values / 1e9:.1f} G parameters take long on a CPU; --verify full compares them"
    return ""


def _make_prompts(config: EngineConfig, path: Path) -> list[list[int]]:
    """The prompts: random ids from the whole vocabulary, and a sentence if the engine has a tokenizer."""
    generator = torch.Generator().manual_seed(0)
    length = max(1, min(PROMPT_TOKENS, config.limits.max_seq_len - NUM_TOKENS))
    prompts = [torch.randint(0, config.model.vocab_size, (length,), generator=generator).tolist()]
    if (path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode("The capital of Japan is the city of").ids[:length]
        prompts += [ids] if ids else []
    return prompts


def _generate(engine: Engine, prompt: list[int], advance: Callable[[], None]) -> tuple[list[int], Tensor]:
    """(NUM_TOKENS greedy tokens, their logits as float32 [tokens, vocab]) of the engine for one prompt."""
    model, length = engine.config.model, len(prompt) + NUM_TOKENS
    source = Float32Source(FileTensorSource(engine.path / rank_file_name(0), CPU))
    loader = Loader(source, engine.config.recipe, torch.float32, CPU, SINGLE)
    decoder = Decoder(model, loader, max(length, engine.config.limits.max_seq_len))
    states = StateCache(model, range(model.num_layers), 1, 1, decoder.dtype, decoder.device).layers
    caches: list[KVCache] = []
    for i in range(model.num_layers):
        shared = model.kv_layer(i)
        caches.append(caches[shared] if shared != i else _make_cache(*kv_shapes(model, i), length, states[i]))
    tokens: list[int] = []
    rows, new, start = [], prompt, 0
    while len(tokens) < NUM_TOKENS:
        logits = decoder(_single_row_batch(new, start), caches)[0]
        start += len(new)
        new = [int(logits.argmax())]
        tokens += new
        rows.append(logits.float())
        advance()
    return tokens, torch.stack(rows)


def _make_cache(heads: int, key_size: int, value_size: int, length: int, state: LayerState | None) -> KVCache:
    """A KV cache of one block of `length` tokens, and the layer's recurrent state."""
    values = torch.zeros(1, heads, length, value_size) if value_size else None
    return KVCache(torch.zeros(1, heads, length, key_size), values, state=state)


def _single_row_batch(tokens: list[int], start: int) -> ForwardBatch:
    """The batch with the tokens at positions `start` and up of one sequence, whose only KV cache block is block 0."""
    count, stop = len(tokens), start + len(tokens)

    def int32(values: Iterable[int] | list[list[int]]) -> Tensor:
        """An int32 tensor of these values."""
        return torch.tensor(list(values), dtype=torch.int32)

    positions = int32(range(start, stop))
    return ForwardBatch(
        token_ids=int32(tokens),
        positions=positions,
        slots=positions,
        query_starts=int32([0, count]),
        state_slots=torch.zeros(1, dtype=torch.int32),
        seq_lens=int32([stop]),
        block_tables=int32([[0]]),
        num_decodes=int(count == 1),
        max_query_len=count,
        max_seq_len=stop,
    )


class Float32Source(TensorSource):
    """The tensors of a file, where floating-point tensors are converted to float32 on request."""

    def __init__(self, source: FileTensorSource) -> None:
        self.source = source

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor called `name` in `dtype`."""
        entry = self.source.entries.get(name)
        is_converted = entry is not None and entry.dtype.is_floating_point and dtype == torch.float32
        return self.source.get(name, shape, entry.dtype if entry is not None and is_converted else dtype).to(dtype)


def _compare(generated: list[tuple[list[int], Tensor]], expected: list[Tensor]) -> GreedyComparison:
    """Compare generated tokens and logits with the logits `expected` of the reference, both per prompt."""
    num_tokens = num_equal = 0
    error = 0.0
    for (tokens, logits), reference in zip(generated, expected, strict=True):
        reference = reference.float()
        deviation = reference.std(dim=-1)
        error = max(error, float(((logits - reference).abs().amax(dim=-1) / deviation).max()))
        # A token counts as equal when no other token's logit is higher by more than the tolerance, because ties may fall either way.
        gap = reference.amax(dim=-1) - reference[torch.arange(len(tokens)), torch.tensor(tokens)]
        num_equal += int((gap <= TOLERANCE * deviation).sum())
        num_tokens += len(tokens)
    return GreedyComparison(num_tokens, num_equal, error)
