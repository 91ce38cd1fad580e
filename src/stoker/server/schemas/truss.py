"""What the Truss door takes from config.yaml, besides what every protocol shares."""

from __future__ import annotations

import msgspec


class TrussOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How /v1/models/model:predict answers."""

    legacy: bool = False  # the seed-era body (prompt, max_tokens, bad_words_list) even where the body would read as OpenAI's
    default_route: str | None = None  # an OpenAI route that :predict stands for: /v1/chat/completions or /v1/completions
