"""Every GGUF architecture: the logits of an engine from a GGUF file, and those of the model that the tensors come from."""

from __future__ import annotations

import contextlib
import fnmatch
from pathlib import Path

import gguf
import pytest
import torch
from cases import GEMMA3N, GROUPED, QWEN3_5, QWEN3_NEXT, native
from gguf_cases import GGUF_CASES
from gguf_writer import write_gguf
from harness import Harness, prefill_logits

from stoker.base.config import Limits
from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.checkpoint.checkpoint import Checkpoint, open_checkpoint
from stoker.builder.checkpoint.gguf.config import read_config
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.builder.checkpoint.gguf.registry import ARCHITECTURES
from stoker.builder.checkpoint.gguf.weights import GGUFWeights
from stoker.builder.config import BuildConfig
from stoker.builder.conversion.tensor_plan import plan_tensors
from stoker.builder.prepare import read_model
from stoker.core.specs import LinearSpec
from stoker.layers.decoder import declare
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.int8_grouped import GroupedInt8

TOLERANCE = 1e-4
LIMITS = Limits(max_input_len=128, max_output_len=128, max_num_tokens=512, max_batch_size=8, tokens_per_block=16)


def test_every_architecture_is_proven() -> None:
    assert set(ARCHITECTURES) == {case.arch for case in GGUF_CASES.values()}


@pytest.mark.parametrize("name", GGUF_CASES, ids=lambda name: name.replace(" ", "_"))
def test_logits_equal_those_of_the_model(name: str, tmp_path: Path, tokenizer: Path) -> None:
    case = GGUF_CASES[name]
    reference = case.reference()
    reference.save(tmp_path / "hf")
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", case.arch, case.change, case.describe)
    settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS)
    build(source, tmp_path / "engine", settings, verify="none")
    check_metadata(GGUFWeights(source), source)
    check_tensors(open_checkpoint(source))
    prompt = torch.randint(3, 90, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    found, expected = prefill_logits(Harness(tmp_path / "engine", 256), prompt), reference.logits(prompt, len(prompt))
    assert expected.abs().max() > 0.3
    assert float((found.double() - expected.double()).abs().max()) <= TOLERANCE
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["nemotron_h", "granitehybrid", "llama4"])
def test_the_build_compares_greedy_tokens_with_transformers(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """Convolutions and experts are converted back to the layout of transformers."""
    case = GGUF_CASES[name]
    case.reference().save(tmp_path / "hf")
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", case.arch, case.change, case.describe)
    engine = build(source, tmp_path / "engine", BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS))
    greedy = engine.config.checks["greedy"]
    assert greedy["equal"] == greedy["tokens"] == 32, greedy


def test_the_quantized_table_of_layer_inputs_keeps_its_values(tmp_path: Path, tokenizer: Path) -> None:
    """Rows of 4-bit weights cannot be looked up, so the table of Gemma 3n is stored as int8 in the same groups."""
    wide = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "hidden_size_per_layer_input": 32, "intermediate_size": [96] * 6}
    native("Gemma3nText", **GEMMA3N | wide).save(tmp_path / "hf")
    case = GGUF_CASES["gemma3n"]
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", case.arch, case.change, case.describe, gguf.GGMLQuantizationType.Q4_0)
    engine = build(source, tmp_path / "engine", BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS))
    formats = {name: type(found).__name__ for name, found in engine.config.recipe.overrides.items()}
    assert formats["layer_inputs.embed"] == "GroupedInt8" and type(engine.config.recipe.default).__name__ == "Int4"
    greedy = engine.config.checks["greedy"]
    assert greedy["equal"] == greedy["tokens"] == 32, "those of transformers with the dequantized weights"


def test_mxfp4_of_gpt_oss_keeps_its_bits(tmp_path: Path, tokenizer: Path) -> None:
    """Experts too. The table of embeddings is int8 in groups. The oracle is the gguf library, which dequantizes for the other engine."""
    sizes = GROUPED | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    native("GptOss", **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=9).save(tmp_path / "hf")
    case = GGUF_CASES["gpt-oss"]
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", case.arch, case.change, case.describe, gguf.GGMLQuantizationType.MXFP4)
    logits = []
    for quantization in ("NO_QUANT", None):
        settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS, quantization=quantization)
        engine = build(source, tmp_path / str(quantization), settings, verify="none")
        logits.append(prefill_logits(Harness(engine.path, 256), list(range(3, 36))))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    linears = {
        spec.name: engine.config.recipe.format_for(spec) for spec in declare(engine.config.model).values() if isinstance(spec, LinearSpec)
    }
    assert linears["layers.0.mlp.experts.up"] == linears["layers.1.mlp.experts.down"] == linears["layers.0.attention.qkv"] == Fp4()
    assert isinstance(linears["embed"], GroupedInt8)


_WIDE = {
    "hidden_size": 64, "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [("qwen35", "Q4_0", {}), ("qwen35", "Q8_0", {"linear_value_head_dim": 16}), ("qwen3next", "Q8_0", {"moe_intermediate_size": 32})],
)
def test_rows_and_columns_of_quantized_weights_are_moved(
    name: str, kind: str, sizes: dict[str, int], tmp_path: Path, tokenizer: Path
) -> None:
    """Linears keep their stored bits unless a head has fewer columns than a block. Dequantized ones give the same logits."""
    case = GGUF_CASES[name]
    made = native("Qwen3_5Text", **QWEN3_5 | _WIDE | sizes) if name == "qwen35" else native("Qwen3Next", **QWEN3_NEXT | _WIDE | sizes)
    made.save(tmp_path / "hf")
    block = gguf.GGMLQuantizationType[kind]
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", case.arch, case.change, case.describe, block)
    prompt = torch.randint(3, 90, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for quantization in ("NO_QUANT", None):
        settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS, quantization=quantization)
        engine = build(source, tmp_path / str(quantization), settings, verify="none")
        logits.append(prefill_logits(Harness(engine.path, 256), prompt))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    mixers = [spec for spec in declare(engine.config.model).values() if isinstance(spec, LinearSpec) and not spec.name.startswith("embed")]
    dense = {spec.name.partition(".")[2].partition(".")[2] for spec in mixers if engine.config.recipe.format_for(spec) == Dense()}
    torn = {"state.out"} if sizes.get("linear_value_head_dim") == 16 else set()
    assert dense & {"attention.qkv", "attention.gate", "attention.out", "state.in", "state.out"} == torn


def check_metadata(weights: GGUFWeights, path: Path) -> None:
    """Any value of a key is read, or refused with a CheckpointError. A key that the architecture does not have is refused by name."""
    file, row = weights.file, weights.row

    def read() -> None:
        config = read_config(file, row, Metadata(file, row.name, weights.read))
        read_model(Checkpoint(path, path.name, config, weights, gguf=weights))

    file.metadata[f"{row.name}.attention.unknown_setting"] = 1
    with pytest.raises(CheckpointError, match=rf"{row.name}\.attention\.unknown_setting is not supported"):
        read()
    del file.metadata[f"{row.name}.attention.unknown_setting"]
    read()
    for key in [key for key in file.metadata if key.startswith(row.name)]:
        value = file.metadata.pop(key)
        for other in (None, "x", [1], 0, -1, True, 1 << 40, float("nan")):
            if other is not None:
                file.metadata[key] = other
            with contextlib.suppress(CheckpointError):
                read()
        file.metadata[key] = value
    read()


def check_tensors(checkpoint: Checkpoint) -> None:
    """A tensor that is missing, and one that the architecture does not have, are refused by name."""
    architecture, model = read_model(checkpoint)
    tensors: dict = checkpoint.weights.tensors
    plan_tensors(architecture, model, checkpoint.weights)
    assert checkpoint.gguf is not None
    for table in (tensors, checkpoint.gguf._tensors):
        table["blk.0.attn_extra.weight"] = table["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_extra\.weight would not be used"):
        plan_tensors(architecture, model, checkpoint.weights)
    for table in (tensors, checkpoint.gguf._tensors):
        del table["blk.0.attn_extra.weight"]
    optional = ("blk.1.*", "blk.2.*", "output.*", "rope_*", *checkpoint.gguf.row.ignored_tensors)
    for name in [name for name in tensors if not any(fnmatch.fnmatchcase(name, pattern) for pattern in optional)]:
        info = tensors.pop(name)
        with pytest.raises(CheckpointError, match=r"tensor (blk\.\d\.|token_embd|position_embd|output_norm|per_layer|altup).* is missing"):
            plan_tensors(architecture, model, checkpoint.weights)
        tensors[name] = info
