"""Converts tokenizers that are published as Python code with the weights. Their vocabulary files are converted; the code is never run.

The table has one row per class name in tokenizer_config.json. Sources: tokenization_qwen.py, tokenization_chatglm.py (three
generations) and tokenization_glm.py of the published models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import read_json_object
from stoker.builder.tokenizers.chatglm_6b import convert_chatglm_6b
from stoker.builder.tokenizers.sentencepiece import convert_sentencepiece
from stoker.builder.tokenizers.split_patterns import ONE_DIGIT, THREE_DIGITS
from stoker.builder.tokenizers.tiktoken import convert_tiktoken

# (tokenizer, default values for tokenizer_config.json)
Converted = tuple[Tokenizer, dict[str, Any]]
# (required files, converter of a directory and its tokenizer_config)
Row = tuple[tuple[str, ...], Callable[[Path, dict[str, Any]], Converted]]

_CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_GLM_MASKS = ("[MASK]", "[gMASK]", "[sMASK]")
_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_MEDIA = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")


def convert_published_tokenizer(path: Path, config: dict[str, Any]) -> Converted | None:
    """(tokenizer, content of tokenizer_config.json) for directory `path`, or None if its `tokenizer_class` is not in the table.

    Raises CheckpointError naming a vocabulary file that is missing or damaged.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    for files, convert in TOKENIZERS.get(name, ()):
        if all((path / file).is_file() for file in files):
            return convert(path, config)
    if name not in TOKENIZERS:
        return None
    needed = " or ".join(" and ".join(files) for files, _ in TOKENIZERS[name])
    raise CheckpointError(f"{path} has no {needed}, which {name} needs.", cure="Download it, or name another tokenizer with --tokenizer.")


def _convert_qwen(path: Path, config: dict[str, Any]) -> Converted:
    """(tokenizer, default tokenizer_config) of Qwen 1.

    If generation_config.json sets chat_format to chatml, answers end with <|im_end|> in addition to <|endoftext|>.
    """
    tokenizer = convert_tiktoken(path / "qwen.tiktoken", ONE_DIGIT, _QWEN_SPECIAL, nfc=True)
    generation = read_json_object(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    is_chat = generation.get("chat_format") == "chatml"
    defaults = {"eos_token": "<|im_end|>" if is_chat else "<|endoftext|>", "pad_token": "<|endoftext|>"}
    return tokenizer, defaults | ({"chat_template": _CHATML} if is_chat else {})


def _convert_chatglm(path: Path, config: dict[str, Any]) -> Converted:
    """(tokenizer, default tokenizer_config) of ChatGLM-6B. A prompt ends with [gMASK] <sop>."""
    tokenizer = convert_chatglm_6b(path / "ice_text.model", int(config.get("num_image_tokens", 20000)))
    _set_template(tokenizer, "$A", "[gMASK]", "<sop>")
    return tokenizer, {"bos_token": "<sop>", "eos_token": "<eop>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _convert_chatglm2(path: Path, config: dict[str, Any]) -> Converted:
    """(tokenizer, default tokenizer_config) of ChatGLM 2 and 3. A prompt begins with [gMASK] sop.

    `sop` and `eop` also occur in words, so they are tokens only where they stand alone.
    """
    own_config = {key: value for key, value in config.items() if key != "added_tokens_decoder"}
    tokenizer = convert_sentencepiece(path / "tokenizer.model", own_config)
    if tokenizer is None:  # early GLM-4 checkpoints have the same class name
        return _convert_glm4(path, config)
    words = [AddedToken(word, normalized=False, single_word=True, special=True) for word in ("sop", "eop")]
    _add_special_tokens(tokenizer, *_GLM_MASKS, *words, *_GLM_ROLES)
    _set_template(tokenizer, "[gMASK]", "sop", "$A")
    return tokenizer, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}


def _convert_glm4(path: Path, config: dict[str, Any]) -> Converted:
    """(tokenizer, default tokenizer_config) of GLM-4. A prompt begins with [gMASK] <sop>."""
    special = ("<|endoftext|>", *_GLM_MASKS, "<sop>", "<eop>", *_GLM_ROLES, *_GLM_MEDIA)
    tokenizer = convert_tiktoken(path / "tokenizer.model", THREE_DIGITS, special)
    _set_template(tokenizer, "[gMASK]", "<sop>", "$A")
    return tokenizer, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


def _convert_glm_10b(path: Path, config: dict[str, Any]) -> Converted:
    """(tokenizer, default tokenizer_config) of GLM-10B, which has GPT-2's vocabulary and added_tokens.json.

    A prompt is [CLS], the text, the end token, and the answer's start token.
    """
    tokenizer = Tokenizer(_read_bpe(path / "vocab.json", path / "merges.txt"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    added = read_json_object(path / "added_tokens.json")
    _add_special_tokens(tokenizer, *sorted(added, key=added.__getitem__))
    if wrong := [token for token, i in added.items() if tokenizer.token_to_id(token) != i]:
        raise CheckpointError(f"{path / 'added_tokens.json'}: {wrong[0]!r} cannot have id {added[wrong[0]]}.", cure="Download it again.")
    _set_template(tokenizer, "[CLS]", "$A", "<|endoftext|>", "<|startofpiece|>")
    return tokenizer, {"eos_token": "<|endofpiece|>", "pad_token": "<|endoftext|>"}


def _read_bpe(vocab: Path, merges: Path) -> models.BPE:
    """The BPE model in two vocabulary files. Raises CheckpointError for damaged files."""
    try:
        return models.BPE.from_file(str(vocab), str(merges))
    except Exception as problem:  # the library raises bare Exception for every defect
        raise CheckpointError(f"{vocab} and {merges.name} are not a vocabulary ({problem}).", cure="Download them again.") from None


def _add_special_tokens(tokenizer: Tokenizer, *tokens: str | AddedToken) -> None:
    """Add tokens that are never split and are left out of decoded text."""
    added = [token if isinstance(token, AddedToken) else AddedToken(token, normalized=False, special=True) for token in tokens]
    tokenizer.add_special_tokens(added)


def _set_template(tokenizer: Tokenizer, *parts: str) -> None:
    """Set the tokens around a prompt's text, which is written `$A`. Raises CheckpointError for a token outside the vocabulary."""
    ids = {part: tokenizer.token_to_id(part) for part in parts if part != "$A"}
    if missing := [part for part, token_id in ids.items() if token_id is None]:
        raise CheckpointError(f"the vocabulary has no {missing[0]}, which every prompt contains.", cure="Download it again.")
    tokenizer.post_processor = processors.TemplateProcessing(single=list(parts), pair=None, special_tokens=list(ids.items()))


TOKENIZERS: dict[str, tuple[Row, ...]] = {
    "QWenTokenizer": ((("qwen.tiktoken",), _convert_qwen),),
    "ChatGLMTokenizer": ((("ice_text.model",), _convert_chatglm), (("tokenizer.model",), _convert_chatglm2)),
    "ChatGLM4Tokenizer": ((("tokenizer.model",), _convert_glm4),),
    "GLMGPT2Tokenizer": ((("vocab.json", "merges.txt", "added_tokens.json"), _convert_glm_10b),),
}
