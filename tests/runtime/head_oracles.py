"""Random draft heads for tiny models of transformers: their files in published formats, and drafts computed with transformers' layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from stoker.base.draft_tree import DraftTree

Files = dict[str, Tensor]


def randomize(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if "norm" in name else 0.0))


def write(folder: Path, config: dict[str, Any], tensors: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def run_layer(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    """A decoder layer of transformers on one sequence [T, width]."""
    count = x.shape[0]
    mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
    positions = torch.arange(count)[None]
    found = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=model.model.rotary_emb(x[None], positions))
    return (found[0] if isinstance(found, tuple) else found).reshape(count, -1)


class Oracle:
    """A head of `model`: its files, and its drafts after a sequence of tokens."""

    layers: tuple[int, ...] | None = None  # hidden states of transformers that are read; None: after the final norm
    token_map: Tensor | None = None  # the ids of the draft vocabulary
    config: dict[str, Any]
    files: Files

    def __init__(self, model: Any) -> None:
        self.model, self.hidden = model, model.config.hidden_size

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """`tokens` end with the newest one, whose hidden state is not known yet."""
        states = self.model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        read = states[-1] if self.layers is None else torch.cat([states[i] for i in self.layers], dim=-1)
        return self.after(read[0], tokens, count)

    @torch.no_grad()
    def tree(self, tokens: list[int], tree: DraftTree) -> list[int]:
        """The drafts of a tree: each path is computed by itself."""
        states = self.model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        read = states[-1] if self.layers is None else torch.cat([states[i] for i in self.layers], dim=-1)
        paths: list[list[int]] = [[]]
        ranked: dict[int, list[int]] = {}
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            if parent not in ranked:
                ranked[parent] = self.ranked(read[0], tokens, paths[parent])
            paths.append([*paths[parent], ranked[parent][rank]])
        return [path[-1] for path in paths[1:]]

    def after(self, states: Tensor, tokens: list[int], count: int) -> list[int]:
        """The drafts from the hidden states [T - 1, ...] of the tokens before the newest one: one output after another."""
        found: list[int] = []
        for _ in range(count):
            found.append(self.ranked(states, tokens, found)[0])
        return found

    def ranked(self, states: Tensor, tokens: list[int], path: list[int]) -> list[int]:
        """All tokens after the drafts `path`, the most likely first."""
        found = self.logits(self.outputs(states, tokens, path)).argsort(descending=True)
        return (found if self.token_map is None else self.token_map[found]).tolist()

    def outputs(self, states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        """The output [width] after the drafts `path`."""
        x = self.begin(states)
        for i in range(len(path) + 1):
            out = self.head(x, self.model.model.embed_tokens(torch.tensor((tokens + path[:i])[1:])))
            x = torch.cat((x, out[-1:]))
        return out[-1]

    def begin(self, states: Tensor) -> Tensor:
        return states

    def head(self, x: Tensor, embedded: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        return self.model.lm_head(x)


class MedusaOracle(Oracle):
    """Two residual blocks per head in FasterDecoding's format, or one and a draft vocabulary in vLLM's."""

    def __init__(self, model: Any, *, vllm: bool = False) -> None:
        super().__init__(model)
        vocab, depth = model.config.vocab_size, 1 if vllm else 2
        self.token_map = torch.arange(40) * 3 + 2 if vllm else torch.arange(vocab)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(self.hidden, self.hidden, bias=not vllm) for _ in range(depth)) for _ in range(3)
        )
        self.heads = nn.ModuleList(nn.Linear(self.hidden, len(self.token_map), bias=False) for _ in range(3))
        for module in (self.blocks, self.heads):
            randomize(module, 5)
        self.files, self.config = {}, {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "tiny"}
        if vllm:
            self.files = {"token_map": self.token_map}
            self.config = {
                "model_type": "medusa",
                "hidden_size": self.hidden,
                "vocab_size": vocab,
                "truncated_vocab_size": 40,
                "num_heads": 3,
            }
        for i, (blocks, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            for j, block in enumerate(blocks):
                stem = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
                self.files |= {f"{stem}.{name}": tensor for name, tensor in block.named_parameters()}
            self.files[f"lm_heads.{i}.weight" if vllm else f"{i}.{depth}.weight"] = head.weight

    def outputs(self, states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        """The logits of a head, which are its output."""
        x = states[-1]
        for block in self.blocks[len(path)]:
            x = x + nn.functional.silu(block(x))
        return self.heads[len(path)](x)

    def logits(self, x: Tensor) -> Tensor:
        return x


class EagleOracle(Oracle):
    """Two layers, of which the first has no norm before its attention."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.fc = nn.Linear(2 * self.hidden, self.hidden)
        self.decoder = nn.ModuleList(LlamaDecoderLayer(model.config, i) for i in range(2))
        self.decoder[0].input_layernorm = nn.Identity()
        for module in (self.fc, self.decoder):
            randomize(module, 6)
        layers = {f"layers.{name}": tensor for name, tensor in self.decoder.named_parameters()}
        self.files = layers | {"fc.weight": self.fc.weight, "fc.bias": self.fc.bias, "embed_tokens.weight": model.model.embed_tokens.weight}
        self.config = model.config.to_dict() | {"num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}

    def head(self, x: Tensor, embedded: Tensor) -> Tensor:
        x = self.fc(torch.cat((embedded, x), dim=-1))
        for layer in self.decoder:
            x = run_layer(self.model, layer, x)
        return x


class Eagle3Layer(LlamaDecoderLayer):
    def __init__(self, config: Any) -> None:
        super().__init__(config, 0)
        size, attention = config.head_dim, self.self_attn
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads), ("v", config.num_key_value_heads)):
            setattr(attention, f"{name}_proj", nn.Linear(2 * config.hidden_size, heads * size, bias=False))


class Eagle3Oracle(Oracle):
    """Draft vocabulary of 64 tokens. In the format of SafeAILab, or of RedHat with the residual after the norm and other layers."""

    def __init__(self, model: Any, *, speculators: bool = False) -> None:
        super().__init__(model)
        config = model.config
        self.layers = (1, 2, 0) if speculators else (2, config.num_hidden_layers // 2, config.num_hidden_layers - 3)
        self.norm_before_residual = speculators
        self.fc, self.lm_head = nn.Linear(3 * self.hidden, self.hidden, bias=False), nn.Linear(self.hidden, 64, bias=False)
        self.layer, self.norm = Eagle3Layer(config), LlamaRMSNorm(self.hidden, config.rms_norm_eps)
        for module in (self.fc, self.lm_head, self.layer, self.norm):
            randomize(module, 7)
        self.token_map = torch.arange(64) * (config.vocab_size // 64)
        stem = "layers.0" if speculators else "midlayer"
        self.files = {f"{stem}.{name}": tensor for name, tensor in self.layer.named_parameters()}
        self.files |= {"fc.weight": self.fc.weight, "norm.weight": self.norm.weight, "lm_head.weight": self.lm_head.weight}
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[self.token_map] = True
        self.files |= {"d2t": self.token_map - torch.arange(64), "t2d": t2d}
        sizes = config.to_dict() | {"num_hidden_layers": 1}
        if speculators:
            self.config = {
                "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "transformer_layer_config": sizes,
                "draft_vocab_size": 64, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": list(self.layers),
                "speculators_config": {"algorithm": "eagle3"},
            }  # fmt: skip
        else:
            self.config = sizes | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64}

    def begin(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def head(self, x: Tensor, embedded: Tensor) -> Tensor:
        normalized, layer = self.layer.hidden_norm(x), self.layer
        residual = normalized if self.norm_before_residual else x
        wide = torch.cat((layer.input_layernorm(embedded), normalized), dim=-1)[None]
        count = x.shape[0]
        mask, positions = torch.full((1, 1, count, count), float("-inf")).triu(1), torch.arange(count)[None]
        rotary = self.model.model.rotary_emb(wide, positions)
        attended, _ = layer.self_attn(hidden_states=wide, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        x = residual + attended[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


class MtpOracle(Oracle):
    """A multi-token prediction layer with the blocks of the last layer of `model`, within the checkpoint of the model."""

    def __init__(
        self, model: Any, layer: type[nn.Module], *, mimo: bool = False, qwen_norm: type[nn.Module] | None = None, is_stacked: bool = False
    ) -> None:
        """`qwen_norm`: the class of the norms of Qwen3-Next or Qwen3.5, whose names the layer then has. `is_stacked`: its experts are."""
        super().__init__(model)
        config, self.mimo = model.config, mimo
        number = config.num_hidden_layers
        self.layer = layer(config, number - 1)
        self.norms = nn.ModuleDict(
            {name: (qwen_norm or LlamaRMSNorm)(self.hidden, config.rms_norm_eps) for name in ("enorm", "hnorm", "norm")}
        )
        self.project = nn.Linear(2 * self.hidden, self.hidden, bias=False)
        for module in (self.layer, self.norms, self.project):
            randomize(module, 8)
        stem = "model.mtp_layers.0" if mimo else f"model.layers.{number}"
        names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
        if qwen_norm is not None:
            stem, names = "mtp", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        elif not mimo:
            names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        modules = (*self.norms.values(), self.project)
        tensors = {f"{name}.weight": module.weight for name, module in zip(names, modules, strict=True)}
        if not mimo and qwen_norm is None:
            tensors |= {"shared_head.head.weight": model.lm_head.weight, "embed_tokens.weight": model.model.embed_tokens.weight}
        state = self.layer.state_dict()
        inner = "layers.0." if qwen_norm is not None else ""
        tensors |= {inner + name: tensor for name, tensor in (state if is_stacked else per_expert(state)).items()}
        self.files = {f"{stem}.{name}": tensor for name, tensor in tensors.items()}

    def head(self, x: Tensor, embedded: Tensor) -> Tensor:
        parts = self.norms["enorm"](embedded), self.norms["hnorm"](x)
        x = self.project(torch.cat(parts[::-1] if self.mimo else parts, dim=-1))
        return self.norms["norm"](run_layer(self.model, self.layer, x))


def per_expert(tensors: Files) -> Files:
    """The tensors of a layer in which the stacked experts of transformers are single linears, as in published checkpoints."""
    found: Files = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                stem = name.removesuffix("gate_up_proj") + str(expert)
                found |= {f"{stem}.gate_proj.weight": both.chunk(2)[0], f"{stem}.up_proj.weight": both.chunk(2)[1]}
        elif name.endswith("experts.down_proj"):
            found |= {name.removesuffix("down_proj") + f"{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


ORACLES: dict[str, Callable[[Any], Oracle]] = {
    "medusa": MedusaOracle,
    "medusa-vllm": lambda model: MedusaOracle(model, vllm=True),
    "eagle": EagleOracle,
    "eagle3": Eagle3Oracle,
    "eagle3-speculators": lambda model: Eagle3Oracle(model, speculators=True),
}
