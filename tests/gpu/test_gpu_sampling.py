"""All sampling options on the device. The oracle is an engine of the same checkpoint on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker import LLM, SamplingParams
from stoker.base.config import Limits
from stoker.base.types import FinishReason, Guide
from stoker.builder.build import build
from stoker.builder.config import BuildConfig

sys.path.append(str(Path(__file__).parents[1] / "builder"))  # small random checkpoints

DEVICE = "cuda"
LIMITS = Limits(max_batch_size=16, max_input_len=160, max_output_len=64, max_num_tokens=256)
PROMPTS = [[(7 * i + 3 * j) % 300 + 10 for j in range(5 + 9 * i)] for i in range(8)]
NEW = 24


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import tiny

    folder = tmp_path_factory.mktemp("sampling")
    model = tiny.model(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    checkpoint = tiny.save(model, folder / "checkpoint")
    for device in {DEVICE, "cpu"}:
        build(checkpoint, folder / device, BuildConfig(device=device, dtype="float32", limits=LIMITS), verify="files")
    return {device: folder / device for device in (DEVICE, "cpu")}


@pytest.fixture(scope="module")
def llm(engines: dict[str, Path]) -> Iterator[LLM]:
    with LLM(engines[DEVICE], kv_cache_tokens=8192) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def oracle(engines: dict[str, Path]) -> Iterator[LLM]:
    with LLM(engines["cpu"], kv_cache_tokens=8192, num_threads=1) as loaded:
        yield loaded


def answers(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [answer.choices[0].token_ids for answer in llm.generate(PROMPTS, params)]


SAMPLED = {
    "temperature": SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.9, seed=11),
    "top_k": SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.2, top_k=5, seed=12),
    "top_p": SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.0, top_p=0.7, seed=13),
    "min_p": SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.0, min_p=0.2, seed=14),
    "all": SamplingParams(
        max_tokens=NEW, ignore_eos=True, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=15, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={20: 2.0, 21: -100.0}, bad_words=((30,), (40, 41)), min_tokens=4,
        allowed_token_ids=tuple(range(0, 300, 3)),
    ),
    "allowed": SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.0, seed=16, allowed_token_ids=(7, 20, 30, 77)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_a_seed_gives_the_same_tokens_alone_and_in_a_mixed_batch(llm: LLM, name: str) -> None:
    params = SAMPLED[name]
    together = answers(llm, params)
    assert answers(llm, params) == together
    alone = [llm.generate(prompt, params).choices[0].token_ids for prompt in PROMPTS[:3]]
    assert alone == together[:3]
    others = list(SAMPLED.values())
    mixed = answers(llm, [params if i < 3 else others[i % len(others)] for i in range(len(PROMPTS))])
    assert mixed[:3] == together[:3]
    assert len({tuple(tokens) for tokens in together}) > 1


@pytest.mark.parametrize("name", SAMPLED)
def test_draws_equal_the_cpu(llm: LLM, oracle: LLM, name: str) -> None:
    """The same seeds give the same random numbers. Logits differ in their last bits, so a draw near the edge between two tokens may give
    either, and all later tokens of that row differ. At most one row of eight may."""
    on_device, on_cpu = answers(llm, SAMPLED[name]), answers(oracle, SAMPLED[name])
    assert sum(a != b for a, b in zip(on_device, on_cpu, strict=True)) <= 1


def test_logprobs_equal_the_cpu(llm: LLM, oracle: LLM) -> None:
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.7, seed=5, logprobs=5)
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        choice = answer.choices[0]
        scored = oracle.generate(prompt + choice.token_ids, SamplingParams(max_tokens=1, prompt_logprobs=5))
        found = scored.prompt_logprobs
        assert found is not None
        for ours, theirs in zip(choice.logprobs, found[len(prompt) :], strict=True):
            assert theirs is not None and ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-3)
            assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=2e-3)


def test_prompt_logprobs_equal_the_cpu(llm: LLM, oracle: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=3)
    ours, theirs = (made.generate(PROMPTS[-1], params).prompt_logprobs for made in (llm, oracle))
    assert ours is not None and theirs is not None and ours[0] is None and theirs[0] is None
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a is not None and b is not None and a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=2e-3)


def test_draws_respect_top_k_and_top_p(llm: LLM) -> None:
    """A drawn token is one of the k most probable; with top_k=1 or a tiny top_p it is the greedy token."""
    k = 4
    drawn = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.5, top_k=k, seed=2, logprobs=k))
    for answer in drawn:
        for position in answer.choices[0].logprobs:
            assert position.token_id in [token for token, _ in position.top]
    greedy = answers(llm, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert answers(llm, SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=2.0, top_k=1, seed=9)) == greedy
    assert answers(llm, SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=2.0, top_p=1e-6, seed=9)) == greedy


def test_penalties_biases_and_bans(llm: LLM) -> None:
    once = answers(llm, SamplingParams(max_tokens=NEW, ignore_eos=True, frequency_penalty=100.0))
    assert all(len(set(tokens)) == NEW for tokens in once)
    forced = answers(llm, SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={77: 100.0}))
    assert forced == [[77] * 4] * len(PROMPTS)
    allowed = answers(llm, SAMPLED["allowed"])
    assert {token for tokens in allowed for token in tokens} == {7, 20, 30, 77}
    plain = answers(llm, SamplingParams(max_tokens=NEW, ignore_eos=True))
    banned = plain[0][0]
    assert banned not in answers(llm, SamplingParams(max_tokens=NEW, ignore_eos=True, bad_words=((banned,),)))[0]


def test_several_answers_of_a_prompt_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.0, seed=3, n=4)
    first, again = (llm.generate(PROMPTS[2], params) for _ in range(2))
    tokens = [choice.token_ids for choice in first.choices]
    assert tokens == [choice.token_ids for choice in again.choices]
    assert len({tuple(own) for own in tokens}) == 4


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}, "ok": {"type": "boolean"}},
          "required": ["age", "ok"], "additionalProperties": False}  # fmt: skip
GUIDES = [Guide("json_schema", json.dumps(SCHEMA)), Guide("regex", r"(yes|no) [0-9]{3}\."), Guide("choice", json.dumps(["fox", "dog"]))]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.kind)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guided_answers_match_their_grammar(llm: LLM, guide: Guide, temperature: float) -> None:
    pytest.importorskip("xgrammar", reason="guided decoding needs xgrammar")
    params = SamplingParams(max_tokens=64, temperature=temperature, seed=4, guide=guide)
    guided = [llm.generate(prompt, params) for prompt in PROMPTS[:2]]
    beside = llm.generate(PROMPTS[:2] + PROMPTS[2:4], [params, params, SAMPLED["all"], SamplingParams(max_tokens=NEW)])
    assert [answer.choices[0].text for answer in beside[:2]] == [answer.choices[0].text for answer in guided]
    for answer in guided:
        text = answer.choices[0].text
        assert answer.choices[0].finish_reason is FinishReason.STOP, text
        if guide.kind == "json_schema":
            found = json.loads(text)
            assert set(found) == {"age", "ok"} and 0 <= found["age"] <= 120 and isinstance(found["ok"], bool)
        elif guide.kind == "choice":
            assert text in ("fox", "dog")
        else:
            assert text[:3].rstrip() in ("yes", "no") and text.endswith(".")
