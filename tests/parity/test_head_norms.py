"""Which norms of queries and keys are part of the kernels that rotate, and which are ops of their own. Results: `test_parity`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import FIRST
from test_fused_layers import decoded, harness

from stoker.kernels import ops
from stoker.kernels.types import Rotary

# Architecture → whether its norms are RMS norms per head with weights of all heads.
NORMS = {
    "Qwen3ForCausalLM": True, "Qwen3MoeForCausalLM": True, "Gemma3ForCausalLM": True, "Gemma3nForCausalLM": True,
    "Exaone4ForCausalLM": True, "HunYuanDenseV1ForCausalLM": True, "Olmo2ForCausalLM": False, ("CohereForCausalLM", "q/k norms"): False,
}  # fmt: skip


@pytest.mark.parametrize("row", NORMS)
def test_norms_per_head_are_no_ops_of_their_own(
    row: str | tuple[str, str], tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(row, tuple):
        monkeypatch.setitem(FIRST, row[0], row)
        row, expected = row[0], NORMS[row]
    else:
        expected = NORMS[row]
    model = harness(row, tmp_path, tokenizer)
    blocks = [layer.attention for layer in model.model.layers]
    assert {block.head_norms is not None for block in blocks} == {expected}
    assert {block.qk_norm is not None for block in blocks} == {not expected}
    rotaries: list[Rotary] = []

    def observe(name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "rope_store":
            rotaries.append(args[3])

    with ops.observe_ops(observe):
        decoded(model)
    assert len(rotaries) == 5 * len(blocks) and all((rotary.norms is not None) == expected for rotary in rotaries)
