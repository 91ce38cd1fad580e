"""Layers that TensorRT-LLM stores in other ways than those of Llama: latent attention, states, and the experts of Granite and Phi."""

from __future__ import annotations

import torch
from tensorrt_llm_writer import Config, Tensors, expert_tensors


def latent(w: Tensors, old: str, hf: Config, rank: int, tp: int) -> Tensors:
    """convert_layer of deepseek_v2/convert.py, and the experts. `fused_q_proj` is the product that its attention multiplies by."""
    attention, heads = f"{old}self_attn.", hf["num_attention_heads"]
    nope, rope, size = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    down = w[f"{attention}kv_a_proj_with_mqa.weight"]
    if hf["q_lora_rank"] is not None:
        down, q = torch.cat((w[f"{attention}q_a_proj.weight"], down)), w[f"{attention}q_b_proj.weight"]
    else:
        q = w[f"{attention}q_proj.weight"]
    q = q.unflatten(0, (heads, nope + rope)).chunk(tp)[rank]
    k, v = w[f"{attention}kv_b_proj.weight"].unflatten(0, (heads, nope + size)).chunk(tp)[rank].split((nope, size), 1)
    product = torch.cat((torch.einsum("hdq,hdk->hkq", q[:, :nope], k), q[:, nope:]), 1).flatten(0, 1)
    out = {
        "attention.fused_a.weight": down, "attention.fused_q_proj": product, "attention.q_b_proj": q.flatten(0, 1),
        "attention.kv_b_proj": torch.cat((k.flatten(0, 1), v.flatten(0, 1))),
    }  # fmt: skip
    for norm in ("q_a_layernorm", "kv_a_layernorm"):
        if f"{attention}{norm}.weight" in w:
            out[f"attention.{norm}.weight"] = w[f"{attention}{norm}.weight"]
    if f"{old}mlp.gate.weight" in w:
        out |= expert_tensors(w, f"{old}mlp.", "mlp.", rank, tp)
    if f"{old}mlp.gate.e_score_correction_bias" in w:
        out["mlp.e_score_correction_bias"] = w[f"{old}mlp.gate.e_score_correction_bias"]
    return out


def mamba(w: Tensors, old: str, hf: Config, rank: int, tp: int) -> Tensors:
    """convert_from_hf_checkpoint of mamba/convert.py for Mamba 1, which cannot be divided."""
    assert (rank, tp) == (0, 1)
    mixer = {name.removeprefix(f"{old}mixer."): tensor for name, tensor in w.items() if name.startswith(f"{old}mixer.")}
    out = {}
    for name, tensor in mixer.items():
        if name.startswith("in_proj"):
            x, z = tensor.chunk(2)
            out |= {f"ssm.{name.replace('proj', 'proj_x')}": x, f"ssm.{name.replace('proj', 'proj_z')}": z}
        elif name == "A_log":
            out["ssm.A"] = -tensor.exp().t()
        elif name == "dt_proj.bias":
            out["ssm.dt_bias"] = tensor
        else:
            out[f"ssm.{name}"] = tensor.unsqueeze(3) if name == "conv1d.weight" else tensor
    return out


def mamba2(w: Tensors, old: str, hf: Config, rank: int, tp: int) -> Tensors:
    """convert_from_hf_checkpoint of mamba/convert.py for Mamba 2."""
    inner, states, heads = hf["num_heads"] * hf["head_dim"], hf["n_groups"] * hf["state_size"], hf["num_heads"]
    mixer = {name.removeprefix(f"{old}mixer."): tensor for name, tensor in w.items() if name.startswith(f"{old}mixer.")}
    out = {}
    for name, tensor in mixer.items():
        if name.startswith(("in_proj", "conv1d")):
            sizes = (inner, inner, states, states, heads) if name.startswith("in_proj") else (inner, states, states)
            tensor = torch.cat([part.chunk(tp)[rank] for part in tensor.split(sizes)])
            out[f"ssm.{name}"] = tensor.unsqueeze(3) if name == "conv1d.weight" else tensor
        elif name == "A_log":
            out["ssm.A"] = -tensor.exp().chunk(tp)[rank]
        elif name.startswith("out_proj"):
            out[f"ssm.{name}"] = tensor.chunk(tp, 1)[rank] if tensor.dim() == 2 else tensor
        else:
            out[f"ssm.{name}"] = tensor.chunk(tp)[rank]
    return out


def granite_experts(w: Tensors, old: str, hf: Config, rank: int, tp: int) -> Tensors:
    """The experts of Granite: the up projection precedes the gate projection in `fc`, as its kernel requires."""
    gate, up = w[f"{old}block_sparse_moe.input_linear.weight"].chunk(2, 1)
    return {
        "mlp.router.weight": w[f"{old}block_sparse_moe.router.layer.weight"],
        "mlp.fc.weight": torch.cat((up.chunk(tp, 1)[rank], gate.chunk(tp, 1)[rank]), 1),
        "mlp.proj.weight": w[f"{old}block_sparse_moe.output_linear.weight"].chunk(tp, 2)[rank],
    }


def phi_experts(w: Tensors, old: str, hf: Config, rank: int, tp: int) -> Tensors:
    """phi3/convert.py: w3 precedes w1. Its split_weights.py divides the experts among ranks."""
    names = [f"{old}block_sparse_moe.experts.{e}." for e in range(hf["num_local_experts"])]
    w1, w2, w3 = (torch.stack([w[f"{name}{part}.weight"] for name in names]) for part in ("w1", "w2", "w3"))
    fc, proj = (tensor.chunk(tp)[rank] for tensor in (torch.cat((w3, w1), 1), w2))
    return {"mlp.router.weight": w[f"{old}block_sparse_moe.gate.weight"], "mlp.fc.weight": fc, "mlp.proj.weight": proj}
