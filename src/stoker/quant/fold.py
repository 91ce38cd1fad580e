"""Where a scaling of a linear's input can be undone for nothing: in the norm before it, or in the rows of the linear before it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, MoEConfig
from stoker.quant.stats import InputStats

_NORM_BEFORE = ("pre", "sandwich")  # layouts whose norm feeds one block and nothing else


@dataclass(frozen=True, slots=True)
class Fold:
    """`consumers` read the same input; dividing it by factors [in] is done in `norm`'s weight and bias, or in rows of `linear`."""

    consumers: tuple[str, ...]  # linears that a format may own; the first one's format chooses the factors
    plain: tuple[str, ...] = ()  # other weights that read the input: routers
    norm: str = ""
    linear: str = ""
    rows: tuple[int, int] = (0, 0)  # of `linear` that make the input
    repeats: int = 1  # query heads that read one value head: they share factors
    head_size: int = 1


def folds(layer: LayerConfig, name: str) -> list[Fold]:
    """The folds of a layer, in the order to apply them: a linear's rows are scaled before its columns."""
    return [*_attention(layer, f"{name}.attention"), *_mlp(layer, f"{name}.mlp"), *_norms(layer, name)]


def _attention(layer: LayerConfig, name: str) -> list[Fold]:
    attention = layer.attention
    if not isinstance(attention, AttentionConfig) or attention.clip_qkv is not None:
        return []
    size = attention.head_size
    first, kv = (attention.num_heads + attention.num_kv_heads) * size, attention.num_kv_heads * size
    repeats = attention.num_heads // attention.num_kv_heads
    return [Fold((f"{name}.out",), linear=f"{name}.qkv", rows=(first, first + kv), repeats=repeats, head_size=size)]


def _mlp(layer: LayerConfig, name: str) -> list[Fold]:
    mlp = layer.mlp
    if isinstance(mlp, MLPConfig):
        return _down(mlp, name)
    shared = _down(mlp.shared, f"{name}.shared") if mlp.shared is not None else []
    return shared if mlp.glu_clip is not None else [*shared, *_down(mlp.expert, f"{name}.experts")]


def _down(mlp: MLPConfig, name: str) -> list[Fold]:
    """act(gate) × up is linear in up; relu(up) scales with up; other activations are neither."""
    if not mlp.gated and mlp.activation != "relu":
        return []
    first = mlp.size if mlp.gated else 0
    return [Fold((f"{name}.down",), linear=f"{name}.up", rows=(first, first + mlp.size))]


def _norms(layer: LayerConfig, name: str) -> list[Fold]:
    separate = layer.layout in _NORM_BEFORE or (layer.layout == "parallel" and layer.parallel_norms == 2)
    if not layer.norm.weight or not (separate or layer.layout == "parallel"):
        return []
    attention = f"{name}.attention.{'qkv' if isinstance(layer.attention, AttentionConfig) else 'down'}"
    up, plain = _mlp_inputs(layer, f"{name}.mlp")
    if not separate:
        return [Fold((attention, *up), plain, norm=f"{name}.attention_norm")]
    return [Fold((attention,), norm=f"{name}.attention_norm"), Fold(up, plain, norm=f"{name}.mlp_norm")]


def _mlp_inputs(layer: LayerConfig, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    mlp = layer.mlp
    if not isinstance(mlp, MoEConfig):
        return (f"{name}.up",), ()
    shared = (f"{name}.shared.up",) if mlp.shared is not None else ()
    return (f"{name}.experts.up", *shared), (f"{name}.router.weight", *((f"{name}.shared_gate.weight",) if mlp.shared_gate else ()))


def tied(stats: InputStats, fold: Fold) -> InputStats:
    """The statistics with those of features that share a factor made equal."""
    if fold.repeats == 1:
        return stats
    return InputStats(stats.gram, _each(stats.sum_abs, fold, "mean"), _each(stats.amax, fold, "max"), stats.sample, stats.count)


def _each(values: Tensor, fold: Fold, how: str) -> Tensor:
    heads = values.view(-1, fold.repeats, fold.head_size)
    one = heads.mean(1, keepdim=True) if how == "mean" else heads.amax(1, keepdim=True)
    return one.expand_as(heads).reshape(-1)


def apply(fold: Fold, factors: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Scale `weights` (by full engine name) in place. Returns the factors [in] that were used: equal where features share them."""
    factors = _each(factors.log(), fold, "mean").exp() if fold.repeats > 1 else factors
    for name in (*(f"{consumer}.weight" for consumer in fold.consumers), *fold.plain):
        weights[name].mul_(factors.to(weights[name].dtype))
    if fold.norm:
        for suffix in ("weight", "bias"):
            if (tensor := weights.get(f"{fold.norm}.{suffix}")) is not None:
                tensor.div_(factors.to(tensor.dtype))
        return factors
    made = factors.view(-1, fold.repeats, fold.head_size)[:, 0].reshape(-1)  # one a row of the linear
    start, stop = fold.rows
    weight, bias = weights[f"{fold.linear}.weight"], weights.get(f"{fold.linear}.bias")
    weight[..., start:stop, :] /= made[:, None].to(weight.dtype)
    if bias is not None:
        bias[..., start:stop] /= made.to(bias.dtype)
    return factors
