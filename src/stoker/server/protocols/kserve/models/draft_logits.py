"""The input `draft_logits`: the distribution from which the draft tokens of a request were sampled."""

from __future__ import annotations

import numpy as np

from stoker.base.errors import RequestError
from stoker.server.protocols.kserve.tensors.input_row import InputRow


def draft_logits(row: InputRow, vocab_size: int) -> bytes:
    """The float32 logits [draft tokens, vocabulary] of a row; empty without the input. Raises RequestError for another shape, or no number.

    -inf is the logit of a token that was not possible.
    """
    array = row.array("draft_logits")
    if array is None or not array.size:
        return b""
    expected = (row.size("draft_input_ids"), vocab_size)
    if array.shape != expected:
        limit = f"the draft_input_ids have shape [{expected[0]}], so the shape must be {list(expected)}"
        raise RequestError("draft_logits", f"shape {list(array.shape)}", limit, cure="Send the logits of each draft token.")
    highest = array.max(axis=-1)
    if not np.isfinite(highest).all():  # the maximum is NaN if any logit is
        token = int(np.isfinite(highest).argmin())
        raise RequestError("draft_logits", float(highest[token]), f"draft token {token} has no finite largest logit")
    return np.ascontiguousarray(array, np.float32).tobytes()
