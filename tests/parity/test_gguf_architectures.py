"""Every GGUF architecture: the logits of an engine from a GGUF file, and those of the model that the tensors come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_cases import GGUF_CASES
from gguf_writer import write_gguf
from harness import Harness, prefill_logits

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.checkpoint.gguf.registry import ARCHITECTURES
from stoker.builder.config import BuildConfig

TOLERANCE = 1e-4
LIMITS = Limits(max_input_len=128, max_output_len=128, max_num_tokens=512, max_batch_size=8, tokens_per_block=16)


def test_every_architecture_is_proven() -> None:
    assert set(ARCHITECTURES) == {case.arch for case in GGUF_CASES.values()}


@pytest.mark.parametrize("name", GGUF_CASES, ids=lambda name: name.replace(" ", "_"))
def test_logits_equal_those_of_the_model(name: str, tmp_path: Path, tokenizer: Path) -> None:
    case = GGUF_CASES[name]
    reference = case.reference()
    reference.save(tmp_path / "hf")
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", case.arch, case.change, case.describe)
    settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS)
    build(source, tmp_path / "engine", settings, verify="none")
    prompt = torch.randint(3, 90, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    found, expected = prefill_logits(Harness(tmp_path / "engine", 256), prompt), reference.logits(prompt, len(prompt))
    assert expected.abs().max() > 0.3
    assert float((found.double() - expected.double()).abs().max()) <= TOLERANCE
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
