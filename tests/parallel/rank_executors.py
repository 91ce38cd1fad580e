"""An executor whose step loop the test runs on its own thread, for engines of any number of ranks."""

from __future__ import annotations

from pathlib import Path

from stoker.base.config import RuntimeConfig
from stoker.base.types import SamplingParams
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.request import SequenceOutput, TokenRequest


def load(engine: Path, **settings: object) -> Executor:
    return load_executor(engine, RuntimeConfig(num_threads=1, **settings), SynchronousMailbox)  # type: ignore[arg-type]


def generate(
    executor: Executor, prompts: list[list[int]], num_new: int, *, drafts: list[list[int]] | None = None, **params: object
) -> list[list[int]]:
    """The generated tokens of each prompt. All are submitted at once. `drafts`: those of each request."""
    settings = SamplingParams(max_tokens=num_new, ignore_eos=True, **params)  # type: ignore[arg-type]
    names = [f"{executor.stats.num_steps}-{i}" for i in range(len(prompts))]
    calls = zip(names, prompts, drafts or [[] for _ in prompts], strict=True)
    found = outputs(
        executor,
        [TokenRequest(request_id=name, prompt_ids=prompt, params=settings, draft_ids=drafted) for name, prompt, drafted in calls],
    )
    return [[token for output in each for token in output.token_ids] for each in found]


def outputs(executor: Executor, requests: list[TokenRequest]) -> list[list[SequenceOutput]]:
    """The outputs of each request, none of which fails. All are submitted at once."""
    mailbox = executor.mailbox
    assert isinstance(mailbox, SynchronousMailbox)
    mailbox.submit(list(requests))
    found: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
    unfinished = set(found)
    while unfinished:
        executor.turn(0.0)
        for output in mailbox.pop_outputs():
            assert output.error is None, output.error
            found[output.request_id].append(output)
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
    return list(found.values())
