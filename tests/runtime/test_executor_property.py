"""Random lives of an executor over a stand-in for the device that fails at random: each sequence ends once, and nothing stays."""

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
from stoker.runtime.worker.model_runner import StepResult

END = 3
ENDS_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


def token(request: TokenRequest, index: int, place: int) -> int:
    """What the device answers: a matter of the request alone."""
    return zlib.crc32(f"{request.prompt_ids}/{request.cache_salt}/{index}/{place}".encode()) % 9


def alone(request: TokenRequest, index: int, max_seq_len: int) -> tuple[list[int], FinishReason]:
    """The sequence's whole answer."""
    made: list[int] = []
    params = request.params
    for place in range(min(params.max_tokens, max_seq_len - len(request.prompt_ids))):
        made.append(token(request, index, place))
        if made[-1] in request.end_ids and len(made) > params.min_tokens:
            return made, FinishReason.STOP
    return made, FinishReason.LENGTH


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Device:
    """A runner whose steps, preparations and beginnings fail as the dice fall. It sees to it that spoilt blocks are zeroed before reuse."""

    def __init__(self, dice: random.Random, rates: dict[str, float], tokens_per_block: int) -> None:
        self.dice, self.rates, self.size = dice, rates, tokens_per_block
        self.begun: set[int] = set()
        self.spoilt: set[int] = set()
        self.preparing: list[tuple[Future[Any], str]] = []
        self._given: dict[tuple[int, int], int] = {}  # how many blocks of each sequence have been seen
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
        assert seq.seq_id not in self.begun
        if seq.params.guide is not None:
            assert seq.grammar == seq.request_id
        self.begun.add(seq.seq_id)
        if self.fails("add"):
            raise MemoryError("no room to begin")

    def remove(self, seq: Sequence) -> None:
        self.begun.discard(seq.seq_id)

    def zero_blocks(self, blocks: list[int]) -> None:
        assert not any(set(blocks) & set(used) for used in self._in_flight), "zeroed under a step"
        self.spoilt.difference_update(blocks)

    def launch(self, plan: StepPlan) -> Any:
        rows = list(zip(plan.sequences, plan.starts, plan.num_new, plan.samples, strict=True))
        for seq, *_ in rows:
            place = (seq.seq_id, seq.num_preemptions)
            new = seq.blocks[self._given.get(place, 0) :]
            self._given[place] = len(seq.blocks)
            assert not self.spoilt & set(new), "a block is given again before it is zeroed"
        used = [block for seq, *_ in rows for block in seq.blocks]
        written = {block for seq, start, new, _ in rows for block in seq.blocks[start // self.size : -(-(start + new) // self.size)]}
        if self.fails("launch"):
            self.spoilt |= written
            raise RuntimeError("the device is angry")
        self._in_flight.append(used)
        sampled = [(seq, start + new - seq.num_prompt) for seq, start, new, samples in rows if samples]

        def wait() -> StepResult:
            self._in_flight.remove(used)
            if self.fails("wait"):
                self.spoilt |= written
                raise RuntimeError("the device is angry")
            token_ids = []
            for seq, place in sampled:
                spoils = self.fails("numbers")
                if spoils and seq.finish_reason is None:
                    self.spoilt |= set(seq.blocks)
                token_ids.append([-1 if spoils else token(seq.request, seq.index, place)])
            return StepResult([seq for seq, _ in sampled], token_ids, [])

        return SimpleNamespace(wait=wait)


class Line:
    """As many stages as the executor keeps in flight."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages

    def check(self) -> None: ...
    def blame(self) -> None: ...
    def close(self) -> None: ...


@st.composite
def scenes(draw: Any) -> dict[str, Any]:
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


class Life:
    """One executor, what it was asked, and what came."""

    def __init__(self, scene: dict[str, Any], clock: Clock) -> None:
        self.clock, self.dice = clock, random.Random(scene["seed"])
        self.max_seq_len = scene["scheduler"]["max_seq_len"]
        self.device = Device(self.dice, scene["rates"], scene["scheduler"]["tokens_per_block"])
        info = ExecutorInfo(limits=Limits(), max_seq_len=self.max_seq_len, vocab_size=9, device="cpu", kv_cache_tokens=0, model="none")
        self.mailbox = SynchronousMailbox(info)
        ranks = Line(3) if scene["depth"] == "stages" else None
        config = RuntimeConfig(max_queue_size=scene["queue"], max_batch_size=scene["scheduler"]["max_batch_size"])
        self.executor = Executor(self.device, Scheduler(**scene["scheduler"]), self.mailbox, info, config, ranks)
        if scene["depth"] == "overlap":
            self.executor._depth = 2
        self.asked: list[TokenRequest] = []
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
            request_id=str(len(self.asked)), prompt_ids=prompt, params=params, end_ids=dice.choice(((), (END,))),
            priority=dice.choice((0, 1)), timeout_s=dice.choice((None, None, None, 0.0, float(dice.randrange(20)))),
            cache_salt=dice.choice(("", "a")),
        )  # fmt: skip
        self.asked.append(request)
        self.tokens |= {(request.request_id, index): [] for index in range(params.n)}
        self.mailbox.submit([request])

    def stir(self) -> None:
        dice = self.dice
        for _ in range(dice.choice((0, 0, 1, 2, 3))):
            self.submit()
        if self.asked and dice.random() < 0.5:
            self.mailbox.messages.append(Cancel(dice.choice(self.asked[-6:]).request_id, dice.choice((None, 0, 1))))
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

    def live(self) -> None:
        for _ in range(40):
            self.stir()
            self.turn()
        self.mailbox.messages.append(Pause(False))
        if self.dice.random() < 0.5:
            self.mailbox.messages.append(Shutdown(drain=self.dice.random() < 0.7))
            self.submit()
        while self.executor.is_busy or self.mailbox.messages:
            assert self.clock.now < 5000, "no end in sight"
            self.turn()
        self.turn()

    def check(self) -> None:
        assert self.ends.keys() == self.tokens.keys(), "a sequence never ended"
        for request in self.asked:
            for index in range(request.params.n):
                made, reason = self.tokens[request.request_id, index], self.ends[request.request_id, index]
                expected = alone(request, index, self.max_seq_len)
                if reason in ENDS_ITSELF:
                    assert (made, reason) == expected
                else:
                    assert made == expected[0][: len(made)]
        executor, scheduler = self.executor, self.executor.scheduler
        stats = executor.snapshot()
        assert stats.num_free_blocks == stats.num_blocks and scheduler.kv_cache.num_reserved == 0
        assert stats.num_running == stats.num_waiting == stats.num_paused == 0 == len(scheduler.request_ids())
        assert len(scheduler._running_set._free_rows) == len(set(scheduler._running_set._free_rows)) and not scheduler._running_set.running
        assert not self.device.begun and not self.device.spoilt and not executor._announced and not executor.admission._preparing
        refused = sum(request.params.n - 1 for request in self.asked) + len(self.asked)
        assert stats.num_finished + stats.num_cancelled <= refused


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(scene=scenes())
def test_each_sequence_ends_once_and_nothing_stays(scene: dict[str, Any]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (executor, admission):
            patch.setattr(module, "time", clock)
        patch.setattr(executor, "log", SimpleNamespace(error=lambda *_, **__: None))
        life = Life(scene, clock)
        life.live()
        life.check()


def test_spoilt_blocks_are_zeroed_before_they_are_anothers_also_when_their_last_holder_is_cancelled() -> None:
    rates = dict.fromkeys(("prepare", "compile", "add", "launch", "wait", "numbers"), 0.0)
    scheduler = {"num_blocks": 12, "tokens_per_block": 4, "max_batch_size": 4, "max_num_tokens": 5, "max_seq_len": 40}
    life = Life({"scheduler": scheduler, "depth": "plain", "rates": rates, "queue": 9, "seed": 0}, Clock())

    def ask(name: str, prompt: list[int]) -> None:
        life.asked.append(TokenRequest(request_id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=9)))
        life.tokens[name, 0] = []
        life.mailbox.submit(life.asked[-1:])

    ask("bad", [1] * 9)
    while not life.tokens["bad", 0]:
        life.turn()
    ask("sharing", [1] * 8 + [2] * 20)
    life.turn()
    rates["numbers"] = 1.0
    life.turn()
    rates["numbers"] = 0.0
    assert life.ends["bad", 0] is FinishReason.ERROR and len(life.device.spoilt) > 1
    life.mailbox.messages.append(Cancel("sharing"))
    ask("next", [3] * 12)
    while life.executor.is_busy or life.mailbox.messages:
        life.turn()
    assert len(life.tokens["next", 0]) == 9
    life.check()
