"""Scale folding: the places where the input of a linear can be divided by factors in a preceding norm or linear, at no cost at run time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker.core.model_config import AttentionConfig, DeltaNetConfig, LayerConfig, MLPConfig, MoEConfig
from stoker.quant.calibration.input_stats import InputStats

_NORM_BEFORE = ("pre", "sandwich", "single")  # layouts in which a norm is the input of one block only


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """One input that can be divided by factors [in], and the linears (`consumers`) whose columns are then multiplied by them.

    The division is done in the weight and bias of `norm`, or in `rows` of `linear`.
    """

    consumers: tuple[str, ...]  # linears that may be quantized. The format of the first one chooses the factors
    plain: tuple[str, ...] = ()  # other weights that multiply the input: routers
    norm: str = ""
    linear: str = ""
    rows: tuple[int, int] = (0, 0)  # the rows of `linear` that compute the input
    repeats: int = 1  # query heads for each value head, which share factors
    head_size: int = 1


def scale_folds(layer: LayerConfig, name: str) -> list[ScaleFold]:
    """The folds of a layer in the order in which they are applied: the rows of a linear are scaled before its columns."""
    return [*_attention(layer, f"{name}.attention"), *_mlp(layer, f"{name}.mlp"), *_norms(layer, name)]


def _attention(layer: LayerConfig, name: str) -> list[ScaleFold]:
    """The fold of the output projection's input into the value rows of the QKV linear."""
    attention = layer.attention
    if not isinstance(attention, AttentionConfig) or attention.clip_qkv is not None:
        return []
    if attention.v_norm is not None or attention.kv_layer is not None:  # factors of values have no effect, or are those of another layer
        return []
    size = attention.head_size
    first, kv = (attention.num_heads + attention.num_kv_heads) * size, attention.num_kv_heads * size
    repeats = attention.num_heads // attention.num_kv_heads
    return [ScaleFold((f"{name}.out",), linear=f"{name}.qkv", rows=(first, first + kv), repeats=repeats, head_size=size)]


def _mlp(layer: LayerConfig, name: str) -> list[ScaleFold]:
    """The folds of the inputs of an MLP's `down` linears."""
    mlp = layer.mlp
    if mlp is None:
        return []
    if isinstance(mlp, MLPConfig):
        return _down(mlp, name)
    shared = _down(mlp.shared, f"{name}.shared") if mlp.shared is not None else []
    return shared if mlp.glu_clip is not None else [*shared, *_down(mlp.expert, f"{name}.experts")]


def _down(mlp: MLPConfig, name: str) -> list[ScaleFold]:
    """The fold of the input of `down` into the rows of `up`, if the activation permits it.

    act(gate) × up is linear in up, and relu(up) is proportional to positive factors of up. Other activations permit no fold.
    """
    if not mlp.gated and mlp.activation != "relu":
        return []
    first = mlp.size if mlp.gated else 0
    return [ScaleFold((f"{name}.down",), linear=f"{name}.up", rows=(first, first + mlp.size))]


def _norms(layer: LayerConfig, name: str) -> list[ScaleFold]:
    """The folds of the inputs of attention and MLP into the norms before them."""
    separate = layer.layout in _NORM_BEFORE or (layer.layout == "parallel" and layer.parallel_norms == 2)
    if not layer.norm.weight or not (separate or layer.layout == "parallel"):
        return []
    attention = _attention_inputs(layer, name)
    up, plain = _mlp_inputs(layer, f"{name}.mlp")
    if not separate:
        return [ScaleFold((*attention, *up), plain, norm=f"{name}.attention_norm")]
    gates = (f"{name}.state.gates.weight",) if isinstance(layer.state, DeltaNetConfig) else ()
    first = ScaleFold(attention, gates, norm=f"{name}.attention_norm")
    return [first] if layer.mlp is None else [first, ScaleFold(up, plain, norm=f"{name}.mlp_norm")]


def _attention_inputs(layer: LayerConfig, name: str) -> tuple[str, ...]:
    """The names of linears that read the input of attention, and of the block with a state."""
    attention, names = layer.attention, []
    if attention is not None:
        names.append(f"{name}.attention.{'qkv' if isinstance(attention, AttentionConfig) else 'down'}")
        if isinstance(attention, AttentionConfig) and attention.out_gate:
            names.append(f"{name}.attention.gate")
    if layer.state is not None:
        names.append(f"{name}.state.in")
    return tuple(names)


def _mlp_inputs(layer: LayerConfig, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of linears, names of unquantized weights) that read the input of the MLP."""
    mlp = layer.mlp
    if not isinstance(mlp, MoEConfig):
        return (f"{name}.up",), ()
    shared = (f"{name}.shared.up",) if mlp.shared is not None else ()
    return (f"{name}.experts.up", *shared), (f"{name}.router.weight", *((f"{name}.shared_gate.weight",) if mlp.shared_gate else ()))


def tie_features(stats: InputStats, fold: ScaleFold) -> InputStats:
    """The statistics with equal values for features that must share a factor: those of query heads with the same KV head."""
    if fold.repeats == 1:
        return stats
    return InputStats(stats.gram, _tied(stats.sum_abs, fold, "mean"), _tied(stats.amax, fold, "max"), stats.sample, stats.count)


def _tied(values: Tensor, fold: ScaleFold, reduction: str) -> Tensor:
    """`values` [in], in which features that share a factor have their mean or maximum."""
    heads = values.view(-1, fold.repeats, fold.head_size)
    reduced = heads.mean(1, keepdim=True) if reduction == "mean" else heads.amax(1, keepdim=True)
    return reduced.expand_as(heads).reshape(-1)


def fold_factors(fold: ScaleFold, factors: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Apply a fold with the factors [in] to `weights`, whose keys are full engine names, in place.

    Returns the factors that were used, which are equal for features that share a factor.
    """
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
