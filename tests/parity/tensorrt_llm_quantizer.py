"""Quantizes the tensors of a rank as TensorRT-LLM and ModelOpt store them, and returns the plain numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensorrt_llm_files import order_for_gpu
from torch import Tensor

Tensors = dict[str, Tensor]
Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]  # (stem with a final period, weight [(experts,) out, in]) → (stored, plain)

LINEARS = ("qkv.weight", "dense.weight", "fc.weight", "gate.weight", "proj.weight")
GROUP = 32  # of AWQ. The order of a GPU needs groups of 64 for GPTQ
E4M3 = torch.float8_e4m3fn


def fp8(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """FP8: one scale for each weight, or for each expert, and a static scale of inputs."""
    scale = weight.abs().amax((-1, -2), keepdim=True) / 448
    stored = (weight / scale).to(E4M3)
    shape = (-1, 1) if weight.dim() == 3 else (1,)
    scales = {f"{stem}weights_scaling_factor": scale.reshape(shape), f"{stem}activation_scaling_factor": torch.tensor([0.1])}
    return {f"{stem}weight": stored} | scales, stored.float() * scale


def weight_only(bits: int, gpu: str) -> Quantize:
    """W8A16 and W4A16: one scale for each output feature, in the order of a GPU. Experts have the same order on any GPU."""

    def quantize(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        half = 1 << (bits - 1)
        scale = weight.abs().amax(-1, keepdim=True) / half
        values = (weight / scale).round().clamp(-half, half - 1)
        if weight.dim() == 3:
            stored = torch.stack([order_for_gpu(one.T.to(torch.int8), bits, "ampere") for one in values])
        else:
            stored = order_for_gpu(values.T.to(torch.int8), bits, gpu)
        return {f"{stem}weight": stored, f"{stem}per_channel_scale": scale.squeeze(-1)}, values * scale

    return quantize


def gptq(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """W4A16_GPTQ: groups of 64 with zero points, in the order of a GPU."""
    grouped = weight.unflatten(-1, (-1, 64))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    values = (grouped / scale + zero).round().clamp(0, 15)
    plain = ((values - zero) * scale).flatten(-2)
    stored = order_for_gpu((values - 8).flatten(-2).T.to(torch.int8), 4, "ampere").view(torch.float16)
    scales = {f"{stem}weights_scaling_factor": scale.squeeze(-1).half().T, f"{stem}zero": ((8 - zero) * scale).squeeze(-1).half().T}
    return {f"{stem}weight": stored} | scales, plain


def awq(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """W4A16_AWQ of ModelOpt: groups of 32, and factors by which the inputs of `dense` and `proj` are multiplied."""
    factors = torch.linspace(0.5, 2, weight.shape[1]) if stem.endswith(("dense.", "proj.")) else None
    real = weight if factors is None else weight / factors
    grouped = real.unflatten(-1, (-1, GROUP))
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    values = (grouped / scale).round().clamp(-8, 7)
    plain = (values * scale).flatten(-2)
    words = values.flatten(-2).to(torch.int8).view(torch.uint8) & 15
    stored = {f"{stem}weight": words[::2] | (words[1::2] << 4), f"{stem}weights_scaling_factor": scale.squeeze(-1)}
    if factors is None:
        return stored, plain
    return stored | {f"{stem}prequant_scaling_factor": factors}, plain * factors


def smoothquant(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN, with smoothers of `dense` and `proj`."""
    smoother = torch.linspace(0.5, 2, weight.shape[1]) if stem.endswith(("dense.", "proj.")) else torch.ones(weight.shape[1])
    scale = (weight * smoother).abs().amax(-1, keepdim=True) / 127
    values = (weight * smoother / scale).round()
    stored = {f"{stem}weight": values.to(torch.int8), f"{stem}per_channel_scale": scale.T}
    if stem.endswith(("dense.", "proj.")):
        stored[f"{stem}smoother"] = smoother[None]
    return stored, values * scale / smoother


QUANTIZERS: dict[str, Quantize] = {
    "FP8": fp8, "W8A16": weight_only(8, "hopper"), "W4A16": weight_only(4, "ampere"), "W4A16_GPTQ": gptq, "W4A16_AWQ": awq,
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": smoothquant,
}  # fmt: skip


def quantize_rank(tensors: Tensors, algorithm: str, with_experts: bool) -> tuple[Tensors, Tensors]:
    """(the tensors of a rank with quantized linears of layers, the same tensors with the plain numbers of these)."""
    stored, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if ".layers." in name and name.endswith(LINEARS)]:
        weight = tensors[name]
        if weight.dim() == 2 or (weight.dim() == 3 and with_experts):
            del stored[name]
            quantized, plain[name] = QUANTIZERS[algorithm](name.removesuffix("weight"), weight)
            stored |= quantized
    return stored, plain
