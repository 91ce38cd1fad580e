"""The data of a config.json, which checks each value that a config reader uses, and records its key, so that none is ignored silently.

Every key is one of three things: read by the config reader of the architecture, known to have no effect on the model (`NO_EFFECT`, or
`Architecture.ignored_keys`), or rejected by name. A key whose value is null counts as absent.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from stoker.base.errors import CheckpointError, shorten
from stoker.models.config_values import CURE, KINDS, Kind, refused

_MAX_NAMED = 20  # keys that one error names
_MAX_KEY_CHARS = 80  # of such a key, nested ones with their objects

# Keys without an effect on the logits of a decoder, as fnmatch patterns. Nested keys are written with a dot.
NO_EFFECT = (
    # what the file is, and what wrote it
    "architectures", "model_type", "auto_map", "transformers_version", "transformers.js_config*", "_name_or_path", "name_or_path",
    "_from_model_config", "_num_labels", "rope_scaling.finetuned", "_commit_hash", "model_name", "unsloth_*", "custom_pipelines*",
    "tokenizer_class", "tokenizer_name", "prefix",
    "task_specific_params*", "license", "version", "language",
    # token ids, which the builder reads with generation_config.json and the tokenizer
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "cls_token_id", "mask_token_id",
    "decoder_start_token_id", "forced_*_token_id", "suppress_tokens", "begin_suppress_tokens",
    # defaults of generation that old versions of transformers wrote
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "remove_invalid_values", "exponential_decay_length_penalty", "max_memory_length",
    # storage and precision, which the builder decides (dtype) or reads elsewhere (quantization)
    "dtype", "torch_dtype", "fp16", "bf16", "fp32", "use_bfloat16", "quantization_config*", "compression_config*", "quantization_bit",
    # how the reference implementation computes the same function
    "use_cache", "cache_implementation", "attn_implementation", "_attn_implementation*", "_flash_attn_2_enabled", "use_flash_attn*",
    "use_flash_attention*", "flash_attn*", "use_sdpa*", "pretraining_tp", "tp_plan", "pp_plan", "ep_size", "device_map", "init_device",
    "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "reorder_and_upcast_attn", "masked_softmax_fusion",
    "bias_dropout_fusion", "bias_dropout_add_fusion", "gradient_checkpointing*", "checkpoint_activations", "checkpoint_num_layers",
    "chunk_size_feed_forward", "fused_*", "use_fused_*", "onnx_safe", "use_cache_quantization", "use_cache_kernel",
    "softmax_in_fp32", "tie_encoder_decoder", "parallel_output", "skip_bias_add*", "apply_query_key_layer_scaling",
    # outputs and heads for other tasks
    "output_attentions", "output_hidden_states", "output_past", "output_predict", "output_router_logits", "return_dict",
    "id2label*", "label2id*", "num_labels", "problem_type", "finetuning_task", "classifier_*", "summary_*", "torchscript",
    "is_decoder", "pruned_heads*", "bad_words*", "tf_legacy_loss",
    # training
    "initializer_range", "initializer_factor", "init_std", "init_method", "init_config*", "_init_*", "*dropout", "*dropout_prob", "*_pdrop",
    "layerdrop", "router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise", "rescale_*grad*",
    "label_smoothing*", "ignore_index", "use_liger*", "verbose", "training_*", "train_*",
    # the length that the tokenizer and the positions of the reference implementation are prepared for
    "model_max_length", "max_sequence_length", "n_ctx",
)  # fmt: skip


class ConfigData(dict[str, Any]):
    """The object in a config.json, or an object nested in it, which checks the values that are read, and records their keys.

    `kinds` are the kinds of values that differ from `config_values.KINDS`. Objects that are created with `|`, and nested ones, share them
    and the record. Reading raises CheckpointError for a value that is not of the kind of its key, and for a missing key.
    """

    def __init__(
        self, data: Mapping[str, Any], kinds: Mapping[str, Kind] | None = None, used: set[str] | None = None, path: str = ""
    ) -> None:
        self._kinds = kinds or {}
        self._used: set[str] = set() if used is None else used
        self._path = path
        super().__init__({key: self._nested(key, value) for key, value in data.items()})

    def __getitem__(self, key: str) -> Any:
        self._used.add(self._path + key)
        return self._checked(key, super().__getitem__(key), allows_null=False)

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"config.json has no {self._path}{key}.", cure=CURE)

    def get(self, key: str, default: Any = None) -> Any:
        """The value under `key`, or `default`. The key is recorded as used."""
        self._used.add(self._path + key)
        return self._checked(key, super().get(key, default), allows_null=default is None)

    def _checked(self, key: str, value: Any, allows_null: bool) -> Any:
        """`value`, if it is of the kind of its key. `allows_null`: whether the reader takes null for an absent key."""
        kind = self._kinds.get(key) or KINDS.get(key)
        if kind is None or kind.accepts(value) or (value is None and (allows_null or kind.has_null)):
            return value
        raise refused(self._path + key, value, f"it must be {kind.text}")

    def __contains__(self, key: object) -> bool:
        self._used.add(f"{self._path}{key}")
        return super().__contains__(key)

    def __or__(self, other: Mapping[str, Any]) -> ConfigData:  # type: ignore[override]
        for key in self.keys() & other.keys():
            self._checked(key, super().__getitem__(key), allows_null=True)  # a wrong value is refused even if it is replaced
        return ConfigData({**self._plain(), **_plain(other)}, self._kinds, self._used, self._path)

    def __ror__(self, other: Mapping[str, Any]) -> ConfigData:  # type: ignore[override]
        return ConfigData({**_plain(other), **self._plain()}, self._kinds, self._used, self._path)

    def unused(self) -> Iterator[str]:
        """The paths of keys that were never read, in the order of the file, without keys whose value is null."""
        for key, value in self.items():
            path = self._path + key
            if path not in self._used:
                if value is not None:
                    yield path
            elif isinstance(value, ConfigData):
                yield from value.unused()

    def _nested(self, key: str, value: Any) -> Any:
        """A value that was read; an object becomes a ConfigData with the same record."""
        return ConfigData(value, self._kinds, self._used, f"{self._path}{key}.") if isinstance(value, dict) else value

    def _plain(self) -> dict[str, Any]:
        """A plain dict with the same content."""
        return dict(self.items())


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """A plain dict with the same content."""
    return dict(data.items())


def check_all_keys_used(data: ConfigData, architecture: str, ignored: tuple[str, ...]) -> None:
    """Raise CheckpointError naming each key that was not read and is not known to have no effect.

    `ignored` are fnmatch patterns of further keys without effect.
    """
    has_no_effect = _matcher((*NO_EFFECT, *ignored))
    # A nested object may be a config with the same keys.
    unknown = [key for key in data.unused() if not has_no_effect(key) and not has_no_effect(key.rpartition(".")[2])]
    if unknown:
        verb, have, them = ("is", "it has", "it") if len(unknown) == 1 else ("are", "they have", "them")
        named = [key if key.isprintable() and len(key) < _MAX_KEY_CHARS else shorten(key) for key in unknown[:_MAX_NAMED]]
        more = f" and {len(unknown) - len(named)} more" if len(unknown) > len(named) else ""
        raise CheckpointError(
            f"config.json: {', '.join(named)}{more} {verb} not supported for {architecture}.",
            cure=f"If {have} no effect on the model, list {them} with --ignore-config-key or delete {them} from config.json.",
        )


@lru_cache(maxsize=128)
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """A function that tells whether a key matches one of the fnmatch `patterns`."""
    matches = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns)).match
    names = frozenset(patterns)  # most keys equal a pattern without wildcards
    return lambda key: key in names or matches(key) is not None
