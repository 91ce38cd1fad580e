"""The pre-tokenizers of byte-level BPE by their names in GGUF files, and what depends on these names.

A pre-tokenizer is a list of regular expressions, which split the text one after the other. Sources: llama.cpp's src/llama-vocab.cpp for the
names, and the tokenizer.json that the publisher of each model has for the expressions.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers

from stoker.builder.tokenizers.split_patterns import ONE_DIGIT, THREE_DIGITS

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{c}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{c}}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = _WORDS.replace("{c}", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_O200K = _WORDS.replace("{c}", f"{_CONTRACTION}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_NOT_HAN = "&&[^\\p{Han}]]"
_KIMI = (
    r"[\p{Han}]+|"
    + _WORDS.replace("{c}", f"{_CONTRACTION}?").replace(r"\p{M}]", rf"\p{{M}}{_NOT_HAN}")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3 = rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HAN_AND_HANGUL = r"[一-龥ࠀ-一가-퟿]+"

# The letters of scripts with upper and lower case, as in the tokenizer.json of DeepSeek LLM.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

# Names in tokenizer.ggml.pre → regular expressions.
_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "gigachat", "trillion", "exaone4", "a.x-4.0", "mellum", "granite-docling"): (
        _GPT2,
    ),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT2),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (THREE_DIGITS,),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): (THREE_DIGITS,),
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"): (ONE_DIGIT,),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4", "minimax-m2"): (_O200K,),
    ("kimi-k2",): (_KIMI,),
    ("deepseek-llm",): (
        r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HAN_AND_HANGUL, r"\p{N}+"
    ),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense"): (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_V3),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    ("bloom", "poro-chat", "gpt3-finnish"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("seed-coder",): (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
}  # fmt: skip
PATTERNS = {name: patterns for names, patterns in _FAMILIES.items() for name in names}

# A word that is in the vocabulary is one token, even if no merges produce it.
IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
# Files of these have the begin token in front of a text unless add_bos_token says otherwise.
BEGINS_WITH_BOS = IGNORES_MERGES
# The publishers' tokenizers compose characters first (NFC).
COMPOSES = ("qwen2", "deepseek-r1-qwen", "megrez")


def pre_tokenizer(name: str) -> Any:
    """The pre-tokenizer of byte-level BPE with this name. Raises KeyError for an unknown one."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
