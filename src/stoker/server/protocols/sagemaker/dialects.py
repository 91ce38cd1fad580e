"""The dialects of {"generated_text"} and {"token"}: which members each release writes, and in which order."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

from stoker.frontend.service import Service
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.protocols.sagemaker.request import Asked
from stoker.server.protocols.sagemaker.tokens import Token, token_text

encode = json.JSONEncoder(ensure_ascii=False).encode


class Shapes:
    """How one request is answered. Every record is JSON as Python spaces it."""

    def __init__(self, options: LMIOptions, asked: Asked, service: Service) -> None:
        self._asked = asked
        self._service = service
        self._dialect = options.dialect
        self._list = options.tgi_compat or not options.rolling_batch
        short = options.tgi_compat or options.dialect == "async"
        self._logprob, self._special = ("logprob", "special") if short else ("log_prob", "special_token")
        # What stands around id, text and log-probability in the line of an ordinary token.
        before, after = encode(self.line(Token(7, "\0", 0.5))).split("7", 1)
        between, after = after.split(encode("\0"), 1)
        self._parts = (before, between, *after.split("0.5", 1))

    def token(self, token: Token) -> dict[str, Any]:
        old = self._dialect in ("0.26", "0.27")
        shaped: dict[str, Any] = {"id": [token.id] if self._dialect == "0.27" else token.id}
        if not (old and token.special):
            shaped["text"] = token.text
        shaped[self._logprob] = token.logprob
        if token.special:
            shaped[self._special] = True
        return shaped

    def whole(self, answers: list[dict[str, Any]]) -> bytes:
        """The body; `answers` are of the inputs, one each."""
        text = encode(answers if self._list else answers[0])
        return (text + "\n" if self._dialect == "async" else text).encode()

    def answer(self, prompt: str, texts: list[str], ends: list[str], tokens: list[list[Token]], prefill: list[Token]) -> dict[str, Any]:
        """One input's answer: the best of its sequences, the others inside its details."""
        shaped: dict[str, Any] = {"generated_text": (prompt if self._asked.full_text else "") + texts[0]}
        if self._asked.details or self._asked.several:
            shaped["details"] = self._details(prompt, ends[0], tokens[0], prefill)
            others = list(zip(texts, ends, tokens, strict=True))[1:]
            if others:
                shaped["details"]["best_of_sequences"] = [
                    {"generated_text": text, "finish_reason": end, "generated_tokens": len(own), "tokens": [self.token(t) for t in own]}
                    for text, end, own in others
                ]
        return shaped

    def third_party(self, text: str, end: str, num_prompt: int, num_tokens: int) -> dict[str, Any]:
        """The 3p formatter's whole answer."""
        body = {"generation": text, "prompt_token_count": num_prompt, "generation_token_count": num_tokens, "stop_reason": end}
        return {
            "body": body,
            "metering": {"inputTokenCount": num_prompt, "outputTokenCount": num_tokens},
            "content_type": "application/json",
        }

    def third_party_part(self, text: str, end: str | None, num_prompt: int | None, num_tokens: int) -> dict[str, Any]:
        """The 3p_stream formatter's record; the prompt is counted in the first one."""
        body = {"generation": text, "prompt_token_count": num_prompt, "generation_token_count": num_tokens, "stop_reason": end}
        metering = {"outputTokenCount": num_tokens} | ({} if num_prompt is None else {"inputTokenCount": num_prompt})
        return {"body": body, "metering": metering, "content_type": "application/jsonlines"}

    def _details(self, prompt: str, end: str, tokens: list[Token], prefill: list[Token]) -> dict[str, Any]:
        asked, shaped = self._asked, [self.token(token) for token in tokens]
        if self._dialect == "async":
            before = [self.token(token) for token in prefill if token.logprob is not None]
            return {"finish_reason": end, "generated_tokens": len(tokens), "seed": asked.seed, "prefill": before, "tokens": shaped}
        counts: dict[str, Any] = {"finish_reason": end, "generated_tokens": len(tokens), "inputs": prompt}
        if asked.several:
            counts = {"inputs": prompt, "finish_reason": end, "generated_tokens": len(tokens)}
        if self._dialect == "0.26":
            counts = {"finish_reason": end}
        return {**counts, "tokens": shaped, **self._extras(tokens, prefill)}

    def _extras(self, tokens: list[Token], prefill: list[Token]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._asked.prefill:
            extras["prefill"] = [self.token(token) for token in prefill]
        if self._asked.num_top:
            extras["top_tokens"] = [[self._candidate(*pair) for pair in token.top] for token in tokens]
        return extras

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        return self.token(Token(token_id, token_text(self._service, token_id), logprob, token_id in self._service.end_ids))

    def line(self, token: Token) -> dict[str, Any]:
        """The record of a token that is not the last."""
        if self._dialect == "async":
            return {"index": 0, "token": self.token(token), "generated_text": None, "details": None}
        return {"token": self.token(token)}

    def plain_line(self, token_id: int, text: str, logprob: float | None) -> str:
        """`line` of a token that is not special, as JSON. Nearly every line of a stream is one, so it is put together from parts."""
        before, between, scored, after = self._parts
        score = "null" if logprob is None else repr(logprob)
        return f"{before}{token_id}{between}{encode_basestring(text)}{scored}{score}{after}"

    def last_line(self, prompt: str, text: str, end: str, tokens: list[Token], prefill: list[Token]) -> dict[str, Any]:
        """The record of the last token, with all of the text."""
        shaped = {**self.line(tokens[-1]), "generated_text": (prompt if self._asked.full_text else "") + text}
        if not self._asked.details:
            return shaped
        if self._dialect == "async":
            num_prompt = len(self._asked.requests[0].prompt)
            shaped["details"] = {
                "finish_reason": end, "seed": self._asked.seed, "generated_tokens": len(tokens), "input_length": num_prompt,
            }  # fmt: skip
            return shaped
        counts = {} if self._dialect == "0.26" else {"generated_tokens": len(tokens), "inputs": prompt}
        return {**shaped, "details": {"finish_reason": end, **counts, **self._extras(tokens, prefill)}}
