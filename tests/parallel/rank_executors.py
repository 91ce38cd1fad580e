"""An executor whose step loop the test runs on its own thread, for engines of any number of ranks."""

from __future__ import annotations

from pathlib import Path

from stoker.base.config import RuntimeConfig
from stoker.base.types import SamplingParams
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.request import TokenRequest


def load(engine: Path, **settings: object) -> Executor:
    return load_executor(engine, RuntimeConfig(num_threads=1, **settings), SynchronousMailbox)  # type: ignore[arg-type]


def generate(
    executor: Executor, prompts: list[list[int]], num_new: int, *, drafts: list[list[int]] | None = None, **params: object
) -> list[list[int]]:
    """The generated tokens of each prompt. All are submitted at once. `drafts`: those of each request."""
    mailbox = executor.mailbox
    assert isinstance(mailbox, SynchronousMailbox)
    settings = SamplingParams(max_tokens=num_new, ignore_eos=True, **params)  # type: ignore[arg-type]
    names = [f"{executor.stats.num_steps}-{i}" for i in range(len(prompts))]
    calls = zip(names, prompts, drafts or [[] for _ in prompts], strict=True)
    mailbox.submit(
        [TokenRequest(request_id=name, prompt_ids=prompt, params=settings, draft_ids=drafted) for name, prompt, drafted in calls]
    )
    tokens: dict[str, list[int]] = {name: [] for name in names}
    unfinished = set(names)
    while unfinished:
        executor.turn(0.0)
        for output in mailbox.pop_outputs():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
    return [tokens[name] for name in names]
