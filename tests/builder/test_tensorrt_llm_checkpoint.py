"""Checkpoints of TensorRT-LLM, sharded here as its converters do, give the logits of the model that they were converted from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorrt_llm_files import E4M3, converted
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.engine.layerwise import LayerwiseModel, split_windows


@pytest.mark.parametrize(
    ("kind", "tp", "pp"),
    [("llama", 1, 1), ("llama", 4, 1), ("qwen2", 2, 3), ("qwen3", 2, 1), ("mixtral", 2, 2), ("qwen2_moe", 2, 1), ("qwen3_moe", 2, 1)],
)
def test_ranks_and_stages_are_merged(kind: str, tp: int, pp: int, tmp_path: Path) -> None:
    source, model = converted(tmp_path / "trt", kind, tp, pp)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu", dtype="float32"), verify="files")
    ids = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(2))
    found = LayerwiseModel(engine.config.model, split_windows(ids.tolist(), 40)).run(engine.loader())
    logits = model(ids[None]).logits[0, :-1].detach()
    assert found.nll == pytest.approx(float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")), rel=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_fp8_weights_are_merged_without_a_change(tp: int, tmp_path: Path) -> None:
    source, _ = converted(tmp_path / "trt", tp=tp, quantization={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []})
    wholes: dict[str, list[Tensor]] = {}
    for rank in range(tp):
        path = source / f"rank{rank}.safetensors"
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(("qkv.weight", "dense.weight", "fc.weight", "gate.weight", "proj.weight"))]:
            stem = name.removesuffix("weight")
            tensors[name] = (tensors[name] / 0.01).to(E4M3)
            tensors |= {f"{stem}weights_scaling_factor": torch.tensor([0.01]), f"{stem}activation_scaling_factor": torch.tensor([0.02])}
            wholes.setdefault(name, []).append(tensors[name].float())
        for i in range(3):
            cache = f"transformer.layers.{i}.attention."
            tensors |= {f"{cache}{kind}_cache_scaling_factor": torch.tensor([0.25]) for kind in ("k", "v", "kv")}
        save_file(tensors, path)
    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    assert engine.config.recipe.kv_cache == "float8_e4m3fn"
    stored = load_file(engine.path / "rank0.safetensors")
    dense = torch.cat(wholes["transformer.layers.1.attention.dense.weight"], 1)
    assert torch.equal(stored["layers.1.attention.out.weight"].float(), dense)
    assert torch.equal(stored["layers.1.mlp.down.scale"], torch.full((64,), 0.01))
    assert stored["layers.1.attention.value_scale"].tolist() == [0.25, 0.25]


def test_numbers_that_differ_between_ranks_are_rejected(tmp_path: Path) -> None:
    source, _ = converted(tmp_path / "trt", tp=2)
    path = source / "rank1.safetensors"
    tensors = load_file(path)
    tensors["transformer.layers.1.input_layernorm.weight"] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.input_layernorm\.weight differs between ranks.*tp_size=1"):
        build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "BertModel"}, "checkpoints of 'BertModel' are not supported. Supported: LlamaForCausalLM"),
        ({"architecture": "DbrxForCausalLM"}, "'DbrxForCausalLM' are not supported: Stoker has no architecture of DBRX. Supported: Llama"),
        ({"architecture": "MambaForCausalLM", "mamba_version": "Mamba3"}, "mamba_version='Mamba3' is not supported, only 'Mamba1'"),
        ({"residual_mlp": True}, "residual_mlp='True' is not supported, only False"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ({"new_key": 3}, "new_key='3' is not known"),
        ({"mapping": {"tp_size": 2}}, r"rank1\.safetensors is missing: config.json describes 2 ranks"),
        ({"mapping": {"tp_size": 10**9}}, "mapping.tp_size='1000000000' is not from 1 to 1024"),
        ({"mapping": {"cp_size": 2}}, "mapping.cp_size='2' is not supported, only 1"),
        ({"mapping": []}, "mapping is not an object"),
        ({"quantization": "FP8"}, "quantization is not an object"),
        ({"rotary_scaling": 8}, "rotary_scaling='8' is not an object"),
        ({"num_attention_heads": 7}, "num_kv_heads=2 is refused: it must divide the 7 heads"),
            ({"num_attention_heads": 10}, "attention.qkv.weight has 96 rows, which are not 10 heads"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\.\S+ is missing"),
        ({"moe": 5}, "moe='5' is not an object"),
        ({"architecture": "MixtralForCausalLM", "moe": {"num_experts": 10**9}}, "moe.num_experts='1000000000' is not from 1 to 4096"),
        ({"architecture": "DeepseekV2ForCausalLM", "moe": [3]}, r"moe='\[3\]' is not an object"),
        ({"architecture": "PhiMoEForCausalLM", "moe": {"normalization_mode": 1}}, r"normalization_mode='1' is not.*only 2 \(SPARSE_MIXER"),
        ({"moe": {"num_experts": 4}}, "LlamaForCausalLM with experts is not supported"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads='two' is not a positive number"),
    ],
)  # fmt: skip
def test_unsupported_configs_are_rejected(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    source, _ = converted(tmp_path / "trt", **change)
    with pytest.raises(CheckpointError, match=message):
        prepare(source, BuildConfig(device="cpu"))


def test_unknown_tensors_and_shards_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    source, _ = converted(tmp_path / "trt", tp=2)
    path = source / "rank0.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"transformer.layers.0.attention.rel_attn_table": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"not all ranks have transformer\.layers\.0\.attention\.rel_attn_table"):
        open_checkpoint(source)
    save_file(tensors | {"transformer.ln_f.weight": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match=r"transformer\.ln_f\.weight does not fit the other ranks"):
        open_checkpoint(source)
    save_file({name: t for name, t in tensors.items() if ".0." not in name}, path)
    save_file({name: t for name, t in tensors.items() if ".0." not in name}, source / "rank1.safetensors")
    with pytest.raises(CheckpointError, match="the layers of a stage are not numbered from 0"):
        open_checkpoint(source)


def test_tensors_without_elements_and_wrong_numbers_of_experts_are_rejected(tmp_path: Path) -> None:
    source, _ = converted(tmp_path / "trt", "mixtral")
    path, name = source / "rank0.safetensors", "transformer.layers.1.mlp.fc.weight"
    tensors = load_file(path)
    save_file(tensors | {name: torch.ones(40_000, 192, 0)}, path)
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors: transformer\.layers\.1\.mlp\.fc\.weight has no elements"):
        open_checkpoint(source)
    save_file(tensors | {name: tensors[name].repeat(2, 1, 1)}, path)
    with pytest.raises(CheckpointError, match=r"mlp\.fc\.weight has 8 experts, and config\.json describes 4"):
        open_checkpoint(source)
    save_file(tensors | {"lm_head.weight": torch.ones(())}, path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is one number, and not a matrix"):
        open_checkpoint(source)
    save_file(tensors | {f"transformer.layers.{'1' * 900}.mlp.fc.weight": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"the tensor 'transformer\.layers\.111.* is not known"):
        open_checkpoint(source)
