"""Blocks of imports that fail, end late, or follow each other: none is written by two, and none is lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from pairs import LIMIT_S, Pair, request, run, with_tickets
from test_transfers import prompt

from stoker.base.types import FinishReason
from stoker.runtime.request import TokenRequest
from stoker.runtime.transfer import transfers
from stoker.runtime.transfer.imports import Imports
from stoker.runtime.transfer.nixl_agent import NixlAgent
from stoker.runtime.transfer.pages import RankPages
from stoker.runtime.transfer.progress import StepProgress
from stoker.runtime.transfer.rank_server import RankServer, listen
from stoker.runtime.worker.model_runner import ModelRunner


def imports_of(both: Pair) -> Imports:
    found = both.decode.executor._transfers
    assert found is not None
    return found.imports


def wait(until: Callable[[], object]) -> None:
    """Wait in a thread of the executor until the test has proceeded."""
    deadline = time.monotonic() + LIMIT_S
    while not until():
        assert time.monotonic() < deadline, "the executors do not proceed"
        time.sleep(0.0005)


def replace_writes(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Call `before` with the number of the write, from 0 on, in the thread of the import."""
    write, numbers = RankPages.write, itertools.count()

    def replaced(self: RankPages, *args: Any) -> None:
        before(next(numbers))
        write(self, *args)

    monkeypatch.setattr(RankPages, "write", replaced)


def test_blocks_of_a_failed_import_are_zeroed_before_the_next_one_writes_to_them(
    tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second import waits for the blocks of the first one, which fails."""
    both = pair(tiny_engine, kv_cache_tokens=256, prefill_tokens=1024)
    imports, runner = imports_of(both), cast(ModelRunner, both.decode.executor.runner)
    zero_blocks, zeroed = runner.zero_blocks, set[int]()

    def checked(blocks: list[int]) -> None:
        zeroed.update(blocks)
        assert not {block for each in imports._imports if each.targets is not None for block in each.targets.blocks} & set(blocks)
        zero_blocks(blocks)

    def fail(number: int) -> None:
        if not number:
            wait(lambda: any(each.wants_blocks for each in imports._imports))
            raise ValueError("a layer that breaks off")

    monkeypatch.setattr(runner, "zero_blocks", checked)
    replace_writes(monkeypatch, fail)
    wanted, decoded = [request(prompt(40 + i, 150)) for i in range(2)], list[TokenRequest]()
    for each in wanted:
        decoded.append(both.submit(each)[1])
        run(both.sides, lambda: any(each.targets is not None for each in imports._imports))
    run(both.sides, lambda: all(both.decode.has_answered(each) for each in decoded))
    assert (both.decode.stats.num_failed_imports, both.decode.stats.num_imports) == (1, 1)
    assert len(zeroed) == 9
    alone = pair(tiny_engine).prefill
    assert [both.decode.answer(each) for each in decoded] == [alone.generate(each) for each in wanted]


def test_prompts_that_fill_both_caches_are_imported_one_after_the_other(tiny_engine: Path, pair: type[Pair]) -> None:
    """The second prompt is computed when the first one was read, for which the blocks of the decoding engine must be free until then."""
    both = pair(tiny_engine, kv_cache_tokens=256)
    wanted = [request(prompt(60 + i, 150)) for i in range(2)]
    submitted = [both.submit(each) for each in wanted]
    both.decode.mailbox.messages.reverse()  # so that the import of the second prompt begins first
    run(both.sides, lambda: all(both.decode.has_answered(decoded) for _, decoded in submitted))
    assert (both.decode.stats.num_imports, both.decode.stats.num_failed_imports) == (2, 0)


def test_engines_that_wait_for_each_other_compute_a_prompt_themselves(
    tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine computes a prompt for the other one, and has then no blocks for the prompt that it imports."""
    monkeypatch.setattr(transfers, "STALL_S", 0.0)
    both = pair(tiny_engine, kv_cache_tokens=256)
    read, of_sides = Imports._run, [cast(Any, side.executor)._transfers for side in both.sides]

    def read_when_both_compute(self: Imports, each: Any) -> None:
        wait(lambda: all(any(export.segments for export in list(side.exports._by_id.values())) for side in of_sides))
        read(self, each)

    monkeypatch.setattr(Imports, "_run", read_when_both_compute)
    wanted, decoded = [request(prompt(70 + i, 150)) for i in range(2)], list[TokenRequest]()
    for each, sides in zip(wanted, (both.sides, both.sides[::-1]), strict=True):
        address = sides[0].executor.info.transfer
        assert address is not None
        requests = with_tickets(each, address.host, address.port)
        for side, submitted in zip(sides, requests, strict=True):
            side.mailbox.submit([submitted])
        decoded.append(requests[1])
    run(both.sides, lambda: both.decode.has_answered(decoded[0]) and both.prefill.has_answered(decoded[1]))
    assert sum(side.stats.num_failed_imports for side in both.sides) == 1
    alone = pair(tiny_engine).prefill
    assert [both.decode.answer(decoded[0]), both.prefill.answer(decoded[1])] == [alone.generate(each) for each in wanted]


def test_a_rank_writes_imported_blocks_after_it_has_zeroed_them() -> None:
    progress = StepProgress(1, torch.device("cpu"))
    assert progress.wait_for_zeroing(0, 0.0) and not progress.wait_for_zeroing(3, 0.0)
    waiting = threading.Thread(target=lambda: progress.wait_for_zeroing(3, LIMIT_S))
    waiting.start()
    progress.end_zeroing(2)
    assert not progress.wait_for_zeroing(3, 0.0)
    progress.end_zeroing(1)
    waiting.join(LIMIT_S)
    assert not waiting.is_alive() and progress.wait_for_zeroing(3, 0.0)


@pytest.mark.parametrize("repeats_ticket", [False, True])
def test_a_request_id_is_repeated_while_the_cancelled_import_still_reads(
    tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch, repeats_ticket: bool
) -> None:
    both, writes, continues = pair(tiny_engine), threading.Event(), threading.Event()
    imports = imports_of(both)

    def delay(number: int) -> None:
        if not number:
            writes.set()
            wait(continues.is_set)

    replace_writes(monkeypatch, delay)
    first, wanted = request(prompt(50, 60)), request(prompt(51, 60))
    _, decoded = both.submit(first)
    run(both.sides, writes.is_set)
    both.decode.cancel(decoded)
    run([both.decode], lambda: both.decode.has_answered(decoded))
    assert both.decode.reasons.pop((decoded.request_id, 0)) is FinishReason.CANCELLED
    _, again = both.submit(wanted)
    for side in both.sides[repeats_ticket ^ 1 :]:
        side.mailbox.messages.clear()
    again = msgspec.structs.replace(again, request_id=decoded.request_id, transfer=decoded.transfer if repeats_ticket else again.transfer)
    both.decode.mailbox.submit([again])
    if not repeats_ticket:
        run(both.sides, lambda: both.decode.stats.num_imports == 1)
    continues.set()
    run(both.sides, lambda: both.decode.has_answered(again) and not both.decode.executor.is_busy)
    assert both.decode.stats.num_imports == (not repeats_ticket) and not len(imports.held)
    assert both.decode.answer(again) == pair(tiny_engine).prefill.generate(wanted)


@pytest.mark.parametrize("answers", [True, False])
def test_blocks_of_a_failed_import_are_released_after_every_rank_has_answered(
    tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The leader has no memory while another rank writes, which then answers, or closes its connection and still writes."""
    both, proceeds = pair(tiny_engine), threading.Event()
    imports, kv_cache = imports_of(both), both.decode.executor.scheduler.kv_cache
    server = RankServer(listen("127.0.0.1", 0), imports._rank.key)
    server.start(imports._rank, imports._rank.progress, torch.float32)
    monkeypatch.setattr(imports, "_others", [msgspec.structs.replace(imports._rank.layout, host="127.0.0.1", port=server.address[1])])
    writers: list[str] = []

    def write(number: int) -> None:
        name = threading.current_thread().name
        writers.append(name)
        wait(lambda: len(writers) > 1)
        if name != "kv transfer":
            raise torch.OutOfMemoryError("no memory")
        wait(proceeds.is_set)

    replace_writes(monkeypatch, write)
    _, decoded = both.submit(request(prompt(60, 60)))
    run(both.sides, lambda: len(writers) == 2)
    targets = imports._imports[0].targets
    assert targets is not None and len(targets.blocks) == 3
    deadline = time.monotonic() + 0.2
    run(both.sides, lambda: time.monotonic() > deadline)
    assert imports.num_running == 1 and not both.decode.has_answered(decoded)
    if answers:
        proceeds.set()
    else:
        server.close()
    run(both.sides, lambda: both.decode.has_answered(decoded) and not both.decode.executor.is_busy)
    assert both.decode.stats.num_failed_imports == 1
    assert kv_cache.pool.num_free == kv_cache.pool.num_blocks - (0 if answers else 3)
    proceeds.set()
    server.close()
    if not answers:
        kv_cache.release_blocks(targets.blocks)


def test_blocks_are_not_reused_while_a_copy_that_cannot_be_aborted_may_write_to_them(
    tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is answered at once; the blocks are free when the copy has ended."""
    pytest.importorskip("nixl")
    both = pair(tiny_engine, transfer_backend="nixl", transfer_timeout_s=0.5)
    imports, kv_cache = imports_of(both), both.decode.executor.scheduler.kv_cache
    state, release, ended = NixlAgent.state, NixlAgent.release, threading.Event()

    def release_ended(self: NixlAgent, handle: Any) -> None:
        if not ended.is_set():
            raise RuntimeError("the transfer is in progress")
        release(self, handle)

    monkeypatch.setattr(NixlAgent, "state", lambda self, handle: state(self, handle) if ended.is_set() else "PROC")
    monkeypatch.setattr(NixlAgent, "release", release_ended)
    wanted = request(prompt(60, 60))
    _, decoded = both.submit(wanted)
    run(both.sides, lambda: both.decode.has_answered(decoded) and not both.decode.executor.is_busy)
    assert both.decode.stats.num_failed_imports == 1
    assert kv_cache.pool.num_free == kv_cache.pool.num_blocks - 3 and imports._rank.nixl is not None and imports._rank.nixl.may_write
    ended.set()
    run(both.sides, lambda: kv_cache.pool.num_free == kv_cache.pool.num_blocks)
    assert not imports._rank.nixl.may_write
    assert both.decode.answer(decoded) == pair(tiny_engine).prefill.generate(wanted)


def test_an_import_after_a_cached_prefix_that_is_not_valid_any_more_has_failed(
    tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, proceeds = pair(tiny_engine), threading.Event()
    imports, kv_cache = imports_of(both), both.decode.executor.scheduler.kv_cache
    tokens = prompt(70, 100)
    both.decode.generate(request(tokens[:33], 1))
    replace_writes(monkeypatch, lambda number: wait(proceeds.is_set))
    wanted = request(tokens)
    _, decoded = both.submit(wanted)
    run(both.sides, lambda: bool(imports._imports) and imports._imports[0].targets is not None)
    kv_cache.poison(both.decode.blocks_of(tokens[:33])[1:2])
    proceeds.set()
    run(both.sides, lambda: both.decode.has_answered(decoded))
    assert (both.decode.stats.num_failed_imports, both.decode.stats.num_imports) == (1, 0)
    assert both.decode.answer(decoded) == pair(tiny_engine).prefill.generate(wanted)


def test_the_capture_of_a_graph_computes_no_layer_of_the_step(tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that runs the model on dummy inputs before the step. The reported layers are those of the replay."""
    both = pair(tiny_engine)
    wanted = request(prompt(71, 20), 2)
    both.prefill.generate(wanted)  # after a step without a graph
    runner = cast(ModelRunner, both.prefill.executor.runner)
    progress, reported = runner.progress, list[bool]()
    assert progress is not None

    def run_graph(packed: object, all_greedy: bool, num_wanted: int | None = None) -> tuple[torch.Tensor, None, None]:
        if runner.model.after_layer is not None:
            runner.model.after_layer()
        reported.append(progress.wait(progress.num_planned, 0, 0.0))
        return torch.zeros(1, dtype=torch.int64), None, None

    monkeypatch.setattr(runner, "graphs", SimpleNamespace(run=run_graph))
    packed: Any = SimpleNamespace(is_padded=True, sampled=[], moves=None, ranks=None)
    runner.follow(packed, True)
    progress.num_planned += 1
    runner._start(cast(Any, SimpleNamespace(num_wanted=0, parts=())), packed, True)
    assert reported == [False, False] and progress.wait(progress.num_planned, 0, 0.0)


def test_an_error_in_the_inputs_of_a_step_counts_as_a_step(tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(tiny_engine)
    runner, wanted = cast(ModelRunner, both.prefill.executor.runner), request(prompt(72, 20), 2)
    progress = runner.progress
    assert progress is not None

    def fail(packed: object) -> None:
        raise ValueError("no inputs")

    with monkeypatch.context() as patch:
        patch.setattr(runner.inputs, "unpack", fail)
        both.prefill.generate(wanted)
        assert both.prefill.reasons[wanted.request_id, 0] is FinishReason.ERROR and progress.num_planned == 1
    both.prefill.generate(request(prompt(72, 20), 2))
    assert progress.num_planned == 3 and progress.wait(3, 0, 0.0)
