"""Guided decoding: the answers of a random model match the grammar."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import tokenizers
import torch
from drive import END, Answer, Driven, request

from stoker import LLM
from stoker.base.types import FinishReason, Guide, SamplingParams
from stoker.runtime.client import Cancel
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import SampledRow
from stoker.runtime.sampling.grammar_client import CompileProcess
from stoker.runtime.sampling.grammar_source import compile_guide
from stoker.runtime.sampling.guided_decoding import Guides, _Match
from stoker.runtime.sampling.json_schema import check_schema
from stoker.runtime.schedule.draft_length import DraftLength

Make = Callable[..., Driven]
LONG = 64
SHORT = {"type": "string", "minLength": 1, "maxLength": 5}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "who": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/id"}]},
    },
    "required": ["name", "age"],
    "$defs": {"id": {"type": "integer", "minimum": 1, "maximum": 9}},
}
CHOICES = ["fox", 'a "b"\\\n', "fox jumps", "日本"]
EBNF = 'root ::= "[" digit ("," digit){0,3} "]"\ndigit ::= [0-9]{1,2}'


@pytest.fixture(scope="session")
def text_of(tiny_engine: Path) -> Callable[[Answer], str]:
    core = tokenizers.Tokenizer.from_file(str(tiny_engine / "tokenizer.json"))
    return lambda answer: core.decode(answer.tokens, skip_special_tokens=True)


def valid_json(text: str) -> bool:
    return json.dumps(json.loads(text)) != ""


def valid_schema(text: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


GUIDES: dict[str, tuple[Guide, Callable[[str], object]]] = {
    "json_schema": (Guide("json_schema", json.dumps(SCHEMA)), valid_schema),
    "regex": (Guide("regex", r"(yes|no) [0-9]{3}[a-fé]?\."), re.compile(r"(yes|no) [0-9]{3}[a-fé]?\.").fullmatch),
    "grammar": (Guide("grammar", EBNF), re.compile(r"\[\d{1,2}(,\d{1,2}){0,3}\]").fullmatch),
    "choice": (Guide("choice", json.dumps(CHOICES)), CHOICES.__contains__),
    "structural_tag": (
        Guide("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "ab{1,4}c"}})),
        re.compile("ab{1,4}c").fullmatch,
    ),
}  # fmt: skip


def guided(prompt: list[int], guide: Guide, **params: Any) -> Any:
    return request(prompt, **{"max_tokens": LONG, "end_ids": (END,), "guide": guide} | params)


def check(answers: list[Answer], text_of: Callable[[Answer], str], valid: Callable[[str], object]) -> None:
    for answer in answers:
        assert answer.error is None
        assert answer.reason is FinishReason.STOP and answer.stop_id == END == answer.tokens[-1], text_of(answer)
        assert valid(text_of(answer)), text_of(answer)


@pytest.mark.parametrize("name", GUIDES)
def test_every_answer_is_valid(drive: Make, prompts: list[list[int]], text_of: Callable[[Answer], str], name: str) -> None:
    guide, valid = GUIDES[name]
    driven = drive()
    requests = [guided(prompt, guide, temperature=temperature, n=2, seed=7) for prompt in prompts[:3] for temperature in (0.0, 1.0, 5.0)]
    answers = driven.run(*requests)
    check(answers, text_of, valid)
    assert len({text_of(answer) for answer in answers}) > 1


def test_any_json(drive: Make, prompts: list[list[int]], text_of: Callable[[Answer], str]) -> None:
    """Random answers rarely end; those that end are valid JSON."""
    answers = drive().run(*(guided(prompt, Guide("json"), temperature=2.0, n=8, seed=3, logit_bias={END: 12.0}) for prompt in prompts[:4]))
    ended = [answer for answer in answers if answer.reason is FinishReason.STOP]
    assert len(ended) > 8
    check(ended, text_of, valid_json)


def test_batches_and_preemption_do_not_change_answers(drive: Make, prompts: list[list[int]], text_of: Callable[[Answer], str]) -> None:
    alone = drive()
    kinds = list(GUIDES.values())
    expected = [alone.run(guided(prompt, guide, temperature=1.0, seed=5, n=2)) for prompt in prompts[:2] for guide, _ in kinds]
    batch = drive(policy="max_utilization", max_num_tokens=16, kv_cache_tokens=10 * 16)
    strangers = [request(prompt, temperature=1.0, max_tokens=40) for prompt in prompts]
    requests = [guided(prompt, guide, temperature=1.0, seed=5, n=2) for prompt in prompts[:2] for guide, _ in kinds]
    batch.run(*requests, *strangers)
    found = [[batch.answers[one.request_id, index].tokens for index in range(2)] for one in requests]
    assert found == [[answer.tokens for answer in answers] for answers in expected]
    assert batch.stats.num_preemptions > 0


@pytest.mark.parametrize("started", [False, True])
def test_reasoning_before_the_answer_is_free(
    drive: Make, prompts: list[list[int]], text_of: Callable[[Answer], str], started: bool
) -> None:
    """With reasoning_start, only if the first token is that one."""
    begin, last, end = 300, 299, 301
    guide = msgspec.structs.replace(GUIDES["regex"][0], reasoning_end=(last, end), reasoning_start=None if started else begin)
    options = {"temperature": 3.0, "n": 4, "seed": 5, "max_tokens": 200, "logit_bias": {last: 15.0, end: 15.0}}
    answers = drive(max_num_tokens=32, policy="max_utilization", kv_cache_tokens=40 * 16).run(
        *(guided(prompt, guide, **options) for prompt in prompts[:2]),
        *(guided(prompt, guide, **{**options, "logit_bias": {begin: 15.0, last: 15.0, end: 15.0}}) for prompt in prompts[:2]),
    )
    lengths = []
    for answer in answers:
        reasoned = started or answer.tokens[0] == begin
        pairs = list(itertools.pairwise(answer.tokens))
        lengths.append(pairs.index((last, end)) + 2 if reasoned else 0)
        assert END not in answer.tokens[: lengths[-1]], "an end id would end the sequence without an answer"
        check([Answer(tokens=answer.tokens[lengths[-1] :], reason=answer.reason, stop_id=answer.stop_id)], text_of, GUIDES["regex"][1])
    assert max(lengths) > 3 and (started or 0 in lengths)


def test_with_the_other_features(drive: Make, prompts: list[list[int]], text_of: Callable[[Answer], str]) -> None:
    guide, valid = GUIDES["json_schema"]
    answers = drive().run(
        guided(prompts[0], guide, min_tokens=60, temperature=1.0, seed=1),  # the grammar ends earlier and takes precedence
        guided(prompts[0], guide, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={END: -100.0, 40: 100.0}),
        guided(prompts[0], guide, logprobs=2, prompt_logprobs=1),
        guided(prompts[0], guide, end_ids=(), stop_token_ids=(END,)),
    )
    check(answers, text_of, valid)
    assert len(answers[2].logprobs) == len(answers[2].tokens)


def test_a_grammar_whose_tokens_are_all_banned_ends_only_its_request(
    drive: Make, prompts: list[list[int]], text_of: Callable[[Answer], str]
) -> None:
    all_tokens = tuple((token,) for token in range(320) if token != END)
    guide, valid = GUIDES["regex"]
    dead, good = drive().run(guided(prompts[0], guide, bad_words=all_tokens), guided(prompts[0], guide))
    assert dead.reason is FinishReason.ERROR and dead.error is not None and "banned" in dead.error.message
    check([good], text_of, valid)


BAD = {
    "json_schema": [
        "{", "[1]", '{"type": "foo"}', '{"type": "array", "uniqueItems": true}', '{"not": {}}', '{"$ref": "http://a/b"}', "[" * 5000,
    ],
    "regex": ["(", "(?=a)b", r"(a)\1"],
    "grammar": ["root = x", "root ::= y", 'x ::= "a"', ""],
    "choice": ["[]", "{}", "[1]", "x", '[""]'],
    "structural_tag": ["{", '{"type": "x"}', json.dumps({"type": "structural_tag", "format": {"type": "what"}})],
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_an_invalid_grammar_is_rejected_by_field(drive: Make, prompts: list[list[int]], kind: str) -> None:
    driven = drive()
    answers = driven.run(*(guided(prompts[0], Guide(kind, text)) for text in BAD[kind]), request(prompts[0], max_tokens=2))
    for answer in answers[:-1]:
        assert answer.reason is FinishReason.ERROR and answer.error is not None
        assert (answer.error.code, answer.error.status) == ("bad_request", 400)
        assert answer.error.message.startswith("guide.text=") and kind in answer.error.message and "/project/" not in answer.error.message
    assert answers[-1].reason is FinishReason.LENGTH


def test_a_guide_without_an_end_id_is_rejected(drive: Make, prompts: list[list[int]]) -> None:
    (answer,) = drive().run(guided(prompts[0], GUIDES["regex"][0], end_ids=(), ignore_eos=True))
    assert answer.error is not None and "ignore_eos" in answer.error.message


def test_a_guide_without_xgrammar_is_rejected(drive: Make, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    (answer,) = drive().run(guided(prompts[0], GUIDES["regex"][0]))
    assert answer.error is not None and answer.error.code == "missing_dependency" and "stoker[guided]" in answer.error.message


# The branches are compared in pairs, which takes several minutes.
SLOW = Guide("json_schema", json.dumps({"oneOf": [{"const": i} for i in range(9000)]}))


def test_compilation_delays_no_other_request_and_ends_with_its_own(
    drive: Make, prompts: list[list[int]], own_compiler: CompileProcess
) -> None:
    driven = drive(max_queue_size=4, guide_timeout_s=600)
    driven.grammars.process = own_compiler
    blocked = guided(prompts[0], SLOW, n=2)
    timed = guided(prompts[0], SLOW, timeout_s=0.0)
    again = guided(prompts[0], SLOW, request_id=blocked.request_id)
    driven.submit(blocked, timed)
    driven.turn()
    assert driven.stats.num_waiting == 2 and driven.answers[timed.request_id, 0].reason is FinishReason.DEADLINE
    other = request(prompts[1], max_tokens=5)
    driven.submit(other)
    driven.finish(until=lambda: driven.answers[other.request_id, 0].reason is not None)
    assert driven.answers[other.request_id, 0].reason is FinishReason.LENGTH
    driven.send(Cancel(blocked.request_id, 0))
    driven.turn()
    assert driven.answers[blocked.request_id, 0].reason is FinishReason.CANCELLED and driven.stats.num_waiting == 1
    with pytest.raises(Exception, match="in flight"):
        driven.executor.admission.admit(again)
    driven.send(Cancel(blocked.request_id))
    driven.turn()
    assert driven.answers[blocked.request_id, 1].reason is FinishReason.CANCELLED and driven.stats.num_waiting == 0
    late = guided(prompts[0], SLOW)
    driven.executor.admission.prepare_timeout_s = 0.0
    driven.submit(late)
    driven.finish()
    error = driven.answers[late.request_id, 0].error
    assert error is not None and error.status == 503 and "for the compilation of others" in error.message


def test_a_slow_grammar_ends_only_its_request(drive: Make, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time per token grows with each token, to 1.1 s for the 70th, during which all other requests wait."""
    monkeypatch.setattr("stoker.runtime.sampling.guided_decoding.MAX_MATCH_S", 0.02)
    slow = guided(prompts[0], Guide("regex", "((a{1,50}){1,50}){1,50}"), logit_bias={END: -50.0})
    started = time.thread_time()
    ended, other = drive().run(slow, request(prompts[1], max_tokens=LONG))
    assert time.thread_time() - started < 5
    assert ended.reason is FinishReason.ERROR and ended.error is not None and 0 < len(ended.tokens) < LONG
    assert (ended.error.code, ended.error.status) == ("guide_too_slow", 400) and "the regex took 0." in ended.error.message
    assert len(other.tokens) == LONG


class StubMatcher:
    """A grammar that allows token number `index` in the row with this index."""

    def accept_token(self, token: int) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False

    is_completed = is_terminated

    def rollback(self, count: int) -> None:
        return

    def fill_next_token_bitmask(self, masks: torch.Tensor, index: int) -> None:
        masks[index] = 1 << index


def masks_of_a_tree(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> tuple[list[int], Sequence]:
    """The masks of four rows, and their sequence. `times`: the values of the clock."""
    monkeypatch.setattr("stoker.runtime.sampling.guided_decoding.time.thread_time", iter(times).__next__)
    call = guided([5, 6], Guide("regex", "a"))
    seq = Sequence(0, call, 0, 0.0)
    guides = Guides(32)
    assert call.params.guide is not None
    guides._matches[0] = _Match(call.params.guide, StubMatcher(), frozenset([END]))
    paths = [(), (7,), (8,), (8, 9)]
    _, masks = guides.gather([SampledRow(at, seq, 2 + len(path), path) for at, path in enumerate(paths)])
    return masks.ravel().tolist(), seq


def test_rows_after_a_slow_one_of_a_tree_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tree the rows after a slow one may be reached without it. They have no mask, and yield no token."""
    masks, seq = masks_of_a_tree(monkeypatch, [0.0, 0.1, 0.1, 9.0])  # the second row is slow
    assert masks == [1, 0, 0, 0] and seq.fault is not None and seq.fault.code == "guide_too_slow"


def test_a_slow_grammar_limits_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft takes as long as a token, and 63 of them would delay all other requests 63 times as long."""
    lengths = DraftLength(63, is_adaptive=False)
    for took, limit in ((0.0, 63), (0.0005, 63), (0.004, 12), (0.2, 0)):
        masks, seq = masks_of_a_tree(monkeypatch, [0.0, took, took, took, took, took, took, took, took])
        assert masks == [1, 2, 4, 8] and lengths.limit(seq, 1) == limit


def test_many_distinct_grammars_at_once(drive: Make, prompts: list[list[int]], text_of: Callable[[Answer], str]) -> None:
    started = time.monotonic()
    answers = drive().run(*(guided(prompts[0], Guide("regex", f"a{{{i}}}b")) for i in range(1, 30)))
    assert [text_of(answer) for answer in answers] == ["a" * i + "b" for i in range(1, 30)]
    assert time.monotonic() - started < 15


async def test_the_stream_is_the_whole_answer(tiny_engine: Path) -> None:
    params = SamplingParams(max_tokens=LONG, temperature=1.0, seed=3, n=2, guide=GUIDES["json_schema"][0])
    with LLM(tiny_engine, device="cpu", kv_cache_tokens=1024, num_threads=1) as llm:
        whole = llm.generate("the quick", params)
        texts = ["", ""]
        async for delta in llm.stream("the quick", params):
            texts[delta.index] += delta.text
    assert texts == [choice.text for choice in whole.choices]
    for text in texts:
        assert valid_schema(text)


@pytest.mark.parametrize(
    "guide",
    [
        Guide("json_schema", json.dumps(SHORT)),
        Guide("json_schema", json.dumps({"type": "object", "propertyNames": SHORT, "additionalProperties": {"type": "null"}})),
        Guide(
            "structural_tag",
            json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SHORT}}),
        ),
    ],
    ids=["string", "names", "structural tag"],
)
def test_strings_with_a_length_contain_no_control_characters(guide: Guide) -> None:
    """JSON does not allow them, and xgrammar's grammars do."""
    import xgrammar

    vocabulary = xgrammar.TokenizerInfo([f"<0x{byte:02X}>" for byte in range(256)], xgrammar.VocabType.BYTE_FALLBACK)
    compiled = compile_guide(vocabulary, guide)
    template = '{"%s":null}' if "propertyNames" in guide.text else '"%s"'
    for text, allowed in (("ab", True), ("é🎉", True), ("a\x03", False), ("\t", False), ("\x00a", False)):
        assert xgrammar.GrammarMatcher(compiled).accept_string(template % text) is allowed, text


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "required": ["a"]}, "#/required"),
        ({"properties": {"x": {"type": "string", "pattern": "a", "maxLength": 3}}}, "#/properties/x/pattern"),
        ({"minLength": 3}, "#/minLength"),
        ({"items": {"maximum": 3}}, "#/items/maximum"),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "#/allOf"),
        ({"type": "integer", "anyOf": [{"minimum": 3}]}, "#/type"),
        ({"type": "integer", "enum": [1, "a"]}, "#/type"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "#/minimum"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "#/oneOf"),
        ({"$defs": {"a": {"if": {}}}}, "#/$defs/a/if"),
        ({"dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    ],
)
def test_keywords_that_a_grammar_cannot_enforce_are_named(schema: dict, path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(path)):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        True, SCHEMA, {"$ref": "#/$defs/a", "description": "x", "$defs": {"a": {"type": "integer"}}},
        {"type": "string", "enum": ["a", "b"], "default": "a"}, {"type": "number", "enum": [1, 2.5]},
        {"allOf": [{"type": "string"}], "title": "t"},
        {"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"oneOf": [{"const": 1}, {"const": 2}]},
        {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {
            name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "cd"
        }},
    ],
)  # fmt: skip
def test_schemas_that_a_grammar_enforces_are_accepted(schema: Any) -> None:
    check_schema(json.dumps(schema))
