"""The JSON records {"generated_text"} and {"token"}: the members that each LMI release writes, in its order."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

from stoker.frontend.service import Service
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.protocols.sagemaker.request import InvocationCall
from stoker.server.protocols.sagemaker.tokens import Token, token_text

encode = json.JSONEncoder(ensure_ascii=False).encode


class RecordBuilder:
    """Builds the records of one response in the dialect of the options. JSON is spaced as by Python's json module."""

    def __init__(self, options: LMIOptions, call: InvocationCall, service: Service) -> None:
        self._call = call
        self._service = service
        self._dialect = options.dialect
        self._list = options.tgi_compat or not options.rolling_batch
        short = options.tgi_compat or options.dialect == "async"
        self._logprob, self._special = ("logprob", "special") if short else ("log_prob", "special_token")
        # The JSON text around the id, text and log-probability of an ordinary token.
        before, after = encode(self.token_record(Token(7, "\0", 0.5))).split("7", 1)
        between, after = after.split(encode("\0"), 1)
        self._parts = (before, between, *after.split("0.5", 1))

    def token(self, token: Token) -> dict[str, Any]:
        """One token as an object. Special tokens have no text in old dialects."""
        old = self._dialect in ("0.26", "0.27")
        shaped: dict[str, Any] = {"id": [token.id] if self._dialect == "0.27" else token.id}
        if not (old and token.special):
            shaped["text"] = token.text
        shaped[self._logprob] = token.logprob
        if token.special:
            shaped[self._special] = True
        return shaped

    def body(self, answers: list[dict[str, Any]]) -> bytes:
        """The body of a whole response; `answers` has one entry per input."""
        text = encode(answers if self._list else answers[0])
        return (text + "\n" if self._dialect == "async" else text).encode()

    def answer(
        self, prompt: str, texts: list[str], finish_reasons: list[str], tokens: list[list[Token]], prompt_tokens: list[Token]
    ) -> dict[str, Any]:
        """The answer to one input: its best sequence, with the others in details.best_of_sequences."""
        shaped: dict[str, Any] = {"generated_text": (prompt if self._call.full_text else "") + texts[0]}
        if self._call.details or self._call.multiple:
            shaped["details"] = self._details(prompt, finish_reasons[0], tokens[0], prompt_tokens)
            others = list(zip(texts, finish_reasons, tokens, strict=True))[1:]
            if others:
                shaped["details"]["best_of_sequences"] = [
                    {
                        "generated_text": text,
                        "finish_reason": finish_reason,
                        "generated_tokens": len(own),
                        "tokens": [self.token(t) for t in own],
                    }
                    for text, finish_reason, own in others
                ]
        return shaped

    def third_party(self, text: str, finish_reason: str, num_prompt: int, num_tokens: int) -> dict[str, Any]:
        """The whole response of the formatter 3p."""
        body = {"generation": text, "prompt_token_count": num_prompt, "generation_token_count": num_tokens, "stop_reason": finish_reason}
        return {
            "body": body,
            "metering": {"inputTokenCount": num_prompt, "outputTokenCount": num_tokens},
            "content_type": "application/json",
        }

    def third_party_part(self, text: str, finish_reason: str | None, num_prompt: int | None, num_tokens: int) -> dict[str, Any]:
        """One record of the formatter 3p_stream. Only the first has the length of the prompt."""
        body = {"generation": text, "prompt_token_count": num_prompt, "generation_token_count": num_tokens, "stop_reason": finish_reason}
        metering = {"outputTokenCount": num_tokens} | ({} if num_prompt is None else {"inputTokenCount": num_prompt})
        return {"body": body, "metering": metering, "content_type": "application/jsonlines"}

    def _details(self, prompt: str, finish_reason: str, tokens: list[Token], prompt_tokens: list[Token]) -> dict[str, Any]:
        """The member `details` of a whole response."""
        call, shaped = self._call, [self.token(token) for token in tokens]
        if self._dialect == "async":
            before = [self.token(token) for token in prompt_tokens if token.logprob is not None]
            return {"finish_reason": finish_reason, "generated_tokens": len(tokens), "seed": call.seed, "prefill": before, "tokens": shaped}
        counts: dict[str, Any] = {"finish_reason": finish_reason, "generated_tokens": len(tokens), "inputs": prompt}
        if call.multiple:
            counts = {"inputs": prompt, "finish_reason": finish_reason, "generated_tokens": len(tokens)}
        if self._dialect == "0.26":
            counts = {"finish_reason": finish_reason}
        return {**counts, "tokens": shaped, **self._extras(tokens, prompt_tokens)}

    def _extras(self, tokens: list[Token], prompt_tokens: list[Token]) -> dict[str, Any]:
        """The members `prefill` and `top_tokens`, if they were requested."""
        extras: dict[str, Any] = {}
        if self._call.prompt_details:
            extras["prefill"] = [self.token(token) for token in prompt_tokens]
        if self._call.num_top_tokens:
            extras["top_tokens"] = [[self._candidate(*pair) for pair in token.top] for token in tokens]
        return extras

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        """One of the most likely tokens of a position."""
        return self.token(Token(token_id, token_text(self._service, token_id), logprob, token_id in self._service.end_ids))

    def token_record(self, token: Token) -> dict[str, Any]:
        """The record of a token other than the last."""
        if self._dialect == "async":
            return {"index": 0, "token": self.token(token), "generated_text": None, "details": None}
        return {"token": self.token(token)}

    def token_line(self, token_id: int, text: str, logprob: float | None) -> str:
        """`token_record` of a token that is not special, as JSON text.

        Most records of a stream are of this kind, so the text is joined from parts that are encoded once.
        """
        before, between, scored, after = self._parts
        score = "null" if logprob is None else repr(logprob)
        return f"{before}{token_id}{between}{encode_basestring(text)}{scored}{score}{after}"

    def last_record(self, prompt: str, text: str, finish_reason: str, tokens: list[Token], prompt_tokens: list[Token]) -> dict[str, Any]:
        """The record of the last token, which also has the whole text."""
        shaped = {**self.token_record(tokens[-1]), "generated_text": (prompt if self._call.full_text else "") + text}
        if not self._call.details:
            return shaped
        if self._dialect == "async":
            num_prompt = len(self._call.requests[0].prompt)
            shaped["details"] = {
                "finish_reason": finish_reason,
                "seed": self._call.seed,
                "generated_tokens": len(tokens),
                "input_length": num_prompt,
            }
            return shaped
        counts = {} if self._dialect == "0.26" else {"generated_tokens": len(tokens), "inputs": prompt}
        return {**shaped, "details": {"finish_reason": finish_reason, **counts, **self._extras(tokens, prompt_tokens)}}
