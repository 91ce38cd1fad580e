"""After writing: is everything there, and does the engine say what the checkpoint says?"""

from __future__ import annotations

import contextlib
import gc
import io
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import EngineError
from stoker.builder.checkpoint.checkpoint import Checkpoint
from stoker.builder.checkpoint.weights import reason
from stoker.builder.conversion.convert import CPU, Layouts
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.distributed.group import SINGLE
from stoker.engine.config import EngineConfig
from stoker.engine.reader import Engine, rank_file
from stoker.engine.tensor_source import FileSource
from stoker.layers.decoder import Decoder, kv_shapes
from stoker.layers.loader import Loader
from stoker.quant.format import TensorSource

NUM_TOKENS = 16  # generated for each prompt
PROMPT_TOKENS = 12
MAX_FLOAT32_BYTES = 8 << 30  # of a model that is verified without being asked: larger ones take minutes on a CPU
TOLERANCE = 0.02  # of the logits' standard deviation; float32 noise measured on SmolLM2 is under 0.0005 of it


class Greedy(msgspec.Struct, frozen=True):
    """How the engine's greedy tokens compare with the checkpoint's."""

    tokens: int = 0  # compared
    equal: int = 0
    max_error: float = 0.0  # of a logit, in standard deviations of its row
    skipped: str = ""  # why nothing was compared


def verify_files(path: Path, planned: list[Layouts]) -> None:
    """Re-read the files: digests, and every tensor that was planned for each rank, none more. Raises EngineError."""
    engine = Engine.open(path, verify=True)
    for rank, layouts in enumerate(planned if engine.config.weights == "files" else []):
        file = path / rank_file(rank)
        found = {name: (e.shape, e.dtype) for name, e in FileSource(file, CPU).entries.items()}
        if found != layouts:
            wrong = sorted(set(found.items()) ^ set(layouts.items()), key=str)[0]
            raise EngineError(f"{file} does not hold what was planned: {wrong}.", cure="Report this with the checkpoint's name.")


def verify_tokens(path: Path, checkpoint: Checkpoint, *, ask: bool, trust_remote_code: bool) -> Greedy:
    """Greedy tokens of the engine against transformers' on the same checkpoint, both in float32 on the CPU.

    The reference gets the engine's rounding of the weights, so an engine without quantization must agree token for token but for ties;
    raises EngineError when it does not. `ask`: compare even when it takes long.
    """
    engine = Engine.open(path)
    if skipped := _skip_reason(engine.config, checkpoint, ask):
        return Greedy(skipped=skipped)
    prompts = _prompts(engine.config, path)
    with torch.inference_mode():
        ours = [_generate(engine, prompt) for prompt in prompts]
        gc.collect()
        try:
            reference = reference_model(checkpoint, engine.config.dtype, trust_remote_code)
        except Exception as problem:  # transformers raises anything for what it does not know
            return Greedy(skipped=f"transformers cannot load the checkpoint ({reason(problem)})")
        theirs = [
            reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
            for prompt, (tokens, _) in zip(prompts, ours, strict=True)
        ]
    verdict = _compare(ours, theirs)
    if engine.config.recipe.name == "NO_QUANT" and (verdict.equal < verdict.tokens or verdict.max_error > TOLERANCE):
        raise EngineError(
            f"the engine disagrees with the checkpoint: {verdict.equal} of {verdict.tokens} greedy tokens, "
            f"logits off by {verdict.max_error:.3g} standard deviations.",
            cure="Report this with the checkpoint's name; --verify files builds without the comparison.",
        )
    return verdict


def _skip_reason(config: EngineConfig, checkpoint: Checkpoint, ask: bool) -> str:
    if config.weights == "dummy":
        return "the weights are random"
    if config.mapping.world_size > 1:
        return f"the engine is for {config.mapping.world_size} ranks, and one process verifies"
    values = sum(stored.num_bytes // stored.dtype.itemsize for stored in checkpoint.weights.stored.values())
    # The engine's decoder and the reference are in memory one after the other; the reference while it widens 16-bit weights.
    needed, there = values * 6, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        return f"it needs {needed / 2**30:.1f} GiB of memory and {there / 2**30:.1f} are free"
    if values * 4 > MAX_FLOAT32_BYTES and not ask:
        return f"{values / 1e9:.1f} G parameters take long on a CPU; --verify full compares them"
    return ""


def _prompts(config: EngineConfig, path: Path) -> list[list[int]]:
    """Token ids drawn over the whole vocabulary, and a sentence when there is a tokenizer."""
    generator = torch.Generator().manual_seed(0)
    room = max(1, min(PROMPT_TOKENS, config.limits.max_seq_len - NUM_TOKENS))
    prompts = [torch.randint(0, config.model.vocab_size, (room,), generator=generator).tolist()]
    if (path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode("The capital of Japan is the city of").ids[:room]
        prompts += [ids] if ids else []
    return prompts


def _generate(engine: Engine, prompt: list[int]) -> tuple[list[int], Tensor]:
    """(greedy tokens, their logits float32 [tokens, vocab])."""
    model, length = engine.config.model, len(prompt) + NUM_TOKENS
    source = Widened(FileSource(engine.path / rank_file(0), CPU))
    decoder = Decoder(
        model, Loader(source, engine.config.recipe, torch.float32, CPU, SINGLE), max(length, engine.config.limits.max_seq_len)
    )
    caches = [_cache(*kv_shapes(model, i), length) for i in range(model.num_layers)]
    tokens: list[int] = []
    rows, new, start = [], prompt, 0
    while len(tokens) < NUM_TOKENS:
        logits = decoder(_batch(new, start), caches)[0]
        start += len(new)
        new = [int(logits.argmax())]
        tokens += new
        rows.append(logits.float())
    return tokens, torch.stack(rows)


def _cache(heads: int, key_size: int, value_size: int, length: int) -> KVCache:
    values = torch.zeros(1, heads, length, value_size) if value_size else None
    return KVCache(torch.zeros(1, heads, length, key_size), values)


def _batch(tokens: list[int], start: int) -> ForwardBatch:
    """One row whose only block is block 0, as long as the sequence."""
    count, stop = len(tokens), start + len(tokens)

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    places = ints(range(start, stop))
    return ForwardBatch(ints(tokens), places, places, ints([0, count]), ints([stop]), ints([[0]]), int(count == 1), count, stop)


class Widened(TensorSource):
    """Stored tensors as they are, floating-point ones in the dtype that is asked for."""

    def __init__(self, source: FileSource) -> None:
        self.source = source

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        entry = self.source.entries.get(name)
        stored = entry.dtype if entry is not None and entry.dtype.is_floating_point and dtype == torch.float32 else dtype
        return self.source.get(name, shape, stored).to(dtype)


def reference_model(checkpoint: Checkpoint, dtype: str, trust_remote_code: bool) -> torch.nn.Module:
    """transformers' model of the checkpoint, its weights rounded to `dtype`, in float32."""
    rounded = getattr(torch, dtype)
    with contextlib.redirect_stderr(io.StringIO()):  # it draws its own progress bars
        if checkpoint.gguf is not None:
            return _from_tensors(checkpoint, rounded).eval()
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        return AutoModelForCausalLM.from_pretrained(str(checkpoint.path), dtype=rounded, **options).float().eval()


def _from_tensors(checkpoint: Checkpoint, rounded: torch.dtype) -> torch.nn.Module:
    """transformers' own GGUF reader wants the accelerate package; its model takes the tensors that were read here just as well."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: checkpoint.weights.read(name).to(rounded) for name in checkpoint.weights.stored}
    missing = set(model.load_state_dict(weights, strict=False).missing_keys)
    if missing - {"lm_head.weight"}:
        raise ValueError(f"{sorted(missing)} are not in the file")
    return model


def _compare(ours: list[tuple[list[int], Tensor]], theirs: list[Tensor]) -> Greedy:
    tokens = equal = 0
    error = 0.0
    for (chosen, logits), reference in zip(ours, theirs, strict=True):
        reference = reference.float()
        spread = reference.std(dim=-1)
        error = max(error, float(((logits - reference).abs().amax(dim=-1) / spread).max()))
        # A token is right when no other is better by more than the tolerance: ties fall either way.
        behind = reference.amax(dim=-1) - reference[torch.arange(len(chosen)), torch.tensor(chosen)]
        equal += int((behind <= TOLERANCE * spread).sum())
        tokens += len(chosen)
    return Greedy(tokens, equal, error)
