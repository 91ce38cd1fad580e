"""What the value of each key of a config.json may be.

`KINDS` has the keys that the readers in `architectures/` use, also those of nested objects. `ConfigData` checks a value as it is read,
before anything is computed or allocated with it, so that readers need no checks of types and ranges. A family in which a key has other
values declares them in `Architecture.kinds`. Keys that are compared with one supported value (`require_values`) are missing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.base.errors import CheckpointError, shorten
from stoker.core.model_config import MAX_LAYERS

MAX_SIZE = 1 << 18  # of one width or count, so that the product of any three is a byte count that fits in 64 bits
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 31
_MAX_NUMBER = 1e30  # products of a few such numbers and sizes are finite in float32 or at least in float64
_MAX_ITEMS = 4096  # of lists and characters
# config.json's name of an activation → ours.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "quick_gelu": "gelu_quick", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
CURE = "Correct config.json, or download it again."


@dataclass(frozen=True, slots=True)
class Kind:
    """A set of values. `text` completes the sentence "it must be ..."."""

    text: str
    accepts: Callable[[Any], bool]
    has_null: bool = False  # whether null has a meaning that differs from that of an absent key


def whole(low: int, high: int) -> Kind:
    """Whole numbers within bounds. true and 4.0 are none."""
    return Kind(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def number(text: str, accepts: Callable[[float], bool] = lambda value: True) -> Kind:
    """Finite numbers for which `accepts` holds. Whole ones are compared exactly, because huge ones cannot be converted."""
    return Kind(text, lambda value: type(value) in (int, float) and -_MAX_NUMBER <= value <= _MAX_NUMBER and accepts(value))


def choice(*names: str) -> Kind:
    """Some texts."""
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def each(kind: Kind) -> Kind:
    """Lists of values of a kind."""
    text = f"a list of at most {_MAX_ITEMS} values, each of which is {kind.text}"
    return Kind(text, lambda value: isinstance(value, list) and len(value) <= _MAX_ITEMS and all(map(kind.accepts, value)))


def either(first: Kind, second: Kind) -> Kind:
    """The values of two kinds."""
    return Kind(f"{first.text}, or {second.text}", lambda value: first.accepts(value) or second.accepts(value))


def or_null(kind: Kind) -> Kind:
    """The values of a kind, and null."""
    return Kind(f"{kind.text}, or null", kind.accepts, has_null=True)


def _is_limits(value: Any) -> bool:
    """Whether a value is a pair of bounds from 0 on, the second of which may be infinite, as transformers writes infinity."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    low, high = (math.inf if bound in ("Infinity", {"__float__": "Infinity"}) else bound for bound in value)
    return all(type(bound) in (int, float) for bound in (low, high)) and 0 <= low <= high and low <= _MAX_NUMBER


SIZE, COUNT = whole(1, MAX_SIZE), whole(0, MAX_SIZE)
FLAG = Kind("true or false", lambda value: type(value) is bool, has_null=True)
NAME = Kind(f"a text of at most {_MAX_ITEMS} characters", lambda value: isinstance(value, str) and len(value) <= _MAX_ITEMS)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_NUMBER = number("a finite number")
_POSITIVE = number("a finite number above 0", lambda value: value >= 1 / _MAX_NUMBER)
_SIZE_OR_AUTO = either(SIZE, choice("auto"))
_LAYERS = Kind(f"a whole number of layers from 1 to {MAX_LAYERS}", whole(1, MAX_LAYERS).accepts)
_POSITIONS = whole(1, MAX_POSITIONS // 2)  # tables of positions have a few rows more

_KEYS: tuple[tuple[Kind, str], ...] = (
    (_LAYERS, "num_hidden_layers n_layer n_layers num_layers"),
    (whole(1, MAX_VOCAB), "vocab_size padded_vocab_size vocab_size_per_layer_input"),
    (whole(0, MAX_POSITIONS - 1), "bos_token_id mask_token_id gmask_token_id smask_token_id sop_token_id"),
    (_POSITIONS, """
        max_position_embeddings original_max_position_embeddings n_positions seq_length max_seq_len max_sequence_length model_max_length
        attention_chunk_size floor_scale"""),
    (or_null(_POSITIONS), "sliding_window"),
    (SIZE, """
        hidden_size n_embd n_embed d_model word_embed_proj_dim inner_hidden_size hidden_size_per_layer_input
        intermediate_size n_inner ffn_dim ffn_hidden_size intermediate_size_mlp
        num_attention_heads num_key_value_heads head_dim n_head n_heads n_head_kv num_kv_heads attention_head_dim kv_channels
        multi_query_group_num
        kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim laurel_rank altup_num_inputs
        moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok moe_topk moe_k n_group topk_group
        interleave_moe_layer_step moe_layer_freq moe_layer_interval decoder_sparse_step attn_layer_period expert_layer_period
        sliding_window_pattern _sliding_window_pattern no_rope_layer_interval full_attention_interval
        state_size ssm_state_size conv_kernel num_heads n_groups mamba_d_conv mamba_d_ssm mamba_d_state mamba_head_dim mamba_n_groups
        mamba_n_heads mamba_num_heads linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim"""),
    (or_null(SIZE), "q_lora_rank rotary_dim"),
    (_SIZE_OR_AUTO, "mamba_d_head mamba_dt_rank time_step_rank"),
    (whole(1, 256), "expansion_ratio"),
    (whole(1, 2), "num_ln_in_parallel_attn"),
    (COUNT, """
        shared_intermediate_size n_shared_experts moe_num_shared_experts num_shared_expert first_k_dense_replace
        moe_layer_start_index max_window_layers attn_layer_offset expert_layer_offset num_kv_shared_layers altup_active_idx"""),
    (whole(-1, MAX_LAYERS), "moe_layer_end_index"),
    (number("a number from 0 to 1", lambda value: 0 <= value <= 1), """
        rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon mixer_rms_eps router_jitter_noise"""),
    (number("a number from 0.01 to 1", lambda value: 0.01 <= value <= 1), "partial_rotary_factor rotary_pct rope_pct rope_percent"),
    (_POSITIVE, """
        rope_theta rope_local_base_freq rotary_emb_base base rope_ratio alpha attention_factor low_freq_factor
        high_freq_factor beta_fast beta_slow query_pre_attn_scalar logits_scaling swiglu_limit alibi_bias_max dim_model_base"""),
    (number("a number above 0 and at most 2 ** 20", lambda value: 0 < value <= 1 << 20), "factor scaling_factor"),
    (number("a number from 0.01 to 256", lambda value: 0.01 <= value <= 256), "expand mamba_expand"),
    (or_null(_POSITIVE), "attn_logit_softcapping final_logit_softcapping"),
    (or_null(number("a finite number of at least 0", lambda value: value >= 0)), "clip_qkv"),
    (number("a finite number of at least 0", lambda value: value >= 0), "time_step_min mamba_dt_min mscale mscale_all_dim"),
    (_NUMBER, """
        attention_multiplier residual_multiplier embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier
        attention_out_multiplier ssm_in_multiplier ssm_out_multiplier routed_scaling_factor logit_scale scale_emb scale_depth
        swiglu_alpha attn_scale llama_4_scaling_beta short_mscale long_mscale softmax_scale"""),
    (FLAG, """
        tie_word_embeddings attention_bias mlp_bias qkv_bias bias use_bias attention_out_bias add_bias_linear add_qkv_bias enable_bias
        lm_head_bias no_bias use_qkv_bias use_conv_bias mamba_conv_bias mamba_proj_bias projectors_bias use_qk_norm qk_layernorm
        multi_query multi_query_attention new_decoder_architecture parallel_attn use_parallel_residual alibi rmsnorm post_layer_norm
        apply_residual_connection_post_layernorm do_layer_norm_before layer_norm_elementwise_affine _remove_final_layer_norm
        scale_attn_weights scale_attn_by_inverse_layer_idx norm_topk_prob rope_interleave use_dynamic_ntk use_logn_attn truncate
        use_sliding_window attn_temperature_tuning altup_correct_scale mamba_rms_norm mamba_norm_before_gate"""),
    (choice(*ACTIVATIONS), "hidden_act hidden_activation activation_function activation mlp_hidden_act mamba_hidden_act"),
    (choice("softmax", "sigmoid"), "scoring_func"),
    (choice("greedy", "group_limited_greedy", "noaux_tc"), "topk_method"),
    (NAME, """
        rope_type type attention_head_type norm_type model_type chatglm_model_version _name_or_path hybrid_override_pattern"""),
    (OBJECT, "text_config rope_scaling rope_parameters full_attention sliding_attention attn_config"),
    (each(NAME), "layer_types layers_block_type"),
    (each(either(FLAG, whole(0, 1))), "no_rope_layers"),
    (each(COUNT), "mlp_only_layers moe_layers"),
    (each(_NUMBER), "mlp_multipliers ssm_multipliers"),
    (each(_POSITIVE), "short_factor long_factor"),
    (each(number("a number of at least 0 and less than 1", lambda value: 0 <= value < 1)), "activation_sparsity_pattern"),
    (Kind("a list of two numbers from 0 on, the second of which is the greater one", _is_limits), "time_step_limit"),
)  # fmt: skip
KINDS = {key: kind for kind, keys in _KEYS for key in keys.split()}


def refused(key: str, value: object, limit: str) -> CheckpointError:
    """The error for a value of config.json. `limit` says what it must be."""
    return CheckpointError(f"config.json: {key}={shorten(value)} is refused: {limit}.", cure=CURE)
