"""Beam search gives the results of transformers on a small random model; the driver runs it on an executor."""

from __future__ import annotations

import math
import random

import pytest
from fake_executor import info
from test_generation_service import make_request, serving

from stoker.base.errors import RequestError, UnavailableError
from stoker.base.types import FinishReason, SamplingParams, TokenLogprobs
from stoker.frontend.beam_search import BeamSearch
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.request import TokenRequest

VOCAB = 24


def log_probs(ids: list[int]) -> list[float]:
    """A random model: the distribution of the next token depends on the last two tokens."""
    rng = random.Random(str(ids[-2:]))
    logits = [rng.gauss(0, 1.5) for _ in range(VOCAB)]
    norm = math.log(sum(math.exp(x) for x in logits))
    return [x - norm for x in logits]


def best(ids: list[int], count: int) -> list[tuple[int, float]]:
    return sorted(enumerate(log_probs(ids)), key=lambda pair: -pair[1])[:count]


def reference(prompt: list[int], params: SamplingParams, end_ids: list[int]) -> tuple[list[list[int]], list[float]]:
    import torch
    from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class Table(PreTrainedModel, GenerationMixin):
        config_class = PretrainedConfig
        main_input_name = "input_ids"

        def __init__(self) -> None:
            super().__init__(PretrainedConfig(vocab_size=VOCAB, is_encoder_decoder=False))
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, **_):  # type: ignore[no-untyped-def]
            rows = [[log_probs(row)] for row in input_ids.tolist()]
            return CausalLMOutput(logits=torch.tensor(rows))

        def prepare_inputs_for_generation(self, input_ids, **_):  # type: ignore[no-untyped-def]
            return {"input_ids": input_ids}

    config = GenerationConfig(
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=end_ids,
        pad_token_id=VOCAB - 1,
        use_cache=False,
        do_sample=False,
        min_new_tokens=params.min_tokens or None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    out = Table().eval().generate(torch.tensor([prompt]), generation_config=config)
    rows = []
    for row in out.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in end_ids), len(row))
        rows.append(row[:end])
    return rows, out.sequences_scores.tolist()


@pytest.mark.parametrize("seed", range(24))
def test_equals_transformers(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.choice([2, 3, 4, 6])
    end_ids = rng.sample(range(VOCAB - 1), rng.choice([1, 1, 2, 4]))
    params = SamplingParams(
        beam_width=width,
        n=rng.randint(1, width),
        max_tokens=rng.choice([1, 5, 12]),
        length_penalty=rng.choice([0.0, 0.6, 1.0, 2.0, -1.0]),
        early_stopping=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 1]),
    )
    prompt = [rng.randrange(VOCAB) for _ in range(3)]
    search = BeamSearch(params, frozenset(end_ids))
    while not search.done:
        search.step([best(prompt + beam.ids, search.num_candidates) for beam in search.running])
    want_ids, want_scores = reference(prompt, params, end_ids)
    assert [beam.ids for beam in search.finished[: params.n]] == want_ids
    assert [beam.score for beam in search.finished[: params.n]] == pytest.approx(want_scores, abs=1e-4)


def scripted_best(request: TokenRequest) -> TokenLogprobs:
    ranked = best(request.prompt_ids, request.params.logprobs or 0)
    return TokenLogprobs(ranked[0][0], ranked[0][1], ranked)


class TestDriver:
    """Beam search through the service and a scripted executor."""

    @pytest.fixture(autouse=True)
    def _logprobs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import fake_executor

        step = fake_executor.Running.step

        def with_best(running, group):  # type: ignore[no-untyped-def]
            output = step(running, group)
            if running.request.params.logprobs:
                output.logprobs = [scripted_best(running.request)]
            return output

        monkeypatch.setattr(fake_executor.Running, "step", with_best)

    async def test_answers_best_first(self, tokenizer: Tokenizer) -> None:
        async with serving(tokenizer, lambda request, index: [5]) as (service, executor):
            whole = await service.complete(make_request([4, 5, 6], beam_width=3, n=2, max_tokens=6, logprobs=2, ignore_eos=True))
        params = SamplingParams(beam_width=3, n=2, max_tokens=6)
        want_ids, _ = reference([4, 5, 6], params, [VOCAB + 5])
        assert [choice.token_ids for choice in whole.choices] == want_ids
        assert [choice.text for choice in whole.choices] == [tokenizer.decode(ids) for ids in want_ids]
        assert all(choice.finish_reason is FinishReason.LENGTH for choice in whole.choices)
        assert [entry.token_id for entry in whole.choices[0].logprobs] == want_ids[0]
        assert [len(entry.top) for entry in whole.choices[0].logprobs] == [2] * 6
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.cached_tokens) == (3, 12, 1)
        assert len(executor.requests) == 1 + 3 * 5

    async def test_stop_strings_end_beams(self, tokenizer: Tokenizer) -> None:
        async with serving(tokenizer, lambda request, index: [5]) as (service, _):
            free = await service.complete(make_request([4, 5, 6], beam_width=2, max_tokens=4, ignore_eos=True))
            stop = tokenizer.decode(free.choices[0].token_ids[:2])
            cut = await service.complete(make_request([4, 5, 6], beam_width=2, n=2, max_tokens=4, ignore_eos=True, stop=(stop,)))
        assert all(stop not in choice.text for choice in cut.choices)
        assert any(choice.stop_reason == stop and len(choice.token_ids) == 2 for choice in cut.choices)

    async def test_cancelled_search_returns_the_beams_found_so_far(self, tokenizer: Tokenizer) -> None:
        import asyncio

        async with serving(tokenizer, lambda request, index: [5], step_s=0.005) as (service, executor):
            task = asyncio.create_task(service.complete(make_request([4], beam_width=2, max_tokens=60, ignore_eos=True)))
            while len(executor.requests) < 5:
                await asyncio.sleep(0.001)
            service.cancel("r")
            choice = (await task).choices[0]
        assert choice.finish_reason is FinishReason.CANCELLED
        assert 0 < len(choice.token_ids) < 60

    async def test_an_executor_that_dies_is_unavailable(self, tokenizer: Tokenizer) -> None:
        import asyncio

        async with serving(tokenizer, lambda request, index: [5], step_s=0.005) as (service, executor):
            task = asyncio.create_task(service.complete(make_request([4], beam_width=3, max_tokens=60, ignore_eos=True)))
            while len(executor.requests) < 5:
                await asyncio.sleep(0.001)
            executor.mailbox.close("it broke")
            with pytest.raises(UnavailableError, match="it broke"):
                await task


async def test_too_many_beams_are_refused(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, lambda request, index: [5]) as (service, _):
        service._client.info = info(tokenizer.vocab_size, max_beam_width=10)
        with pytest.raises(RequestError, match=r"beam_width=10.*end ids \(11\)"):
            await service.complete(make_request(beam_width=10, stop_token_ids=tuple(range(11))))
