"""The description of a decoder: what an architecture reads from config.json, and what the blocks are composed from.

The engine's config.json stores a `ModelConfig` completely, so the runtime composes the model from it alone. All sizes are those of the
whole model, before sharding. Field names are part of the engine format.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

MAX_LAYERS = 4096  # of a model, checked before anything is created for each layer


class Frozen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of the classes in this module."""


class NormConfig(Frozen, frozen=True, kw_only=True):
    """RMS norm or layer norm. Offsets such as Gemma's 1 + w are added to the weight by the build."""

    kind: str = "rms"  # rms or layer
    eps: float = 1e-6
    weight: bool = True
    bias: bool = False
    wide: bool = False  # store the weight in float32, because 1 + w in bfloat16 would lose the low bits of w


class RopeConfig(Frozen, frozen=True, kw_only=True):
    """Rotary position embeddings."""

    dim: int  # rotated features of each head, beginning with the first
    theta: float = 10000.0
    interleaved: bool = False  # rotate features (2i, 2i + 1) as in GPT-J; otherwise (i, i + dim / 2) as in GPT-NeoX
    scaling: str = "default"  # a row of layers.rope.METHODS: default, linear, dynamic, qwen, llama3, yarn or longrope
    factor: float = 1.0  # by which the context is extended
    original_max_positions: int = 0  # context length before the extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; None: computed by the method
    mscale: float = 0.0  # yarn in DeepSeek
    mscale_all_dim: float = 0.0  # yarn in DeepSeek
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope: divisor of each frequency, within the original context
    long_factor: tuple[float, ...] = ()  # longrope: the same beyond the original context
    short_mscale: float | None = None  # longrope in Phi-3.5-MoE: multiplies cos and sin within the original context
    long_mscale: float | None = None  # longrope in Phi-3.5-MoE: the same beyond the original context
    two_axes: bool = False  # ChatGLM 1: rotate one half of the features by the position, the other by the block position


class QueryScaleConfig(Frozen, frozen=True, kw_only=True):
    """Queries at later positions are multiplied by 1 + beta × log(1 + floor((position + offset) / interval)) (arXiv 2501.19399)."""

    interval: int
    beta: float
    offset: int = 0


class AttentionConfig(Frozen, frozen=True, kw_only=True, tag="attention"):
    """Multi-head, grouped-query or multi-query attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None  # of the scores; None: head_size ** -0.5
    window: int | None = None  # sliding window: a token attends to itself and the window - 1 tokens before it
    chunk: int | None = None  # a token attends only within its chunk of this number of positions (Llama 4)
    softcap: float | None = None  # scores become softcap × tanh(scores / softcap)
    rope: RopeConfig | None = None
    alibi: bool = False  # linear biases (arXiv 2108.12409)
    alibi_max: float = 8.0  # slopes are from 2 ** (-alibi_max / heads) to 2 ** -alibi_max
    alibi_scale: float = 1.0  # multiplies the slopes; Falcon scales biases like scores
    qk_norm: NormConfig | None = None  # of queries and keys, before the rotary embedding
    qk_norm_after_rope: bool = False  # normalize after the rotary embedding (Hunyuan)
    qk_norm_full: bool = False  # normalize all heads together (OLMo 2) instead of each head
    qk_norm_heads: bool = False  # each head has its own norm weight (Command-R+)
    sinks: bool = False  # a learned logit per head takes part in the softmax (gpt-oss)
    clip_qkv: float | None = None  # clamp q, k and v to this absolute value
    v_norm: NormConfig | None = None  # of the values of each head (Gemma 3n)
    kv_layer: int | None = None  # the earlier layer whose keys and values this one reads; it has none of its own (Gemma 3n)
    out_gate: bool = False  # multiply the output of each head by sigmoid(a linear of the input) (Qwen3-Next)
    logn_length: int | None = None  # Qwen 1: beyond this position, queries are multiplied by log(position) / log(logn_length)
    query_scale: QueryScaleConfig | None = None  # Llama 4, Ministral 3

    @property
    def cached_rope(self) -> RopeConfig | None:
        """The rotary embedding that is applied as keys are stored. None if there is none, or if norms follow it."""
        return None if self.qk_norm_after_rope else self.rope


class MLAConfig(Frozen, frozen=True, kw_only=True, tag="mla"):
    """Multi-head latent attention (DeepSeek V2, arXiv 2405.04434). The KV cache holds the latent and the rotated part of the key."""

    num_heads: int
    q_rank: int | None  # None: queries are projected from the hidden state directly
    kv_rank: int
    nope_size: int  # features of a head without rotary embedding
    rope_size: int  # features of a head with rotary embedding
    v_size: int
    rope: RopeConfig
    norm: NormConfig  # of the latents
    window: int | None = None  # sliding window: a token attends to itself and the window - 1 tokens before it
    scale: float | None = None  # of the scores; None: (nope_size + rope_size) ** -0.5
    down_bias: bool = False
    out_bias: bool = False

    @property
    def cached_rope(self) -> RopeConfig:
        """The rotary embedding that is applied as keys are stored."""
        return self.rope


class Mamba1Config(Frozen, frozen=True, kw_only=True, tag="mamba1"):
    """A Mamba block (arXiv 2312.00752): a causal convolution, and a state per feature whose elements decay differently at each token."""

    inner_size: int  # features of the recurrence
    state_size: int  # elements of the state of a feature
    step_rank: int  # width from which the time steps of all features are projected
    kernel: int  # tokens of the convolution
    norm: NormConfig | None = None  # of the inputs of the time step, of B and of C (Jamba, Falcon Mamba)
    activation: str = "silu"  # after the convolution
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False

    def local_channels(self, num_ranks: int = 1) -> int:
        """The channels of the convolution on one of several ranks: its features."""
        return self.inner_size // num_ranks

    @property
    def num_heads(self) -> int:
        """The number of independent parts of the state, which are its features."""
        return self.inner_size

    @property
    def state_shape(self) -> tuple[int, int]:
        """The recurrent state of a sequence: (features, elements)."""
        return self.inner_size, self.state_size

    @property
    def key_heads(self) -> int:
        """The number of groups that tensor parallelism keeps together: each feature is one."""
        return self.inner_size


class Mamba2Config(Frozen, frozen=True, kw_only=True, tag="mamba2"):
    """A Mamba 2 block (arXiv 2405.21060): a causal convolution, and a state per head that decays by a scalar at each token."""

    num_heads: int
    head_size: int  # features of one head
    num_groups: int  # heads of a group share B and C
    state_size: int  # features of B and C
    kernel: int  # tokens of the convolution
    norm: NormConfig | None  # of the gated output, within each of `norm_groups` groups; None: the output is gated only
    norm_groups: int = 1
    gate_first: bool = True  # gate, then norm; otherwise norm, then gate
    activation: str = "silu"  # after the convolution
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    min_step: float = 0.0  # bounds of the time step
    max_step: float | None = None
    part_scales: tuple[float, ...] = ()  # multiply gate, x, B, C and time step of the input projection (Falcon-H1); (): none do

    def local_channels(self, num_ranks: int = 1) -> int:
        """The channels of the convolution on one of several ranks: the inputs of its heads, then B and C of its groups."""
        return self.num_heads // num_ranks * self.head_size + 2 * max(self.num_groups // num_ranks, 1) * self.state_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The recurrent state of a sequence: (heads, features, state features)."""
        return self.num_heads, self.head_size, self.state_size

    @property
    def inner_size(self) -> int:
        """The features of the output of the recurrence."""
        return self.num_heads * self.head_size

    @property
    def key_heads(self) -> int:
        """The number of groups of heads, which tensor parallelism keeps together."""
        return self.num_groups


class DeltaNetConfig(Frozen, frozen=True, kw_only=True, tag="delta_net"):
    """A gated delta net (arXiv 2412.06464): linear attention whose state decays, and is corrected by what a key already retrieves."""

    num_heads: int  # of values
    key_heads: int  # of queries and keys, which groups of value heads share
    key_size: int
    value_size: int
    kernel: int  # tokens of the convolution
    norm: NormConfig  # of each head's output, which is then gated
    activation: str = "silu"  # after the convolution

    def local_channels(self, num_ranks: int = 1) -> int:
        """The channels of the convolution on one of several ranks: queries, keys and values of its heads."""
        return 2 * max(self.key_heads // num_ranks, 1) * self.key_size + self.num_heads // num_ranks * self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The recurrent state of a sequence: (value heads, key features, value features)."""
        return self.num_heads, self.key_size, self.value_size

    @property
    def inner_size(self) -> int:
        """The features of the output of the recurrence."""
        return self.num_heads * self.value_size


StateConfig = Mamba1Config | Mamba2Config | DeltaNetConfig


class MLPConfig(Frozen, frozen=True, kw_only=True, tag="mlp"):
    """down(act(gate(x)) × up(x)) when gated, otherwise down(act(up(x)))."""

    size: int
    activation: str = "silu"  # silu, gelu, gelu_tanh, gelu_quick, relu, relu2, or xielu, which has weights and cannot be gated
    gated: bool = True
    up_bias: bool = False  # of gate and up
    down_bias: bool = False
    # Gemma 3n: gate becomes relu(gate - cutoff) before the activation, where `sparsity` is the fraction of a normal distribution with the
    # mean and the standard deviation of the token's gate that is below the cutoff
    sparsity: float = 0.0
    gate_scale: float = 1.0  # multiplies gate(x) before the activation (Falcon-H1)
    out_scale: float = 1.0  # multiplies the output (Falcon-H1)


class MoEConfig(Frozen, frozen=True, kw_only=True, tag="moe"):
    """Routed experts, and optionally a shared expert. The router computes in float32."""

    num_experts: int
    top_k: int
    expert: MLPConfig
    # softmax, sigmoid, softmax_topk (softmax over the chosen experts only) or sparsemixer (Phi-3.5-MoE, arXiv 2409.12136)
    score: str = "softmax"
    jitter: float = 0.01  # sparsemixer: half of the relative distance to the best score beyond which an expert has no weight
    scale_input: bool = False  # multiply the input of an expert by its weight instead of its output (Llama 4)
    renormalize: bool = True  # make the weights of the chosen experts sum to 1
    scale: float = 1.0  # multiplies the weights (routed_scaling_factor)
    router_bias: bool = False
    correction_bias: bool = False  # DeepSeek V3: a bias on the scores by which experts are chosen, but not on their weights
    num_groups: int = 1  # group-limited routing: experts are chosen within the best groups
    top_groups: int = 1
    group_score: str = "max"  # max (DeepSeek V2), or top2: sum of the two best scores (DeepSeek V3)
    shared: MLPConfig | None = None
    shared_gate: bool = False  # Qwen2-MoE: the shared expert is multiplied by sigmoid(gate(x))
    glu_clip: float | None = None  # gpt-oss: (up + 1) × gate × sigmoid(glu_alpha × gate), with gate and up clamped to glu_clip
    glu_alpha: float = 1.702


class AltUpConfig(Frozen, frozen=True, kw_only=True):
    """What the layers of Gemma 3n have beside attention and MLP.

    AltUp (arXiv 2301.13310): the hidden states are several streams; each layer computes one of them and predicts the others. LAuReL (arXiv
    2411.07501): a low-rank product beside attention. Per-layer inputs: each layer adds a function of its own embedding of the token.
    """

    num_streams: int
    active: int = 0  # the stream that the layers compute
    scale_corrected: bool = True  # the per-layer input is gated by the active stream times a learned vector
    laurel_rank: int
    num_inputs: int  # layers of the model, each of which has an input
    input_size: int  # features of the input of one layer
    input_vocab: int  # rows of the table of inputs; tokens beyond it have the input of token 0
    input_activation: str  # of the gate of the input

    @property
    def inputs_width(self) -> int:
        """The features of the inputs of all layers."""
        return self.num_inputs * self.input_size


class BranchScales(Frozen, frozen=True, kw_only=True):
    """Multipliers of a layer that has both attention and a block with a state: of their inputs, and of their outputs (Falcon-H1)."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    state_in: float = 1.0
    state_out: float = 1.0


class LayerConfig(Frozen, frozen=True, kw_only=True):
    """One decoder layer: attention, MLP, and how norms and residual additions are placed around them.

    A layer of a hybrid model has a block with a recurrent state (`state`) instead of attention, or both with the same input. `layout` is a
    row of layers.layer.LAYOUTS:
      pre       norm → block → add
      post      block → norm → add
      sandwich  norm → block → norm → add
      parallel  attention and MLP have the same input, and both outputs are added
      add_norm  norm → block → add to the output of the norm
      last      block → add → norm
      single    norm → block → add, without an MLP
      altup     sandwich, with the additions of AltUpConfig
    """

    attention: AttentionConfig | MLAConfig | None = None
    state: Mamba1Config | Mamba2Config | DeltaNetConfig | None = None
    mlp: MLPConfig | MoEConfig | None = None
    norm: NormConfig
    layout: str = "pre"
    parallel_norms: int = 1  # parallel layout: 2 when attention and MLP have separate norms
    residual_scale: float = 1.0  # multiplies block outputs before they are added (Granite)
    branch_scales: BranchScales = BranchScales()
    skip_scale: float = 1.0  # add_norm layout: multiplies the residual (alpha of ChatGLM 1)
    altup: AltUpConfig | None = None  # altup layout


class PrefixConfig(Frozen, frozen=True, kw_only=True):
    """A prefix LM (ChatGLM 1, GLM), in which the tokens before the answer's start token attend in both directions.

    The start token and all tokens after it have the position of the prompt's mask token, and their block positions count 1, 2, ….
    `core.prefix_lm` computes these positions.
    """

    start_id: int  # the token that begins the answer, and ends a well-formed prompt
    mask_ids: tuple[int, ...]  # tokens that mark the place of the answer; the first one in the prompt counts
    ranked: bool = False  # the one that is first in `mask_ids` counts instead (ChatGLM: [gMASK] before [MASK])


class ModelConfig(Frozen, frozen=True, kw_only=True):
    """A complete decoder."""

    architecture: str  # name of the architecture that read the config.json, such as LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    max_positions: int  # longest sequence
    layers: tuple[LayerConfig, ...]
    norm: NormConfig | None  # after the last layer
    tie_head: bool = False  # the output head is the token embedding
    head_bias: bool = False
    embed_scale: float = 1.0  # multiplies the embeddings
    embed_norm: NormConfig | None = None  # of the embeddings (BLOOM)
    learned_positions: int = 0  # rows of a learned position table; 0: none
    position_offset: int = 0  # row of position 0 in that table (2 in OPT)
    embed_size: int | None = None  # width of the embeddings, if they are projected to and from hidden_size (OPT-350m)
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits become cap × tanh(logits / cap)
    block_positions: int = 0  # rows of a learned table of block positions (GLM); 0: none
    prefix: PrefixConfig | None = None  # set for a prefix LM
    altup: AltUpConfig | None = None  # that of all layers, if the residual stream consists of several ones

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def stream_width(self) -> int:
        """The features of a token's hidden state between two layers: `hidden_size`, or all AltUp streams and the inputs of the layers."""
        return self.hidden_size if self.altup is None else self.altup.num_streams * self.hidden_size + self.altup.inputs_width

    @property
    def shares_caches(self) -> bool:
        """Whether a layer reads the keys and values of another layer."""
        return any(self.kv_layer(i) != i for i in range(self.num_layers))

    @property
    def requires_whole_prompt(self) -> bool:
        """Whether a prompt must be prefilled in one step and shares no prefix, because its tokens attend to later ones."""
        return self.prefix is not None

    @property
    def ropes(self) -> set[RopeConfig]:
        """The rotary embeddings of all layers that have one."""
        return {layer.attention.rope for layer in self.layers if layer.attention is not None and layer.attention.rope is not None}

    @property
    def has_state(self) -> bool:
        """Whether a layer has a recurrent state, which a sequence holds beside its blocks of the KV cache."""
        return any(layer.state is not None for layer in self.layers)

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or an earlier one (`AttentionConfig.kv_layer`)."""
        attention = self.layers[layer].attention
        shared = attention.kv_layer if isinstance(attention, AttentionConfig) else None
        return layer if shared is None else shared

    def windowed(self, window: int) -> ModelConfig:
        """A copy in which the sliding window of every layer is at most `window`."""
        layers = []
        for layer in self.layers:
            if layer.attention is None:
                layers.append(layer)
                continue
            narrow = min(window, layer.attention.window or window)
            layers.append(msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, window=narrow)))
        return msgspec.structs.replace(self, layers=tuple(layers))


class _Run(msgspec.Struct, forbid_unknown_fields=True):
    """Consecutive equal layers."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    layer: LayerConfig


class _Layers(msgspec.Struct):
    """The layers in the data of a model."""

    layers: list[_Run] = []


def encode_model(config: ModelConfig) -> dict[str, Any]:
    """The config as JSON data. Consecutive equal layers are stored once, with a count."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    runs: list[list[Any]] = []  # [count, layer]
    for layer in data["layers"]:
        if runs and runs[-1][1] == layer:
            runs[-1][0] += 1
        else:
            runs.append([1, layer])
    data["layers"] = [{"count": count, "layer": layer} for count, layer in runs]
    return data


def decode_model(data: dict[str, Any]) -> ModelConfig:
    """The inverse of `encode_model`. Raises msgspec.ValidationError naming the path of an invalid value."""
    runs = msgspec.convert(data, _Layers).layers
    if sum(run.count for run in runs) > MAX_LAYERS:
        raise msgspec.ValidationError(f"Expected at most {MAX_LAYERS} layers - at `$.layers`")
    config = msgspec.convert({**data, "layers": []}, ModelConfig)
    return msgspec.structs.replace(config, layers=tuple(run.layer for run in runs for _ in range(run.count)))
