"""The layer of Gemma 3n, and the streams between its layers: AltUp, LAuReL and per-layer inputs (`AltUpConfig`).

Between layers, the hidden state of a token has `ModelConfig.stream_width` features: the n streams of `hidden` features each, and then the
inputs of all layers, that of the next layer first. Each layer moves its own input to the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.model_config import AltUpConfig, LayerConfig, ModelConfig, NormConfig
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.kernels import ops
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm
from stoker.layers.vocabulary import Embedding

_MIN_SQUARE = 1e-5  # smallest mean square of a projected stream


def _linear(name: str, features: int, *rows: int) -> LinearSpec:
    """The spec of a small linear, which all ranks hold and which is not quantized."""
    return LinearSpec(name=name, in_features=features, parts=rows, quantize=False)


class AltUpLayer:
    """What a layer has beside the blocks of a sandwich layer.

    With the streams s [n, hidden], the active stream a, and the layer f with its attention and MLP:

        p = s + P(s[a]) s                  # predicted streams; P [n, n] depends on the token
        y = f(p[a])                        # attention beside LAuReL, then the MLP
        c = p + (1 + C(y)) (y - p[a])      # corrected streams; C [n] depends on the token
        c[1:] += norm(W (act(G (scale c[a])) × input))
    """

    def __init__(self, config: AltUpConfig, norm: NormConfig, loader: Loader, name: str, hidden: int) -> None:
        self.config, self.hidden = config, hidden
        weights = loader.load(self.specs(config, norm, name, hidden))
        self.router, self.predict, self.correct = weights["router"], weights["predict"], weights["correct"]
        self.left, self.right = weights["left"], weights["right"]
        self.gate, self.project, self.scale = weights["gate"], weights["project"], weights.get("scale")
        self.router_norm, self.laurel_norm, self.input_norm = (
            Norm(norm, loader, f"{name}.{kind}", hidden) for kind in ("altup.router_norm", "laurel.norm", "input.norm")
        )

    @staticmethod
    def specs(config: AltUpConfig, norm: NormConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of the weights without the norms. Keys are the attributes that load them."""
        n = config.num_streams
        specs: dict[str, Spec] = {
            "router": _linear(f"{name}.altup.router", hidden, n),
            "predict": TensorSpec(name=f"{name}.altup.predict.weight", shape=(n * n, n)),
            "correct": TensorSpec(name=f"{name}.altup.correct.weight", shape=(n, n)),
            "left": _linear(f"{name}.laurel.left", hidden, config.laurel_rank),
            "right": _linear(f"{name}.laurel.right", config.laurel_rank, hidden),
            "gate": _linear(f"{name}.input.gate", hidden, config.input_size),
            "project": _linear(f"{name}.input.project", config.input_size, hidden),
        }
        if config.scale_corrected:
            specs["scale"] = TensorSpec(name=f"{name}.altup.scale", shape=(hidden,))
        return specs

    @staticmethod
    def all_specs(config: AltUpConfig, norm: NormConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of all weights, including the norms."""
        specs = AltUpLayer.specs(config, norm, name, hidden)
        for kind in ("altup.router_norm", "laurel.norm", "input.norm"):
            specs |= {f"{kind}.{key}": spec for key, spec in Norm.specs(norm, f"{name}.{kind}", hidden).items()}
        return specs

    def predict_streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(predicted streams [T, n, hidden], inputs of the layers [T, inputs_width]) from the hidden states [T, stream_width]."""
        n = self.config.num_streams
        streams, inputs = x.split_with_sizes((n * self.hidden, self.config.inputs_width), dim=-1)
        streams = streams.unflatten(-1, (n, self.hidden))
        coefficients = F.linear(self._modalities(streams[:, self.config.active].contiguous()), self.predict)
        return torch.baddbmm(streams, coefficients.unflatten(-1, (n, n)), streams), inputs

    def laurel(self, x: Tensor) -> Tensor:
        """x + norm(right(left(x))), [T, hidden]."""
        return x + self.laurel_norm(self.right(self.left(x)))

    def correct_streams(self, predicted: Tensor, computed: Tensor, inputs: Tensor) -> Tensor:
        """The hidden states [T, stream_width] after the layer, which has computed the active stream [T, hidden]."""
        config = self.config
        innovation = computed - predicted[:, config.active]
        coefficients = F.linear(self._modalities(computed), self.correct) + 1
        corrected = predicted + coefficients.unsqueeze(-1) * innovation.unsqueeze(1)
        active = corrected[:, config.active]
        active = active.contiguous() if self.scale is None else active * self.scale
        own, others = inputs.split_with_sizes((config.input_size, config.inputs_width - config.input_size), dim=-1)
        added = self.input_norm(self.project(ops.activate(self.gate(active), config.input_activation) * own))
        corrected[:, 1:] += added.unsqueeze(1)
        return torch.cat((corrected.flatten(1), others, own), dim=-1)

    def _modalities(self, x: Tensor) -> Tensor:
        """[T, n]: the features of the stream x [T, hidden] on which the coefficients depend."""
        return torch.tanh(self.router(self.router_norm(x) * self.hidden**-1.0).float()).to(x.dtype)


def altup_layer_specs(layer: LayerConfig, name: str, hidden: int) -> list[Spec]:
    """The specs of the weights that a layer has for AltUp; empty for other layouts."""
    return [] if layer.altup is None else [*AltUpLayer.all_specs(layer.altup, layer.norm, name, hidden).values()]


class StreamExpansion:
    """Makes the streams and the inputs of all layers from the embeddings, before the first layer.

    Streams after the first are projections of the embedding, scaled to its root mean square. The inputs are (E[token] + norm(W x)) / √2.
    """

    def __init__(self, config: ModelConfig, altup: AltUpConfig, loader: Loader) -> None:
        self.config, self.hidden = altup, config.hidden_size
        linears = self.linears(config, altup)
        weights = loader.load({**linears})
        self.embed = Embedding(weights["embed"], linears["embed"], loader)
        self.streams, self.inputs = weights["streams"], weights["inputs"]
        self.norm = Norm(_inputs_norm(config), loader, "layer_inputs.norm", altup.input_size)

    @staticmethod
    def linears(config: ModelConfig, altup: AltUpConfig) -> dict[str, LinearSpec]:
        """The specs of the table of inputs and of the linears. Keys are the attributes that load them."""
        hidden, width = config.hidden_size, altup.inputs_width
        return {
            "streams": _linear("altup.expand", hidden, *(hidden,) * (altup.num_streams - 1)),
            "embed": LinearSpec(name="layer_inputs.embed", in_features=width, parts=(altup.input_vocab,), split="vocab", quantize=False),
            "inputs": _linear("layer_inputs.project", hidden, width),
        }

    @staticmethod
    def specs(config: ModelConfig, altup: AltUpConfig) -> dict[str, Spec]:
        """The specs of all weights, by name."""
        linears, norm = StreamExpansion.linears(config, altup), _inputs_norm(config)
        return {spec.name: spec for spec in (*linears.values(), *Norm.specs(norm, "layer_inputs.norm", altup.input_size).values())}

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """The hidden states [T, stream_width] before the first layer, from the embeddings x [T, hidden] of `token_ids` [T]."""
        altup, size = self.config, self.config.input_size
        ids = torch.where(token_ids < altup.input_vocab, token_ids, 0)
        # Scales are rounded to the model's dtype first, as the reference implementation does.
        embedded = self.embed(ids, x.dtype) * torch.tensor(size**0.5, dtype=x.dtype).item()
        projected = (self.inputs(x) * torch.tensor(self.hidden**-0.5, dtype=x.dtype).item()).unflatten(-1, (-1, size))
        inputs = (self.norm(projected).flatten(1) + embedded) * torch.tensor(0.5**0.5, dtype=x.dtype).item()
        others = self.streams(x).unflatten(-1, (-1, self.hidden))
        return torch.cat((x, _with_magnitude(others, x.unsqueeze(1)).flatten(1), inputs), dim=-1)


class StreamMerge:
    """Makes the output of the last layer from the streams: their mean, after those behind the first are projected and scaled."""

    def __init__(self, config: ModelConfig, altup: AltUpConfig, loader: Loader) -> None:
        self.config, self.hidden = altup, config.hidden_size
        self.linears = [*loader.load(self.specs(config, altup)).values()]

    @staticmethod
    def specs(config: ModelConfig, altup: AltUpConfig) -> dict[str, Spec]:
        """The specs of all weights, by name."""
        hidden = config.hidden_size
        names = [f"altup.merge.{i}" for i in range(altup.num_streams - 1)]
        return {name: _linear(name, hidden, hidden) for name in names}

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] from the hidden states [T, stream_width]."""
        first, *others = x[:, : self.config.num_streams * self.hidden].split(self.hidden, dim=-1)
        projected = [linear(other.contiguous()) for linear, other in zip(self.linears, others, strict=True)]
        return torch.stack([first, *(_with_magnitude(each, first) for each in projected)]).mean(0)


def _inputs_norm(config: ModelConfig) -> NormConfig:
    """The norm of the projected inputs of each layer, which has the settings of the final norm."""
    assert config.norm is not None
    return config.norm


def _with_magnitude(x: Tensor, target: Tensor) -> Tensor:
    """x [..., hidden] scaled to the root mean square of `target`."""
    return x * target.square().mean(-1, keepdim=True).sqrt() / x.square().mean(-1, keepdim=True).clamp(min=_MIN_SQUARE).sqrt()
