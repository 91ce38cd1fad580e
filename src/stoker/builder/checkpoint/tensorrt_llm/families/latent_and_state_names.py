"""The modules of multi-head latent attention (DeepSeek V2 and V3) and of blocks with a state (Mamba), and the rows of their parts."""

from __future__ import annotations

from torch import Tensor

from stoker.builder.checkpoint.tensorrt_llm.families.module_names import DEEPSEEK, Modules
from stoker.builder.checkpoint.tensorrt_llm.tensors import Data, Module


def _down_rows(data: Data) -> tuple[int, ...]:
    """The rows of fused_a: those of the latent vector of queries, and those of the other one with the rotary key."""
    return (data["q_lora_rank"], data["kv_lora_rank"] + data["qk_rope_head_dim"])


def _key_and_value_rows(data: Data) -> tuple[int, ...]:
    """The rows of kv_b_proj: a rank has the keys of all of its heads, then the values."""
    heads = data["num_attention_heads"]
    return (heads * data["qk_nope_head_dim"], heads * data["v_head_dim"])


LATENT: Modules = {
    **{name: module for name, module in DEEPSEEK.items() if not name.startswith("attention.")},
    "attention.fused_a": Module(("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), "same", sizes=_down_rows),
    "attention.q_a_layernorm": Module(("self_attn.q_a_layernorm",), "same"),
    "attention.kv_a_layernorm": Module(("self_attn.kv_a_layernorm",), "same"),
    "attention.dense": Module(("self_attn.o_proj",), "columns"),
}
LATENT_WITHOUT_QUERY_RANK: Modules = {**LATENT, "attention.fused_a": Module(("self_attn.kv_a_proj_with_mqa",), "same")}
LATENT_PARAMETERS: Modules = {
    "attention.q_b_proj": Module(("self_attn.q_b_proj.weight",), "rows"),
    "attention.kv_b_proj": Module(
        ("self_attn.kv_b_proj.weight",), "rows", layout="groups", sizes=_key_and_value_rows, groups_key="num_attention_heads"
    ),
    "mlp.e_score_correction_bias": Module(("mlp.gate.e_score_correction_bias",), "same"),
}
LATENT_PARAMETERS_WITHOUT_QUERY_RANK: Modules = {**LATENT_PARAMETERS, "attention.q_b_proj": Module(("self_attn.q_proj.weight",), "rows")}


def _without_last_axis(weight: Tensor) -> Tensor:
    """The weight [channels, 1, kernel] of a convolution from [channels, 1, kernel, 1]."""
    return weight.squeeze(-1)


def _log_of_negative(weight: Tensor) -> Tensor:
    """A_log from A, which is -exp(A_log). That of Mamba 1 [inner, state] is transposed."""
    return (-weight).log().t()


def _convolution_rows(data: Data) -> tuple[int, ...]:
    """The rows of conv1d of Mamba 2: x, B and C."""
    return (data["rnn_hidden_size"], *(data["ngroups"] * data["state_size"],) * 2)


def _input_rows(data: Data) -> tuple[int, ...]:
    """The rows of in_proj of Mamba 2: z, x, B, C and the time steps of heads."""
    return (data["rnn_hidden_size"], *_convolution_rows(data), data["rnn_hidden_size"] // data["rnn_head_size"])


# Mamba 1 is not divided over ranks.
MAMBA: Modules = {
    "ssm.in_proj_x": Module(("mixer.in_proj",), "same", followed_by="ssm.in_proj_z"),
    "ssm.in_proj_z": Module((), "same"),  # a part of the former
    "ssm.conv1d": Module(("mixer.conv1d",), "same", finish=_without_last_axis),
    "ssm.x_proj": Module(("mixer.x_proj",), "same"),
    "ssm.dt_proj": Module(("mixer.dt_proj",), "same"),
    "ssm.out_proj": Module(("mixer.out_proj",), "same"),
    "input_layernorm": Module(("norm",), "same"),
}
MAMBA_PARAMETERS: Modules = {
    "ssm.A": Module(("mixer.A_log",), "same", finish=_log_of_negative),
    "ssm.D": Module(("mixer.D",), "same"),
    "ssm.dt_bias": Module(("mixer.dt_proj.bias",), "same"),
}
MAMBA2: Modules = {
    "ssm.in_proj": Module(("mixer.in_proj",), "rows", layout="heads", sizes=_input_rows),
    "ssm.conv1d": Module(("mixer.conv1d",), "rows", layout="heads", sizes=_convolution_rows, finish=_without_last_axis),
    "ssm.norm": Module(("mixer.norm",), "rows"),
    "ssm.out_proj": Module(("mixer.out_proj",), "columns"),
    "input_layernorm": Module(("norm",), "same"),
}
MAMBA2_PARAMETERS: Modules = {
    "ssm.A": Module(("mixer.A_log",), "rows", finish=_log_of_negative),
    "ssm.D": Module(("mixer.D",), "rows"),
    "ssm.dt_bias": Module(("mixer.dt_bias",), "rows"),
}
