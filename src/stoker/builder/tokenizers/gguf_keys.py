"""The metadata keys of a tokenizer in a GGUF file: those that the conversion reads, those without effect, and those that are rejected.

The names are those of llama.cpp's src/llama-arch.cpp and of the gguf library (`gguf.Keys.Tokenizer`).
"""

from __future__ import annotations

import fnmatch

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.file import GGUFFile

_PREFIX = "tokenizer."
# Keys that the conversion reads, as fnmatch patterns. Each is without `tokenizer.`, also below.
READ = (
    "ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.scores", "ggml.merges", "ggml.bos_token_id", "ggml.eos_token_id",
    "ggml.eot_token_id", "ggml.eom_token_id", "ggml.unknown_token_id", "ggml.padding_token_id", "ggml.add_bos_token", "ggml.add_eos_token",
    "ggml.add_space_prefix", "chat_template", "chat_template.*",
)  # fmt: skip
# Keys without an effect on the tokens of one text: roles of tokens that a prompt does not have unless it contains them, and copies.
NO_EFFECT = (
    "ggml.fim_*_token_id", "ggml.prefix_token_id", "ggml.suffix_token_id", "ggml.middle_token_id",  # of infilling
    "ggml.cls_token_id", "ggml.mask_token_id", "ggml.token_type_count",  # of encoders
    "ggml.seperator_token_id", "ggml.separator_token_id", "ggml.add_sep_token",  # between two texts; a prompt is one text
    "chat_templates",  # the names of the templates, which are in their keys, too
    "huggingface.json", "rwkv.world",  # the tokenizer in another form
)  # fmt: skip
# Keys that change a text before it is split, unless the value is false, or an empty array.
REJECTED_UNLESS_EMPTY = (
    "ggml.precompiled_charsmap", "ggml.remove_extra_whitespaces", "ggml.normalizer.lowercase", "ggml.normalizer.strip_accents"
)  # fmt: skip


def check_tokenizer_keys(file: GGUFFile) -> None:
    """Raise CheckpointError naming a key of the tokenizer that is not known, or that requires what the conversion does not do."""
    for key, value in file.metadata.items():
        name = key.removeprefix(_PREFIX)
        if name == key or any(fnmatch.fnmatchcase(name, pattern) for pattern in (*READ, *NO_EFFECT)):
            continue
        if name not in REJECTED_UNLESS_EMPTY or value:
            shown = f"{len(value)} elements" if isinstance(value, list) else repr(value)[:60]
            raise CheckpointError(f"{file.path}: {key[:80]} ({shown}) is not supported.", cure="Name a tokenizer with --tokenizer.")
