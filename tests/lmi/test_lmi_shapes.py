"""`RecordBuilder.token_line`, which joins encoded parts, equals the encoding of the whole record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmi_recordings import RecordedService

from stoker.server.protocols.sagemaker.dialects import RecordBuilder, encode
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.protocols.sagemaker.request import InvocationCall
from stoker.server.protocols.sagemaker.tokens import Token

CALL = InvocationCall(
    inputs=["hi"],
    requests=[],
    formatter="jsonlines",
    details=False,
    prompt_details=False,
    num_top_tokens=0,
    full_text=False,
    num_choices=1,
    multiple=False,
    seed=None,
)


@pytest.mark.parametrize("options", [{"dialect": name} for name in ("head", "0.26", "0.27", "async")] + [{"tgi_compat": True}], ids=str)
@settings(max_examples=50, deadline=None)
@given(token_id=st.integers(-1, 1 << 31), text=st.text(), logprob=st.none() | st.floats(-9999, 0))
def test_joined_parts_equal_the_encoded_record(options: dict[str, Any], token_id: int, text: str, logprob: float | None) -> None:
    builder = RecordBuilder(LMIOptions(**options), CALL, RecordedService())
    assert builder.token_line(token_id, text, logprob) == encode(builder.token_record(Token(token_id, text, logprob)))
