"""Scale folding: where the input of a linear can be divided by factors without cost, in the norm or in the rows of the linear before it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, MoEConfig
from stoker.quant.calibration.input_stats import InputStats

_NORM_BEFORE = ("pre", "sandwich")  # layouts in which a norm is the input of one block only


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """An input that `consumers` share. Dividing it by factors [in] is done in the weight and bias of `norm`, or in rows of `linear`."""

    consumers: tuple[str, ...]  # linears that may be quantized. The format of the first one chooses the factors
    plain: tuple[str, ...] = ()  # other weights that multiply the input: routers
    norm: str = ""
    linear: str = ""
    rows: tuple[int, int] = (0, 0)  # the rows of `linear` that compute the input
    repeats: int = 1  # query heads for each value head, which share factors
    head_size: int = 1


def scale_folds(layer: LayerConfig, name: str) -> list[ScaleFold]:
    """The folds of a layer, in the order in which they are applied: the rows of a linear are scaled before its columns."""
    return [*_attention(layer, f"{name}.attention"), *_mlp(layer, f"{name}.mlp"), *_norms(layer, name)]


def _attention(layer: LayerConfig, name: str) -> list[ScaleFold]:
    attention = layer.attention
    if not isinstance(attention, AttentionConfig) or attention.clip_qkv is not None:
        return []
    size = attention.head_size
    first, kv = (attention.num_heads + attention.num_kv_heads) * size, attention.num_kv_heads * size
    repeats = attention.num_heads // attention.num_kv_heads
    return [ScaleFold((f"{name}.out",), linear=f"{name}.qkv", rows=(first, first + kv), repeats=repeats, head_size=size)]


def _mlp(layer: LayerConfig, name: str) -> list[ScaleFold]:
    mlp = layer.mlp
    if isinstance(mlp, MLPConfig):
        return _down(mlp, name)
    shared = _down(mlp.shared, f"{name}.shared") if mlp.shared is not None else []
    return shared if mlp.glu_clip is not None else [*shared, *_down(mlp.expert, f"{name}.experts")]


def _down(mlp: MLPConfig, name: str) -> list[ScaleFold]:
    """act(gate) × up is linear in up, and relu(up) is proportional to positive factors of up. Other activations are neither."""
    if not mlp.gated and mlp.activation != "relu":
        return []
    first = mlp.size if mlp.gated else 0
    return [ScaleFold((f"{name}.down",), linear=f"{name}.up", rows=(first, first + mlp.size))]


def _norms(layer: LayerConfig, name: str) -> list[ScaleFold]:
    separate = layer.layout in _NORM_BEFORE or (layer.layout == "parallel" and layer.parallel_norms == 2)
    if not layer.norm.weight or not (separate or layer.layout == "parallel"):
        return []
    attention = f"{name}.attention.{'qkv' if isinstance(layer.attention, AttentionConfig) else 'down'}"
    up, plain = _mlp_inputs(layer, f"{name}.mlp")
    if not separate:
        return [ScaleFold((attention, *up), plain, norm=f"{name}.attention_norm")]
    return [ScaleFold((attention,), norm=f"{name}.attention_norm"), ScaleFold(up, plain, norm=f"{name}.mlp_norm")]


def _mlp_inputs(layer: LayerConfig, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    mlp = layer.mlp
    if not isinstance(mlp, MoEConfig):
        return (f"{name}.up",), ()
    shared = (f"{name}.shared.up",) if mlp.shared is not None else ()
    return (f"{name}.experts.up", *shared), (f"{name}.router.weight", *((f"{name}.shared_gate.weight",) if mlp.shared_gate else ()))


def tie_features(stats: InputStats, fold: ScaleFold) -> InputStats:
    """The statistics in which features that share a factor are equal."""
    if fold.repeats == 1:
        return stats
    return InputStats(stats.gram, _tied(stats.sum_abs, fold, "mean"), _tied(stats.amax, fold, "max"), stats.sample, stats.count)


def _tied(values: Tensor, fold: ScaleFold, reduction: str) -> Tensor:
    heads = values.view(-1, fold.repeats, fold.head_size)
    reduced = heads.mean(1, keepdim=True) if reduction == "mean" else heads.amax(1, keepdim=True)
    return reduced.expand_as(heads).reshape(-1)


def fold_factors(fold: ScaleFold, factors: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Apply factors [in] to `weights`, which have full engine names, in place. Returns the factors used: equal for tied features."""
    factors = _tied(factors.log(), fold, "mean").exp() if fold.repeats > 1 else factors
    for name in (*(f"{consumer}.weight" for consumer in fold.consumers), *fold.plain):
        weights[name].mul_(factors.to(weights[name].dtype))
    if fold.norm:
        for suffix in ("weight", "bias"):
            if (tensor := weights.get(f"{fold.norm}.{suffix}")) is not None:
                tensor.div_(factors.to(tensor.dtype))
        return factors
    row_factors = factors.view(-1, fold.repeats, fold.head_size)[:, 0].reshape(-1)
    start, stop = fold.rows
    weight, bias = weights[f"{fold.linear}.weight"], weights.get(f"{fold.linear}.bias")
    weight[..., start:stop, :] /= row_factors[:, None].to(weight.dtype)
    if bias is not None:
        bias[..., start:stop] /= row_factors.to(bias.dtype)
    return factors
