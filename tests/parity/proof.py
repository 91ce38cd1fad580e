"""What makes a checkpoint proven: the logits of a prefill, those of a generation in a batch, and the greedy tokens equal the reference."""

from __future__ import annotations

import torch
from harness import Harness, Sequence, generate_in_batch, prefill_logits
from oracles import Reference
from torch import Tensor

TOLERANCE = 1e-4


def check_generation(harness: Harness, reference: Reference, num_new: int) -> tuple[list[int], list[list[int]], Sequence]:
    """Compare a prefill in one step, and `num_new` greedy tokens, with the reference.

    Returns the prompt, the other prompts of the batch, and the generated sequence.
    """
    prompt, others = make_prompts(reference, harness)
    assert_close(prefill_logits(harness, prompt), reference.logits(prompt, len(prompt)))
    main = generate_in_batch(harness, prompt, others, num_new)
    expected = reference.logits(main.tokens[:-1], len(prompt))
    assert_close(torch.stack([main.logits[i] for i in range(len(main.tokens) - 1)]), expected)
    assert main.tokens[len(prompt) :] == expected[len(prompt) - 1 :].argmax(-1).tolist()
    return prompt, others, main


def make_prompts(reference: Reference, harness: Harness) -> tuple[list[int], list[list[int]]]:
    """A prompt, and two others. For prefix LMs, each ends with a mask token and the start token."""
    generator = torch.Generator().manual_seed(1)
    lengths = (21, 5, 38)
    made = [torch.randint(3, min(reference.vocab, 90), (n,), generator=generator).tolist() for n in lengths]
    prefix = harness.config.prefix
    if prefix is not None:
        mask = 98
        assert mask in prefix.mask_ids
        made = [[*ids[:-2], mask, prefix.start_id] for ids in made]
    return made[0], made[1:]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.3, "the logits of the reference are too small for a comparison"
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= TOLERANCE, f"logits differ by {error:.2e}"
