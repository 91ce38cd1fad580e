"""Trees of a draft engine on the CPU: it drafts the nodes that transformers computes, and answers are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drive import Driven, request
from head_oracles import Oracle
from test_draft_engine import LIMITS, build_tiny
from test_draft_heads import Watched
from test_draft_trees import DYNAMIC, best_tree
from test_padded_drafts import CalledSteps
from test_speculation import FEATURES, comparable
from torch import Tensor

from stoker.base.draft_tree import parse_tree
from stoker.base.errors import ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.runtime.request import Sequence
from stoker.runtime.worker.model_runner import ModelRunner

Make = Callable[..., Driven]
DEEP = "[0],[1],[0,0],[0,1],[1,0],[0,0,0],[0,1,0],[0,0,1],[0,0,0,0],[0,0,0,1]"  # four levels; the inner nodes of two of them are several


class EngineOracle(Oracle):
    """A draft engine, whose outputs are its logits."""

    def outputs(self, states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        return self.model(torch.tensor([tokens + path])).logits[0, -1]

    def logits(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture(scope="module")
def similar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngineOracle]:
    """An engine whose weights differ a little from those of the tiny engine, so that drafts of all ranks are accepted."""
    made, folder = tiny.model(), tmp_path_factory.mktemp("similar")
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in made.parameters():
            weight += torch.randn_like(weight) * 0.008
    checkpoint = tiny.save(made, folder / "checkpoint")
    path = build(checkpoint, folder / "engine", BuildConfig(device="cpu", limits=LIMITS), verify="files").path
    return path, EngineOracle(made)


def record_paths(driven: Driven) -> list[tuple[int, list[int]]]:
    """(drafts, accepted nodes) of each row and step from now on."""
    found, length = list[tuple[int, list[int]]](), driven.executor.scheduler.draft_length  # type: ignore[union-attr]
    record = length.record

    def add(seq: Sequence, num_drafts: int, path: Any) -> None:
        found.append((num_drafts, list(path)))
        record(seq, num_drafts, path)

    length.record = add  # type: ignore[method-assign]
    return found


@torch.no_grad()
def test_the_nodes_of_static_trees(drive: Make, prompts: list[list[int]], similar: tuple[Path, EngineOracle]) -> None:
    """Those that transformers computes path by path, after each accepted path."""
    (path, oracle), tree = similar, parse_tree(DEEP)
    driven = drive(speculate=str(path), draft_tree=DEEP, adaptive_drafts=False)
    watched, paths, branches = Watched(driven), record_paths(driven), set[int]()
    for prompt in (prompts[0], prompts[3]):
        (plain,) = drive().run(request(prompt, max_tokens=30))
        (answer,) = driven.run(request(prompt, max_tokens=30))
        assert answer.tokens == plain.tokens
        tokens, at = [*prompt, *plain.tokens], len(prompt)
        for (newest, drafts), (_, accepted) in zip(watched.found, [*paths, (0, [])], strict=False):
            assert tokens[at] == newest
            assert drafts == oracle.tree(tokens[: at + 1], tree)[: len(drafts)]
            at += 1 + len(accepted)
        watched.found.clear()
        branches.update(node for _, accepted in paths for node in accepted if node not in {1, 3, 6, 9})
        paths.clear()
    assert branches, "nodes that are not the most likely ones are accepted, too"


@torch.no_grad()
def test_the_nodes_of_dynamic_trees(drive: Make, prompts: list[list[int]], similar: tuple[Path, EngineOracle]) -> None:
    path, oracle = similar
    driven = drive(speculate=str(path), draft_tree=DYNAMIC, adaptive_drafts=False)
    watched, paths = Watched(driven), record_paths(driven)
    (answer,) = driven.run(request(prompts[0], max_tokens=30))
    tokens, at = [*prompts[0], *answer.tokens], len(prompts[0])
    for (newest, drafts), (_, accepted) in zip(watched.found, paths, strict=False):
        ids, parents = best_tree(oracle, tokens[: at + 1], 4, 3, 10)
        assert newest == tokens[at]
        assert [draft & 0xFFFFFF for draft in drafts] == ids[: len(drafts)] and [draft >> 24 for draft in drafts] == parents[: len(drafts)]
        at += 1 + len(accepted)
    assert len({tuple(draft >> 24 for draft in found) for _, found in watched.found}) > 2  # the shape follows the probabilities
    assert any(node != depth for _, accepted in paths for depth, node in enumerate(accepted, 1))


@pytest.mark.parametrize(("tree", "cases"), [(DEEP, FEATURES[:8]), (DYNAMIC, FEATURES[4:])], ids=["static", "dynamic"])
def test_features(
    drive: Make, prompts: list[list[int]], similar: tuple[Path, EngineOracle], tree: str, cases: list[dict[str, Any]]
) -> None:
    """All sampling features, with chunked prefills and preemptions."""
    calls = [request(prompts[i % len(prompts)], **{"max_tokens": 24} | params) for i, params in enumerate(cases)]
    expected = [comparable(answer) for answer in drive().run(*calls)]
    tight: dict[str, Any] = {"max_num_tokens": 40, "kv_cache_tokens": 160, "policy": "max_utilization"}
    driven = drive(speculate=str(similar[0]), draft_tree=tree, adaptive_drafts=False, **tight)
    assert [comparable(answer) for answer in driven.run(*calls)] == expected
    assert driven.stats.num_preemptions > 0 and driven.stats.num_accepted_draft_tokens > driven.stats.num_draft_steps / 8


def check_full_paths(driven: Driven, calls: list[Any], expected: list[list[int]], num_nodes: int, depth: int) -> None:
    """An equal engine's most likely path is accepted completely in each step that verifies it."""
    paths = record_paths(driven)
    assert [answer.tokens for answer in driven.run(*calls)] == expected
    complete = [len(accepted) for num_drafts, accepted in paths if num_drafts == num_nodes]
    assert len(complete) > 3 and set(complete) == {depth}


@pytest.mark.parametrize(("tree", "num_nodes", "depth"), [(DEEP, 10, 4), ("dynamic:2,3,12", 12, 2)])
def test_tokens_of_steps_without_drafts_are_computed_later(
    drive: Make, prompts: list[list[int]], tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, tree: str, num_nodes: int, depth: int
) -> None:
    """Its cache has all keys after accepted paths, reused prefixes, chunked prefills, and steps in which the draft engine did not run."""
    shared = prompts[4][:40]
    calls = [request([*shared, *prompt], max_tokens=41) for prompt in prompts]
    expected = [answer.tokens for answer in drive().run(*calls)]
    driven = drive(speculate=str(tiny_engine), draft_tree=tree, adaptive_drafts=False, max_num_tokens=48)

    def limit(seq: Sequence, num_rows: int) -> int:
        num_generated = len(seq.tokens) - seq.num_prompt
        return num_nodes if num_generated < 6 or (num_generated + 3 * seq.seq_id) % 20 >= 6 else 0

    monkeypatch.setattr(driven.executor.scheduler.draft_length, "limit", limit)
    check_full_paths(driven, calls[:1], expected[:1], num_nodes, depth)
    check_full_paths(driven, calls[1:], expected[1:], num_nodes, depth)
    assert driven.stats.num_reused_tokens > 100


@pytest.mark.parametrize("params", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
def test_padded_steps(drive: Make, prompts: list[list[int]], similar: tuple[Path, EngineOracle], params: dict[str, Any]) -> None:
    """Steps as captured graphs run them: padding has no effect, and a tree is one part of the step."""
    calls = [request(prompt, max_tokens=24, **params) for prompt in prompts[:4]]
    expected = [answer.tokens for answer in drive().run(*calls)]
    for tree in (DEEP, DYNAMIC):
        driven = drive(speculate=str(similar[0]), draft_tree=tree, adaptive_drafts=False)
        runner = driven.executor.runner
        assert isinstance(runner, ModelRunner)
        runner.graphs = steps = CalledSteps(runner, 10)
        assert [answer.tokens for answer in driven.run(*calls)] == expected
        assert steps.num_runs > 5 and driven.stats.num_accepted_draft_tokens > 20
        for shape in steps.shapes.verifications()[:2]:
            steps.trace(shape)


@pytest.mark.parametrize(
    ("model_type", "changes", "kv_cache_dtype"),
    [("mistral", {"sliding_window": 70}, "int8"), ("gpt2", {}, None)],
    ids=["window-int8", "learned-positions"],
)
def test_architectures(
    prompts: list[list[int]], tmp_path: Path, model_type: str, changes: dict[str, Any], kv_cache_dtype: str | None
) -> None:
    """A window and learned positions, of the model and of the draft engine."""
    engine = build_tiny(tmp_path, model_type, kv_cache_dtype=kv_cache_dtype, **changes)
    calls = [request([*prompts[1], *prompt], max_tokens=41) for prompt in prompts[:4]]
    expected = [answer.tokens for answer in Driven(engine, None, kv_cache_tokens=1024).run(*calls)]
    driven = Driven(engine, None, kv_cache_tokens=1024, speculate=str(engine), draft_tree=DEEP, adaptive_drafts=False)
    check_full_paths(driven, calls, expected, 10, 4)
    driven.check_idle()


def test_trees_that_a_draft_engine_cannot_draft(drive: Make, tiny_engine: Path, tmp_path: Path) -> None:
    window = build_tiny(tmp_path, "mistral", sliding_window=24)
    for settings, message in (
        ({"speculate": str(window), "draft_tree": DEEP}, "of .*engine attends to a window of 24 tokens, and trees need more than 63"),
        ({"speculate": str(tiny_engine), "draft_tree": DEEP, "attention_window": 48}, "attends to a window of 48 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            drive(**settings)
