"""Options of the Truss protocol, read from config.yaml."""

from __future__ import annotations

import msgspec


class TrussOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How /v1/models/model:predict reads a body.

    A body has either the legacy format of the first Truss releases (prompt, bad_words_list) or the format of OpenAI's endpoints. By
    default, a body that contains `model` has OpenAI's format.
    """

    legacy: bool = False  # every body has the legacy format, also if it contains `model`
    openai: bool = False  # every body has OpenAI's format: chat if it contains `messages`, otherwise completions
    default_route: str | None = None  # every body is of this OpenAI endpoint: /v1/chat/completions or /v1/completions
    max_tokens_counts_prompt: bool = False  # legacy max_tokens limits prompt and answer together, as the first documentation says
