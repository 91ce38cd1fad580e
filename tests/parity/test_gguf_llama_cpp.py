"""The GGUF files of the parity tests mean for llama.cpp what they mean here. Needs xllamacpp (the extra `llamacpp`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_cases import GGUF_CASES
from gguf_writer import write_gguf

xllamacpp = pytest.importorskip("xllamacpp")

# One architecture for each kind of conversion: permuted rows, divisors of frequencies, separated projections, experts, latent attention,
# scales, windows, partial rotary embeddings, states, value heads in another order. llama.cpp evaluates GELU from a table in float16, so
# models with it are left out.
CASES = (
    "llama", "mixtral", "qwen3moe", "internlm2", "granitemoe", "cohere2", "chatglm", "olmo3", "deepseek3", "minimax-m2", "mamba2", "jamba",
    "falcon-h1", "nemotron_h_moe", "qwen3next", "qwen35", "llama4", "mistral3", "apertus",
)  # fmt: skip
TOLERANCE = 2e-5  # of log-probabilities in float32


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    case = GGUF_CASES[name]
    reference = case.reference()
    reference.save(tmp_path / "hf")
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "hf", case.arch, case.change, case.describe)
    prompt = torch.randint(3, 90, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference.logits(prompt, len(prompt))[-1].double().log_softmax(-1)
    found = most_likely(source, prompt)
    assert found[0]["id"] == int(expected.argmax())
    assert max(abs(token["logprob"] - float(expected[token["id"]])) for token in found) <= TOLERANCE


def most_likely(path: Path, prompt: list[int]) -> list[dict[str, Any]]:
    """The five most likely next tokens, with their log-probabilities."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = str(path), 256, 1, False, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    answer = server.handle_completions({"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 5})
    del server
    tokens: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return tokens
