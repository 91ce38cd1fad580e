"""Tokenizers that their publishers wrote as Python code beside the weights: rebuilt from the vocabulary file, and none of it is run.

One row a class that tokenizer_config.json may name. Sources: tokenization_qwen.py, tokenization_chatglm.py (three generations) and
tokenization_glm.py of the published models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import read_json
from stoker.builder.tokenizers.chatglm_6b import from_ice
from stoker.builder.tokenizers.sentencepiece import from_sentencepiece
from stoker.builder.tokenizers.tiktoken import ONE_DIGIT, THREE_DIGITS, from_ranks

# (tokenizer, what tokenizer_config.json says unless it says something else)
Made = tuple[Tokenizer, dict[str, Any]]
Row = tuple[tuple[str, ...], Callable[[Path, dict[str, Any]], Made]]

_CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_GLM = ("[MASK]", "[gMASK]", "[sMASK]")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_SEEN = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")


def published_tokenizer(path: Path, config: dict[str, Any]) -> Made | None:
    """The tokenizer of `path` when tokenizer_config.json names a class of the table, else None.

    Raises CheckpointError naming a vocabulary file that is missing or damaged.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    for files, make in TOKENIZERS.get(name, ()):
        if all((path / file).is_file() for file in files):
            return make(path, config)
    if name not in TOKENIZERS:
        return None
    wanted = " or ".join(" and ".join(files) for files, _ in TOKENIZERS[name])
    raise CheckpointError(f"{path} has no {wanted}, of which {name} is made.", cure="Download it, or name another with --tokenizer.")


def _qwen(path: Path, config: dict[str, Any]) -> Made:
    """ChatML when generation_config.json says so; <|im_end|> then ends an answer beside <|endoftext|>."""
    tokenizer = from_ranks(path / "qwen.tiktoken", ONE_DIGIT, _QWEN, nfc=True)
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    chats = generation.get("chat_format") == "chatml"
    plain = {"eos_token": "<|im_end|>" if chats else "<|endoftext|>", "pad_token": "<|endoftext|>"}
    return tokenizer, plain | ({"chat_template": _CHATML} if chats else {})


def _chatglm(path: Path, config: dict[str, Any]) -> Made:
    """ChatGLM-6B: a prompt ends in [gMASK] <sop>."""
    tokenizer = from_ice(path / "ice_text.model", int(config.get("num_image_tokens", 20000)))
    _frame(tokenizer, "$A", "[gMASK]", "<sop>")
    return tokenizer, {"bos_token": "<sop>", "eos_token": "<eop>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _chatglm2(path: Path, config: dict[str, Any]) -> Made:
    """ChatGLM 2 and 3: a prompt begins with [gMASK] sop. sop and eop are English words, too: only alone are they tokens."""
    own = {key: value for key, value in config.items() if key != "added_tokens_decoder"}
    tokenizer = from_sentencepiece(path / "tokenizer.model", own)
    if tokenizer is None:  # GLM-4's class had this name, too
        return _glm4(path, config)
    words = [AddedToken(word, normalized=False, single_word=True, special=True) for word in ("sop", "eop")]
    _special(tokenizer, *_GLM, *words, *_ROLES)
    _frame(tokenizer, "[gMASK]", "sop", "$A")
    return tokenizer, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}


def _glm4(path: Path, config: dict[str, Any]) -> Made:
    tokenizer = from_ranks(path / "tokenizer.model", THREE_DIGITS, ("<|endoftext|>", *_GLM, "<sop>", "<eop>", *_ROLES, *_SEEN))
    _frame(tokenizer, "[gMASK]", "<sop>", "$A")
    return tokenizer, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


def _glm10b(path: Path, config: dict[str, Any]) -> Made:
    """GPT-2's vocabulary and added_tokens.json: [CLS], the text with its mask, the end, and the token that starts the answer."""
    tokenizer = Tokenizer(_bpe(path / "vocab.json", path / "merges.txt"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    added = read_json(path / "added_tokens.json")
    _special(tokenizer, *sorted(added, key=added.__getitem__))
    if odd := [token for token, i in added.items() if tokenizer.token_to_id(token) != i]:
        raise CheckpointError(f"{path / 'added_tokens.json'}: {odd[0]!r} cannot have id {added[odd[0]]}.", cure="Download it again.")
    _frame(tokenizer, "[CLS]", "$A", "<|endoftext|>", "<|startofpiece|>")
    return tokenizer, {"eos_token": "<|endofpiece|>", "pad_token": "<|endoftext|>"}


def _bpe(vocab: Path, merges: Path) -> models.BPE:
    try:
        return models.BPE.from_file(str(vocab), str(merges))
    except Exception as problem:  # the library raises bare Exception for every defect
        raise CheckpointError(f"{vocab} and {merges.name} are no vocabulary ({problem}).", cure="Download them again.") from None


def _special(tokenizer: Tokenizer, *tokens: str | AddedToken) -> None:
    made = [token if isinstance(token, AddedToken) else AddedToken(token, normalized=False, special=True) for token in tokens]
    tokenizer.add_special_tokens(made)


def _frame(tokenizer: Tokenizer, *parts: str) -> None:
    """What stands around a prompt's text, `$A`. Raises CheckpointError for a token that the vocabulary lacks."""
    ids = {part: tokenizer.token_to_id(part) for part in parts if part != "$A"}
    if missing := [part for part, found in ids.items() if found is None]:
        raise CheckpointError(f"the vocabulary has no {missing[0]}, which stands around every prompt.", cure="Download it again.")
    tokenizer.post_processor = processors.TemplateProcessing(single=list(parts), pair=None, special_tokens=list(ids.items()))


TOKENIZERS: dict[str, tuple[Row, ...]] = {
    "QWenTokenizer": ((("qwen.tiktoken",), _qwen),),
    "ChatGLMTokenizer": ((("ice_text.model",), _chatglm), (("tokenizer.model",), _chatglm2)),
    "ChatGLM4Tokenizer": ((("tokenizer.model",), _glm4),),
    "GLMGPT2Tokenizer": ((("vocab.json", "merges.txt", "added_tokens.json"), _glm10b),),
}
