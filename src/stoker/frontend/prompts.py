"""Prompts of requests: conversion of text to token ids, and truncation to the last or first tokens. Protocols call these functions."""

from __future__ import annotations

import asyncio

from stoker.frontend.service import Service

INLINE_CHARS = 4096  # tokenizing fewer characters takes about 1 ms, hardly more than the switch to a thread


async def encode_prompt(
    service: Service, text: str, *, add_special_tokens: bool = True, truncate_prompt_tokens: int | None = None
) -> list[int]:
    """The token ids of `text`, or only the last `truncate_prompt_tokens` of them.

    A long text is tokenized in a thread, so that other requests continue to stream. Raises RequestError for a text that is too long.
    """
    if len(text) <= INLINE_CHARS:
        ids = service.encode(text, add_special_tokens=add_special_tokens)
    else:
        ids = await asyncio.to_thread(service.encode, text, add_special_tokens=add_special_tokens)
    return truncate_prompt(ids, truncate_prompt_tokens)


def truncate_prompt(token_ids: list[int], num_tokens: int | None, side: str = "left") -> list[int]:
    """At most `num_tokens` (at least 1) of the ids; all of them for None.

    `side` is the side on which ids are removed: "left" leaves the last ids, "right" the first ones.
    """
    if num_tokens is None:
        return token_ids
    return token_ids[:num_tokens] if side == "right" else token_ids[-num_tokens:]
