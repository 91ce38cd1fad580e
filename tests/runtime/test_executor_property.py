"""Random workloads on an executor with a stub device that fails at random: each sequence ends once, and no state remains."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.errors import DependencyError
from stoker.base.types import FinishReason, Guide, SamplingParams
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime import admission, executor
from stoker.runtime.client import Cancel, ExecutorInfo, Pause, Shutdown
from stoker.runtime.executor import Executor
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.policies import POLICIES
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.step_handle import StepResult

END = 3
ENDS_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


def token(request: TokenRequest, index: int, position: int) -> int:
    """The token that the device samples, a function of the request only."""
    return zlib.crc32(f"{request.prompt_ids}/{request.cache_salt}/{index}/{position}".encode()) % 9


def reference(request: TokenRequest, index: int, max_seq_len: int) -> tuple[list[int], FinishReason]:
    """The complete answer of a sequence."""
    generated: list[int] = []
    params = request.params
    for position in range(min(params.max_tokens, max_seq_len - len(request.prompt_ids))):
        generated.append(token(request, index, position))
        if generated[-1] in request.end_ids and len(generated) > params.min_tokens:
            return generated, FinishReason.STOP
    return generated, FinishReason.LENGTH


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Device:
    """A runner whose methods fail at random with the given rates. It checks that poisoned blocks are zeroed before reuse."""

    def __init__(self, dice: random.Random, rates: dict[str, float], tokens_per_block: int) -> None:
        self.dice, self.rates, self.size = dice, rates, tokens_per_block
        self.added: set[int] = set()
        self.poisoned: set[int] = set()
        self.preparing: list[tuple[Future[Any], str]] = []
        self._num_blocks: dict[tuple[int, int], int] = {}  # blocks of each sequence at its last step
        self._in_flight: list[list[int]] = []

    def fails(self, what: str) -> bool:
        return self.dice.random() < self.rates[what]

    def prepare(self, request: TokenRequest) -> Future[Any] | None:
        if request.params.guide is None:
            return None
        if self.fails("prepare"):
            raise DependencyError("grammars", "guided decoding", "guided")
        future: Future[Any] = Future()
        self.preparing.append((future, request.request_id))
        return future

    def finish_preparing(self) -> None:
        for future, name in self.preparing:
            if future.cancelled() or self.dice.random() < 0.5:
                continue
            if self.fails("compile"):
                future.set_exception(RuntimeError("no grammar"))
            else:
                future.set_result(name)
        self.preparing = [entry for entry in self.preparing if not entry[0].done()]

    def add(self, seq: Sequence) -> None:
        assert seq.seq_id not in self.added
        if seq.params.guide is not None:
            assert seq.grammar == seq.request_id
        self.added.add(seq.seq_id)
        if self.fails("add"):
            raise MemoryError("out of memory")

    def remove(self, seq: Sequence) -> None:
        self.added.discard(seq.seq_id)

    def close(self) -> None:
        return

    @property
    def capture_is_due(self) -> bool:
        return self.dice.random() < 0.1

    def capture_next(self) -> bool:
        assert not self._in_flight, "the capture is in the time of a step"
        return True

    def zero_blocks(self, blocks: list[int]) -> None:
        assert not any(set(blocks) & set(used) for used in self._in_flight), "a block of a step in flight is zeroed"
        self.poisoned.difference_update(blocks)

    def launch(self, plan: StepPlan) -> Any:
        rows = list(zip(plan.sequences, plan.starts, plan.num_new, plan.samples, strict=True))
        for seq, *_ in rows:
            key = (seq.seq_id, seq.num_preemptions)
            new = seq.blocks[self._num_blocks.get(key, 0) :]
            self._num_blocks[key] = len(seq.blocks)
            assert not self.poisoned & set(new), "a block is reused before it is zeroed"
        used = [block for seq, *_ in rows for block in seq.blocks]
        written = {block for seq, start, new, _ in rows for block in seq.blocks[start // self.size : -(-(start + new) // self.size)]}
        if self.fails("launch"):
            self.poisoned |= written
            raise RuntimeError("device failure")
        self._in_flight.append(used)
        sampled = [(seq, start + new - seq.num_prompt) for seq, start, new, samples in rows if samples]

        def wait() -> StepResult:
            self._in_flight.remove(used)
            if self.fails("wait"):
                self.poisoned |= written
                raise RuntimeError("device failure")
            token_ids = []
            for seq, position in sampled:
                is_nan = self.fails("numbers")
                if is_nan and seq.finish_reason is None:
                    self.poisoned |= set(seq.blocks)
                token_ids.append([-1 if is_nan else token(seq.request, seq.index, position)])
            return StepResult([seq for seq, _ in sampled], token_ids, [])

        return SimpleNamespace(wait=wait)


class StubRanks:
    """Follower ranks that never fail. The executor has `num_stages` steps in flight."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages

    def check(self) -> None: ...
    def check_after_error(self) -> None: ...
    def close(self, failure: str = "") -> None: ...


@st.composite
def scenarios(draw: Any) -> dict[str, Any]:
    batch = draw(st.integers(1, 4))
    depth = draw(st.sampled_from(("plain", "overlap", "stages")))
    rates = {what: draw(st.sampled_from((0.0, 0.0, 0.05, 0.3))) for what in ("prepare", "compile", "add", "launch", "wait", "numbers")}
    scheduler = {
        "num_blocks": draw(st.integers(6, 24)), "tokens_per_block": draw(st.integers(1, 4)), "max_batch_size": batch,
        "max_num_tokens": draw(st.integers(1, 16)), "max_num_sequences": draw(st.none() | st.integers(1, batch + 4)),
        "policy": draw(st.sampled_from(POLICIES.names())), "chunked_prefill": draw(st.booleans()), "prefix_reuse": draw(st.booleans()),
        "num_stages": 3 if depth == "stages" else 1,
    }  # fmt: skip
    scheduler["max_seq_len"] = draw(st.integers(2, scheduler["num_blocks"] * scheduler["tokens_per_block"]))
    queue = draw(st.sampled_from((1, 3, 1000)))
    return {"scheduler": scheduler, "depth": depth, "rates": rates, "queue": queue, "seed": draw(st.integers(0, 1 << 32))}


class Run:
    """An executor with its requests and their outputs."""

    def __init__(self, scenario: dict[str, Any], clock: Clock) -> None:
        self.clock, self.dice = clock, random.Random(scenario["seed"])
        self.max_seq_len = scenario["scheduler"]["max_seq_len"]
        self.device = Device(self.dice, scenario["rates"], scenario["scheduler"]["tokens_per_block"])
        info = ExecutorInfo(limits=Limits(), max_seq_len=self.max_seq_len, vocab_size=9, device="cpu", kv_cache_tokens=0, model="none")
        self.mailbox = SynchronousMailbox(info)
        ranks = StubRanks(3) if scenario["depth"] == "stages" else None
        config = RuntimeConfig(max_queue_size=scenario["queue"], max_batch_size=scenario["scheduler"]["max_batch_size"])
        self.executor = Executor(self.device, Scheduler(**scenario["scheduler"]), self.mailbox, info, config, ranks)
        if scenario["depth"] == "overlap":
            self.executor._depth = 2
        self.requests: list[TokenRequest] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], FinishReason] = {}
        self.bases = [[self.dice.randrange(9) for _ in range(12)] for _ in range(2)]

    def submit(self) -> None:
        dice = self.dice
        prompt = dice.choice(self.bases)[: dice.randrange(13)] + [dice.randrange(9) for _ in range(dice.randrange(3))]
        if dice.random() < 0.1:
            prompt = [1] * (self.max_seq_len - dice.choice((0, 1, 2)))
        max_tokens = dice.randrange(1, 10)
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=dice.choice((0, 0, max_tokens)), n=dice.choice((1, 1, 2, 3)),
            guide=Guide("json") if dice.random() < 0.2 else None, prompt_logprobs=0 if dice.random() < 0.1 else None,
        )  # fmt: skip
        request = TokenRequest(
            request_id=str(len(self.requests)), prompt_ids=prompt, params=params, end_ids=dice.choice(((), (END,))),
            priority=dice.choice((0, 1)), timeout_s=dice.choice((None, None, None, 0.0, float(dice.randrange(20)))),
            cache_salt=dice.choice(("", "a")),
        )  # fmt: skip
        self.requests.append(request)
        self.tokens |= {(request.request_id, index): [] for index in range(params.n)}
        self.mailbox.submit([request])

    def submit_random_messages(self) -> None:
        dice = self.dice
        for _ in range(dice.choice((0, 0, 1, 2, 3))):
            self.submit()
        if self.requests and dice.random() < 0.5:
            self.mailbox.messages.append(Cancel(dice.choice(self.requests[-6:]).request_id, dice.choice((None, 0, 1))))
        if dice.random() < 0.1:
            self.mailbox.messages.append(Pause(dice.random() < 0.5))

    def turn(self) -> None:
        self.device.finish_preparing()
        self.executor.turn(0.0)
        self.clock.now += 1.0
        for output in self.mailbox.pop_outputs():
            key = output.request_id, output.index
            assert key not in self.ends, "an output after the last"
            self.tokens[key] += output.token_ids
            if output.finish_reason is not None:
                assert (output.error is not None) is (output.finish_reason is FinishReason.ERROR)
                self.ends[key] = output.finish_reason

    def run(self) -> None:
        for _ in range(40):
            self.submit_random_messages()
            self.turn()
        self.mailbox.messages.append(Pause(False))
        if self.dice.random() < 0.5:
            self.mailbox.messages.append(Shutdown(drain=self.dice.random() < 0.7))
            self.submit()
        while self.executor.is_busy or self.mailbox.messages:
            assert self.clock.now < 5000, "the requests do not end"
            self.turn()
        self.turn()

    def check(self) -> None:
        assert self.ends.keys() == self.tokens.keys(), "a sequence never ended"
        for request in self.requests:
            for index in range(request.params.n):
                tokens, reason = self.tokens[request.request_id, index], self.ends[request.request_id, index]
                expected = reference(request, index, self.max_seq_len)
                if reason in ENDS_ITSELF:
                    assert (tokens, reason) == expected
                else:
                    assert tokens == expected[0][: len(tokens)]
        executor, scheduler = self.executor, self.executor.scheduler
        stats = executor.snapshot()
        assert stats.num_free_blocks == stats.num_blocks and scheduler.kv_cache.num_reserved == 0
        assert stats.num_running == stats.num_waiting == stats.num_paused == 0 == len(scheduler.request_ids())
        assert len(scheduler._running_set._free_rows) == len(set(scheduler._running_set._free_rows)) and not scheduler._running_set.running
        assert not self.device.added and not self.device.poisoned and not executor._announced and not executor.admission._preparing
        num_sequences = sum(request.params.n - 1 for request in self.requests) + len(self.requests)
        assert stats.num_finished + stats.num_cancelled <= num_sequences


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenario=scenarios())
def test_each_sequence_ends_once_and_nothing_stays(scenario: dict[str, Any]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (executor, admission):
            patch.setattr(module, "time", clock)
        patch.setattr(executor, "log", SimpleNamespace(error=lambda *_, **__: None))
        run = Run(scenario, clock)
        run.run()
        run.check()


def test_poisoned_blocks_are_zeroed_before_reuse_if_their_last_holder_is_cancelled() -> None:
    rates = dict.fromkeys(("prepare", "compile", "add", "launch", "wait", "numbers"), 0.0)
    scheduler = {"num_blocks": 12, "tokens_per_block": 4, "max_batch_size": 4, "max_num_tokens": 5, "max_seq_len": 40}
    run = Run({"scheduler": scheduler, "depth": "plain", "rates": rates, "queue": 9, "seed": 0}, Clock())

    def submit(name: str, prompt: list[int]) -> None:
        run.requests.append(TokenRequest(request_id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=9)))
        run.tokens[name, 0] = []
        run.mailbox.submit(run.requests[-1:])

    submit("bad", [1] * 9)
    while not run.tokens["bad", 0]:
        run.turn()
    submit("sharing", [1] * 8 + [2] * 20)
    run.turn()
    rates["numbers"] = 1.0
    run.turn()
    rates["numbers"] = 0.0
    assert run.ends["bad", 0] is FinishReason.ERROR and len(run.device.poisoned) > 1
    run.mailbox.messages.append(Cancel("sharing"))
    submit("next", [3] * 12)
    while run.executor.is_busy or run.mailbox.messages:
        run.turn()
    assert len(run.tokens["next", 0]) == 9
    run.check()
