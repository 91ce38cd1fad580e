"""The gated delta net block of Qwen3-Next: input projection, causal convolution, gated delta rule, gated norm, output projection."""

from __future__ import annotations

from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import DeltaNetConfig
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, DeltaParams
from stoker.layers.linear import linear_all_reduce
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm


class DeltaNet:
    """Ranks divide the value heads, and with them the heads of queries and keys."""

    def __init__(self, config: DeltaNetConfig, loader: Loader, name: str, hidden: int) -> None:
        self.config = config
        weights = loader.load(self.specs(config, name, hidden))
        self.project, self.gates, self.out, self.conv = weights["in"], weights["gates"], weights["out"], weights["conv"]
        self.norm_weight: Tensor = weights["norm"]
        self.params = DeltaParams(-weights["a_log"].exp(), weights["dt_bias"])
        self.group, size = loader.group, loader.sharding.size
        self.num_heads = config.num_heads // size
        self.key_heads = max(config.key_heads // size, 1)

    @staticmethod
    def specs(config: DeltaNetConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of all weights of the block. The input projection has the parts q, k, v and output gate.

        `gates` has the parts beta and time step. It is not quantized: it is small, and its errors accumulate in the state.
        """
        heads, key_heads = config.num_heads, config.key_heads
        keys, values = key_heads * config.key_size, heads * config.value_size
        return {
            "in": LinearSpec(
                name=f"{name}.in", in_features=hidden, parts=(keys, keys, values, values), split="heads",
                head_size=config.value_size, part_heads=(key_heads, key_heads, heads, heads),
            ),
            "gates": LinearSpec(
                name=f"{name}.gates", in_features=hidden, parts=(heads, heads), split="heads", head_size=1, part_heads=(heads, heads),
                quantize=False,
            ),
            "out": LinearSpec(
                name=f"{name}.out", in_features=values, parts=(hidden,), split="row_heads", head_size=config.value_size
            ),
            "conv": TensorSpec(
                name=f"{name}.conv.weight", shape=(config.local_channels(), config.kernel), split="kv_heads", parts=(keys, keys, values),
                part_heads=(key_heads, key_heads, heads),
            ),
            "a_log": TensorSpec(name=f"{name}.a_log", shape=(heads,), split="kv_heads", dtype="float32"),
            "dt_bias": TensorSpec(name=f"{name}.dt_bias", shape=(heads,), split="kv_heads", dtype="float32"),
            "norm": TensorSpec(name=f"{name}.norm.weight", shape=(config.value_size,)),
        }  # fmt: skip

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """delta_net(norm(x)) + residual, [T, hidden], summed over ranks. Replaces the states of the step's rows in `cache`."""
        config, state = self.config, cache.state
        assert state is not None
        heads, key_heads = self.num_heads, self.key_heads
        keys, values = key_heads * config.key_size, heads * config.value_size
        fusion = PLAIN if norm is None else norm.fusion
        inputs, gate = self.project(x, fusion).split_with_sizes((2 * keys + values, values), dim=-1)
        beta, dt = self.gates(x, fusion).chunk(2, dim=-1)
        convolved = ops.causal_conv(inputs, self.conv, None, state.conv, batch, config.activation)
        q, k, v = convolved.split_with_sizes((keys, keys, values), dim=-1)
        q, k, v = q.unflatten(-1, (key_heads, -1)), k.unflatten(-1, (key_heads, -1)), v.unflatten(-1, (heads, -1))
        out = ops.delta_rule(q, k, v, dt, beta, self.params, state.recurrent, batch)
        gated = ops.gated_norm(out.flatten(1), gate, self.norm_weight, config.norm.eps, heads, gate_first=False)
        return linear_all_reduce(self.out, gated, self.group, residual)
