"""Trees of drafts on the CPU: answers are those of plain decoding, whatever path is accepted, and heads draft the whole tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from drive import Driven, request
from head_oracles import ORACLES, Oracle, write
from test_draft_engine import build_tiny
from test_draft_heads import Watched
from test_padded_drafts import CalledSteps
from test_speculation import COUNT, FEATURES, comparable

from stoker.base.draft_tree import PARENT_SHIFT, DraftTree, parse_tree
from stoker.base.errors import ConfigError
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.grammar_client import CompileProcess
from stoker.runtime.worker.model_runner import ModelRunner

Make = Callable[..., Driven]
TREE = "[0],[1],[0,0],[2],[1,0],[0,1],[1,0,0],[0,0,0],[1,0,1],[2,0]"
DYNAMIC = "dynamic:4,3,10"
WIDE = ",".join([*(f"[{i}]" for i in range(16)), *(f"[{i},{j}]" for i in range(6) for j in range(4)), *(f"[{i},0,{i}]" for i in range(6))])


@pytest.fixture(scope="module")
def heads(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Oracle]]:
    folder = tmp_path_factory.mktemp("heads")
    oracles = {name: ORACLES[name](model) for name in ("medusa", "medusa-vllm", "eagle", "eagle3")}
    return {name: (write(folder / name, oracle.config, oracle.files), oracle) for name, oracle in oracles.items()}


class Script:
    """Proposes trees in which a random path has the true continuation, mostly, and siblings are different tokens."""

    def __init__(
        self, driven: Driven, tree: DraftTree, answers: dict[tuple[str, int], list[int]], seed: int, *, is_dynamic: bool = False
    ) -> None:
        self.is_dynamic = is_dynamic
        self.tree, self.answers, self.rng = tree, answers, random.Random(seed)
        self.num_paths = 0
        driven.executor.scheduler._planner._proposer.propose = self.propose  # type: ignore[method-assign]

    def propose(self, seq: Sequence, limit: int) -> list[int]:
        tree, rng = self.tree.prefix(limit), self.rng
        if self.is_dynamic:
            tree = DraftTree(tuple(rng.randrange(i + 1) for i in range(len(tree))), tree.ranks)
        answer = self.answers[seq.request_id, seq.index]
        true_path, node = set[int](), rng.randrange(len(tree) + 1)
        while node:
            true_path.add(node)
            node = tree.parents[node - 1]
        self.num_paths += len(true_path) > 1
        ids: list[int] = []
        used: dict[int, set[int]] = {}
        for i, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True), 1):
            at = len(seq.tokens) - seq.num_prompt + depth - 1
            token = answer[at] if i in true_path and at < len(answer) and rng.random() < 0.9 else rng.randrange(300)
            while token in used.setdefault(parent, set()):
                token = rng.randrange(300)
            used[parent].add(token)
            ids.append(token)
        seq.proposal = [token | parent << PARENT_SHIFT for token, parent in zip(ids, tree.parents, strict=True)]
        return ids


def check_features(make: Make, path: Path, prompts: list[list[int]], cases: list[dict[str, Any]], tree: str, **settings: Any) -> Driven:
    """Scripted trees give the answers of plain decoding in fewer steps. Returns the executor."""
    calls = [request(prompts[i % len(prompts)], **{"max_tokens": COUNT} | params) for i, params in enumerate(cases)]
    plain = make()
    expected = plain.run(*calls)
    again = [request(call.prompt_ids, end_ids=call.end_ids) for call in calls]
    answers: dict[tuple[str, int], list[int]] = {}
    for call, other in zip(calls, again, strict=True):
        other.params = call.params
        for index in range(call.params.n):
            answers[other.request_id, index] = plain.answers[call.request_id, index].tokens
    driven = make(speculate=str(path), draft_tree=tree, adaptive_drafts=False, **settings)
    script = Script(driven, parse_tree(TREE), answers, 3, is_dynamic=tree == DYNAMIC)
    found = driven.run(*again)
    for case, one, other in zip([call for call in calls for _ in range(call.params.n)], expected, found, strict=True):
        assert comparable(one) == comparable(other), case.params
    assert script.num_paths > 20 and driven.stats.num_accepted_draft_tokens > driven.stats.num_draft_steps / 2
    return driven


@pytest.mark.parametrize("settings", [{}, {"max_num_tokens": 24, "policy": "max_utilization", "kv_cache_tokens": 8 * 16}], ids=str)
def test_features(drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]], settings: dict[str, Any]) -> None:
    """All sampling features, with trees that cross block boundaries, beside prefill chunks, and with preemption."""
    driven = check_features(drive, heads["medusa"][0], prompts, FEATURES, TREE, **settings)
    assert driven.stats.num_preemptions > 0 or not settings


def test_features_with_dynamic_trees(drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]]) -> None:
    """Each row and step has a random tree."""
    check_features(drive, heads["eagle"][0], prompts, FEATURES, DYNAMIC)


def test_blocks_of_accepted_paths_are_reused(drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]]) -> None:
    """A second turn reuses the blocks with moved keys of the first one, and generates what it generates without them."""
    calls = [request(prompt, max_tokens=50) for prompt in prompts[:3]]
    plain = drive()
    first = [answer.tokens for answer in plain.run(*calls)]
    driven = drive(speculate=str(heads["medusa"][0]), draft_tree=TREE, adaptive_drafts=False)
    Script(driven, parse_tree(TREE), {(call.request_id, 0): tokens for call, tokens in zip(calls, first, strict=True)}, 5)
    assert [answer.tokens for answer in driven.run(*calls)] == first
    turns = [[*call.prompt_ids, *tokens, 7, 8, 9] for call, tokens in zip(calls, first, strict=True)]
    expected = drive(prefix_reuse=False).run(*(request(turn, max_tokens=12, logprobs=1) for turn in turns))
    again = [request(turn, max_tokens=12, logprobs=1) for turn in turns]
    Script(driven, parse_tree(TREE), {(call.request_id, 0): one.tokens for call, one in zip(again, expected, strict=True)}, 6)
    found = driven.run(*again)
    assert [comparable(answer) for answer in found] == [comparable(answer) for answer in expected]
    assert all(answer.cached >= 48 for answer in found)


def test_a_quantized_cache_and_a_window(compiler: CompileProcess, heads: dict[str, tuple[Path, Oracle]], tmp_path: Path) -> None:
    """Keys of 8 bits are moved as they are, and a window ends at the same keys as in plain decoding. Prompts are longer than the window."""
    engine = build_tiny(tmp_path, "mistral", sliding_window=70, kv_cache_dtype="int8")

    def make(**settings: Any) -> Driven:
        return Driven(engine, compiler, **{"kv_cache_tokens": 1024} | settings)

    prompts = [[(7 * i + j) % 290 + 3 for j in range(count)] for i, count in enumerate((100, 61))]
    driven = check_features(make, heads["medusa"][0], prompts, FEATURES[:6], TREE)
    driven.check_idle()


@pytest.mark.parametrize("name", ["medusa", "medusa-vllm", "eagle", "eagle3"])
def test_heads_draft_the_tree(drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]], name: str) -> None:
    """Each step drafts the nodes that the reference computes path by path, and accepted paths leave the caches as plain decoding does."""
    (path, oracle), tree = heads[name], parse_tree(WIDE)
    params: dict[str, Any] = {"max_tokens": 24, "logit_bias": dict.fromkeys((5, 8, 20), 4.0)}  # so that some drafts are accepted
    for prompt in (prompts[0], prompts[3]):
        (plain,) = drive().run(request(prompt, **params))
        driven = drive(speculate=str(path), draft_tree=WIDE, adaptive_drafts=False)
        watched = Watched(driven)
        (answer,) = driven.run(request(prompt, **params))
        assert answer.tokens == plain.tokens
        tokens, at = [*prompt, *plain.tokens], len(prompt)
        for newest, drafts in watched.found[:-1]:
            assert tokens[at] == newest
            assert drafts == oracle.tree(tokens[: at + 1], tree)[: len(drafts)]
            node, at = 0, at + 1
            verified = drafts[: len(tokens) - 1 - at]  # a step computes no more tokens than the answer may have
            children = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, verified, strict=False), 1)}
            while at < len(tokens) and (node := children.get((node, tokens[at]), -1)) > 0:
                at += 1


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_sampled_trees(drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]], name: str) -> None:
    """Random sampling with seeds, penalties, log-probabilities and n, with drafts of the heads and an adaptive number of them."""
    cases: list[dict[str, Any]] = [{"temperature": 0.9, "seed": 5, "n": 2}, {"frequency_penalty": 0.5}, {"logprobs": 1}]
    calls = [request(prompts[i], max_tokens=20, logit_bias=dict.fromkeys((5, 8, 20), 4.0), **params) for i, params in enumerate(cases)]
    expected = [comparable(answer) for answer in drive().run(*calls)]
    for settings in ({"adaptive_drafts": False}, {"draft_tokens": 30}):
        driven = drive(speculate=str(heads[name][0]), draft_tree=WIDE, **settings)
        assert [comparable(answer) for answer in driven.run(*calls)] == expected
        assert driven.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
def test_padded_steps(
    drive: Make,
    prompts: list[list[int]],
    heads: dict[str, tuple[Path, Oracle]],
    name: str,
    params: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps as captured graphs run them: padding has no effect on trees, and a tree is one part of the step."""
    calls = [request(prompt, max_tokens=24, **params) for prompt in prompts[:4]]
    expected = [answer.tokens for answer in drive().run(*calls)]
    driven = drive(speculate=str(heads[name][0]), draft_tree=TREE, adaptive_drafts=False)
    Script(driven, parse_tree(TREE), {(call.request_id, 0): tokens for call, tokens in zip(calls, expected, strict=True)}, 4)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner)
    runner.graphs = steps = CalledSteps(runner, 10)
    assert [answer.tokens for answer in driven.run(*calls)] == expected
    assert steps.num_runs > 5 and driven.stats.num_accepted_draft_tokens > 20
    layers = MagicMock(wraps=runner.model.hidden_states)
    monkeypatch.setattr(runner.model, "hidden_states", layers)
    for shape in steps.shapes.verifications()[:2]:
        steps.trace(shape)
    assert layers.call_count == 2, "once for both kinds of sampling, as on ranks without a drafter"


def test_trees_that_cannot_work_are_refused(drive: Make, heads: dict[str, tuple[Path, Oracle]]) -> None:
    medusa = str(heads["medusa"][0])
    for settings, message in (
        ({"speculate": "ngram", "draft_tree": TREE}, "has no effect with speculate=ngram. Set speculate to the directory of"),
        ({"speculate": medusa, "draft_tree": "[0],[0,0],[0,0,0],[0,0,0,0],[1]"}, "is 4 tokens deep, and .* has 3 heads"),
        ({"speculate": medusa, "draft_tree": TREE, "draft_tokens": 11}, "draft_tokens=11 is refused: draft_tree has 10 nodes"),
        ({"speculate": medusa, "draft_tree": TREE, "attention_window": 48}, "a window of 48 tokens, and trees need more than 63"),
        ({"speculate": str(heads["medusa-vllm"][0]), "draft_tree": "[0],[45]"}, "the rank 45, and .* drafts 40 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            drive(**settings)


def test_paths_of_trees() -> None:
    expected = DraftTree((0, 1, 0), (0, 0, 1))
    for text in ("[[0],[0,0],[1]]", "[(0,), (0, 0), (1,)]", "{0},{0,0},{1}", " [0], [0, 0], [1] ", "{{0}, {0, 0}, {1}}"):
        assert parse_tree(text) == expected
    published = parse_tree("mc_sim_7b_63")
    assert len(published) == 63 and max(published.depths) == 4 and published.prefix(2).is_chain
    chain = str([[10] * depth for depth in range(1, 64)])
    assert len(chain) == 8190 and parse_tree(chain.replace("10", "0")) == DraftTree.chain(63)
    for text, message in (
        ("", "draft_tree='' is refused"), ("0,1", "is refused"), ("[0],[1,0],[1]", r"contains \[1, 0\], and not \[1\] before it"),
        ("[0],[0]", r"the path \[0\] twice"), ("[0];[1]", "is refused"), ("[64]", "the rank 64"), ("[0] [1]", "is refused"),
        (",".join(f"[{i}]" for i in range(64)), "has 64 nodes, and may have 63"), ("[0]" * 6000, "has 18000 characters, and may"),
        ("[0]" + " " * 16000 + "x", "is refused"), (" [ [0] , [1] ] ]", "is refused"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            parse_tree(text)


def test_key_means_have_the_period_of_trees() -> None:
    from stoker.kernels.types import MEAN_TOKENS
    from stoker.runtime.schedule.planner import TREE_PERIOD

    assert TREE_PERIOD == MEAN_TOKENS and torch.iinfo(torch.int64).bits == 64


def best_tree(oracle: Oracle, tokens: list[int], depth: int, width: int, count: int) -> tuple[list[int], list[int]]:
    """(token ids, parents) of a dynamic tree: each path is computed by itself."""
    model = oracle.model
    states = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    read = states[-1] if oracle.layers is None else torch.cat([states[i] for i in oracle.layers], dim=-1)
    scores, expanded = dict[tuple[int, ...], float](), [()]
    for _ in range(depth):
        level = dict[tuple[int, ...], float]()
        for path in expanded:
            x = oracle.outputs(read[0], tokens, list(path))
            logprobs = oracle.logits(x).log_softmax(-1)
            best, ids = logprobs.topk(width)
            found = ids.tolist() if oracle.token_map is None else oracle.token_map[ids].tolist()
            level |= {(*path, token): scores.get(path, 0.0) + score for token, score in zip(found, best.tolist(), strict=True)}
        scores |= level
        expanded = sorted(level, key=level.__getitem__, reverse=True)[:width]
    nodes = [(), *sorted(scores, key=scores.__getitem__, reverse=True)[:count]]
    return [path[-1] for path in nodes[1:]], [nodes.index(path[:-1]) for path in nodes[1:]]


@torch.no_grad()
@pytest.mark.parametrize(("name", "depth"), [("eagle", 4), ("eagle3", 4), ("medusa", 3), ("medusa-vllm", 3)])
def test_dynamic_trees(drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]], name: str, depth: int) -> None:
    """Each row has the most probable nodes, and answers are those of plain decoding, also with random sampling."""
    path, oracle = heads[name]
    driven = drive(speculate=str(path), draft_tree=f"dynamic:{depth},3,10", adaptive_drafts=False)
    watched = Watched(driven)
    (answer,) = driven.run(request(prompts[0], max_tokens=14))
    drafts = [found for _, found in watched.found]
    ids, parents = best_tree(oracle, [*prompts[0], answer.tokens[0]], depth, 3, 10)
    assert [draft & 0xFFFFFF for draft in drafts[0]] == ids and [draft >> 24 for draft in drafts[0]] == parents
    assert len({tuple(draft >> 24 for draft in found) for found in drafts}) > 1  # the shape follows the probabilities

    cases: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5, "n": 2}, {"frequency_penalty": 0.5}, {"max_tokens": 3}]
    calls = [request(prompts[i], **{"max_tokens": 14} | case) for i, case in enumerate(cases)]
    plain = drive().run(*calls)
    assert [comparable(answer) for answer in driven.run(*calls)] == [comparable(answer) for answer in plain]


@pytest.mark.parametrize(
    ("tree", "message"),
    [("dynamic:4", "is refused"), ("dynamic:9,9,20", "expands 72"), ("dynamic:2,2,7", "from 1 to 6"), ("dynamic:0,2,1", "DEPTH")],
)
def test_sizes_of_dynamic_trees(tree: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tree(tree)


def test_medusa_heads_refuse_deep_trees(drive: Make, heads: dict[str, tuple[Path, Oracle]]) -> None:
    with pytest.raises(ConfigError, match=r"draft_tree is 4 tokens deep, and .* has 3 heads"):
        drive(speculate=str(heads["medusa"][0]), draft_tree=DYNAMIC)
