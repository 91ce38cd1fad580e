"""The mixture-of-experts block: a router, routed experts, and a shared expert."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker.core.model_config import MoEConfig
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.distributed.group import SINGLE, Group
from stoker.kernels import ops
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.types import PLAIN, ClippedGate, Gate
from stoker.layers.loader import Loader
from stoker.layers.mlp import MLP
from stoker.layers.norm import Norm


class MoE:
    """The sum over a token's chosen experts of weight × expert(x), plus the shared expert.

    Ranks hold a shard of every expert, or whole experts with expert parallelism. In both cases their results are summed. Data-parallel
    ranks gather the tokens of all first, and each computes the shared expert for its own tokens.
    """

    def __init__(self, config: MoEConfig, loader: Loader, name: str, hidden: int) -> None:
        self.config = config
        weights = loader.load(self.specs(config, name, hidden))
        self.router, self.router_bias, self.correction = weights["router"], weights.get("router_bias"), weights.get("correction")
        self.up, self.down = weights["up"], weights["down"]
        self.shared = MLP(config.shared, loader, f"{name}.shared", hidden) if config.shared is not None else None
        self.shared_gate = weights.get("shared_gate")
        self.group, self.dispatch = loader.group, loader.dispatch
        self._offset_indices = self._local_offset_indices(loader)
        self.gate = self._gate(config)
        self.params = RoutingParams(
            top_k=config.top_k,
            score=config.score,
            renormalize=config.renormalize,
            scale=config.scale,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            jitter=config.jitter,
            group_score=config.group_score,
        )

    @staticmethod
    def specs(config: MoEConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of the router and the routed experts, without the shared expert."""
        count, expert = config.num_experts, config.expert
        parts = (expert.size, expert.size) if expert.gated else (expert.size,)
        specs: dict[str, Spec] = {
            "router": TensorSpec(name=f"{name}.router.weight", shape=(count, hidden), dtype="float32"),
            "up": LinearSpec(
                name=f"{name}.experts.up", in_features=hidden, parts=parts, bias=expert.up_bias, split="column", num_experts=count
            ),
            "down": LinearSpec(
                name=f"{name}.experts.down", in_features=expert.size, parts=(hidden,), bias=expert.down_bias, split="row", num_experts=count
            ),
        }
        if config.router_bias:
            specs["router_bias"] = TensorSpec(name=f"{name}.router.bias", shape=(count,), dtype="float32")
        if config.correction_bias:
            specs["correction"] = TensorSpec(name=f"{name}.correction", shape=(count,), dtype="float32")
        if config.shared_gate:
            specs["shared_gate"] = LinearSpec(name=f"{name}.shared_gate", in_features=hidden, parts=(1,), quantize=False)
        return specs

    @staticmethod
    def all_specs(config: MoEConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of all weights of the block, including the shared expert."""
        specs = MoE.specs(config, name, hidden)
        if config.shared is not None:
            specs |= {f"shared.{key}": spec for key, spec in MLP.specs(config.shared, f"{name}.shared", hidden).items()}
        return specs

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """moe(norm(x)) + residual, [T, hidden], summed over ranks."""
        if self.dispatch is not None:
            x = x if norm is None else norm(x)
            routed = self.dispatch.sum_tokens(self._experts(*self._route(self.dispatch.gather_tokens(x))))
            shared = self._shared(x)
            return ops.all_reduce(routed if shared is None else routed + shared, self.group, residual)
        x, routing = self._route(x, norm)
        shared = self._shared(x)
        if shared is None:
            return self._experts(x, routing, residual, self.group)
        return ops.all_reduce(self._experts(x, routing, shared), self.group, residual)

    def _route(self, x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Routing]:
        """(norm(x) [T, hidden], the experts of each token)."""
        fusion = PLAIN if norm is None else norm.fusion
        return ops.route_tokens(x, self.router, self.router_bias, self.correction, self.params, fusion)

    def _experts(self, x: Tensor, routing: Routing, addend: Tensor | None = None, group: Group = SINGLE) -> Tensor:
        """The sum over this rank's experts for the tokens x [T, hidden], summed over the ranks of `group`, + `addend`."""
        if self._offset_indices is not None:
            # Choices of other ranks' experts stay in the order; their rows are zeros on this rank.
            routing = Routing(routing.weights, routing.order, routing.offsets.index_select(0, self._offset_indices), is_whole=False)
        scales_input, activation = self.config.scale_input, self.config.expert.activation
        gates_input = self.gate == activation and (scales_input or self.down.quantizes_input)
        y = self.up.up(x, routing, None if gates_input else self.gate)
        if scales_input:  # the projection has no bias, so that its result can be scaled instead of its input
            y = y * routing.weights.flatten()[routing.order.long(), None].to(y.dtype)
            routing = replace(routing, weights=torch.ones_like(routing.weights))
        if gates_input:
            return self.down.down(y, routing, addend, activation, group)
        return self.down.down(y if self.gate else ops.activate(y, activation), routing, addend, group=group)

    def _shared(self, x: Tensor) -> Tensor | None:
        """This rank's summand of the shared expert of x [T, hidden]; None: there is no shared expert."""
        if self.shared is None:
            return None
        shared = self.shared.partial(x)
        return shared if self.shared_gate is None else shared * torch.sigmoid(self.shared_gate(x))

    @staticmethod
    def _gate(config: MoEConfig) -> Gate | None:
        """The gate of the experts, if they have one."""
        if config.glu_clip is not None:
            return ClippedGate(config.glu_clip, config.glu_alpha)
        return config.expert.activation if config.expert.gated else None

    def _local_offset_indices(self, loader: Loader) -> Tensor | None:
        """Indices into `Routing.offsets`: the start of each of this rank's experts, and the end of the last.

        None without expert parallelism.
        """
        sharding, count = loader.sharding, self.config.num_experts
        if not sharding.by_expert or sharding.num_expert_ranks == 1:
            return None
        per_rank = -(-count // sharding.num_expert_ranks)
        start = (loader.group if loader.dispatch is None else loader.dispatch.group).rank * per_rank
        return torch.arange(start, start + per_rank + 1, device=loader.device).clamp(max=count)
