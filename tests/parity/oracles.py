"""The references of the parity tests: models of transformers, and float64 forward passes written from the published definitions."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass
class Reference:
    """A checkpoint, and the logits that its engine should compute. `logits(ids, num_prompt)` returns [len(ids), vocab]."""

    save: Callable[[Path], None]
    logits: Callable[[list[int], int], Tensor]
    vocab: int
    positions: int


def hf_model(name: str, *, seed: int = 0, attention: str = "eager", multimodal: bool = False, **sizes: Any) -> Any:
    """The model of transformers for configuration class `name`, with random weights, norms, biases and buffers.

    `multimodal`: the model with a vision tower instead of the language model.
    """
    config = getattr(transformers, f"{name}Config")(**sizes)
    auto = transformers.models.auto.modeling_auto
    kind = (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if multimodal else auto.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    model = uninitialized_model(kind, config, attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        stored = set(model.state_dict())
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if key in stored:
                tensor.copy_(random_like(key, tensor, generator))
    return model


def uninitialized_model(kind: Any, config: Any, attention: str) -> Any:
    """A model of transformers in float32 whose weights and stored buffers the caller sets, so that they are not initialized before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "initialize_weights", lambda *_, **__: None)
        return kind._from_config(config, attn_implementation=attention).eval().float()


def random_like(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Random values: matrices that preserve the norm of their input, norm weights near 1, and small biases."""
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.dim() >= 2:
        return noise * (0.4 if "emb" in name or "wte" in name or "wpe" in name else tensor.shape[-1] ** -0.5)
    return noise * 0.2 + (1.0 if "norm" in name or "ln_" in name else 0.0) * (name.endswith("weight"))


@contextlib.contextmanager
def recurrent_delta_rule(model: Any) -> Iterator[None]:
    """Let a model of transformers compute gated delta nets token by token.

    By default it computes them in chunks, whose float32 sums change logits of these tests by up to 8e-5.
    """
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "torch_recurrent_gated_delta_rule"):
            patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
        yield


def hf_logits(model: Any) -> Callable[[list[int], int], Tensor]:
    def run(ids: list[int], num_prompt: int) -> Tensor:
        with torch.no_grad(), recurrent_delta_rule(model):
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()

    return run


def plain_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | float = 0.0, scale: float | None = None) -> Tensor:
    """q, k, v [T, heads, size] → [T, heads × size]; mask `seen` [T, T] and `bias` [heads, 1, T] or [heads, T, T]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v).flatten(1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def layer_norm(x: Tensor, w: Tensors, name: str, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def linear(x: Tensor, w: Tensors, name: str) -> Tensor:
    return torch.nn.functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """x [T, heads, size] with features (i, i + size / 2) rotated by position × theta ** (-2 i / size)."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None].double() * theta ** -(torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))


def causal(size: int, prefix: int = 0) -> Tensor:
    """A mask [T, T]: a token attends to earlier tokens, and to the whole prefix."""
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    seen[:, :prefix] = True
    return seen


def published_slopes(num_heads: int) -> Tensor:
    """ALiBi slopes as in the published code, which is recursive for a number of heads that is not a power of two."""

    def power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(num_heads).is_integer():
        return torch.tensor(power(num_heads), dtype=torch.float64)
    closest = 2 ** math.floor(math.log2(num_heads))
    extra = published_slopes(2 * closest)[0::2][: num_heads - closest]
    return torch.cat((torch.tensor(power(closest), dtype=torch.float64), extra))


def baichuan_13b(w: Tensors, heads: int, layers: int, eps: float, unit_head: bool) -> Callable[[list[int], int], Tensor]:
    """Baichuan-13B: Llama with ALiBi instead of rotary embeddings. `unit_head`: rows of the head are normalized, as in Baichuan 2."""
    w = {k: t.double() for k, t in w.items()}

    def run(ids: list[int], num_prompt: int) -> Tensor:
        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        where = torch.arange(len(ids)).double()
        bias = published_slopes(heads)[:, None, None] * where[None, None, :]
        for i in range(layers):
            p = f"model.layers.{i}"
            q, k, v = linear(rms(x, w[f"{p}.input_layernorm.weight"], eps), w, f"{p}.self_attn.W_pack").chunk(3, -1)
            q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
            x = x + linear(plain_attention(q, k, v, causal(len(ids)), bias), w, f"{p}.self_attn.o_proj")
            y = rms(x, w[f"{p}.post_attention_layernorm.weight"], eps)
            gate = torch.nn.functional.silu(linear(y, w, f"{p}.mlp.gate_proj"))
            x = x + linear(gate * linear(y, w, f"{p}.mlp.up_proj"), w, f"{p}.mlp.down_proj")
        head = w["lm_head.weight"]
        head = head / head.norm(dim=-1, keepdim=True) if unit_head else head
        return rms(x, w["model.norm.weight"], eps) @ head.T

    return run


def qwen_1(w: Tensors, config: dict[str, Any], trained: int, total: int) -> Callable[[list[int], int], Tensor]:
    """Qwen 1 with log-n attention, and NTK scaling for sequences of `total` tokens (get_ntk_alpha of the published code)."""
    heads, layers, eps = config["num_attention_heads"], config["num_hidden_layers"], config["layer_norm_epsilon"]
    w = {k: t.double() for k, t in w.items()}

    def run(ids: list[int], num_prompt: int) -> Tensor:
        x = w["transformer.wte.weight"][torch.tensor(ids)]
        where = torch.arange(len(ids))
        size = x.shape[-1] // heads
        alpha = max(2 ** math.ceil(math.log(total / trained, 2) + 1) - 1, 1) if config["use_dynamic_ntk"] else 1
        theta = 10000.0 * alpha ** (size / (size - 2))
        logn = torch.tensor([math.log(i, trained) if i > trained else 1.0 for i in range(1, len(ids) + 1)], dtype=torch.float64)
        logn = logn if config["use_logn_attn"] else torch.ones_like(logn)
        for i in range(layers):
            p = f"transformer.h.{i}"
            q, k, v = linear(rms(x, w[f"{p}.ln_1.weight"], eps), w, f"{p}.attn.c_attn").chunk(3, -1)
            q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
            q, k = rotate(q, where, theta) * logn[:, None, None], rotate(k, where, theta)
            x = x + linear(plain_attention(q, k, v, causal(len(ids))), w, f"{p}.attn.c_proj")
            y = rms(x, w[f"{p}.ln_2.weight"], eps)
            x = x + linear(linear(y, w, f"{p}.mlp.w1") * torch.nn.functional.silu(linear(y, w, f"{p}.mlp.w2")), w, f"{p}.mlp.c_proj")
        return linear(rms(x, w["transformer.ln_f.weight"], eps), w, "lm_head")

    return run


def chatglm_1(w: Tensors, heads: int, layers: int, eps: float, start_id: int, mask_id: int) -> Callable[[list[int], int], Tensor]:
    """ChatGLM-6B: rotary embeddings on two axes, prefix mask, and a residual of √(2 × layers) times the normed input."""
    w = {k: t.double() for k, t in w.items()}

    def run(ids: list[int], num_prompt: int) -> Tensor:
        x = w["transformer.word_embeddings.weight"][torch.tensor(ids)]
        context, mask = ids.index(start_id), ids.index(mask_id)
        first = torch.tensor([*range(context), *[mask] * (len(ids) - context)])
        second = torch.tensor([*[0] * context, *range(1, len(ids) - context + 1)])
        seen, alpha = causal(len(ids), context), math.sqrt(2 * layers)

        def rotate_both(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((rotate(a, first), rotate(b, second)), -1)

        for i in range(layers):
            p = f"transformer.layers.{i}"
            normed = layer_norm(x, w, f"{p}.input_layernorm", eps)
            fused = linear(normed, w, f"{p}.attention.query_key_value").unflatten(-1, (heads, -1))
            q, k, v = fused.chunk(3, -1)
            mixed = plain_attention(rotate_both(q), rotate_both(k), v, seen)
            x = normed * alpha + linear(mixed, w, f"{p}.attention.dense")
            normed = layer_norm(x, w, f"{p}.post_attention_layernorm", eps)
            x = normed * alpha + linear(gelu_tanh(linear(normed, w, f"{p}.mlp.dense_h_to_4h")), w, f"{p}.mlp.dense_4h_to_h")
        return linear(layer_norm(x, w, "transformer.final_layernorm", eps), w, "lm_head")

    return run


def glm(w: Tensors, heads: int, layers: int, eps: float, start_id: int, mask_id: int) -> Callable[[list[int], int], Tensor]:
    """GLM-10B: GPT-2's block, learned positions on two axes, prefix mask, tied head."""
    w = {k: t.double() for k, t in w.items()}

    def run(ids: list[int], num_prompt: int) -> Tensor:
        context, mask = ids.index(start_id), ids.index(mask_id)
        first = torch.tensor([*range(context), *[mask] * (len(ids) - context)])
        second = torch.tensor([*[0] * context, *range(1, len(ids) - context + 1)])
        x = w["word_embeddings.weight"][torch.tensor(ids)]
        x = x + w["transformer.position_embeddings.weight"][first] + w["transformer.block_position_embeddings.weight"][second]
        for i in range(layers):
            p = f"transformer.layers.{i}"
            q, k, v = linear(layer_norm(x, w, f"{p}.input_layernorm", eps), w, f"{p}.attention.query_key_value").chunk(3, -1)
            q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
            x = x + linear(plain_attention(q, k, v, causal(len(ids), context)), w, f"{p}.attention.dense")
            y = layer_norm(x, w, f"{p}.post_attention_layernorm", eps)
            x = x + linear(gelu_tanh(linear(y, w, f"{p}.mlp.dense_h_to_4h")), w, f"{p}.mlp.dense_4h_to_h")
        return layer_norm(x, w, "transformer.final_layernorm", eps) @ w["word_embeddings.weight"].T

    return run
