"""EAGLE-3 heads (arXiv 2503.01840): a layer that reads hidden states of several model layers, and has an output head of its own.

    x  = fc([states before model layers a, b, c])                   the first draft only; later ones read x'
    x' = layer([norm(embedding of the following token), norm(x)])   the residual is x, or norm(x) with `norm_before_residual`
    logits of the draft vocabulary = lm_head(norm(x'));  id of the model = index + d2t[index]

Formats: SafeAILab and SpecForge (tensors `midlayer.*`), and `speculators` of RedHat (`layers.0.*`, sizes in `transformer_layer_config`).
`eagle_aux_hidden_state_layer_ids` at the top of config.json counts the layers before the state (vLLM, speculators). Within `eagle_config`
it names the layers whose output is read (SGLang, SpecForge, ModelOpt). The default are the states before the layers 2, L / 2 and L - 3.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError, ConfigError
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import AttentionConfig, ModelConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.layers.attention import Attention
from stoker.layers.layer import RopeTables, make_layer
from stoker.layers.mlp import MLP
from stoker.layers.norm import Norm
from stoker.models.architectures.llama import llama_names
from stoker.quant.linear_ops import LinearOp
from stoker.runtime.heads.eagle import canonical_name
from stoker.runtime.heads.folder import HeadFolder
from stoker.runtime.heads.head import RecurrentHead, Target, check_equal
from stoker.runtime.heads.layer_config import HEAD_KEYS, check_flags, check_size, read_layers
from stoker.runtime.heads.weights import HeadLoader, HeadTensors

_IDS = "eagle_aux_hidden_state_layer_ids"
MAX_LAYERS_READ = 16
# Settings in `eagle_config` beside the layers, and the values that describe what is computed here. ModelOpt writes most of them.
_EAGLE_CONFIG: dict[str, tuple[bool | int | None, ...]] = {
    "use_aux_hidden_state": (True, None), "use_input_layernorm_in_first_layer": (True, None), "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None), "next_layer_regular": (True, None), "parallel_draft_step": (1, None),
    "parallel_draft_heads_num_layers": (0, 1, None),
}  # fmt: skip


# Keys of `speculators` beside the layers. Drafts are accepted by exact verification, whatever the proposal methods say.
_OUTER_KEYS = (
    "architectures", "auto_map", "transformer_layer_config", "model_type", "dtype", "torch_dtype", "transformers_version",
    "tie_word_embeddings", "_name_or_path",
)  # fmt: skip
_SPECULATORS_KEYS = ("algorithm", "default_proposal_method", "proposal_methods", "verifier")


def is_eagle3(folder: HeadFolder) -> bool:
    """Whether a folder holds an EAGLE-3 head."""
    return folder.config.get("speculators_model_type") == "eagle3" or any(
        name in ("d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight") for name in folder.names
    )


class WideAttention(Attention):
    """Attention whose input is twice as wide as its output."""

    @staticmethod
    def specs(config: AttentionConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of `Attention` with a QKV linear of 2 × hidden input features."""
        wide = Attention.specs(config, name, 2 * hidden)["qkv"]
        return Attention.specs(config, name, hidden) | {"qkv": wide}


class Eagle3Head(RecurrentHead):
    """The layers, norms and the output head of an EAGLE-3 head."""

    def __init__(self, config: ModelConfig, loader: HeadLoader, target: Target, data: dict[str, Any], layers: tuple[int, ...]) -> None:
        self.config, self.target, self.layers = config, target, layers
        hidden, first, wide = config.hidden_size, config.layers[0], len(layers) * target.config.hidden_size
        self.fc = loader.linear(LinearSpec(name="fc", in_features=wide, parts=(hidden,)))
        tables = RopeTables(target.num_positions, loader.device)
        assert isinstance(first.attention, AttentionConfig)
        self.attention = WideAttention(first.attention, loader, "layers.0.attention", hidden, tables.get(first.attention.rope))
        self.mlp = MLP(first.mlp, loader, "layers.0.mlp", hidden)  # type: ignore[arg-type]
        self.embed_norm, self.mlp_norm, self.hidden_norm = (
            Norm(first.norm, loader, f"layers.0.{name}", hidden) for name in ("attention_norm", "mlp_norm", "hidden_norm")
        )
        self.others = [make_layer(config.layers[i], loader, f"layers.{i}", hidden, tables) for i in range(1, config.num_layers)]
        self.norm = Norm(first.norm, loader, "norm", hidden)
        self.input_norm = Norm(first.norm, loader, "input_norm", wide) if data.get("norm_before_fc") else None
        num_norms = len(layers) if data.get("fc_norm") else 0
        self.fc_norms = [Norm(first.norm, loader, f"fc_norm.{i}", target.config.hidden_size) for i in range(num_norms)]
        self.norm_before_residual, self.norm_output = bool(data.get("norm_before_residual")), bool(data.get("norm_output"))
        self.lm_head: LinearOp | None = None
        self.embedding: Tensor | None = None  # [vocab, hidden]; None: that of the model

    def begin(self, x: Tensor) -> Tensor:
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norms:
            x = torch.cat([norm(part.contiguous()) for norm, part in zip(self.fc_norms, x.chunk(len(self.fc_norms), -1), strict=True)], -1)
        return cast("Tensor", self.fc(x))

    def __call__(self, x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        ids = batch.token_ids
        embedded = self.target.embed(ids) if self.embedding is None else self.embedding[ids.long()]
        normalized = self.hidden_norm(x)
        residual = normalized if self.norm_before_residual else x
        x = self.attention(torch.cat((self.embed_norm(embedded), normalized), dim=-1), batch, caches[0], None, residual)
        x = self.mlp(x, self.mlp_norm, x)
        for layer, cache in zip(self.others, caches[1:], strict=True):
            x = layer(x, batch, cache)
        return self.norm(x) if self.norm_output else x

    def logits(self, x: Tensor) -> Tensor:
        x = x if self.norm_output else self.norm(x)
        return self.target.logits(x) if self.lm_head is None else self.lm_head(x)


def load_eagle3(folder: HeadFolder, target: Target) -> Eagle3Head:
    """Load the head of a folder. Raises CheckpointError for damaged files, and ConfigError for a head that does not fit the model."""
    folder = folder.renamed(canonical_name)
    data, model, device = folder.config, target.config, target.model.device
    nested = data.get("transformer_layer_config")
    if not isinstance(nested, dict | None):
        raise CheckpointError(f"{folder.path}: transformer_layer_config is not an object.", cure="Download the heads again.")
    _check_settings(folder)
    config = read_layers(folder.path, data if nested is None else nested)
    check_equal(folder.path, "vocabulary", config.vocab_size, model.vocab_size)
    check_equal(folder.path, "target_hidden_size", data.get("target_hidden_size") or config.hidden_size, model.hidden_size)
    layers = _layers(folder, model.num_layers)
    width = folder.shape("fc.weight")
    if len(width) != 2:
        raise CheckpointError(f"{folder.path}: fc.weight has shape {list(width)}, and is not a matrix.", cure="Download the heads again.")
    check_equal(folder.path, "number of model layers × hidden_size", width[1], len(layers) * model.hidden_size)
    own = {name: name for name in ("fc", "norm", "input_norm", *(f"fc_norm.{i}" for i in range(len(layers))))}
    names = llama_names(config) | own | {"head": "lm_head", "layers.{i}.hidden_norm": "model.layers.{i}.hidden_norm"}
    tensors = HeadTensors(folder, names, config, device)
    loader = HeadLoader(tensors, target.model.dtype, quantized=target.quantized)
    head = Eagle3Head(config, loader, target, data, layers)
    rows = data.get("draft_vocab_size") or config.vocab_size
    if "lm_head.weight" in folder.names:
        head.lm_head = loader.linear(LinearSpec(name="head", in_features=config.hidden_size, parts=(rows,)))
    elif rows != model.vocab_size or config.hidden_size != model.hidden_size:
        raise CheckpointError(f"{folder.path} has no lm_head.weight, and a draft vocabulary of {rows} tokens.", cure="Download it again.")
    if "embed_tokens.weight" in folder.names:
        shape = (model.vocab_size, config.hidden_size)
        head.embedding = folder.read("embed_tokens.weight", target.model.dtype, shape).to(device)
    else:
        check_equal(folder.path, "hidden_size, without embed_tokens.weight,", config.hidden_size, model.hidden_size)
    if "d2t" in folder.names:
        ids = folder.read_integers("d2t", (rows,)) + torch.arange(rows)
        if int(ids.min()) < 0 or int(ids.max()) >= model.vocab_size:
            raise ConfigError(
                f"{folder.path} does not fit: d2t names tokens up to {int(ids.max())}, and the model has {model.vocab_size}.",
                cure="Use heads that were trained for this model.",
            )
        head.target_ids = ids.to(torch.int32).to(device)
    else:
        check_equal(folder.path, "draft vocabulary, without d2t,", rows, model.vocab_size)
    folder.ignore(*(name for name in folder.names if name == "t2d" or name.endswith(".inv_freq")))
    folder.check_all_used()
    head.num_bytes = loader.num_bytes + (head.embedding.nbytes if head.embedding is not None else 0)
    head.draft_bytes = loader.num_bytes + (target.head.num_bytes if head.lm_head is None else 0)
    return head


def _check_settings(folder: HeadFolder) -> None:
    """Raise CheckpointError for settings of EAGLE-3 with a wrong type, and those which change what the head computes."""
    path, data, inner = folder.path, folder.config, folder.config.get("eagle_config")
    for key in ("draft_vocab_size", "target_hidden_size"):
        check_size(path, key, data.get(key))
    check_flags(path, data, ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    if not isinstance(inner, dict | None):
        raise CheckpointError(f"{path}: eagle_config={str(inner)[:60]!r} is not an object.", cure="Download the heads again.")
    _check_keys(path, data)
    for key, value in (inner or {}).items():
        supported = _EAGLE_CONFIG.get(key, ())
        if key != _IDS and not any(value is one for one in supported):
            listed = " or ".join(str(one).lower() for one in supported if one is not None)
            raise CheckpointError(
                f"{path}: eagle_config.{key[:60]}={str(value)[:60]!r} is not supported{f', only {listed}' if listed else ''}.",
                cure="Heads of this variant are not supported.",
            )
    algorithm = (data.get("speculators_config") or {}).get("algorithm") if isinstance(data.get("speculators_config"), dict) else None
    for key, found in (("speculators_model_type", data.get("speculators_model_type")), ("speculators_config.algorithm", algorithm)):
        if found not in (None, "eagle3"):
            raise CheckpointError(f"{path}: {key}={str(found)[:60]!r} is not supported, only eagle3.", cure="Use EAGLE-3 heads.")


def _check_keys(path: object, data: dict[str, Any]) -> None:
    """Raise CheckpointError for an unknown key of `speculators`, whose config has the sizes of the layers in an object of their own."""
    section = data.get("speculators_config")
    section = {} if section is None else section
    if not isinstance(section, dict):
        raise CheckpointError(f"{path}: speculators_config={str(section)[:60]!r} is not an object.", cure="Download the heads again.")
    outer = data if data.get("transformer_layer_config") is not None else {}
    for prefix, settings, known in (("", outer, (*HEAD_KEYS, *_OUTER_KEYS)), ("speculators_config.", section, _SPECULATORS_KEYS)):
        if unknown := sorted(str(key) for key in settings if key not in known):
            raise CheckpointError(f"{path}: {prefix}{unknown[0][:60]} is not known.", cure="Heads of this variant are not supported.")


def _layers(folder: HeadFolder, num_layers: int) -> tuple[int, ...]:
    """The numbers of model layers that are computed before the states which the head reads. Raises CheckpointError or ConfigError."""
    data, inner = folder.config, folder.config.get("eagle_config")
    offset, found = 0, data.get(_IDS)
    if found is None and isinstance(inner, dict) and inner.get(_IDS) is not None:
        offset, found = 1, inner[_IDS]
    if found is None:
        found = [2, num_layers // 2, num_layers - 3]
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_LAYERS_READ or not all(type(layer) is int for layer in found):
        raise CheckpointError(f"{folder.path}: {_IDS}={str(found)[:60]!r} is not a list of layers.", cure="Download the heads again.")
    if wrong := [layer for layer in found if not 0 <= layer + offset <= num_layers]:
        raise ConfigError(
            f"{folder.path} does not fit: it reads the hidden state of layer {wrong[0]}, and the model has {num_layers} layers.",
            cure="Use heads that were trained for this model.",
        )
    return tuple(layer + offset for layer in found)
