"""GGUF files of tiny models: at least one of each architecture, with the reference of the model that its tensors come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import cases
import gguf
import gguf_writer
import oracles
from cases import CASES, GROUPED, MLA, MOE, YARN, native
from gguf_writer import Change, Config
from oracles import Reference

_HEAD = {"head_dim": 8}
_DEEP_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}  # llama.cpp has one key for both
_LONG_SHORT = {"short_factor": [1.0, 1.2], "long_factor": [1.0, 1.2]}


class Case(NamedTuple):
    """How a GGUF file is made: the model, the architecture, the conversion of its tensors, and its metadata beyond the common keys."""

    reference: Callable[[], Reference]
    arch: str
    change: Change | None = None
    describe: Callable[[gguf.GGUFWriter, Config], None] | None = None


def rotary(fraction: float) -> Callable[[gguf.GGUFWriter, Config], None]:
    """The number of rotated features."""

    def describe(writer: gguf.GGUFWriter, c: Config) -> None:
        size = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        writer.add_rope_dimension_count(int(size * fraction))

    return describe


def gptj(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_rope_dimension_count(c["rotary_dim"])


def window(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_sliding_window(c["sliding_window"])


def window_pattern(writer: gguf.GGUFWriter, c: Config) -> None:
    window(writer, c)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c["layer_types"]])


def gemma2(writer: gguf.GGUFWriter, c: Config) -> None:
    window(writer, c)
    writer.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(c["final_logit_softcapping"])


def gemma3n(writer: gguf.GGUFWriter, c: Config) -> None:
    window_pattern(writer, c)
    writer.add_altup_active_idx(c["altup_active_idx"])
    writer.add_altup_num_inputs(c["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(c["num_kv_shared_layers"])
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(s) if s else -math.inf for s in c["activation_sparsity_pattern"]])


def neox(writer: gguf.GGUFWriter, c: Config) -> None:
    rotary(0.25)(writer, c)
    writer.add_parallel_residual(c["use_parallel_residual"])


def mpt(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_clamp_kqv(c["attn_config"]["clip_qkv"])
    writer.add_max_alibi_bias(c["attn_config"]["alibi_bias_max"])


def one_kv_head(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv", None)
    writer.add_head_count_kv(1)


def default_epsilon(writer: gguf.GGUFWriter, c: Config) -> None:
    """The epsilon of a config.json that leaves it out."""
    writer.add_layer_norm_rms_eps(1e-6)


def moe_width(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])


def qwen2_moe(writer: gguf.GGUFWriter, c: Config) -> None:
    moe_width(writer, c)
    writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])


def granite(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_attention_scale(c["attention_multiplier"])
    writer.add_embedding_scale(c["embedding_multiplier"])
    writer.add_residual_scale(c["residual_multiplier"])
    writer.add_logit_scale(c["logits_scaling"])


def minicpm(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_embedding_scale(float(c["scale_emb"]))
    writer.add_residual_scale(c["scale_depth"] / c["num_hidden_layers"] ** 0.5)
    writer.add_logit_scale(c["hidden_size"] / c["dim_model_base"])


def cohere(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_logit_scale(c["logit_scale"])
    if c.get("sliding_window"):
        window(writer, c)


def olmo(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_layer_norm_eps(1e-5)
    writer.add_clamp_kqv(c["clip_qkv"])


def phi3(writer: gguf.GGUFWriter, c: Config) -> None:
    rotary(0.5)(writer, c)
    parameters = gguf_writer.rope_parameters(c)
    writer.add_rope_scaling_orig_ctx_len(c["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors(1.0)
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", gguf_writer.np.array(parameters[f"{name}_factor"], dtype="float32"))


def experts(writer: gguf.GGUFWriter, c: Config) -> None:
    """The experts of DeepSeek and GLM."""
    moe_width(writer, c)
    writer.add_expert_count(c["n_routed_experts"])
    writer.add_expert_shared_count(c["n_shared_experts"])
    writer.add_leading_dense_block_count(c["first_k_dense_replace"])
    writer.add_expert_weights_scale(c.get("routed_scaling_factor") or 1.0)
    writer.add_expert_weights_norm(c["norm_topk_prob"])


def glm4_moe(writer: gguf.GGUFWriter, c: Config) -> None:
    rotary(0.5)(writer, c)
    experts(writer, c)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def deepseek(writer: gguf.GGUFWriter, c: Config) -> None:
    experts(writer, c)
    default_epsilon(writer, c)


def deepseek2(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.kv_data[0].pop("deepseek2.attention.head_count_kv")
    for key in ("deepseek2.attention.key_length", "deepseek2.attention.value_length"):
        writer.kv_data[0].pop(key, None)
    writer.add_head_count_kv(1)
    experts(writer, c)
    if c.get("q_lora_rank"):
        writer.add_q_lora_rank(c["q_lora_rank"])
    writer.add_kv_lora_rank(c["kv_lora_rank"])
    writer.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    writer.add_value_length(c["kv_lora_rank"])
    writer.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    writer.add_value_length_mla(c["v_head_dim"])
    writer.add_rope_dimension_count(c["qk_rope_head_dim"])
    if c["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if multiplier := gguf_writer.rope_parameters(c).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)


def ernie_moe(writer: gguf.GGUFWriter, c: Config) -> None:
    moe_width(writer, c)
    writer.add_expert_count(c["moe_num_experts"])
    writer.add_expert_used_count(c["moe_k"])
    writer.add_expert_shared_count(c["moe_num_shared_experts"])
    writer.add_leading_dense_block_count(c["moe_layer_start_index"])
    writer.add_interleave_moe_layer_step(c["moe_layer_interval"])


def gpt_oss(writer: gguf.GGUFWriter, c: Config) -> None:
    window(writer, c)
    writer.add_expert_feed_forward_length(c["intermediate_size"])


def hunyuan(writer: gguf.GGUFWriter, c: Config) -> None:
    """The converter writes a base that contains alpha, and no scaling."""
    parameters, size = gguf_writer.rope_parameters(c), c["head_dim"]
    writer.kv_data[0].pop(f"{writer.arch}.rope.freq_base", None)
    writer.add_rope_freq_base(parameters["rope_theta"] * parameters["alpha"] ** (size / (size - 2)))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(256 * 1024)


def hunyuan_moe(writer: gguf.GGUFWriter, c: Config) -> None:
    hunyuan(writer, c)
    writer.add_expert_used_count(c["moe_topk"])
    writer.add_expert_shared_feed_forward_length(c["intermediate_size"])
    writer.add_expert_feed_forward_length(c["intermediate_size"])
    writer.add_expert_shared_count(1)


def llama4(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_feed_forward_length(c["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(c["intermediate_size"])
    writer.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
    writer.add_rope_dimension_count(c["head_dim"])


def ministral3(writer: gguf.GGUFWriter, c: Config) -> None:
    parameters = gguf_writer.rope_parameters(c)
    writer.add_rope_scaling_yarn_log_mul(parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(parameters["llama_4_scaling_beta"])


def phimoe(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_rope_scaling_orig_ctx_len(cases.POSITIONS)
    writer.add_sliding_window(c.get("sliding_window") or 0)


XIELU = {"alpha_p": [0.1, 0.7, -0.4], "alpha_n": [0.3, -0.2, 0.5], "beta": [0.5, 0.4, 0.6], "eps": [-1e-6, -2e-6, -1e-6]}


def apertus(writer: gguf.GGUFWriter, c: Config) -> None:
    for name, values in XIELU.items():
        getattr(writer, f"add_xielu_{name}")(values)


def apertus_model() -> Reference:
    """A model whose activations have the parameters `XIELU`, because a converter moves those of the tensors to the metadata."""
    model = oracles.hf_model("Apertus", **GROUPED)
    for i, layer in enumerate(model.model.layers):
        for name, values in XIELU.items():
            getattr(layer.mlp.act_fn, name).data.fill_(values[i])
    return Reference(model.save_pretrained, oracles.hf_logits(model), cases.VOCAB, cases.POSITIONS)


def state_sizes(writer: gguf.GGUFWriter, c: Config, heads: int, head_size: int, groups: int, state: int, kernel: int) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(heads * head_size)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def delta_net(writer: gguf.GGUFWriter, c: Config) -> None:
    heads, size = c["linear_num_value_heads"], c["linear_value_head_dim"]
    state_sizes(writer, c, heads, size, c["linear_num_key_heads"], c["linear_key_head_dim"], c["linear_conv_kernel_dim"])
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(c["head_dim"] // 4)
    writer.add_rope_dimension_sections([1, 1, 0, 0])
    if c.get("num_experts"):
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])


def listed_delta_net(writer: gguf.GGUFWriter, c: Config) -> None:
    """The kind of each layer in the file. The converter writes no feed_forward_length for a model whose config.json has none."""
    delta_net(writer, c)
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [kind == "linear_attention" for kind in c["layer_types"]])
    if not c.get("intermediate_size"):
        writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length", None)


def nemotron_h(writer: gguf.GGUFWriter, c: Config) -> None:
    kinds = c["layers_block_type"]
    has_experts = "moe" in kinds
    width = c["moe_intermediate_size"] if has_experts else c["intermediate_size"]
    state_sizes(writer, c, c["mamba_num_heads"], c["mamba_head_dim"], c["n_groups"], c["ssm_state_size"], c["conv_kernel"])
    writer.add_head_count_kv([c["num_key_value_heads"] * (kind in ("attention", "full_attention")) for kind in kinds])
    writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in kinds])
    writer.add_layer_norm_rms_eps(c["layer_norm_epsilon"])
    writer.add_rope_scaling_finetuned(False)
    for key in ("count", "used_count", "group_count", "group_used_count"):
        writer.kv_data[0].pop(f"{writer.arch}.expert_{key}", None)
    if has_experts:
        writer.add_expert_count(c["n_routed_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(c["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(c["norm_topk_prob"])
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
        writer.add_expert_group_count(c["n_group"])
        writer.add_expert_group_used_count(c["topk_group"])


def minimax(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_rope_dimension_count(c["rotary_dim"])
    writer.add_expert_feed_forward_length(c["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def states(writer: gguf.GGUFWriter, c: Config) -> None:
    """Blocks with recurrent states."""
    inner = c.get("mamba_d_ssm") or c.get("intermediate_size") or 0
    heads = c.get("mamba_n_heads") or c.get("num_heads")
    if "mamba_d_ssm" not in c:
        inner = int(c.get("expand", c.get("mamba_expand")) * c["hidden_size"])
    writer.add_ssm_conv_kernel(c.get("conv_kernel") or c["mamba_d_conv"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(c.get("state_size") or c["mamba_d_state"])
    writer.add_ssm_time_step_rank(heads or c.get("time_step_rank") or c["mamba_dt_rank"])
    if heads:
        writer.add_ssm_group_count(c.get("n_groups") or c["mamba_n_groups"])


def only_states(writer: gguf.GGUFWriter, c: Config) -> None:
    """A model without attention and MLPs."""
    states(writer, c)
    for key in ("feed_forward_length", "attention.key_length", "attention.value_length"):  # head_dim is that of the states
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
    writer.add_feed_forward_length(0)
    writer.add_layer_norm_rms_eps(c["layer_norm_epsilon"])
    if writer.arch == "mamba":
        writer.add_ssm_dt_b_c_rms(c["model_type"] == "falcon_mamba")


def heads_in_layers(writer: gguf.GGUFWriter, c: Config, layers: list[int]) -> None:
    """Key-value heads in the given layers only, and states in the others."""
    states(writer, c)
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv([c["num_key_value_heads"] if i in layers else 0 for i in range(c["num_hidden_layers"])])


def jamba(writer: gguf.GGUFWriter, c: Config) -> None:
    heads_in_layers(writer, c, list(range(c["attn_layer_offset"], c["num_hidden_layers"], c["attn_layer_period"])))


def falcon_h1(writer: gguf.GGUFWriter, c: Config) -> None:
    states(writer, c)
    size = c["hidden_size"] // c["num_attention_heads"]
    writer.add_key_length(size)
    writer.add_value_length(size)


def granite_hybrid(writer: gguf.GGUFWriter, c: Config) -> None:
    granite(writer, c)
    heads_in_layers(writer, c, [i for i, kind in enumerate(c["layer_types"]) if kind in ("attention", "full_attention")])
    writer.add_rope_scaling_finetuned(c["position_embedding_type"] == "rope")
    if c["num_local_experts"]:
        writer.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
    else:
        writer.kv_data[0].pop("granitehybrid.feed_forward_length")
        writer.kv_data[0].pop("granitehybrid.expert_used_count", None)
        writer.add_feed_forward_length(c["shared_intermediate_size"])


def chatglm(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_layer_norm_rms_eps(c["layernorm_epsilon"])
    writer.add_rope_dimension_count(c["kv_channels"] // 2)
    writer.add_rope_freq_base(10000.0 * c["rope_ratio"])


_permuted, _split, _plus_one = gguf_writer.permuted, gguf_writer.ungrouped, gguf_writer.norms_plus_one
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
_ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}
_OWN = {
    "hunyuan-dense": partial(native, "HunYuanDenseV1", **GROUPED, head_dim=12, rope_parameters=_ALPHA),
    "hunyuan-moe": partial(native, "HunYuanMoEV1", **GROUPED, **_HEAD, num_experts=5, moe_topk=2, rope_parameters=_ALPHA),
    "gemma2": partial(native, "Gemma2", **GROUPED, **_HEAD, sliding_window=9, query_pre_attn_scalar=8),
    "gemma3": partial(
        native, "Gemma3Text", **GROUPED, **_HEAD, sliding_window=9, sliding_window_pattern=6, query_pre_attn_scalar=8,
        rope_parameters=_GEMMA3,
    ),
    "qwen2": partial(native, "Qwen2", **GROUPED, tie_word_embeddings=True, rope_parameters=YARN),
    "phi3": partial(
        native, "Phi3", **GROUPED, original_max_position_embeddings=cases.POSITIONS,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "attention_factor": 1.0} | _LONG_SHORT,
    ),
    "phi2": partial(native, "Phi", **GROUPED | {"intermediate_size": 192, "num_key_value_heads": 6}),
    "cohere2": partial(native, "Cohere2", **GROUPED, sliding_window=9, sliding_window_pattern=4),
    "smollm3": partial(native, "SmolLM3", **GROUPED | {"num_hidden_layers": 5}, no_rope_layer_interval=4),
    "olmo3": partial(
        native, "Olmo3", **GROUPED, sliding_window=9, layer_types=_TYPES, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN,
        },
    ),
    "deepseek2": partial(
        native, "DeepseekV2", **MLA, topk_method="group_limited_greedy", n_group=4, topk_group=2, rope_parameters=_DEEP_YARN
    ),
    "deepseek3": partial(native, "DeepseekV3", **MLA, n_group=4, topk_group=2, rope_parameters=_DEEP_YARN),
    "qwen2moe": partial(native, "Qwen2Moe", **MOE, num_experts=6, shared_expert_intermediate_size=56),
    "mamba2": partial(native, "Mamba2", **cases.MAMBA2 | {"time_step_limit": (0.0, float("inf"))}),
    "granitehybrid": partial(native, "GraniteMoeHybrid", **cases.GRANITE_HYBRID | {"time_step_limit": (0.0, float("inf"))}),
    "granitehybrid dense": partial(
        native, "GraniteMoeHybrid", **cases.GRANITE_HYBRID | {"time_step_limit": (0.0, float("inf")), "num_local_experts": 0},
        position_embedding_type="rope",
    ),
    "granitehybrid without attention": partial(
        native, "GraniteMoeHybrid",
        **cases.GRANITE_HYBRID | {"time_step_limit": (0.0, float("inf")), "layer_types": ["linear_attention"] * 3},
    ),
    "seed_oss": partial(native, "SeedOss", **GROUPED, head_dim=12),
    "bloom": partial(native, "Bloom", vocab_size=101, hidden_size=48, n_layer=3, n_head=6, seq_length=256, bos_token_id=1, eos_token_id=2),
    "exaone4": partial(native, "Exaone4", **GROUPED, sliding_window=9, layer_types=_TYPES, head_dim=12),
    "llama4": partial(
        native, "Llama4Text", **GROUPED | {"num_hidden_layers": 5}, **_HEAD, intermediate_size_mlp=80, num_local_experts=5,
        interleave_moe_layer_step=2,
    ),
    "phimoe": partial(native, "Phimoe", **GROUPED, num_local_experts=4, attention_bias=True, lm_head_bias=True, sliding_window=11),
    "mistral": partial(native, "Mistral", **GROUPED, sliding_window=None),
    # llama.cpp has one size of keys and values, and normalizes queries and keys of a delta net with the epsilon of the other norms.
    "qwen3next": partial(native, "Qwen3Next", **cases.QWEN3_NEXT | {"linear_value_head_dim": 12, "rms_norm_eps": 1e-6}),
    "qwen35": partial(native, "Qwen3_5Text", **cases.QWEN3_5 | {"linear_value_head_dim": 12, "rms_norm_eps": 1e-6}),
    "qwen35 listed": partial(
        native,
        "Qwen3_5Text",
        **cases.QWEN3_5
        | {"linear_value_head_dim": 12, "rms_norm_eps": 1e-6}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 4},
    ),
    # With 1e-6, the norm after the recurrence amplifies float32's rounding to 1.05e-4 with AVX2, and to less with AVX-512.
    "qwen35moe": partial(native, "Qwen3_5MoeText", **cases.QWEN3_NEXT_MOE | {"linear_value_head_dim": 12, "rms_norm_eps": 1e-5}),
    "nemotron_h": partial(
        native, "NemotronH", **cases.NEMOTRON_H | {"layers_block_type": ["mamba", "mamba", "mlp", "attention", "mamba"]}, mlp_bias=True,
    ),
    "nemotron_h_moe": partial(
        native, "NemotronH", **cases.NEMOTRON_H | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    "qwen3vl": partial(
        cases.qwen_vl, "Qwen3VL", head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}
    ),
}  # fmt: skip
GGUF_CASES: dict[str, Case] = {
    "llama": Case(CASES["LlamaForCausalLM", "llama3"], "llama", _permuted, rotary(1)),
    "llama with biases": Case(CASES["LlamaForCausalLM", "tied, biased, no architectures"], "llama", _permuted),
    "llama, linear": Case(CASES["LlamaForCausalLM", "linear"], "llama", _permuted),
    "mistral": Case(CASES["MistralForCausalLM", "window"], "llama", _permuted, window),
    "mixtral": Case(CASES["MixtralForCausalLM", "plain"], "llama", _permuted),
    "xverse": Case(CASES["LlamaForCausalLM", "Xverse"], "xverse", _permuted),
    "arcee": Case(CASES["ArceeForCausalLM", "biased"], "arcee", _permuted),
    "qwen": Case(CASES["QWenLMHeadModel", "within"], "qwen", None, default_epsilon),
    "qwen2": Case(_OWN["qwen2"], "qwen2"),
    "qwen2moe": Case(_OWN["qwen2moe"], "qwen2moe", None, qwen2_moe),
    "qwen3": Case(CASES["Qwen3ForCausalLM", "plain"], "qwen3"),
    "qwen3moe": Case(CASES["Qwen3MoeForCausalLM", "plain"], "qwen3moe", None, moe_width),
    "qwen2vl": Case(CASES["Qwen2_5_VLForConditionalGeneration", "text"], "qwen2vl"),
    "qwen3vl": Case(_OWN["qwen3vl"], "qwen3vl"),
    "gemma": Case(CASES["GemmaForCausalLM", "plain"], "gemma", _plus_one),
    "gemma2": Case(_OWN["gemma2"], "gemma2", _plus_one, gemma2),
    "gemma3": Case(_OWN["gemma3"], "gemma3", _plus_one, window),
    "gemma3n": Case(CASES["Gemma3nForCausalLM", "plain"], "gemma3n", gguf_writer.stack_streams, gemma3n),
    "phi2": Case(_OWN["phi2"], "phi2", None, rotary(0.5)),
    "phi3": Case(_OWN["phi3"], "phi3", None, phi3),
    "gpt2": Case(CASES["GPT2LMHeadModel", "plain"], "gpt2", gguf_writer.transposed),
    "starcoder": Case(CASES["GPTBigCodeForCausalLM", "starcoder"], "starcoder", None, one_kv_head),
    "gptj": Case(CASES["GPTJForCausalLM", "plain"], "gptj", None, gptj),
    "gptneox": Case(CASES["GPTNeoXForCausalLM", "parallel"], "gptneox", _split, neox),
    "gptneox, sequential": Case(CASES["GPTNeoXForCausalLM", "sequential"], "gptneox", _split, neox),
    "falcon 7b": Case(CASES["FalconForCausalLM", "7b"], "falcon", _split, one_kv_head),
    "falcon 40b": Case(CASES["FalconForCausalLM", "40b, 180b"], "falcon", _split),
    "falcon 11b": Case(CASES["FalconForCausalLM", "11b"], "falcon", _split),
    "bloom": Case(_OWN["bloom"], "bloom", _split),
    "mpt": Case(CASES["MptForCausalLM", "clipped, six heads"], "mpt", None, mpt),
    "starcoder2": Case(CASES["Starcoder2ForCausalLM", "window"], "starcoder2", None, window),
    "internlm2": Case(CASES["InternLM2ForCausalLM", "plain"], "internlm2", gguf_writer.split_wqkv, default_epsilon),
    "baichuan": Case(CASES["BaiChuanForCausalLM", "v1_7b"], "baichuan", gguf_writer.split_pack, default_epsilon),
    "nemotron": Case(CASES["NemotronForCausalLM", "biased, a quarter rotated"], "nemotron", _plus_one, rotary(0.25)),
    "stablelm": Case(CASES["StableLmForCausalLM", "12b"], "stablelm", gguf_writer.head_norms, rotary(0.25)),
    "seed_oss": Case(_OWN["seed_oss"], "seed_oss"),
    "smollm3": Case(_OWN["smollm3"], "smollm3", _permuted),
    "ernie4_5": Case(CASES["Ernie4_5ForCausalLM", "plain"], "ernie4_5"),
    "ernie4_5-moe": Case(CASES["Ernie4_5_MoeForCausalLM", "plain"], "ernie4_5-moe", gguf_writer.correction_bias, ernie_moe),
    "granite": Case(CASES["GraniteForCausalLM", "plain"], "granite", _permuted, granite),
    "granitemoe": Case(CASES["GraniteMoeForCausalLM", "plain"], "granitemoe", gguf_writer.split_input_linear, granite),
    "minicpm": Case(CASES["MiniCPMForCausalLM", "plain"], "minicpm", _permuted, minicpm),
    "mamba": Case(CASES["MambaForCausalLM", "plain"], "mamba", gguf_writer.state_tensors, only_states),
    "falcon mamba": Case(CASES["FalconMambaForCausalLM", "plain"], "mamba", gguf_writer.state_tensors, only_states),
    "mamba2": Case(_OWN["mamba2"], "mamba2", gguf_writer.state_tensors, only_states),
    "jamba": Case(CASES["JambaForCausalLM", "plain"], "jamba", gguf_writer.jamba_tensors, jamba),
    "jamba without experts": Case(
        CASES["JambaForCausalLM", "no experts, tied, biased, long kernel"], "jamba", gguf_writer.jamba_tensors, jamba
    ),
    "falcon-h1": Case(CASES["FalconH1ForCausalLM", "plain"], "falcon-h1", gguf_writer.falcon_h1_tensors, falcon_h1),
    "granitehybrid": Case(_OWN["granitehybrid"], "granitehybrid", gguf_writer.state_tensors, granite_hybrid),
    "granitehybrid without attention": Case(
        _OWN["granitehybrid without attention"], "granitehybrid", gguf_writer.state_tensors, granite_hybrid
    ),
    "granitehybrid, dense": Case(_OWN["granitehybrid dense"], "granitehybrid", gguf_writer.state_tensors, granite_hybrid),
    "command-r": Case(CASES["CohereForCausalLM", "q/k norms"], "command-r", None, cohere),
    "cohere2": Case(_OWN["cohere2"], "cohere2", None, cohere),
    "chatglm": Case(CASES["ChatGLMModel", "chatglm3_32k"], "chatglm", None, chatglm),
    "glm4": Case(CASES["Glm4ForCausalLM", "plain"], "glm4", None, rotary(0.5)),
    "glm4moe": Case(CASES["Glm4MoeForCausalLM", "4.5"], "glm4moe", gguf_writer.correction_bias, glm4_moe),
    "olmo": Case(CASES["OlmoForCausalLM", "clipped"], "olmo", _permuted, olmo),
    "olmo2": Case(CASES["Olmo2ForCausalLM", "plain"], "olmo2"),
    "olmo3": Case(_OWN["olmo3"], "olmo2", None, window_pattern),
    "olmoe": Case(CASES["OlmoeForCausalLM", "plain"], "olmoe"),
    "exaone": Case(CASES["ExaoneForCausalLM", "3.5"], "exaone"),
    "exaone4": Case(_OWN["exaone4"], "exaone4", None, window_pattern),
    "deepseek": Case(CASES["DeepseekForCausalLM", "plain"], "deepseek", _permuted, deepseek),
    "deepseek2": Case(_OWN["deepseek2"], "deepseek2", gguf_writer.split_kv_b, deepseek2),
    "deepseek2 lite, fused": Case(CASES["DeepseekV2ForCausalLM", "lite"], "deepseek2", None, deepseek2),
    "deepseek3": Case(_OWN["deepseek3"], "deepseek2", gguf_writer.split_kv_b, deepseek2),
    "gpt-oss": Case(CASES["GptOssForCausalLM", "plain"], "gpt-oss", gguf_writer.separate_gates, gpt_oss),
    "granitemoe with a shared expert": Case(
        CASES["GraniteMoeSharedForCausalLM", "plain"], "granitemoe", gguf_writer.split_input_linear, granite
    ),
    "hunyuan-dense": Case(_OWN["hunyuan-dense"], "hunyuan-dense", gguf_writer.hunyuan_norms, hunyuan),
    "hunyuan-moe": Case(_OWN["hunyuan-moe"], "hunyuan-moe", gguf_writer.hunyuan_norms, hunyuan_moe),
    "qwen3vlmoe": Case(CASES["Qwen3VLMoeForConditionalGeneration", "text"], "qwen3vlmoe", gguf_writer.separate_stacked_gates, moe_width),
    "nemotron_h": Case(_OWN["nemotron_h"], "nemotron_h", gguf_writer.nemotron_states, nemotron_h),
    "nemotron_h_moe": Case(_OWN["nemotron_h_moe"], "nemotron_h_moe", gguf_writer.nemotron_states, nemotron_h),
    "llama4": Case(_OWN["llama4"], "llama4", gguf_writer.llama4_experts, llama4),
    "mistral3": Case(CASES["Ministral3ForCausalLM", "plain"], "mistral3", _permuted, ministral3),
    "mistral3 without scaling": Case(_OWN["mistral"], "mistral3", _permuted),
    "phimoe": Case(_OWN["phimoe"], "phimoe", None, phimoe),
    "apertus": Case(apertus_model, "apertus", gguf_writer.without_activations, apertus),
    "qwen3next": Case(_OWN["qwen3next"], "qwen3next", gguf_writer.delta_net, delta_net),
    "qwen35": Case(_OWN["qwen35"], "qwen35", gguf_writer.tiled_delta_net, delta_net),
    "qwen35, layers listed": Case(_OWN["qwen35 listed"], "qwen35", gguf_writer.tiled_delta_net, listed_delta_net),
    "qwen35moe, layers listed": Case(_OWN["qwen35moe"], "qwen35moe", gguf_writer.tiled_delta_net, listed_delta_net),
    "qwen35moe": Case(_OWN["qwen35moe"], "qwen35moe", gguf_writer.tiled_delta_net, delta_net),
    "minimax-m2": Case(CASES["MiniMaxM2ForCausalLM", "half rotated"], "minimax-m2", gguf_writer.correction_bias, minimax),
}
