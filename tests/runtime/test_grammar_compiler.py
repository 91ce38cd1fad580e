"""The compilation of grammars: in processes with limits, with a cache and a bounded queue."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from drive import END, Driven
from test_guides import GUIDES, SLOW, guided

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError, GuideCostError, RequestError, UnavailableError
from stoker.base.types import FinishReason, Guide
from stoker.frontend.executor_errors import to_error
from stoker.runtime.client import Cancel
from stoker.runtime.sampling.grammar_client import CompileProcess
from stoker.runtime.sampling.grammar_source import compile_guide, load_vocabulary
from stoker.server.errors import describe

Make = Callable[..., Driven]
LONG_S = 600.0


def slow(number: int) -> Guide:
    return Guide(SLOW.kind, SLOW.text[:-1] + f', "title": "{number}"' + "}")


def children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.timeout(300)  # two starts of the compile process, of 1.1 s of CPU time each, beside two expensive compilations
def test_expensive_grammars_delay_no_cached_grammar(drive: Make, prompts: list[list[int]], own_compiler: CompileProcess) -> None:
    """Two occupy the compile process; a third waits; a fourth is refused with 503. Nothing remains after the end of the process."""
    driven = drive(guide_timeout_s=LONG_S, guide_queue_size=1)
    driven.grammars.process = own_compiler
    cached, other = GUIDES["regex"][0], GUIDES["choice"][0]
    (before,) = driven.run(guided(prompts[0], cached))
    expensive = [guided(prompts[0], slow(number)) for number in (1, 2)]
    waiting, refused = guided(prompts[1], other), guided(prompts[1], Guide("regex", "a"))
    driven.submit(*expensive, waiting, refused)
    driven.turn()
    error = driven.answers[refused.request_id, 0].error
    assert error is not None
    failure = describe(to_error(error))
    assert (failure.status, [name for name, _ in failure.headers]) == (503, [b"retry-after"])
    assert "guide_queue_size" in failure.message

    again = guided(prompts[0], cached)
    driven.submit(again)
    driven.finish(until=lambda: driven.answers[again.request_id, 0].reason is not None)
    assert driven.answers[again.request_id, 0].tokens == before.tokens
    assert driven.stats.num_waiting == 3

    while own_compiler.num_started < 3:  # the cached one and the two expensive ones
        driven.turn()
    parent = own_compiler.pid
    assert parent is not None
    ended = os.pidfd_open(parent)
    os.kill(parent, signal.SIGKILL)
    driven.finish()
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    for each in expensive:
        error = driven.answers[each.request_id, 0].error
        assert error is not None and error.status == 503 and "the process that compiles grammars" in error.message
    assert driven.answers[waiting.request_id, 0].reason is FinishReason.STOP
    assert driven.stats.num_costly_guides == 0


def test_the_executor_ends_compilations(drive: Make, prompts: list[list[int]], own_compiler: CompileProcess) -> None:
    """Of equal guides one is compiled, also when the first request is cancelled."""
    driven = drive(guide_timeout_s=LONG_S)
    driven.grammars.process = own_compiler
    (first, second) = (guided(prompts[0], SLOW) for _ in range(2))
    driven.run(guided(prompts[0], Guide("regex", "a")))
    driven.submit(first, second)
    driven.turn()
    driven.send(Cancel(first.request_id))
    driven.turn()
    assert driven.stats.num_waiting == 1
    parent = own_compiler.pid
    assert parent is not None
    while not (children := children_of(parent)):
        driven.turn()
    (child,) = children
    ended = [os.pidfd_open(pid) for pid in (parent, child)]
    driven.executor.close()
    driven.finish()
    for descriptor in ended:
        assert select.select([descriptor], [], [], 60)[0]
        os.close(descriptor)
    assert driven.answers[first.request_id, 0].reason is FinishReason.CANCELLED
    error = driven.answers[second.request_id, 0].error
    assert error is not None and error.status == 503


def test_a_compilation_is_killed_at_its_time_limit(drive: Make, prompts: list[list[int]], compiler: CompileProcess) -> None:
    driven = drive(guide_timeout_s=0.5)
    (answer,) = driven.run(guided(prompts[0], SLOW))
    assert answer.error is not None and answer.error.status == 400 and "not compiled within 0.5 s" in answer.error.message
    assert driven.stats.num_costly_guides == 1
    assert compiler.pid is not None
    while children_of(compiler.pid):  # the kernel removes the killed child after its connection
        driven.turn()
    (answer,) = drive(guide_timeout_s=LONG_S).run(guided(prompts[0], GUIDES["regex"][0]))
    assert answer.reason is FinishReason.STOP


def test_a_compilation_is_ended_at_its_memory_limit(compiler: CompileProcess) -> None:
    rules = [f'r{i} ::= "a" r{i + 1} | "b"' for i in range(1000)]
    guide = Guide("grammar", "\n".join(["root ::= r0", *rules, 'r1000 ::= "c"']))
    with pytest.raises(GuideCostError, match="in 32 MiB of memory"):
        compiler.compile(guide, LONG_S, 32 << 20)
    assert compiler.compile(GUIDES["regex"][0], LONG_S)


RULES = "\n".join(["root ::= r0", *(f'r{i} ::= "a"' for i in range(28_000))])
TOO_LARGE = {
    "28001 rules": Guide("grammar", RULES),
    "50000 values": Guide("json_schema", json.dumps({"properties": {"a": {"enum": list(range(50_000))}}})),
    "50000 strings": Guide("choice", json.dumps([f"s{i}" for i in range(50_000)])),
    "more than 50000 JSON values": Guide("json_schema", json.dumps({"properties": {f"p{i}": {"type": "null"} for i in range(30_000)}})),
}


@pytest.mark.parametrize("reason", TOO_LARGE)
def test_size_is_limited_before_the_compilation(compiler: CompileProcess, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        compiler.compile(TOO_LARGE[reason], LONG_S)


def masks(grammar: Any, vocab_size: int) -> list[list[int]]:
    """The masks along the answer that takes the lowest allowed token id each time."""
    matcher, found = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[END]), []
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    while not matcher.is_terminated() and len(found) < 40:
        matcher.fill_next_token_bitmask(mask)
        found.append(mask[0].tolist())
        token = next(token for token in range(vocab_size) if found[-1][token // 32] >> token % 32 & 1)
        assert matcher.accept_token(token)
    return found


@pytest.mark.parametrize("kind", [*GUIDES, "json"])
def test_grammars_equal_those_compiled_in_this_process(tiny_engine: Path, compiler: CompileProcess, kind: str) -> None:
    vocab_size = json.loads((tiny_engine / "config.json").read_text())["model"]["vocab_size"]
    vocabulary = load_vocabulary(tiny_engine, vocab_size)
    guide = GUIDES[kind][0] if kind != "json" else Guide("json")
    expected = compile_guide(vocabulary, guide)
    received = xgrammar.CompiledGrammar.deserialize_json(compiler.compile(guide, LONG_S), vocabulary)
    assert received.serialize_json() == expected.serialize_json()
    assert masks(received, vocab_size) == masks(expected, vocab_size)


def test_a_closed_process_refuses_jobs(own_compiler: CompileProcess) -> None:
    own_compiler.close()
    with pytest.raises(UnavailableError, match="stopping"):
        own_compiler.compile(GUIDES["regex"][0], LONG_S)


@pytest.mark.parametrize(("name", "value"), [("guide_timeout_s", 0.0), ("guide_timeout_s", float("nan")), ("guide_queue_size", -1)])
def test_a_setting_out_of_range_is_rejected(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        RuntimeConfig(**{name: value})
