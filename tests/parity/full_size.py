"""The keys of published config.json files that determine shapes, and the number of parameters of each model."""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int | None = None, vocab: int = 32000, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv or heads, "vocab_size": vocab,
    } | more  # fmt: skip


def _gpt(name: str, layers: int, width: int, heads: int, positions: int = 1024, vocab: int = 50257, **more: Any) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": positions, "vocab_size": vocab}
    return {"architectures": [name]} | sizes | more


def _as(name: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config | {"architectures": [name]} | more


def _neox(hidden: int, inner: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return _as("GPTNeoXForCausalLM", _llama(hidden, inner, layers, heads, vocab=vocab))


def _bloom(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"architectures": ["BloomForCausalLM"], "n_embed": hidden, "n_layer": layers, "num_attention_heads": heads, "vocab_size": 250880}


def _opt(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * hidden, "vocab_size": 50272}
    return {"architectures": ["OPTForCausalLM"]} | sizes | more


def _glm(vocab: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["ChatGLMModel"], "padded_vocab_size": vocab, "num_layers": layers, "hidden_size": 4096, "ffn_hidden_size": 13696,
        "num_attention_heads": 32, "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True,
    } | more  # fmt: skip


def _falcon(hidden: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_kv_heads": kv, "vocab_size": 65024}
    return {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True} | sizes | more


_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": 1536, "topk_method": "group_limited_greedy",
    "n_group": 8, "topk_group": 3, "vocab_size": 102400, "max_position_embeddings": 163840, "routed_scaling_factor": 16.0,
}  # fmt: skip
_LITE = {"q_lora_rank": None, "n_routed_experts": 64, "moe_intermediate_size": 1408, "topk_method": "greedy"}
_GPT_OSS = {"architectures": ["GptOssForCausalLM"]}

# name → (config.json, parameters in the published files, or as counted by the classes of transformers).
# A tied head counts once. Buffers that influence the result count too (the correction biases of DeepSeek V3).
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (_llama(4096, 11008, 32, 32), 6_738_415_616),
    "Llama-2-13B": (_llama(5120, 13824, 40, 40), 13_015_864_320),
    "Llama-2-70B": (_llama(8192, 28672, 80, 64, 8), 68_976_648_192),
    "Llama-3.1-8B": (_llama(4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "Llama-3.1-70B": (_llama(8192, 28672, 80, 64, 8, 128256), 70_553_706_496),
    "Llama-3.1-405B": (_llama(16384, 53248, 126, 128, 8, 128256), 405_853_388_800),
    "Llama-3.2-1B": (_llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True), 1_235_814_400),
    "DeepSeek-LLM-7B": (_llama(4096, 11008, 30, 32, vocab=102400), 6_910_365_696),
    "Mistral-7B": (_as("MistralForCausalLM", _llama(4096, 14336, 32, 32, 8)), 7_241_732_096),
    "Mixtral-8x7B": (_as("MixtralForCausalLM", _llama(4096, 14336, 32, 32, 8)), 46_702_792_704),
    "Mixtral-8x22B": (_as("MixtralForCausalLM", _llama(6144, 16384, 56, 48, 8, 32768)), 140_630_071_296),
    "DeepSeek-MoE-16B": (
        _as(
            "DeepseekForCausalLM",
            _llama(2048, 10944, 28, 16, vocab=102400),
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
        ),
        16_375_728_128,
    ),
    "DeepSeek-V2": (
        _V2 | {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60, "num_attention_heads": 128},
        235_741_434_880,
    ),
    "DeepSeek-V2-Lite": (
        _V2 | _LITE | {"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16},
        15_706_484_224,
    ),
    "DeepSeek-V3": ({"architectures": ["DeepseekV3ForCausalLM"]}, 671_026_419_200),
    "Kimi-K2": (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "vocab_size": 163840,
            "num_attention_heads": 64,
            "n_routed_experts": 384,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        1_026_408_232_448,
    ),
    "Falcon-7B": ({"architectures": ["FalconForCausalLM"]}, 6_921_720_704),
    "Falcon-40B": (_falcon(8192, 60, 128, 8), 41_303_293_952),
    "Falcon-180B": (_falcon(14848, 80, 232, 8), 178_557_088_768),
    "Falcon-11B": (_falcon(4096, 60, 32, 8, num_ln_in_parallel_attn=1, tie_word_embeddings=False), 11_102_822_400),
    "InternLM-7B": (_as("InternLMForCausalLM", _llama(4096, 11008, 32, 32, vocab=103168), bias=True), 7_321_948_160),
    "InternLM2-7B": (_as("InternLM2ForCausalLM", _llama(4096, 14336, 32, 32, 8, 92544), bias=False), 7_737_708_544),
    "InternLM2-20B": (_as("InternLM2ForCausalLM", _llama(6144, 16384, 48, 48, 8, 92544), bias=False), 19_861_149_696),
    "Baichuan-7B": (_as("BaiChuanForCausalLM", _llama(4096, 11008, 32, 32, vocab=64000), max_position_embeddings=4096), 7_000_559_616),
    "Baichuan-13B": (_as("BaichuanForCausalLM", _llama(5120, 13696, 40, 40, vocab=64000)), 13_264_901_120),
    "Baichuan2-7B": (_as("BaichuanForCausalLM", _llama(4096, 11008, 32, 32, vocab=125696), max_position_embeddings=4096), 7_505_973_248),
    "Baichuan2-13B": (_as("BaichuanForCausalLM", _llama(5120, 13696, 40, 40, vocab=125696)), 13_896_668_160),
    "ChatGLM-6B": (
        {"architectures": ["ChatGLMModel"], "inner_hidden_size": 16384, "vocab_size": 130528, "position_encoding_2d": True},
        6_707_929_088,
    ),
    "ChatGLM2-6B": (_glm(65024, 28), 6_243_584_000),
    "GLM-4-9B": (_glm(151552, 40), 9_399_951_360),
    "GLM-10B": (
        {
            "architectures": ["GLMModel"],
            "num_layers": 48,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "vocab_size": 50304,
            "max_sequence_length": 1024,
        },
        9_880_682_496,
    ),
    "GPT-J-6B": ({"architectures": ["GPTJForCausalLM"]}, 6_050_882_784),
    "Qwen-7B": (_as("QWenLMHeadModel", _llama(4096, 22016, 32, 32, vocab=151936)), 7_721_324_544),
    "Qwen-72B": (_as("QWenLMHeadModel", _llama(8192, 49152, 80, 64, vocab=152064)), 72_287_920_128),
    "Qwen2.5-0.5B": (_as("Qwen2ForCausalLM", _llama(896, 4864, 24, 14, 2, 151936), tie_word_embeddings=True), 494_032_768),
    "Qwen2.5-7B": (_as("Qwen2ForCausalLM", _llama(3584, 18944, 28, 28, 4, 152064)), 7_615_616_512),
    "Qwen1.5-MoE-A2.7B": ({"architectures": ["Qwen2MoeForCausalLM"]}, 14_315_784_192),
    "Qwen2-57B-A14B": (
        _as(
            "Qwen2MoeForCausalLM",
            _llama(3584, 18944, 28, 28, 4),
            vocab_size=151936,
            moe_intermediate_size=2560,
            num_experts=64,
            num_experts_per_tok=8,
            shared_expert_intermediate_size=20480,
        ),
        57_408_658_944,
    ),
    "Qwen3-8B": (_as("Qwen3ForCausalLM", _llama(4096, 12288, 36, 32, 8, 151936)), 8_190_735_360),
    "Qwen3-30B-A3B": (_as("Qwen3MoeForCausalLM", _llama(2048, 6144, 48, 32, 4, 151936)), 30_532_122_624),
    "Qwen3-235B-A22B": (_as("Qwen3MoeForCausalLM", _llama(4096, 12288, 94, 64, 4, 151936), moe_intermediate_size=1536), 235_093_634_560),
    "GPT-2": (_gpt("GPT2LMHeadModel", 12, 768, 12), 124_439_808),
    "GPT-2 XL": (_gpt("GPT2LMHeadModel", 48, 1600, 25), 1_557_611_200),
    "SantaCoder": (_gpt("GPT2LMHeadCustomModel", 24, 2048, 16, 2048, 49280, attention_head_type="multiquery"), 1_124_886_528),
    "StarCoder": (_gpt("GPTBigCodeForCausalLM", 40, 6144, 48, 8192, 49152), 15_517_456_384),
    "StarCoder2-15B": (_as("Starcoder2ForCausalLM", _llama(6144, 24576, 40, 48, 4, 49152), tie_word_embeddings=False), 15_957_889_024),
    "Gemma-2B": (_as("GemmaForCausalLM", _llama(2048, 16384, 18, 8, 1, 256000), head_dim=256), 2_506_172_416),
    "Gemma-7B": ({"architectures": ["GemmaForCausalLM"]}, 8_537_680_896),
    "Gemma-2-9B": (_as("Gemma2ForCausalLM", _llama(3584, 14336, 42, 16, 8, 256000), head_dim=256), 9_241_705_984),
    "Gemma-2-27B": (
        _as("Gemma2ForCausalLM", _llama(4608, 36864, 46, 32, 16, 256000), head_dim=128, query_pre_attn_scalar=144),
        27_227_128_320,
    ),
    "Gemma-3-1B": (_as("Gemma3ForCausalLM", _llama(1152, 6912, 26, 4, 1, 262144), head_dim=256), 999_885_952),
    "Gemma-3n-E4B": ({"architectures": ["Gemma3nForConditionalGeneration"]}, 6_835_235_568),  # without the vision and audio towers
    "Gemma-3n-E2B": (
        {"architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10},
        4_435_182_688,
    ),
    "Phi-2": (_as("PhiForCausalLM", _llama(2560, 10240, 32, 32, vocab=51200), partial_rotary_factor=0.4), 2_779_683_840),
    "Phi-3-mini": (_as("Phi3ForCausalLM", _llama(3072, 8192, 32, 32, vocab=32064)), 3_821_079_552),
    "Phi-4": (_as("Phi3ForCausalLM", _llama(5120, 17920, 40, 40, 10, 100352)), 14_659_507_200),
    "OPT-125M": (_opt(768, 12, 12), 125_239_296),
    "OPT-350M": (_opt(1024, 24, 16, do_layer_norm_before=False, word_embed_proj_dim=512), 331_196_416),
    "OPT-6.7B": (_opt(4096, 32, 32), 6_658_473_984),
    "BLOOM-560M": (_bloom(1024, 24, 16), 559_214_592),
    "BLOOM": (_bloom(14336, 70, 112), 176_247_271_424),
    "MPT-7B": ({"architectures": ["MPTForCausalLM"], "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}, 6_649_286_656),
    "GPT-NeoX-20B": (_neox(6144, 24576, 44, 64, 50432), 20_554_567_680),
    "Pythia-6.9B": (_neox(4096, 16384, 32, 32, 50432), 6_857_302_016),
    "OLMo-2-7B": (_as("Olmo2ForCausalLM", _llama(4096, 11008, 32, 32, vocab=100352)), 7_298_617_344),
    "SmolLM3-3B": ({"architectures": ["SmolLM3ForCausalLM"]}, 3_075_098_624),
    "Seed-OSS-36B": (_as("SeedOssForCausalLM", _llama(5120, 27648, 64, 80, 8, 155136), head_dim=128), 36_151_104_512),
    "CWM-32B": (_as("CwmForCausalLM", _llama(6144, 21504, 64, 48, 8, 128256)), 32_581_097_472),
    "Minitron-4B": (_as("NemotronForCausalLM", _llama(3072, 9216, 32, 24, 8, 256000), head_dim=128), 4_190_509_056),
    "AFM-4.5B": (_as("ArceeForCausalLM", _llama(2560, 18432, 36, 20, 4, 128004), head_dim=128), 4_619_184_640),
    "StableLM-3B": (_as("StableLmForCausalLM", _llama(2560, 6912, 32, 32, vocab=50304)), 2_795_443_200),
    "StableLM-2-1.6B": (_as("StableLmForCausalLM", _llama(2048, 5632, 24, 32, vocab=100352), use_qkv_bias=True), 1_644_515_328),
    "StableLM-2-12B": (
        _as("StableLmForCausalLM", _llama(5120, 13824, 40, 32, 8, 100352), qk_layernorm=True, use_parallel_residual=True),
        12_143_185_920,
    ),
    "OLMo-1B": (_as("OlmoForCausalLM", _llama(2048, 8192, 16, 16, vocab=50304), tie_word_embeddings=True), 1_176_764_416),
    "OLMo-7B": (_as("OlmoForCausalLM", _llama(4096, 11008, 32, 32, vocab=50304)), 6_888_095_744),
    "OLMoE-1B-7B": (_as("OlmoeForCausalLM", _llama(2048, 1024, 16, 16, vocab=50304)), 6_919_161_856),
    "OLMo-3-7B": (_as("Olmo3ForCausalLM", _llama(4096, 11008, 32, 32, vocab=100278)), 7_298_011_136),
    "OLMo-3-32B": (_as("Olmo3ForCausalLM", _llama(5120, 27648, 64, 40, 8, 100278)), 32_233_522_176),
    "EXAONE-4.0-1.2B": (
        _as("Exaone4ForCausalLM", _llama(2048, 4096, 30, 32, 8, 102400), tie_word_embeddings=True, sliding_window=None),
        1_279_391_488,
    ),
    "EXAONE-4.0-32B": (_as("Exaone4ForCausalLM", _llama(5120, 27392, 64, 40, 8, 102400)), 32_003_216_384),
    "ERNIE-4.5-0.3B": ({"architectures": ["Ernie4_5_ForCausalLM"], "tie_word_embeddings": True}, 360_748_032),
    "Granite-3.1-8B": (_as("GraniteForCausalLM", _llama(4096, 12800, 40, 32, 8, 49155), tie_word_embeddings=True), 8_170_848_256),
    "Granite-3.1-3B-A800M": (
        _as(
            "GraniteMoeForCausalLM",
            _llama(1536, 512, 32, 24, 8, 49155),
            num_local_experts=40,
            num_experts_per_tok=8,
            tie_word_embeddings=True,
        ),
        3_298_793_472,
    ),
    "MiniMax-M2": (_as("MiniMaxM2ForCausalLM", _llama(3072, 1536, 62, 48, 8, 200064), rotary_dim=64), 228_689_764_864),
    "GLM-4.5-Air": (_as("Glm4MoeForCausalLM", _llama(4096, 10944, 46, 96, 8, 151552), head_dim=128, attention_bias=True), 106_852_251_264),
    "GLM-4.5": (
        _as(
            "Glm4MoeForCausalLM",
            _llama(5120, 12288, 92, 96, 8, 151552),
            head_dim=128,
            attention_bias=True,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            first_k_dense_replace=3,
            use_qk_norm=True,
        ),
        352_797_829_024,
    ),
    "XVERSE-13B": (_as("XverseForCausalLM", _llama(5120, 13824, 40, 40, vocab=100534)), 13_717_652_480),
    "ERNIE-4.5-21B-A3B": (_as("Ernie4_5_MoeForCausalLM", _llama(2560, 12288, 28, 20, 4, 103424), tie_word_embeddings=True), 21_825_437_888),
    "EXAONE-3.5-7.8B": (_as("ExaoneForCausalLM", _llama(4096, 14336, 32, 32, 8, 102400), tie_word_embeddings=False), 7_818_448_896),
    "MiniCPM-2B": (_as("MiniCPMForCausalLM", _llama(2304, 5760, 40, 36, vocab=122753), dim_model_base=256), 2_724_880_896),
    "Qwen2.5-VL-7B": (_as("Qwen2_5_VLForConditionalGeneration", _llama(3584, 18944, 28, 28, 4, 152064)), 7_615_616_512),
    "Qwen3-VL-8B": (_as("Qwen3VLForConditionalGeneration", _llama(4096, 12288, 36, 32, 8, 151936)), 8_190_735_360),
    "Qwen3-VL-30B-A3B": (
        {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "text_config": _llama(2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128),
        },
        30_532_122_624,
    ),
    "Apertus-8B": (_as("ApertusForCausalLM", _llama(4096, 21504, 32, 32, 8, 131072)), 8_053_338_240),
    "Apertus-70B": (_as("ApertusForCausalLM", _llama(8192, 43008, 80, 64, 8, 131072)), 70_599_864_640),
    "Hunyuan-7B": (
        _as("HunYuanDenseV1ForCausalLM", _llama(4096, 14336, 32, 32, 8, 128167), head_dim=128, tie_word_embeddings=True),
        7_504_568_320,
    ),
    "Hunyuan-A13B": (
        _as(
            "HunYuanMoEV1ForCausalLM",
            _llama(4096, 3072, 32, 32, 8, 128167),
            attention_head_dim=128,
            num_experts=64,
            moe_topk=[8] * 32,
            num_shared_expert=[1] * 32,
            moe_intermediate_size=[3072] * 32,
            tie_word_embeddings=True,
        ),
        80_393_183_232,
    ),
    "Phi-3.5-MoE": (
        _as("PhiMoEForCausalLM", _llama(4096, 6400, 32, 32, 8, 32064), attention_bias=True, lm_head_bias=True),
        41_873_153_344,
    ),
    "Llama-4-Scout": ({"architectures": ["Llama4ForConditionalGeneration"], "text_config": {}}, 107_769_861_120),
    "Llama-4-Scout, text model": ({"architectures": ["Llama4ForCausalLM"]}, 107_769_861_120),
    "Llama-4-Maverick": (
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
        },
        400_711_848_960,
    ),
    "Ministral-8B": (_as("MinistralForCausalLM", _llama(4096, 12288, 36, 32, 8, 131072), head_dim=128), 8_019_808_256),
    "Ministral-3-8B": ({"architectures": ["Ministral3ForCausalLM"]}, 8_489_553_920),
    "Mistral-Small-3.1-24B": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {}, "tie_word_embeddings": False},
        23_572_403_200,
    ),
    "Ministral-3-3B": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": _llama(3072, 9216, 26, 32, 8, 131072, head_dim=128, model_type="ministral3"),
            "tie_word_embeddings": True,
        },
        3_429_006_336,
    ),
    "Kimi-K2.5": (
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "text_config": {
                "vocab_size": 163840,
                "num_attention_heads": 64,
                "n_routed_experts": 384,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
            "tie_word_embeddings": False,
        },
        1_026_408_232_448,
    ),
    "granite-3B-A800M with a shared expert": (
        _as(
            "GraniteMoeSharedForCausalLM",
            _llama(1536, 512, 32, 24, 8, 49152),
            num_local_experts=40,
            num_experts_per_tok=8,
            shared_intermediate_size=1024,
            tie_word_embeddings=True,
        ),
        3_449_783_808,
    ),
    "Command-R": (_as("CohereForCausalLM", _llama(8192, 22528, 40, 64, vocab=256000)), 34_980_831_232),
    "Command-R+": (_as("CohereForCausalLM", _llama(12288, 33792, 64, 96, 8, 256000), use_qk_norm=True), 103_810_674_688),
    "Command-R7B": (_as("Cohere2ForCausalLM", _llama(4096, 14336, 32, 32, 8, 256000)), 8_028_033_024),
    "Mamba-Codestral-7B": ({"architectures": ["Mamba2ForCausalLM"]}, 7_285_403_648),
    "Mamba2-2.7B": (
        {
            "architectures": ["Mamba2ForCausalLM"],
            "hidden_size": 2560,
            "num_heads": 80,
            "n_groups": 1,
            "vocab_size": 50288,
            "tie_word_embeddings": True,
        },
        2_702_599_680,
    ),
    "Falcon-H1-0.5B": (
        _as("FalconH1ForCausalLM", _llama(1024, 2048, 36, 8, 2, 32784), head_dim=64)
        | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_norm_before_gate": False},
        521_411_104,
    ),
    "Falcon-H1-34B": (
        _as("FalconH1ForCausalLM", _llama(5120, 21504, 72, 20, 4, 261120), head_dim=128)
        | {"mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_n_groups": 2, "mamba_rms_norm": True},
        33_642_516_224,
    ),
    "Jamba-v0.1": ({"architectures": ["JambaForCausalLM"]}, 51_570_323_328),
    "Mamba-2.8B": ({"architectures": ["MambaForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 64}, 2_768_345_600),
    "Falcon-Mamba-7B": (
        {
            "architectures": ["FalconMambaForCausalLM"],
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "vocab_size": 65024,
            "tie_word_embeddings": False,
        },
        7_272_665_088,
    ),
    "Qwen3-Next-80B-A3B": ({"architectures": ["Qwen3NextForCausalLM"]}, 79_674_391_296),
    "Qwen3.5-9B": (_as("Qwen3_5ForCausalLM", _llama(4096, 12288, 32, 16, 4, 248320)), 8_953_803_264),
    "Qwen3.5-35B-A3B": ({"architectures": ["Qwen3_5MoeForCausalLM"]}, 34_660_610_688),
    "Nemotron-H-8B": (
        {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
        8_100_852_736,
    ),
    "Granite-4.0-H-Small": (
        _as("GraniteMoeHybridForCausalLM", _llama(4096, 768, 40, 32, 8, 100352), tie_word_embeddings=True)
        | {"shared_intermediate_size": 1536, "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_d_state": 128}
        | {"layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]},
        32_207_337_984,
    ),
    "gpt-oss-20B": (_GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20_914_757_184),
    "gpt-oss-120B": (_GPT_OSS, 116_829_156_672),
}
