"""The normalised description of a decoder: what every architecture file produces and the blocks consume.

A checkpoint's config.json becomes a `ModelConfig` in `models/`; the engine's config.json stores it whole, so
the runtime composes the model from this data alone. Sizes are of the whole model, before sharding.
"""

from __future__ import annotations

import msgspec


class Frozen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of the configuration values."""


class NormConfig(Frozen, frozen=True, kw_only=True):
    """RMS norm or layer norm. Weight offsets (Gemma's 1 + w) are folded in by the build."""

    kind: str = "rms"  # rms, layer
    eps: float = 1e-6
    weight: bool = True
    bias: bool = False
    wide: bool = False  # weights are kept in float32: a folded 1 + w would lose w's low bits in bfloat16


class RopeConfig(Frozen, frozen=True, kw_only=True):
    """Rotary positions. `scaling` is a row of layers.rope: default, linear, dynamic, qwen, llama3, yarn, longrope."""

    dim: int  # rotated features of each head, the first ones
    theta: float = 10000.0
    interleaved: bool = False  # pairs (2i, 2i+1) as in GPT-J; else halves (i, i + dim/2) as in GPT-NeoX
    scaling: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; None: by the method's formula
    mscale: float = 0.0  # yarn as DeepSeek uses it
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()
    two_axes: bool = False  # ChatGLM 1: half of the frequencies turn with the position, half with the block position


class AttentionConfig(Frozen, frozen=True, kw_only=True, tag="attention"):
    """Multi-head, grouped-query or multi-query attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None  # None: head_size ** -0.5
    window: int | None = None  # a token sees itself and window - 1 before it
    chunk: int | None = None  # a token sees only its own chunk of so many positions (Llama 4's local layers)
    softcap: float | None = None  # logits become cap * tanh(logits / cap)
    rope: RopeConfig | None = None
    alibi: bool = False  # linear biases by head (arXiv 2108.12409)
    alibi_max: float = 8.0  # the steepest slopes' exponent: slopes fall from 2 ** (-alibi_max / heads) to 2 ** -alibi_max
    alibi_scale: float = 1.0  # multiplies the slopes (Falcon divides scores and biases alike)
    qk_norm: NormConfig | None = None  # of queries and keys, before rope
    qk_norm_full: bool = False  # over all heads together (OLMo 2), else each head
    qk_norm_heads: bool = False  # each head has weights of its own (Command-R+)
    sinks: bool = False  # one learned logit a head joins the softmax (gpt-oss)
    clip_qkv: float | None = None
    logn_length: int | None = None  # Qwen 1: queries past this position grow by log_n(position)


class MLAConfig(Frozen, frozen=True, kw_only=True, tag="mla"):
    """Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): the cache holds the latent and the rope part."""

    num_heads: int
    q_rank: int | None  # None: queries come straight from the hidden state
    kv_rank: int
    nope_size: int
    rope_size: int
    v_size: int
    rope: RopeConfig
    norm: NormConfig  # of the latents
    window: int | None = None  # a token sees itself and window - 1 before it
    scale: float | None = None  # None: (nope_size + rope_size) ** -0.5
    down_bias: bool = False
    out_bias: bool = False


class MLPConfig(Frozen, frozen=True, kw_only=True, tag="mlp"):
    """act(gate) × up → down when gated, else act(up) → down."""

    size: int
    activation: str = "silu"  # silu, gelu, gelu_tanh, gelu_quick, relu, relu2
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False


class MoEConfig(Frozen, frozen=True, kw_only=True, tag="moe"):
    """Routed experts, and optionally shared ones. The router runs in float32."""

    num_experts: int
    top_k: int
    expert: MLPConfig
    score: str = "softmax"  # softmax, sigmoid, softmax_topk (softmax over the chosen only)
    renormalize: bool = True  # chosen weights sum to 1
    scale: float = 1.0  # routed_scaling_factor
    router_bias: bool = False
    correction_bias: bool = False  # DeepSeek V3: added to scores for the choice, not for the weight
    num_groups: int = 1  # group-limited routing
    top_groups: int = 1
    group_score: str = "max"  # max (V2), top2 (V3: sum of the two best)
    shared: MLPConfig | None = None
    shared_gate: bool = False  # Qwen2-MoE: sigmoid(gate(x)) × shared(x)
    glu_clip: float | None = None  # gpt-oss: clamp, (up + 1) × gate × sigmoid(alpha × gate)
    glu_alpha: float = 1.702


class LayerConfig(Frozen, frozen=True, kw_only=True):
    """One decoder layer.

    `layout` is a row of layers.layer.LAYOUTS: pre (norm → block → add), post (block → norm → add), sandwich (norm → block → norm →
    add), parallel (attention and MLP read the same stream; both are added), add_norm (the normed stream is what is added to), last
    (block → add → norm).
    """

    attention: AttentionConfig | MLAConfig
    mlp: MLPConfig | MoEConfig
    norm: NormConfig
    layout: str = "pre"
    parallel_norms: int = 1  # parallel layout: 2 when the MLP has a norm of its own
    residual_scale: float = 1.0  # blocks' outputs are multiplied before the add (Granite)
    skip_scale: float = 1.0  # the residual itself is multiplied (ChatGLM 1's alpha; add_norm layout)


class PrefixConfig(Frozen, frozen=True, kw_only=True):
    """A prefix language model (ChatGLM 1, GLM): what precedes the answer's start token sees itself in both directions.

    The start token and all after it sit at the position of the prompt's first mask token, and their block positions count 1, 2, …;
    `layers.prefix.find_bidirectional_prefix` finds both in a prompt.
    """

    start_id: int  # begins the answer: the last token of a well-formed prompt
    mask_ids: tuple[int, ...]  # tokens that stand for the answer's place: the first one in the prompt does
    ranked: bool = False  # the first of `mask_ids` that the prompt holds does (ChatGLM: [gMASK] before [MASK])


class ModelConfig(Frozen, frozen=True, kw_only=True):
    """A whole decoder."""

    architecture: str  # the row of models/ that made this, e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig | None
    tie_head: bool = False
    head_bias: bool = False
    embed_scale: float = 1.0
    embed_norm: NormConfig | None = None  # BLOOM
    learned_positions: int = 0  # rows of a learned position table; 0: none
    position_offset: int = 0  # OPT's table starts at 2
    embed_size: int | None = None  # embeddings narrower than hidden_size are projected in and out (OPT-350m)
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    block_positions: int = 0  # rows of a learned table of block positions (GLM)
    prefix: PrefixConfig | None = None  # the prompt sees itself in both directions, and tokens have two positions

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def requires_whole_prompt(self) -> bool:
        """Whether a prompt must be prefilled in one step and shares no prefix: its tokens see ones that follow them."""
        return self.prefix is not None

    def windowed(self, window: int) -> ModelConfig:
        """The same model with every layer's window narrowed to at most `window`."""
        layers = []
        for layer in self.layers:
            narrow = min(window, layer.attention.window or window)
            layers.append(msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, window=narrow)))
        return msgspec.structs.replace(self, layers=tuple(layers))


def encode_model(config: ModelConfig) -> dict:
    """The config as plain JSON data. Equal neighbouring layers are stored once with a count."""
    data = msgspec.to_builtins(config)
    runs: list[list] = []
    for layer in data["layers"]:
        if runs and runs[-1][1] == layer:
            runs[-1][0] += 1
        else:
            runs.append([1, layer])
    data["layers"] = [{"count": count, "layer": layer} for count, layer in runs]
    return data


def decode_model(data: dict) -> ModelConfig:
    """The inverse of `encode_model`. Raises msgspec.ValidationError naming the path of a wrong value."""
    runs = data.get("layers", [])
    layers = [run["layer"] for run in runs for _ in range(int(run["count"]))]
    return msgspec.convert({**data, "layers": layers}, ModelConfig)
