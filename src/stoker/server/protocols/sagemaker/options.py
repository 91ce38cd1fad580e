"""What the SageMaker and LMI door takes from serving.properties, besides what every protocol shares."""

from __future__ import annotations

from typing import Literal

import msgspec

DIALECTS = ("head", "0.26", "0.27", "async")
FORMATTERS = ("json", "jsonlines", "sse", "json_chat", "jsonlines_chat")


class LMIOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How /invocations answers."""

    dialect: Literal["head", "0.26", "0.27", "async"] = "head"  # whose bytes: a release of the rolling batch, or the async door
    output_formatter: Literal["json", "jsonlines", "sse", "json_chat", "jsonlines_chat"] | None = None  # None: by the request
    tgi_compat: bool = False  # JSON array reply, SSE stream, logprob and special as names, details always
    rolling_batch: bool = True  # False: the dynamic-batch shapes, lists of inputs and of outputs
    batch_size: int = 1  # dynamic batch: inputs of a request at most
