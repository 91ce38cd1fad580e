"""Predictions, per-request limits of draft tokens, and their counts in the usage, with a client that plays the executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import RequestError
from stoker.base.types import SamplingParams, Usage
from stoker.frontend.active_request import ActiveRequest
from stoker.frontend.admission import check_params
from stoker.frontend.stopwatch import Stopwatch
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.request import FinishReason, SequenceOutput, TokenRequest
from stoker.server.protocols.openai.chat.request import _prediction
from stoker.server.protocols.openai.response_json import usage_object


def test_usage_counts_the_drafts_of_all_sequences(tiny_engine: Path) -> None:
    tokenizer = Tokenizer.load(tiny_engine)
    task = TokenRequest(request_id="r", prompt_ids=[5, 6], params=SamplingParams(n=2, max_tokens=9))
    active = ActiveRequest(task, tokenizer, None, Stopwatch())  # type: ignore[arg-type]
    active.push([SequenceOutput("r", 0, [40, 41], num_drafts=3, num_accepted=1), SequenceOutput("r", 1, [42])])
    active.push([SequenceOutput("r", 1, [43, 44, 45], num_drafts=4, num_accepted=2)])
    deltas = active.push(
        [
            SequenceOutput("r", 0, [46], FinishReason.LENGTH, num_drafts=5, num_accepted=2),
            SequenceOutput("r", 1, [46], FinishReason.LENGTH, num_drafts=4, num_accepted=2),
        ]
    )
    assert deltas[-1].usage == Usage(2, 8, 0, 9, 4) and deltas[0].draft_tokens == 5
    details = usage_object(deltas[-1].usage)["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 5}
    assert "completion_tokens_details" not in usage_object(Usage(2, 7))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ({"type": "content", "content": "abc"}, "abc"),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
    ],
)
def test_the_text_of_a_prediction(value: dict[str, Any] | None, text: str) -> None:
    assert _prediction(value) == text


@pytest.mark.parametrize(
    "value",
    [
        {}, {"type": "content"}, {"content": "a"}, {"type": "text", "content": "a"}, {"type": "content", "content": 5},
        {"type": "content", "content": [{"type": "image_url"}]}, {"type": "content", "content": "a", "x": 1},
    ],
)  # fmt: skip
def test_other_predictions_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"prediction=.* is refused"):
        _prediction(value)


def test_beam_search_is_refused_with_speculative_decoding(executor_info: Any) -> None:
    import msgspec

    params = SamplingParams(beam_width=2)
    info = msgspec.structs.replace(executor_info, limits=msgspec.structs.replace(executor_info.limits, max_beam_width=4))
    check_params(params, info)
    with pytest.raises(RequestError, match=r"beam_width=2 is refused: .*--speculate ngram.*Request one beam"):
        check_params(params, msgspec.structs.replace(info, speculate="ngram"))


@pytest.fixture
def executor_info() -> Any:
    from stoker.base.config import Limits
    from stoker.runtime.client import ExecutorInfo

    return ExecutorInfo(limits=Limits(), max_seq_len=99, vocab_size=300, device="cpu", kv_cache_tokens=999, model="m")
