"""`stoker simulate`: times of single requests by arithmetic, nothing is lost, trace formats, and the report."""

from __future__ import annotations

import json
import random
import statistics
from array import array
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from stoker.base.config import TOKENS_PER_BLOCK
from stoker.base.errors import ConfigError
from stoker.cli.command_table import load_command
from stoker.cli.commands import COMMANDS
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.kv.events.wire import block_hashes, hashes_of_digests
from stoker.runtime.kv.prefix_index import block_digests, child_digest, pack_blocks
from stoker.simulation.latencies import Latencies
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.report import make_report
from stoker.simulation.simulator import Results, Simulator
from stoker.simulation.step_times import StepTimes, read_step_times
from stoker.simulation.traces import Arrival, PromptBlocks, read_trace
from stoker.simulation.transfers import TransferSettings

STEP = StepTimes(fixed_s=0.01, row_s=0.001, prefill_token_s=0.0001, context_token_s=0.000001)
SMALL = ReplicaSettings(max_batch_size=4, max_num_tokens=256, kv_cache_tokens=4096, tokens_per_block=16)


def prompt(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000) for _ in range(count)]


def test_a_replica_holds_no_block_of_prompts_that_it_has_received_and_answered() -> None:
    simulator = Simulator(1, SMALL, STEP, RoutingSettings(disaggregate_tokens=64), 1)
    results = simulator.run([Arrival(i * 0.01, prompt(i, 200), 20) for i in range(40)])
    assert results.num_transferred_tokens == 40 * 192
    for replica in simulator._replicas.values():
        pool = replica.scheduler.kv_cache.pool
        assert pool.num_free == pool.num_blocks and not len(replica._held)


def test_the_times_of_one_request_follow_from_the_step_times() -> None:
    results = Simulator(1, SMALL, STEP).run([Arrival(0.0, prompt(0, 100), 3)])
    prefill = 0.01 + 100 * 0.0001
    decodes = [0.01 + 0.001 + context * 0.000001 for context in (100, 101)]
    assert list(results.first_token_s) == pytest.approx([prefill])
    between = results.between_tokens_s
    assert [between.min_s, between.max_s, between.total_s, between.count] == pytest.approx([*decodes, sum(decodes), 2])
    assert results.end_s == pytest.approx(prefill + sum(decodes)) and list(results.duration_s) == [results.end_s]
    assert list(results.token_s) == pytest.approx([sum(decodes) / 2])


def test_a_step_with_prompts_takes_longer_by_a_fixed_time() -> None:
    """The prompt of 300 tokens has two chunks, the one of 100 tokens two decodes after it."""
    times = msgspec.structs.replace(STEP, prefill_fixed_s=0.5)
    assert list(Simulator(1, SMALL, times).run([Arrival(0.0, prompt(0, 300), 1)]).first_token_s) == pytest.approx(
        [2 * 0.51 + 300 * 0.0001 + 256 * 0.000001]
    )
    alone = Simulator(1, SMALL, times).run([Arrival(0.0, prompt(0, 100), 3)])
    assert list(alone.token_s) == pytest.approx([0.011 + 100.5 * 0.000001])
    with pytest.raises(ConfigError, match="prefill_fixed_s=-1 is refused"):
        msgspec.structs.replace(STEP, prefill_fixed_s=-1)


def test_a_cached_prefix_is_not_computed_again() -> None:
    same = prompt(0, 161)
    results = Simulator(1, SMALL, STEP).run([Arrival(0.0, same, 1), Arrival(5.0, same, 1)])
    assert list(results.first_token_s) == pytest.approx([0.01 + 161 * 0.0001, 0.01 + 0.0001 + 160 * 0.000001])
    assert results.num_reused_tokens == 160


def test_the_router_knows_the_blocks_of_each_replica_by_the_digests_of_their_tokens() -> None:
    """The digests of prompts, which the router has computed, are those of the blocks in the prefix index of a replica."""
    simulator = Simulator(2, SMALL, STEP)
    simulator.run([Arrival(i * 0.05, prompt(i % 7, 16 * (i % 5) + i % 3 + 15), 40) for i in range(60)])
    stored = simulator.router.fleet.stored
    for replica in simulator._replicas.values():
        index = replica.scheduler.kv_cache.index
        assert index is not None
        nodes = index._entries.values()
        assert len(nodes) > 50 and all(node.digest == child_digest(node.parent, node.chunk) for node in nodes)
        assert set(block_hashes(list(nodes))) == stored._blocks[replica.replica.slot]


def test_every_request_ends_once_and_a_queue_forms_under_load() -> None:
    arrivals = [Arrival(i * 0.001, prompt(i, 50 + i % 90), 1 + i % 20) for i in range(200)]
    results = Simulator(2, SMALL, STEP).run([*arrivals, Arrival(1.0, prompt(1, 5000), 5)])
    assert len(results.duration_s) == 200 == len(results.first_token_s) and results.num_rejected == 1
    assert results.num_output_tokens == sum(arrival.max_tokens for arrival in arrivals)
    assert results.between_tokens_s.count == results.num_output_tokens - 200
    alone = Simulator(2, SMALL, STEP).run([Arrival(i * 10.0, arrival.prompt_ids, arrival.max_tokens) for i, arrival in enumerate(arrivals)])
    assert statistics.median(results.first_token_s) > 5 * statistics.median(alone.first_token_s)


def test_routing_by_prefix_reuses_more_than_round_robin() -> None:
    def reuse(policy: str) -> float:
        arrivals = [Arrival(turn * 5 + i * 0.1, prompt(i, 64 * (turn + 1)), 2) for turn in range(5) for i in range(13)]
        results = Simulator(4, SMALL, STEP, RoutingSettings(policy=policy)).run(arrivals)
        return results.num_reused_tokens / results.num_prompt_tokens

    assert reuse("prefix") > 0.6 and reuse("round_robin") < 0.3


def test_a_split_computes_each_prompt_once_and_adds_the_time_of_its_transfer() -> None:
    """The first token follows the prompt on one replica, the bytes of its last chunk, and the last tokens on the other replica."""
    same = prompt(0, 300)
    moves = TransferSettings(kv_bytes_per_token=1000, transfer_gb_per_s=0.001, transfer_latency_ms=5.0)
    split = Simulator(1, SMALL, STEP, RoutingSettings(disaggregate_tokens=64), 1, moves)
    results = split.run([Arrival(0.0, same, 3), Arrival(9.0, same[:290], 2), Arrival(18.0, prompt(1, 40), 2)])
    chunks, sent = [256, 44], 0.0
    ends = [0.01 + 256 * 0.0001, 2 * 0.01 + 300 * 0.0001 + 256 * 0.000001]
    for count, end in zip(chunks, ends, strict=True):
        sent = max(sent, end) + count * 0.001
    last = 0.01 + 12 * 0.0001 + 288 * 0.000001
    again = 0.01 + 2 * 0.0001 + 288 * 0.000001  # both replicas have its blocks
    assert list(results.first_token_s) == pytest.approx([sent + 0.005 + last, again, 0.01 + 40 * 0.0001])
    assert list(results.transfer_s) == pytest.approx([sent + 0.005 - ends[1]])
    assert (results.num_transferred_tokens, results.num_reused_tokens, results.num_output_tokens) == (288, 288, 7)


def test_a_split_loses_no_request_under_load() -> None:
    arrivals = [Arrival(i * 0.002, prompt(i, 50 + 7 * i % 190), 1 + i % 20) for i in range(200)]
    results = Simulator(2, SMALL, STEP, RoutingSettings(disaggregate_tokens=64), 2).run(arrivals)
    assert len(results.duration_s) == 200 == len(results.first_token_s) and len(results.transfer_s) > 50
    assert results.num_output_tokens == sum(arrival.max_tokens for arrival in arrivals)
    assert 0 <= results.num_reused_tokens < 500
    together = Simulator(4, SMALL, STEP, RoutingSettings(disaggregate_tokens=64)).run(arrivals)
    assert results.between_tokens_s.max_s < together.between_tokens_s.max_s


def test_the_report_has_percentiles_and_cost() -> None:
    results = Results(
        first_token_s=_doubles(1, 2, 3, 4),
        token_s=_doubles(0, 0.25),
        between_tokens_s=Latencies(),
        duration_s=_doubles(5),
        transfer_s=_doubles(),
        num_output_tokens=2_000_000,
    )
    results.end_s = 1800.0
    report = make_report(results, 8, 3.0)
    assert report.time_to_first_token_ms == {"p50": 2000, "p90": 4000, "p99": 4000} and report.inter_token_latency_ms == {}
    assert report.time_per_output_token_ms == {"p50": 250, "p90": 250, "p99": 250}
    assert (report.gpu_hours, report.cost, report.cost_per_million_output_tokens) == (4.0, 12.0, 6.0)


def _doubles(*values: float) -> array[float]:
    return array("d", values)


TRACES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    "6,ChatGPT,9,0,9,Conversation log\n45,GPT-4,1087,230,1317,API log\n",
    "mooncake": '{"timestamp": 0, "input_length": 1000, "output_length": 52, "hash_ids": [46, 47]}\n'
    '{"timestamp": 2500, "input_length": 600, "output_length": 26, "hash_ids": [46, 48]}\n',
}
EXPECTED = {
    "azure": [(0.0, 374, 44), (4.314579, 396, 109)],
    "burstgpt": [(0.0, 472, 18), (40.0, 1087, 230)],
    "mooncake": [(0.0, 1000, 52), (2.5, 600, 26)],
}


@pytest.mark.parametrize("name", TRACES)
def test_trace_formats(name: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(TRACES[name])
    arrivals = [request.arrival() for request in read_trace(file, name) if request is not None]
    assert [(pytest.approx(a.at_s, abs=1e-5), len(a.prompt_ids), a.max_tokens) for a in arrivals] == EXPECTED[name]
    first, second = (arrival.prompt_ids for arrival in arrivals)
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert shared == (512 if name == "mooncake" else 0)


@pytest.mark.parametrize("size", TOKENS_PER_BLOCK)
@pytest.mark.parametrize("name", TRACES)
def test_the_blocks_of_a_traced_request_are_those_of_its_token_ids(name: str, size: int, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(TRACES[name])
    for request in filter(None, read_trace(file, name)):
        arrival = request.arrival(size)
        packed = pack_blocks(arrival.prompt_ids, size)
        digests = block_digests(packed, "")
        assert arrival.blocks == PromptBlocks(packed, digests, hashes_of_digests(digests))
        assert msgspec.structs.replace(arrival, blocks=None) == request.arrival()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("azure", "a,b\n1,2\n", "has no column TIMESTAMP"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n", r"trace:2: TIMESTAMP='x' is not a time\."),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,abc,1\n", r"trace:2: ContextTokens='abc' is not a whole number\."),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,5,\n", r"trace:2: Response tokens='' is not a whole number\."),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,5\n", "trace:2: the column Response tokens is missing"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,-5,1\n", "trace:2: .* out of range"),
        ("mooncake", '{"timestamp": 0}\n', "trace:1: .*input_length"),
        ("mooncake", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "1 hash ids are too few for 600"),
        ("other", "", "format='other' is refused"),
    ],
)
def test_malformed_traces_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(read_trace(file, name))


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(TRACES["mooncake"])
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"fixed_s": 0.01, "row_s": 0.001, "prefill_token_s": 0.0001, "context_token_s": 0.0}))
    command = load_command(next(row for row in COMMANDS if row.name == "simulate"))
    arguments = [str(tmp_path / "trace"), "--step-times", str(times), "--replicas", "2", "--gpu-hour-cost", "3"]
    shown = CliRunner().invoke(command, arguments).output
    assert "time to first token" in shown and "per million output tokens" in shown and "prompt tokens reused   32.0 %" in shown
    report = json.loads(CliRunner().invoke(command, [*arguments, "--json", "--rate", "2", "--max-requests", "1"]).output)
    assert (report["requests"], report["gpus"]) == (1, 2)
    for option in ("--transfer-gb-per-s", "--disaggregate-tokens"):
        refused = CliRunner().invoke(command, [*arguments, option, "7"])
        assert "has no effect without prefill replicas" in str(refused.exception)
    times.write_text('{"fixed_s": 1}')
    with pytest.raises(ConfigError, match=r"step_times=.*row_s"):
        read_step_times(times)
