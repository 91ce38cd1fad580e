"""SmoothQuant checkpoints, written as convert_checkpoint.py of TensorRT-LLM does, and the linear that it reads them with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from safetensors.torch import save_file
from tensorrt_llm_files import VOCAB
from torch import Tensor, nn

ALGORITHMS = {
    (False, False): "W8A8_SQ_PER_TENSOR_PLUGIN", (False, True): "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    (True, False): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN", (True, True): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}  # fmt: skip
HIDDEN, INNER, HEADS = 64, 96, 4


def generate_int8(weights: Any, act_range: dict[str, Any], parts: tuple[int, ...] = ()) -> dict[str, Any]:
    """`weights` [in, out]; `act_range`: largest magnitudes of inputs (x), outputs (y) and rows (w). `parts`: rows of q, k and v."""
    largest = act_range["w"]
    if parts:  # one scale for each of q, k and v, repeated for its columns
        largest_t = np.concatenate([np.full(len(part), part.max()) for part in np.split(largest, np.cumsum(parts)[:-1])])
    else:
        largest_t = largest.max()
    scale_w_orig_quant_t, scale_w_orig_quant_c = 127.0 / largest_t, 127.0 / largest
    scale_x_orig_quant_t, scale_y_orig_quant_t = 127.0 / act_range["x"].max(), 127.0 / act_range["y"].max()

    def to_i8(x: Any) -> Any:
        return x.round().clip(-127, 127).astype(np.int8)

    grouped = bool(parts) and parts[0] != parts[1]
    return {
        # multi_query_mode multiplies by the scale where the other modes divide
        "weight.int8": to_i8(weights / scale_w_orig_quant_t if grouped else weights * scale_w_orig_quant_t),
        "weight.int8.col": to_i8(weights * scale_w_orig_quant_c),
        "scale_x_orig_quant": np.float32(scale_x_orig_quant_t),
        "scale_w_quant_orig": np.float32(1.0 / scale_w_orig_quant_t),
        "scale_w_quant_orig.col": np.float32(1.0 / scale_w_orig_quant_c),
        "scale_y_accum_quant": np.float32(scale_y_orig_quant_t / (scale_x_orig_quant_t * scale_w_orig_quant_t)),
        "scale_y_accum_quant.col": np.float32(scale_y_orig_quant_t / (scale_x_orig_quant_t * scale_w_orig_quant_c)),
        "scale_y_quant_orig": np.float32(act_range["y"].max() / 127.0),
    }


@dataclass
class Linear:
    """A linear of a layer: its name in TensorRT-LLM, the modules of transformers, and where its quantizing factor is stored."""

    name: str
    modules: tuple[str, ...]
    factor: str
    by_input: bool = False  # ranks divide the input features
    smoothed: bool = False


LINEARS = (
    Linear("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm.scale_to_int"),
    Linear("attention.dense", ("self_attn.o_proj",), "attention.quantization_scaling_factor", by_input=True, smoothed=True),
    Linear("mlp.fc", ("mlp.gate_proj",), "post_layernorm.scale_to_int"),
    Linear("mlp.gate", ("mlp.up_proj",), "post_layernorm.scale_to_int"),
    Linear("mlp.proj", ("mlp.down_proj",), "mlp.quantization_scaling_factor", by_input=True, smoothed=True),
)


class TensorRTLinear(nn.Module):
    """SmoothQuantLinear and SmoothQuantRowLinear of TensorRT-LLM in float64, from the tensors of its checkpoint before they are divided.

    `rounds`: whether inputs are rounded, which the engine does not do where it cannot fold the smoother.
    """

    def __init__(self, tensors: dict[str, Tensor], rows: slice, rounds: bool) -> None:
        super().__init__()
        self.tensors, self.rows, self.rounds = {name: tensor.double() for name, tensor in tensors.items()}, rows, rounds

    def forward(self, x: Tensor) -> Tensor:
        stored = self.tensors
        scale = stored["per_channel_scale"]
        scale = scale.expand(1, len(stored["weight"]))[:, self.rows]
        if "smoother" in stored:
            x = x / stored["smoother"]
        factor = stored.get("factor")
        if factor is None:
            token_scale = x.abs().amax(-1, keepdim=True) / 127
        else:
            token_scale = stored["act_scale"]  # of the output: per_channel_scale contains those of the input and the weight
        if self.rounds:
            quantized = (x / token_scale).round() if factor is None else (x * factor).round().clamp(-127, 127)  # TensorRT-LLM: from -128
        else:
            quantized = x / token_scale if factor is None else x * factor
        y = (quantized @ stored["weight"][self.rows].T) * token_scale * scale
        return y + stored["bias"][self.rows] if "bias" in stored else y


@dataclass
class Checkpoint:
    """A written checkpoint, and the model that computes what it means."""

    path: Path
    model: Any
    linears: dict[str, TensorRTLinear] = field(default_factory=dict)


def write_smoothquant(
    path: Path, *, per_channel: bool, per_token: bool, kv_heads: int = HEADS, tp: int = 1, bias: bool = False, folded: tuple[str, ...] = ()
) -> Checkpoint:
    """A Llama or Qwen 2 of two layers. `folded`: the linears with smoothers that the engine rounds the inputs of."""
    kind = "qwen2" if bias else "llama"
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": kv_heads}
    model = tiny.model(kind, num_hidden_layers=2, vocab_size=VOCAB, head_dim=HIDDEN // HEADS, **sizes).double()
    ids = torch.randint(3, VOCAB, (2, 48), generator=torch.Generator().manual_seed(5))
    ranges = capture_activation_range(model, ids)
    shards: list[dict[str, Tensor]] = [{} for _ in range(tp)]
    checkpoint = Checkpoint(path, model)
    for index, layer in enumerate(model.model.layers):
        smooth_layer(layer, index, ranges)
        for linear in LINEARS:
            modules = [layer.get_submodule(name) for name in linear.modules]
            stored = linear_tensors(linear, modules, ranges[f"{index}.{linear.modules[0]}"], per_channel, per_token)
            add_shards(shards, f"transformer.layers.{index}.", linear, stored, [len(m.weight) for m in modules], tp)
            start = 0
            for name, module in zip(linear.modules, modules, strict=True):
                rows = slice(start, start + len(module.weight))
                start = rows.stop
                parent, _, leaf = name.rpartition(".")
                replaced = TensorRTLinear(stored, rows, not linear.smoothed or linear.name in folded)
                setattr(layer.get_submodule(parent), leaf, replaced)
                checkpoint.linears[f"{index}.{name}"] = replaced
        for norm, name in (("input_layernorm", "input_layernorm"), ("post_layernorm", "post_attention_layernorm")):
            for shard in shards:
                shard[f"transformer.layers.{index}.{norm}.weight"] = layer.get_submodule(name).weight.detach().float()
    for rank, shard in enumerate(shards):
        shard["transformer.vocab_embedding.weight"] = model.model.embed_tokens.weight.detach().float()
        shard["transformer.ln_f.weight"] = model.model.norm.weight.detach().float()
        shard["lm_head.weight"] = model.lm_head.weight.detach().float().chunk(tp)[rank]
    save(path, shards, model, kind, sizes, ALGORITHMS[per_channel, per_token])
    return checkpoint


def capture_activation_range(model: Any, ids: Tensor) -> dict[str, dict[str, Tensor]]:
    """The largest magnitude of each input feature (x) and output feature (y) of the linears of layers."""
    found: dict[str, dict[str, Tensor]] = {}
    hooks = []
    for index, layer in enumerate(model.model.layers):
        for linear in LINEARS:
            for name in linear.modules:

                def record(module: Any, args: Any, output: Tensor, key: str = f"{index}.{name}") -> None:
                    found[key] = {"x": args[0].detach().flatten(0, 1).abs().amax(0), "y": output.detach().flatten(0, 1).abs().amax(0)}

                hooks.append(layer.get_submodule(name).register_forward_hook(record))
    model(ids)
    for hook in hooks:
        hook.remove()
    return found


def smooth_layer(layer: Any, index: int, ranges: dict[str, dict[str, Tensor]]) -> None:
    """smooth_gemm with alpha 0.5. The smoothers of norms are folded; those of `dense` and `proj` stay in `ranges`."""
    for linears, norm in (((0,), layer.input_layernorm), ((2, 3), layer.post_attention_layernorm), ((1,), None), ((4,), None)):
        names = [name for i in linears for name in LINEARS[i].modules]
        weights = [layer.get_submodule(name).weight.data for name in names]
        x = ranges[f"{index}.{names[0]}"]["x"]
        smoother = (x**0.5 / torch.cat(weights).abs().amax(0) ** 0.5).clamp(min=1e-5)
        for weight, name in zip(weights, names, strict=True):
            weight.mul_(smoother)
            ranges[f"{index}.{name}"] |= {"x": x / smoother, "smoother": smoother}
        if norm is not None:
            norm.weight.data.div_(smoother)
    q, k, v = (ranges[f"{index}.{name}"] for name in LINEARS[0].modules)
    q["y"] = torch.cat((q["y"], k["y"], v["y"]))


def linear_tensors(linear: Linear, modules: list[Any], ranges: dict[str, Tensor], per_channel: bool, per_token: bool) -> dict[str, Tensor]:
    """The tensors of get_tllm_linear_sq_weight before they are divided, and the quantizing factor."""
    weight = torch.cat([module.weight.data for module in modules])
    act_range = {"x": ranges["x"].numpy(), "y": ranges["y"].numpy(), "w": weight.abs().amax(1).numpy()}
    is_qkv = len(modules) == 3
    vals = generate_int8(weight.T.numpy(), act_range, tuple(len(module.weight) for module in modules) if is_qkv else ())
    suffix = ".col" if per_channel else ""
    shape = (1, -1) if per_channel or is_qkv else (1, 1)
    found = {"weight": torch.from_numpy(vals[f"weight.int8{suffix}"]).T.contiguous()}
    scale = vals[f"scale_w_quant_orig{suffix}" if per_token else f"scale_y_accum_quant{suffix}"]
    found["per_channel_scale"] = torch.tensor(scale).reshape(shape)
    if not per_token:
        found |= {"act_scale": torch.tensor([[vals["scale_y_quant_orig"]]]), "factor": torch.tensor([vals["scale_x_orig_quant"]])}
    if linear.smoothed:
        found["smoother"] = ranges["smoother"].float()[None]
    if modules[0].bias is not None:
        found["bias"] = torch.cat([module.bias.data for module in modules]).float()
    return found


def add_shards(shards: list[dict[str, Tensor]], prefix: str, linear: Linear, stored: dict[str, Tensor], sizes: list[int], tp: int) -> None:
    """The tensors of each rank, as get_tllm_linear_sq_weight divides them."""

    def rows_of(tensor: Tensor, rank: int, axis: int) -> Tensor:
        return torch.cat([part.chunk(tp, axis)[rank] for part in tensor.split(sizes, axis)], axis)

    for rank, shard in enumerate(shards):
        for name, tensor in stored.items():
            if name == "factor":
                shard[f"{prefix}{linear.factor}"] = tensor
            elif linear.by_input:
                is_split = name in ("weight", "smoother")
                shard[f"{prefix}{linear.name}.{name}"] = tensor.chunk(tp, 1)[rank] if is_split else tensor
            else:
                is_single = tensor.numel() == 1
                axis = 0 if name in ("weight", "bias") else 1
                shard[f"{prefix}{linear.name}.{name}"] = tensor if is_single else rows_of(tensor, rank, axis)
        if "factor" not in stored and not linear.smoothed:
            shard[f"{prefix}{linear.factor}"] = torch.tensor([1.0])  # written with a scale per token, too


def save(path: Path, shards: list[dict[str, Tensor]], model: Any, kind: str, sizes: dict[str, int], algorithm: str) -> None:
    """Write the files of all ranks, config.json and a tokenizer."""
    path.mkdir(parents=True)
    for rank, shard in enumerate(shards):
        save_file({name: tensor.clone().contiguous() for name, tensor in shard.items()}, path / f"rank{rank}.safetensors")
    data = sizes | {
        "architecture": {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind], "dtype": "float32", "logits_dtype": "float32",
        "num_hidden_layers": len(model.model.layers), "head_size": HIDDEN // HEADS, "vocab_size": VOCAB, "hidden_act": "silu",
        "max_position_embeddings": 256, "norm_epsilon": model.config.rms_norm_eps, "position_embedding_type": "rope_gpt_neox",
        "rotary_base": model.config.rope_parameters["rope_theta"], "attn_bias": kind == "qwen2",
        "mapping": {"world_size": len(shards), "tp_size": len(shards), "pp_size": 1},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, "smoothquant_val": 0.5},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(data))
    tiny.save_tokenizer(path)
