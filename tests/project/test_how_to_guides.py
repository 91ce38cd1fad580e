"""The code of docs/guides runs: the examples are executed as new rows of their tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.base.types import SamplingParams
from stoker.kernels.tuning.table import parse_tuning_file
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.sampling.feature import Feature, SampledRow
from stoker.runtime.schedule.policies import POLICIES
from stoker.runtime.schedule.proposers import PROPOSERS
from stoker.runtime.schedule.scheduler import Scheduler

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def code_of(guide: str, language: str = "python", number: int = 0) -> str:
    """A code block of a guide."""
    return re.findall(rf"^```{language}\n(.*?)^```", (GUIDES / f"{guide}.md").read_text(), re.MULTILINE | re.DOTALL)[number]


def run(guide: str, name: str) -> Any:
    """The class `name` that the first code block of a guide defines."""
    namespace: dict[str, Any] = {"__name__": guide.replace("-", "_")}
    exec(compile(code_of(guide), f"{guide}.md", "exec"), namespace)
    return namespace[name]


def sequence(seq_id: int, prompt: list[int], **params: Any) -> Sequence:
    return Sequence(seq_id, TokenRequest(request_id=str(seq_id), prompt_ids=prompt, params=SamplingParams(**params)), 0, float(seq_id))


def test_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES._rows, "shortest_first", run("policy", "ShortestFirst"))
    scheduler = Scheduler(
        num_blocks=16, tokens_per_block=4, max_batch_size=1, max_num_tokens=16, max_seq_len=32, policy="shortest_first"
    )  # fmt: skip
    for seq_id, size in enumerate((9, 3, 6)):
        scheduler.add(sequence(seq_id, list(range(size)), max_tokens=2))
    assert [seq.seq_id for seq in scheduler.plan(0.0).sequences] == [1]


def test_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPOSERS._rows, "prompt_lookup", run("proposer", "PromptLookup"))
    proposer = PROPOSERS.get("prompt_lookup")()
    assert list(proposer.propose(sequence(0, [1, 2, 3, 4, 1, 2]), 4)) == [3, 4, 1, 2]
    assert list(proposer.propose(sequence(0, [1, 2, 3, 4, 1, 2]), 1)) == [3]
    assert list(proposer.propose(sequence(0, [1, 2, 3]), 4)) == []


def test_sampling_feature() -> None:
    feature: Feature = run("sampling-feature", "NoImmediateRepeat")(8)
    assert not feature.applies_to(SamplingParams()) and feature.applies_to(SamplingParams(frequency_penalty=100))
    logits = torch.zeros(2, 8)
    feature.apply(logits, *map(torch.from_numpy, feature.gather([SampledRow(1, sequence(0, [3, 5]), 3, (6,))])))
    assert torch.isinf(logits).nonzero().tolist() == [[1, 6]]


def test_protocol() -> None:
    """The guide shows the protocol that tests/server/test_server_extension.py uses over HTTP."""
    assert code_of("protocol") == (GUIDES.parents[1] / "tests" / "server" / "echo_protocol.py").read_text()


def test_device(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-l40s.json"
    path.write_text(code_of("device", "json"))
    file, table = parse_tuning_file(path)
    assert file.device_names == ("NVIDIA L40S",) and table.shared_bytes == 101376


@pytest.mark.parametrize(
    ("guide", "number", "file"),
    [
        ("kernel", 0, "kernels/ops.py"),
        ("option-key", 0, "base/config.py"),
        ("quantization-format", 0, "quant/formats/int8.py"),
        ("quantization-format", 1, "quant/formats/int8.py"),
        ("quantization-format", 2, "quant/named_recipes.py"),
        ("sampling-feature", 1, "server/protocols/openai/fields.py"),
    ],
)
def test_snippets_are_quotations(guide: str, number: int, file: str) -> None:
    source = (GUIDES.parents[1] / "src" / "stoker" / file).read_text()
    lines = [line.strip() for line in code_of(guide, number=number).splitlines() if line.strip()]
    assert lines and [line for line in lines if line not in source] == []
