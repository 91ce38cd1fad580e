"""Options of the SageMaker protocol, read from the serving.properties of an LMI folder."""

from __future__ import annotations

from typing import Literal

import msgspec

DIALECTS = ("head", "0.26", "0.27", "async")
FORMATTERS = ("json", "jsonlines", "sse", "json_chat", "jsonlines_chat")


class LMIOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The format of requests and responses of /invocations."""

    dialect: Literal["head", "0.26", "0.27", "async"] = (
        "head"  # response format of an LMI release: rolling batch ("head": the newest) or async mode
    )
    output_formatter: Literal["json", "jsonlines", "sse", "json_chat", "jsonlines_chat"] | None = None  # None: chosen by the request
    tgi_compat: bool = False  # responses are JSON arrays or SSE, name their members logprob and special, and always have details
    rolling_batch: bool = True  # False: dynamic batching, with lists of inputs and outputs
    batch_size: int = 1  # dynamic batching: maximum number of inputs per request
