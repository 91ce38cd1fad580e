"""Every architecture on the device: the tiny checkpoints of tests/parity against the same references.

python -m pytest tests/gpu/test_gpu_architectures.py -n 12
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from cases import CASES, FIRST
from harness import Harness, generate_in_batch, prefill_logits
from oracles import Reference
from proof import assert_close, make_prompts
from test_parity import check_served, check_supplied_drafts

CUDA = torch.device("cuda")
# Relative error of all logits. It is large because the weights are random with width 48, and largest where a rounded router score sends a
# token to another expert. Measured on an H200: 0.11, less than 0.2, 0.31. Where it is larger, so it must be on a CPU (`check_rounded`).
TOLERANCE = {None: 0.15, "WEIGHTS_ONLY_INT8": 0.2, "FP8": 0.4}
# Before 5.23 transformers normalizes the groups of a Mamba 2 block together; each has its own norm in the published implementation.
TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
NORM_OF_GROUPS = (
    ("Mamba2ForCausalLM", "plain"),
    ("Mamba2ForCausalLM", "no convolution bias, bounded time step"),
    ("GraniteMoeHybridForCausalLM", "no experts, rotary, tied"),
)

pytestmark = pytest.mark.timeout(300)  # a case compiles about 30 kernels


def checkpoint(case: tuple[str, str]) -> Reference:
    if case in NORM_OF_GROUPS and TRANSFORMERS < (5, 23):
        pytest.skip("this machine's transformers normalizes the groups of Mamba 2 together")
    try:
        return CASES[case]()
    except AttributeError as problem:
        if "module transformers has no attribute" in str(problem):
            pytest.skip(f"this machine's transformers is older than the model: {problem}")
        raise


def engine_of(
    reference: Reference, folder: Path, tokenizer: Path, dtype: str, quantization: str | None = None, device: str = "cuda"
) -> Path:
    if not (folder / "hf").exists():
        reference.save(folder / "hf")
    half = reference.positions // 2
    limits = Limits(max_input_len=half, max_output_len=half, max_num_tokens=512, max_batch_size=8, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device=device, dtype=dtype, quantization=quantization, limits=limits)
    return build(folder / "hf", folder / f"{device}-{dtype}-{quantization}", config, verify="none").path


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].replace(' ', '_')}")
def test_logits_equal_the_reference(case: tuple[str, str], tmp_path: Path, tokenizer: Path) -> None:
    """float32: chunked prefill and decode in a batch with other sequences; bfloat16: one prefill."""
    reference = checkpoint(case)
    exact = Harness(engine_of(reference, tmp_path, tokenizer, "float32"), reference.positions, device=CUDA)
    prompt, others = make_prompts(reference, exact)
    main = generate_in_batch(exact, prompt, others, 24)
    expected = reference.logits(main.tokens[:-1], len(prompt))
    assert_close(torch.stack([main.logits[i] for i in range(len(main.tokens) - 1)]), expected)
    check_rounded(reference, tmp_path, tokenizer, None)


@pytest.mark.parametrize("row", FIRST)
def test_an_executor_equals_the_reference(row: str, tmp_path: Path, tokenizer: Path) -> None:
    """With CUDA graphs, preemption because the cache is too small, and prefix reuse."""
    reference = checkpoint(FIRST[row])
    engine = engine_of(reference, tmp_path, tokenizer, "float32")
    harness = Harness(engine, reference.positions, device=CUDA)
    prompt, others = make_prompts(reference, harness)
    config = harness.config
    check_served(engine, reference, [prompt, *others], config.requires_whole_prompt, "cuda", has_state=config.has_state)
    if config.has_state:
        check_supplied_drafts(engine, [prompt, *others], "cuda")


@pytest.mark.parametrize("row", FIRST)
@pytest.mark.parametrize("quantization", ["WEIGHTS_ONLY_INT8", "FP8"])
def test_eight_bit_weights(row: str, quantization: str, tmp_path: Path, tokenizer: Path) -> None:
    reference = checkpoint(FIRST[row])
    check_rounded(reference, tmp_path, tokenizer, quantization)


def check_rounded(reference: Reference, folder: Path, tokenizer: Path, quantization: str | None) -> None:
    """The error in bfloat16 is within its tolerance, or not much larger than that of the reference kernels on the CPU."""

    def error_on(device: str) -> float:
        engine = engine_of(reference, folder, tokenizer, "bfloat16", quantization, device)
        harness = Harness(engine, reference.positions, device=torch.device(device))
        return error(harness, reference, make_prompts(reference, harness)[0])

    found = error_on("cuda")
    assert found < TOLERANCE[quantization] or found < 1.5 * error_on("cpu")


def error(harness: Harness, reference: Reference, prompt: list[int]) -> float:
    """The relative error of all logits of a prompt."""
    expected = reference.logits(prompt, len(prompt)).double()
    return float((prefill_logits(harness, prompt).double() - expected).norm() / expected.norm())
