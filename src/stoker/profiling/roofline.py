"""The theoretical floor of the products and of attention in a step: bytes to read and operations to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stoker.core.model_config import AttentionConfig, ModelConfig
from stoker.core.packed_weight import PackedWeight
from stoker.kernels import ops
from stoker.kernels.tuning.table import Ceiling
from stoker.layers.decoder import kv_width
from stoker.runtime.worker.inputs import Shape
from stoker.runtime.worker.model_runner import ModelRunner

LINEARS = ("linear", "packed_linear")
EXPERTS = ("expert_up", "expert_down")
ROUTER = "route_tokens"  # on a GPU. Elsewhere the router is a linear
# Of the observed step. They differ, to distinguish products over all tokens from those over sampled rows. The fused layer kernel does not
# support as many tokens on tensor-parallel ranks: it would exchange data with other ranks, and an observed rank calls its linears instead.
_TOKENS, _ROWS = 9, 2


@dataclass(frozen=True, slots=True)
class Work:
    """The smallest number of bytes that are read and written, and of operations, for some result."""

    bytes: float = 0.0
    flops: float = 0.0
    operand: int = 2  # bytes of an element of the multiplied operands

    def seconds(self, limit: Ceiling) -> float:
        """The theoretical floor in seconds on hardware with these ceilings.

        Memory accesses and arithmetic overlap, so the longer one counts.
        """
        return max(self.bytes / limit.bytes_per_s, self.flops / limit.flops_per_s.get(self.operand, limit.flops_per_s[2]))


@dataclass(frozen=True, slots=True)
class StepSize:
    """The sizes that determine the work of a step."""

    tokens: int
    rows: int  # rows with logits
    keys: int  # sum over rows of the keys that they attend to
    pairs: int  # sum over tokens of the keys that they attend to


@dataclass(frozen=True, slots=True)
class Product:
    """One linear, or one projection of all experts, in a step."""

    label: str
    weight_bytes: int  # of all experts
    params: int  # of one expert
    row_bytes: int  # input and output of one row
    of_rows: bool  # over the rows with logits; otherwise over all tokens
    operand: int
    num_experts: int = 1
    top_k: int = 1

    def work(self, step: StepSize) -> Work:
        """The work of the product in a step of this size. With several experts, the weights of those that are probably chosen are read."""
        rows = (step.rows if self.of_rows else step.tokens) * self.top_k
        read = 1.0 if self.num_experts == 1 else 1.0 - (1.0 - 1.0 / self.num_experts) ** rows
        return Work(self.weight_bytes * read + rows * self.row_bytes, 2.0 * rows * self.params, self.operand)


def products_of(runner: ModelRunner) -> list[Product]:
    """The products of one step of `runner`'s model on its rank, in order. Every rank must call it, because it runs a dummy step."""
    products: list[Product] = []

    def observe(name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record an op if it is a product."""
        if name in LINEARS or name in EXPERTS:
            products.append(_product(name, args[0], args[1:], result))
        elif name == ROUTER:
            products.append(_router(*args[:2]))

    with ops.observe_ops(observe):
        runner.run_dummy_step(Shape(_TOKENS, _ROWS, is_decode=False))
    return products


def attention_work(model: ModelConfig, layers: range, tensor_parallel: int, itemsize: int, step: StepSize) -> Work:
    """The work of attention in one step: each row's keys and values are read once per layer, and each pair has two products.

    Attention windows are ignored. `itemsize` is the size of a cached value in bytes.
    """
    size = sum(kv_width(model, model.kv_layer(layer), tensor_parallel) for layer in layers) * itemsize
    return Work(step.keys * size, sum(_pair_flops(model, layer) for layer in layers) / tensor_parallel * step.pairs)


def _pair_flops(model: ModelConfig, layer: int) -> float:
    """The number of operations of attention for one pair of query and key, over all heads of a layer."""
    attention = model.layers[layer].attention
    if attention is None:
        return 0.0
    if isinstance(attention, AttentionConfig):
        return 4.0 * attention.num_heads * attention.head_size
    return 2.0 * attention.num_heads * (2 * attention.kv_rank + attention.rope_size)


def _router(x: Tensor, weight: Tensor) -> Product:
    """The product of a router: tokens x are widened to the float32 of `weight`, in which the logits are stored, too."""
    outs, features = weight.shape
    row_bytes = features * x.element_size() + outs * weight.element_size()
    label = f"linear {outs} × {features}"
    return Product(label, weight.nbytes, weight.numel(), row_bytes, x.shape[0] == _ROWS, weight.element_size())


def _product(name: str, x: Tensor, args: tuple[Any, ...], result: Tensor) -> Product:
    """The product that an op computes, from its arguments and result."""
    weight = args[0] if isinstance(args[0], PackedWeight) else PackedWeight("dense", args[0])
    outs, features = weight.out_features, weight.in_features
    row_bytes = (x.shape[-1] * x.element_size()) + result.shape[-1] * result.element_size()
    operand = 1 if weight.activations != "none" else x.element_size()
    if name not in EXPERTS:
        label = f"{'linear' if weight.format == 'dense' else weight.format + '_linear'} {outs} × {features}"
        return Product(label, weight.num_bytes, outs * features, row_bytes, x.shape[0] == _ROWS, operand)
    experts, top_k = weight.num_experts, args[1].top_k
    label = f"{name} {experts} of {outs} × {features}"
    return Product(label, weight.num_bytes, outs * features, row_bytes, False, operand, experts, top_k)
