"""Checkpoints of TensorRT-LLM from tiny models of transformers, named, sharded, quantized and ordered for a GPU as its converters do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 320
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
}
E4M3 = torch.float8_e4m3fn
# GPU → (input features are permuted and values biased, output features are interleaved).
GPUS = {"ampere": (True, True), "hopper": (True, False), "early hopper": (False, False)}
FEATURE_ORDER = {
    8: (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15),
    4: (0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27, 4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31),
}


def order_for_gpu(values: Tensor, bits: int, gpu: str) -> Tensor:
    """int8 [in, out × bits / 8] from signed values [in, out]: the steps of cutlass_preprocessors.cpp, with its loops over words."""
    permuted, interleaved = GPUS[gpu]
    rows, columns = values.shape
    matrix = values.numpy().astype(np.int16)
    run = FEATURE_ORDER[bits]
    if permuted:  # permute_B_rows_for_mixed_gemm
        source = [base + run[tile_row] for base in range(0, rows, len(run)) for tile_row in range(len(run))]
        matrix = matrix[source]
    packed = pack_bytes(matrix.T, bits)  # subbyte_transpose
    words = np.ascontiguousarray(packed).view(np.uint32)  # [out, in × bits / 32]
    if interleaved:  # interleave_column_major_tensor
        interleave, per_word = 16 // bits, 32 // bits
        vec_rows, tile = rows // per_word, 64 // per_word
        flat = np.zeros(words.size, np.uint32)
        for read_col in range(columns):
            write_col = read_col // interleave
            for base in range(0, vec_rows, tile):
                write_row = interleave * base + tile * (read_col % interleave)
                start = write_col * vec_rows * interleave + write_row
                flat[start : start + tile] = words[read_col, base : base + tile]
        words = flat
    out = words.reshape(-1).view(np.uint8)
    if permuted:  # add_bias_and_interleave_quantized_tensor_inplace
        out = add_bias_and_interleave(out, bits)
    return torch.from_numpy(out.view(np.int8).copy()).view(rows, -1)


def pack_bytes(matrix: Any, bits: int) -> Any:
    """uint8 [rows, columns × bits / 8]: of two values of four bits, the first is in the low ones."""
    unsigned = (matrix & (2**bits - 1)).astype(np.uint8)
    return unsigned if bits == 8 else unsigned[:, ::2] | (unsigned[:, 1::2] << 4)


def add_bias_and_interleave(data: Any, bits: int) -> Any:
    """The bytes with 128 or 8 added to each value, and with the values of 32 bits exchanged."""
    if bits == 8:
        biased = (data.astype(np.int8).astype(np.int16) + 128).astype(np.uint8).reshape(-1, 4)
        return biased[:, [0, 2, 1, 3]].reshape(-1)  # elements 1 and 2 are swapped
    low, high = (((n ^ 8).astype(np.int16) - 8 + 8).astype(np.uint8) for n in (data & 15, data >> 4))
    registers = (low | (high << 4)).astype(np.uint8).view(np.uint32)
    out = np.zeros_like(registers)
    for target in range(8):
        source = 2 * target if target < 4 else 2 * (target - 4) + 1
        out |= ((registers >> np.uint32(4 * source)) & np.uint32(15)) << np.uint32(4 * target)
    return out.view(np.uint8)


def quantize_weights(state: dict[str, Tensor], algorithm: str, slices: int, group: int) -> None:
    """Round the linears of the layers to an algorithm, and add `q`, `scale` and `zero` of each: [out, in] and [out, groups].

    `slices`: the ranks that share a weight along its input features, each of which has a scale of its own.
    """
    kinds = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "up_proj.weight", "gate_proj.weight", "down_proj.weight")
    for name in [n for n in state if ".layers." in n and n.endswith((*kinds, "experts.gate_up_proj", "experts.down_proj"))]:
        stem, weight = name.removesuffix("weight").removesuffix("."), state[name]
        is_input_split = "o_proj" in name or "down_proj" in name
        if algorithm == "FP8":
            axes = (-1, -2) if weight.dim() == 3 else ()
            # Gate and up of an expert have one scale.
            state[f"{stem}.scale"] = scale = weight.abs().amax(axes, keepdim=True) / 448
            state[f"{stem}.q"] = (weight / scale).to(E4M3)
            state[name] = state[f"{stem}.q"].float() * scale
            continue
        has_zero = algorithm.endswith("GPTQ")
        size = group if has_zero else weight.shape[-1] // (slices if is_input_split else 1)
        half = 1 << (integer_bits(algorithm) - 1)
        grouped = weight.unflatten(-1, (-1, size))
        if has_zero:
            low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
            scale = ((high - low) / (2 * half - 1)).half().float()
            zero = (-low / scale).round().clamp(1, 2 * half - 1)  # 1 to 15: stored minus one by GPTQ
            q = (grouped / scale + zero).round().clamp(0, 2 * half - 1)
            state[f"{stem}.zero"] = zero.squeeze(-1)
            state[name] = ((q - zero) * scale).flatten(-2)
            q = q - half
        else:
            scale = grouped.abs().amax(-1, keepdim=True) / half
            q = (grouped / scale).round().clamp(-half, half - 1)
            state[name] = (q * scale).flatten(-2)
        state[f"{stem}.q"], state[f"{stem}.scale"] = q.flatten(-2).to(torch.int8), scale.squeeze(-1)


def integer_bits(algorithm: str) -> int:
    return 8 if algorithm.startswith("W8") else 4


def stored_tensors(stem: str, q: Tensor, scale: Tensor, zero: Tensor | None, algorithm: str, gpu: str) -> dict[str, Tensor]:
    """The tensors in a file of a quantized module with values `q` [(experts,) out, in] of one rank."""
    if algorithm == "FP8":
        scale = scale.reshape(-1, 1) if q.dim() == 3 else scale.reshape(1)
        return {f"{stem}.weight": q, f"{stem}.weights_scaling_factor": scale, f"{stem}.activation_scaling_factor": torch.tensor([0.02])}
    bits = integer_bits(algorithm)
    if q.dim() == 3:
        weight = torch.stack([order_for_gpu(one.T, bits, "ampere") for one in q])  # experts have this order on any GPU
    else:
        weight = order_for_gpu(q.T, bits, gpu)
    if zero is None:
        return {f"{stem}.weight": weight, f"{stem}.per_channel_scale": scale.squeeze(-1)}
    half = 1 << (bits - 1)
    products = ((half - zero) * scale).half()  # (−qzeros + 8 − 1) × scales, where GPTQ stores zero − 1 as qzeros
    transposed = {f"{stem}.weights_scaling_factor": scale.half().mT, f"{stem}.zero": products.mT}
    return {f"{stem}.weight": weight.view(torch.float16)} | transposed


def rows_of(tensor: Tensor, rank: int, tp: int) -> Tensor:
    return tensor.chunk(tp)[rank].clone()


def columns_of(tensor: Tensor, rank: int, tp: int) -> Tensor:
    return tensor.chunk(tp, -1)[rank].clone() if tensor.shape[-1] > 1 else tensor


def heads_of(tensor: Tensor, rank: int, tp: int, kv_heads: int) -> Tensor:
    """The rows of a rank's key-value head, which neighbouring ranks have in common if there are more ranks than heads."""
    return rows_of(tensor, rank, tp) if tp <= kv_heads else rows_of(tensor, rank * kv_heads // tp, kv_heads)


class Shard:
    """The tensors of one rank, as tensorrt_llm.models.llama.convert and those of Qwen name and split them."""

    def __init__(self, state: dict[str, Tensor], rank: int, tp: int, kv_heads: int, algorithm: str, gpu: str) -> None:
        self.state, self.rank, self.tp, self.kv_heads, self.algorithm, self.gpu = state, rank, tp, kv_heads, algorithm, gpu
        self.tensors: dict[str, Tensor] = {}

    def linear(self, old: list[str], new: str, split: Any) -> None:
        """Add a module whose rows are those of the modules `old`. `split` returns the part of a rank of a tensor of one of them."""
        found: dict[str, Tensor] = {}
        for part in ("weight", "bias", "q", "scale", "zero"):
            tensors = [self.state.get(f"{name}.{part}", self.state.get(name) if part == "weight" else None) for name in old]
            if tensors[0] is not None:
                is_one_scale = part == "scale" and self.algorithm == "FP8"
                found[part] = tensors[0] if is_one_scale else split(tensors)
        if "q" in found:
            q = found["q"]
            self.tensors |= stored_tensors(new, q, found["scale"], found.get("zero"), self.algorithm, self.gpu)
        else:
            self.tensors[f"{new}.weight"] = found["weight"]
        if "bias" in found:
            self.tensors[f"{new}.bias"] = found["bias"]

    def rows(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([rows_of(t, self.rank, self.tp) for t in tensors])

    def columns(self, tensors: list[Tensor]) -> Tensor:
        return columns_of(tensors[0], self.rank, self.tp) if tensors[0].dim() > 1 else tensors[0]

    def heads(self, tensors: list[Tensor]) -> Tensor:
        q, k, v = tensors
        parts = (heads_of(t, self.rank, self.tp, self.kv_heads) for t in (k, v))
        return torch.cat((rows_of(q, self.rank, self.tp), *parts))

    def experts(self, tensors: list[Tensor]) -> Tensor:
        """Up then gate from [experts, gate and up, in]."""
        gate, up = tensors[0].chunk(2, 1)
        return torch.cat((up.chunk(self.tp, 1)[self.rank], gate.chunk(self.tp, 1)[self.rank]), 1)

    def layer(self, old: str, new: str) -> None:
        self.linear([f"{old}self_attn.{part}_proj" for part in "qkv"], f"{new}attention.qkv", self.heads)
        self.linear([f"{old}self_attn.o_proj"], f"{new}attention.dense", self.columns)
        for part in "qk":
            if f"{old}self_attn.{part}_norm.weight" in self.state:
                self.tensors[f"{new}attention.{part}_layernorm.weight"] = self.state[f"{old}self_attn.{part}_norm.weight"]
        if f"{old}mlp.experts.down_proj" in self.state:
            self.linear([f"{old}mlp.experts.gate_up_proj"], f"{new}mlp.fc", self.experts)
            self.linear([f"{old}mlp.experts.down_proj"], f"{new}mlp.proj", self.columns)
            self.tensors[f"{new}mlp.router.weight"] = self.state[f"{old}mlp.gate.weight"].float()
        else:
            self.mlp(f"{old}mlp", f"{new}mlp")
        if f"{old}mlp.shared_expert_gate.weight" in self.state:
            shared = f"{old}mlp.shared_expert"
            self.linear([f"{shared}.up_proj", f"{shared}.gate_proj"], f"{new}mlp.shared_expert.fc", self.rows)
            self.linear([f"{shared}.down_proj"], f"{new}mlp.shared_expert.proj", self.columns)
            self.tensors[f"{new}mlp.shared_expert_gate.weight"] = self.state[f"{old}mlp.shared_expert_gate.weight"]
        self.tensors[f"{new}input_layernorm.weight"] = self.state[f"{old}input_layernorm.weight"]
        self.tensors[f"{new}post_layernorm.weight"] = self.state[f"{old}post_attention_layernorm.weight"]

    def mlp(self, old: str, new: str) -> None:
        self.linear([f"{old}.gate_proj"], f"{new}.fc", self.rows)
        self.linear([f"{old}.up_proj"], f"{new}.gate", self.rows)
        self.linear([f"{old}.down_proj"], f"{new}.proj", self.columns)

    def embedding(self) -> None:
        self.tensors["transformer.vocab_embedding.weight"] = rows_of(self.state["model.embed_tokens.weight"], self.rank, self.tp)

    def head(self) -> None:
        head = torch.nn.functional.pad(self.state["lm_head.weight"], (0, 0, 0, -len(self.state["lm_head.weight"]) % (self.tp * 16)))
        self.tensors |= {"lm_head.weight": rows_of(head, self.rank, self.tp), "transformer.ln_f.weight": self.state["model.norm.weight"]}


def converted(
    path: Path,
    kind: str = "llama",
    tp: int = 1,
    pp: int = 1,
    algorithm: str | None = None,
    gpu: str = "ampere",
    sizes: dict[str, int] | None = None,
    layers: int = 3,
    **config: Any,
) -> tuple[Path, Any]:
    """(a TensorRT-LLM checkpoint with a tokenizer, the model of transformers with the same weights)."""
    default = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    sizes = default | (sizes or {})
    own = EXPERTS.get(kind, {}) | {key: value for key, value in sizes.items() if key in EXPERTS.get(kind, {})}
    model = tiny.model(kind, num_hidden_layers=layers, vocab_size=VOCAB, **{k: v for k, v in sizes.items() if k not in own}, **own)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if algorithm:
        quantize_weights(state, algorithm, tp, 64)
        model.load_state_dict({name: state[name] for name in model.state_dict()})
    path.mkdir(parents=True)
    stages = [list(part) for part in torch.arange(layers).tensor_split(pp)]
    for stage, numbers in enumerate(stages):
        for rank in range(tp):
            shard = Shard(state, rank, tp, sizes["num_key_value_heads"], algorithm or "", gpu)
            for local, i in enumerate(numbers):
                shard.layer(f"model.layers.{int(i)}.", f"transformer.layers.{local}.")
            if stage == 0:
                shard.embedding()
            if stage == pp - 1:
                shard.head()
            save_file({name: t.clone().contiguous() for name, t in shard.tensors.items()}, path / f"rank{stage * tp + rank}.safetensors")
    data = {
        "architecture": ARCHITECTURES[kind], "dtype": "float32", "logits_dtype": "float32", "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": layers, "num_attention_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_key_value_heads"], "head_size": sizes["head_dim"], "vocab_size": VOCAB,
        "intermediate_size": sizes["intermediate_size"],
        "max_position_embeddings": 256, "norm_epsilon": model.config.rms_norm_eps, "hidden_act": "silu",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": model.config.rope_parameters["rope_theta"], "use_parallel_embedding": True, "embedding_sharding_dim": 0,
        "share_embedding_table": False, "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp, "gpus_per_node": 8},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 64,
                         "has_zero_point": bool(algorithm and algorithm.endswith("GPTQ"))},
        "attn_bias": kind.startswith("qwen2"), "qk_layernorm": kind.startswith("qwen3"),
    }  # fmt: skip
    if kind == "mixtral":
        data |= {"hidden_act": "swiglu", "moe": {"num_experts": 4, "top_k": 2, "normalization_mode": 1, "tp_mode": 2}}
    if kind in ("qwen2_moe", "qwen3_moe"):
        mode = int(kind == "qwen3_moe")
        data |= {"hidden_act": "swiglu", "qwen_type": kind, "moe": {"num_experts": 4, "top_k": 2, "normalization_mode": mode}}
        data |= {"moe_intermediate_size": own["moe_intermediate_size"]}
        data |= {"moe_shared_expert_intermediate_size": own.get("shared_expert_intermediate_size", 0)}
    (path / "config.json").write_text(json.dumps(data | config))
    tiny.save_tokenizer(path)
    return path, model
