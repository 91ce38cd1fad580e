"""Writes the GGUF file of a Hugging Face checkpoint as llama.cpp's converter does: keys and tensor names come from the gguf library."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

Config = dict[str, Any]
# Converts (Hugging Face name, tensor) to the names and tensors that the library's table of names knows.
Change = Callable[[str, Tensor, Config], Iterator[tuple[str, Tensor]]]
ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def write_gguf(
    path: Path,
    directory: Path,
    arch: str,
    change: Change | None = None,
    describe: Callable[[gguf.GGUFWriter, Config], None] | None = None,
    kind: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write the checkpoint in `directory` as GGUF architecture `arch`.

    `change` converts tensors, and `describe` adds metadata. `kind`: block type of matrices whose rows consist of whole blocks.
    """
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    if "layers_block_type" in config:
        config["num_hidden_layers"] = len(config["layers_block_type"])
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, config)
    if describe is not None:
        describe(writer, config)
    write_vocabulary(writer, first(config, "vocab_size", "padded_vocab_size"))
    layers = first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], layers)
    for name, tensor in merge_experts(changed(load_file(directory / "model.safetensors"), config, change)):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"{arch} has no name for {name}"
        data = tensor.float().contiguous().numpy()
        is_matrix = data.ndim > 1 and not found.endswith(".bias")  # biases of experts are matrices, too
        if kind is not None and is_matrix and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(found, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(found, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_metadata(writer: gguf.GGUFWriter, c: Config) -> None:
    """The keys that the converter writes for every model."""
    writer.add_block_count(first(c, "num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    positions = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
    writer.add_context_length(first(c, *positions, default=1 << 20))
    hidden = first(c, "hidden_size", "n_embd", "d_model")
    heads = first(c, "num_attention_heads", "n_head", "n_heads", default=0)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(first(c, "intermediate_size", "n_inner", "ffn_hidden_size", default=4 * hidden))
    writer.add_head_count(heads)
    if (kv_heads := first(c, "num_key_value_heads", "multi_query_group_num", "num_kv_heads", default=None)) is not None:
        writer.add_head_count_kv(kv_heads)
    if (size := c.get("head_dim")) is not None:
        writer.add_key_length(size)
        writer.add_value_length(size)
    if (eps := first(c, "rms_norm_eps", default=None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := first(c, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", default=None)) is not None:
        writer.add_layer_norm_eps(eps)
    for key, add in (
        ("num_local_experts", writer.add_expert_count), ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count), ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
    ):  # fmt: skip
        if c.get(key):
            add(c[key])
    write_rope(writer, c)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def write_rope(writer: gguf.GGUFWriter, c: Config) -> None:
    """The rotary base, and linear, YaRN or Llama 3.1's scaling."""
    parameters = rope_parameters(c)
    local = (c.get("rope_parameters") or {}).get("sliding_attention")
    if (theta := first(parameters, "rope_theta", default=first(c, "rope_theta", "rotary_emb_base", default=None))) is not None:
        writer.add_rope_freq_base(theta)
    if local:
        writer.add_key_value(f"{writer.arch}.rope.freq_base_swa", local["rope_theta"], gguf.GGUFValueType.FLOAT32)
    method = parameters.get("rope_type", parameters.get("type"))
    if method in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(method))
        writer.add_rope_scaling_factor(parameters["factor"])
    if method == "yarn":
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if method == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(parameters, c))


def rope_parameters(c: Config) -> Config:
    """The rotary parameters, of full attention if there are several."""
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or {}
    found: Config = parameters.get("full_attention", parameters)
    return found


def llama3_divisors(p: Config, c: Config) -> np.ndarray:
    """The divisor of each frequency (LlamaModel.generate_extra_tensors in convert_hf_to_gguf.py)."""
    size = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    low, high = (p["original_max_position_embeddings"] / p[key] for key in ("low_freq_factor", "high_freq_factor"))
    divisors = []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * (p.get("rope_theta") or c["rope_theta"]) ** (i / size)
        smooth = (p["original_max_position_embeddings"] / wavelength - p["low_freq_factor"]) / (
            p["high_freq_factor"] - p["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / p["factor"] + smooth)
        divisors.append(1.0 if wavelength < high else p["factor"] if wavelength > low else between)
    return np.array(divisors, dtype=np.float32)


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A sentencepiece vocabulary without merges, with which llama.cpp loads the file, too."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"t{i}".encode() for i in range(3, size))])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3, *[1] * (size - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def changed(tensors: dict[str, Tensor], config: Config, change: Change | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the form in which llama.cpp stores them."""
    for name, tensor in tensors.items():
        if not re.search(r"rotary_emb\.inv_freq|rotary_pos_emb|masked_bias|\.attn\.bias|visual\.", name):
            if "ffn_hidden_size" not in config or "padded_vocab_size" in config:  # the published names of BLOOM and ChatGLM
                name = re.sub(r"^transformer\.(?=h\..*(self_attention|mlp\.dense|layernorm)|word_emb|ln_f|enc|emb|output_layer)", "", name)
            name = name.replace("model.language_model.", "model.").replace("language_model.model.", "model.")
            yield from change(name, tensor, config) if change else [(name, tensor)]


def merge_experts(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Stack the matrices of all experts of a layer, and the norms of all heads (`head_norms`)."""
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        if found := re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        else:
            yield name, tensor
    for name, parts in experts.items():
        yield (
            name.replace("_layernorm.experts", "_layernorm").replace("projections.experts", "projections"),
            torch.stack([parts[i] for i in range(len(parts))]),
        )


def first(config: Config, *keys: str, default: Any = KeyError) -> Any:
    """The first value that is present and not null."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    if default is KeyError:
        raise KeyError(keys)
    return default


def state_tensors(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Blocks with states: decays instead of their logarithms, and shapes in which llama.cpp broadcasts them. Also `split_input_linear`."""
    has_heads = "mamba_n_groups" in c or "n_groups" in c  # Mamba 2
    if name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif name.endswith(("A_log", ".D")):
        tensor = -tensor.exp() if name.endswith("A_log") else tensor
        tensor = tensor[:, None] if has_heads else tensor
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.unflatten(0, (c.get("mamba_n_groups", c.get("n_groups")), -1))
    if not c.get("num_local_experts") and "shared_mlp" in name:  # Granite 4 without experts
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        for part, kind in zip(tensor.chunk(2), ("gate", "up"), strict=True) if "input_linear" in name else ((tensor, ""),):
            yield name.replace("shared_mlp.input_linear", f"mlp.{kind}_proj"), part
        return
    yield from split_input_linear(name.replace("feed_forward.experts", "mlp.experts"), tensor, c)


def jamba_tensors(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Jamba: `state_tensors`, without a permutation."""
    yield from state_tensors(name, tensor, c) if "self_attn" not in name else ((name, tensor),)


def falcon_h1_tensors(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Falcon-H1: `jamba_tensors`, and multipliers become a part of the weights."""
    gate, down = c["mlp_multipliers"] or (1.0, 1.0)
    inside, inner, bc = c["attention_in_multiplier"], c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
    parts = (inner, inner, bc, bc, c["mamba_n_heads"])
    rows = torch.cat([torch.full((size,), factor) for size, factor in zip(parts, c["ssm_multipliers"], strict=True)])
    factors: dict[str, Any] = {
        "down_proj": down, "gate_proj": gate, "k_proj": c["key_multiplier"] * inside, "q_proj": inside, "v_proj": inside,
        ".o_proj": c["attention_out_multiplier"], "out_proj": c["ssm_out_multiplier"], "in_proj": c["ssm_in_multiplier"] * rows[:, None],
        "lm_head": c["lm_head_multiplier"], "embed_tokens": c["embedding_multiplier"],
    }  # fmt: skip
    factor = next((factor for part, factor in factors.items() if part in name), 1.0)
    yield from jamba_tensors(name, tensor * factor, c)


def permuted(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """LlamaModel.permute: halves of each head of q and k become interleaved pairs."""
    if found := re.search(r"\.([qk])_proj\.", name):
        heads = c["num_attention_heads"] if found[1] == "q" else c.get("num_key_value_heads") or c["num_attention_heads"]
        tensor = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def norms_plus_one(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Gemma's and Nemotron's norms multiply by 1 + w."""
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def stack_streams(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Gemma 3n: the projections of all streams become one tensor, in `merge_experts`."""
    name = re.sub(r"projections\.(\d+)", r"projections.experts.\1", name)
    yield name + ".weight" if name.endswith("_scale") else name, tensor


def transposed(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """GPT-2's Conv1D has weights [in, out]."""
    yield name, tensor.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else tensor


def ungrouped(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """BLOOM, Falcon and GPT-NeoX: q, k and v of each group of heads become all q, all k and all v."""
    if "query_key_value" in name:
        heads = first(c, "n_head", "num_attention_heads")
        falcon = "ffn_hidden_size" in c
        kv_heads = (c["num_kv_heads"] if c.get("new_decoder_architecture") else 1) if falcon else heads
        size = first(c, "hidden_size") // heads
        rows = tensor.reshape(kv_heads, heads // kv_heads + 2, size, *tensor.shape[1:])
        parts = rows[:, :-2], rows[:, -2:-1], rows[:, -1:]
        tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    yield name, tensor


def split_wqkv(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """InternLM 2: a projection that is fused in groups becomes three, of which q and k are permuted."""
    if not name.endswith("wqkv.weight"):
        yield name, tensor
        return
    rows = tensor.reshape(c["num_key_value_heads"], c["num_attention_heads"] // c["num_key_value_heads"] + 2, -1, tensor.shape[-1])
    for letter, part in zip("qkv", (rows[:, :-2], rows[:, -2], rows[:, -1]), strict=True):
        _, part = next(permuted(f".{letter}_proj.", part.reshape(-1, tensor.shape[-1]), c))
        yield name.replace("wqkv", f"w{letter}"), part


def split_pack(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Baichuan: a projection that is fused in one block becomes three, of which q and k are permuted."""
    if not name.endswith("W_pack.weight"):
        yield name, tensor
        return
    for letter, part in zip("qkv", tensor.chunk(3), strict=True):
        yield from permuted(name.replace("W_pack", f"{letter}_proj"), part, c)


def split_input_linear(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Granite MoE: gates and ups of all experts are one tensor, and those of the shared expert."""
    name = name.replace("shared_mlp.", "mlp.shared_expert.").replace("shared_expert.output_linear", "shared_expert.down_proj")
    if name.endswith("input_linear.weight"):
        for part, kind in zip(tensor.chunk(2, dim=-2), ("gate", "up"), strict=True):
            module = name.replace("block_sparse_moe.input_linear", f"mlp.experts.{kind}_proj")
            yield module.replace("input_linear", f"{kind}_proj"), part
    else:
        yield from permuted(name, tensor, c)


def separate_stacked_gates(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Qwen3-VL: gates and ups of all experts, [experts, gates then ups, in], become one tensor each."""
    if name.endswith("gate_up_proj"):
        yield from (
            (name.replace("gate_up_proj", f"{kind}_proj.weight"), p) for p, kind in zip(tensor.chunk(2, 1), ("gate", "up"), strict=True)
        )
    else:
        yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), tensor


def hunyuan_norms(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Hunyuan: the converter gives norms and routers the names of other models."""
    yield name.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm").replace("gate.wg", "gate"), tensor


def nemotron_states(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """NemotronHModel: Mamba 2 blocks, and experts that are renamed when they are stacked."""
    name = re.sub(r"^model\.", "backbone.", name).replace("e_score_correction_bias", "e_score_correction.bias")
    name = re.sub(r"backbone\.layers\.(\d+)\.mixer\.experts", r"model.layers.\1.mlp.experts", name)
    if name.endswith(("experts.up_proj", "experts.down_proj")):
        name += ".weight"
    yield from jamba_tensors(name, tensor, c)


def delta_net(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Qwen3NextModel: the decay instead of its logarithm, norms that multiply by 1 + w, and inputs that are ungrouped."""
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    elif "conv1d" in name:
        tensor = tensor.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith("in_proj_qkvz.weight"):
        key, value = c["linear_key_head_dim"], c["linear_num_value_heads"] // c["linear_num_key_heads"] * c["linear_value_head_dim"]
        groups = tensor.unflatten(0, (c["linear_num_key_heads"], -1)).split((key, key, value, value), dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in groups)
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat((q, k, v))
        yield name.replace("in_proj_qkvz", "in_proj_z"), z
    else:
        yield from separate_stacked_gates(name, tensor, c)


def tiled_delta_net(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """_LinearAttentionVReorderBase: value heads in the order in which ggml repeats the key heads, for Qwen3.5."""
    keys, values, key_rows = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_num_key_heads"] * c["linear_key_head_dim"]

    def tiled(x: Tensor) -> Tensor:
        return x.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)

    if re.search(r"linear_attn\.(in_proj_[zab]|A_log|dt_bias)", name):
        tensor = tiled(tensor)
    elif re.search(r"linear_attn\.(in_proj_qkv|conv1d)", name):
        tensor = torch.cat((tensor[: 2 * key_rows], tiled(tensor[2 * key_rows :])))
    elif "linear_attn.out_proj" in name:
        tensor = tiled(tensor.T).T
    yield from delta_net(name, tensor, c)


def llama4_experts(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """Llama4Model: experts are stored [experts, in, out], with gates and ups side by side."""
    name = name.replace("language_model.", "")
    if "experts." in name:
        yield from separate_stacked_gates(name, tensor.transpose(-1, -2), c)
    else:
        yield name, tensor


def without_activations(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """ApertusModel: the parameters of activations are metadata (`gguf_cases.apertus`)."""
    if ".act_fn." not in name:
        yield name, tensor


def separate_gates(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss: gates and ups alternate, and weights are [experts, in, out]."""
    found = re.fullmatch(r"(.*experts)\.(gate_up|down)_proj(_bias)?", name)
    if found is None:
        yield name + (".weight" if name.endswith("sinks") else ""), tensor
        return
    rows, suffix = (tensor, "bias") if found[3] else (tensor.transpose(-1, -2), "weight")
    parts = {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if found[2] == "gate_up" else {"down": rows}
    yield from ((f"{found[1]}.{kind}_proj.{suffix}", part) for kind, part in parts.items())


def split_kv_b(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """DeepSeek V2 and V3: the up-projections of keys (transposed) and of values."""
    if name.endswith("kv_b_proj.weight"):
        rows = tensor.unflatten(0, (c["num_attention_heads"], -1))
        yield name.replace("kv_b_proj", "k_b_proj"), rows[:, : c["qk_nope_head_dim"]].transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), rows[:, c["qk_nope_head_dim"] :]
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def head_norms(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """StableLM: the norms of all heads become one tensor, in `merge_experts`."""
    yield name.replace("_layernorm.norms.", "_layernorm.experts.") if ".norms." in name else name, tensor


def correction_bias(name: str, tensor: Tensor, c: Config) -> Iterator[tuple[str, Tensor]]:
    """The correction bias of experts. The converter leaves it [1, experts] in ERNIE."""
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
