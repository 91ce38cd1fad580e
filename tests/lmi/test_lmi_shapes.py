"""The line of an ordinary token, put together from parts, is the one that is encoded whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmi_recordings import StandIn

from stoker.server.protocols.sagemaker.dialects import Shapes, encode
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.protocols.sagemaker.request import Asked
from stoker.server.protocols.sagemaker.tokens import Token

ASKED = Asked(
    inputs=["hi"], requests=[], formatter="jsonlines", details=False, prefill=False, num_top=0, full_text=False, num_choices=1,
    several=False, seed=None,
)  # fmt: skip


@pytest.mark.parametrize("options", [{"dialect": name} for name in ("head", "0.26", "0.27", "async")] + [{"tgi_compat": True}], ids=str)
@settings(max_examples=50, deadline=None)
@given(token_id=st.integers(-1, 1 << 31), text=st.text(), logprob=st.none() | st.floats(-9999, 0))
def test_parts_are_the_whole(options: dict[str, Any], token_id: int, text: str, logprob: float | None) -> None:
    shapes = Shapes(LMIOptions(**options), ASKED, StandIn())
    assert shapes.plain_line(token_id, text, logprob) == encode(shapes.line(Token(token_id, text, logprob)))
