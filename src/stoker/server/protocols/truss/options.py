"""What the Truss door takes from config.yaml, besides what every protocol shares."""

from __future__ import annotations

import msgspec


class TrussOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How /v1/models/model:predict reads a body: as the first Trusses did (prompt, bad_words_list), or as OpenAI's routes do."""

    legacy: bool = False  # the first Trusses' body always, even where it names a model as OpenAI's do
    openai: bool = False  # OpenAI's body always: chat for messages, completions otherwise
    default_route: str | None = None  # OpenAI's body always, by this route: /v1/chat/completions or /v1/completions
    max_tokens_counts_prompt: bool = False  # max_tokens is of the prompt and the answer together, as the first document has it
