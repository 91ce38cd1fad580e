"""Long steps in halves on two GPUs: copies between them give the bits of NCCL, and the values of the step as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has less than two CUDA devices")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overlapped_steps.py"
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 4096, "max_position_embeddings": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "vocab_size": 1024,
}  # fmt: skip


@pytest.mark.parametrize(("quantization", "limit"), [("", 0.02), ("FP8_KV", 0.1)])
def test_halves_equal_the_whole_step(quantization: str, limit: float, tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    """Even and odd numbers of tokens, on ranks that are delayed at random. The script compares the bits of copies and of NCCL."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    rows = tmp_path / "rows.json"
    options = {
        "--model": tmp_path,
        "--quantization": quantization,
        "--tokens": "8192,4099,7001",
        "--checks": 20,
        "--repeats": 1,
        "--json": rows,
    }
    uninterpreted(SCRIPT, *(str(part) for option in options.items() for part in option))
    found = json.loads(rows.read_text())["steps"]
    assert [row["tokens"] for row in found] == [8192, 4099, 7001]
    assert all(row["finite"] and row["relative_difference"] < limit for row in found), found
