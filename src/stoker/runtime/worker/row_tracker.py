"""The tokens of each row on the device, with which steps with drafts are planned before the results of earlier steps are known.

While a step with drafts runs, the host does not know how many of them are accepted. It plans the next step as if all were, which reserves
blocks for the longest advance. The device knows better: it counts the tokens of each row, corrects the positions of the next step at its
start, and looks up its drafts in the tokens that it has. After the step it appends what the step yields:

    host      plan n + 1, launch | wait for n, commit n | plan n + 2, launch | wait for n + 1 ...
    device    correct n, model, verify, append | correct n + 1, model, verify, append | ...

The number and the text of a row are copied from the host only when the row begins to belong to a sequence, or after a preemption.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stoker.base.config import RuntimeConfig
from stoker.core.model_config import ModelConfig
from stoker.kernels import ops
from stoker.kernels.types import RowTokens
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.verification import Verified
from stoker.runtime.staging import StagingBuffers
from stoker.runtime.worker.drafter import DraftSource
from stoker.runtime.worker.inputs import StepInputs

MAX_TEXT = 1 << 15  # newest tokens of a row in which drafts are looked up: 128 KiB per row
_UNKNOWN = 1 << 30  # the length of a row without a sequence: no position is corrected


class RowTracker:
    """`RowTokens` of all rows, and the copies of new rows. `looks_up`: steps look up their drafts; otherwise a drafter proposes them."""

    def __init__(self, num_rows: int, max_seq_len: int, block_size: int, device: torch.device, *, looks_up: bool) -> None:
        width = min(1 << (max_seq_len - 1).bit_length(), MAX_TEXT)
        self.tokens = RowTokens(
            torch.full((num_rows + 1,), _UNKNOWN, dtype=torch.int32, device=device),
            torch.zeros(num_rows + 1, width, dtype=torch.int32, device=device) if looks_up else None,
        )
        self._block_size = block_size
        self._owners = [(-1, 0)] * num_rows
        self._buffers = StagingBuffers(device)

    def update(self, sequences: list[Sequence]) -> None:
        """Start to copy the tokens of each of `sequences` whose row belonged to another one before. All of them are known."""
        new = [seq for seq in sequences if self._owners[seq.row] != (seq.seq_id, seq.num_preemptions)]
        if not new:
            return
        lengths, text = self.tokens
        arrays = [np.array([(seq.row, len(seq.tokens)) for seq in new], dtype=np.int32)]
        if text is not None:
            arrays += [_wrapped(seq.tokens, text.shape[1]) for seq in new]
        (pairs, *texts) = self._buffers.send(arrays)
        lengths.index_copy_(0, pairs[:, 0].long(), pairs[:, 1])
        for seq in new:
            self._owners[seq.row] = (seq.seq_id, seq.num_preemptions)
        if text is not None:
            for seq, ids in zip(new, texts, strict=True):
                text[seq.row, : len(ids)].copy_(ids)

    def correct(self, inputs: StepInputs) -> None:
        """Correct the positions of a step, and find the drafts that it lacks, in place."""
        ops.continue_rows(inputs.batch, inputs.newest_rows, inputs.starts, inputs.counters, self.tokens, self._block_size)

    def append(self, inputs: StepInputs, newest: Tensor, verified: Verified | None) -> None:
        """Add the tokens that a step yields: `newest` int32 [S], or with drafts those of `verified`."""
        if verified is None:
            ops.append_tokens(self.tokens, inputs.newest_rows, newest.unsqueeze(1), None)
        else:
            ops.append_tokens(self.tokens, inputs.newest_rows, verified.token_ids, verified.num_accepted)


def make_tracker(
    config: RuntimeConfig, model: ModelConfig, drafter: DraftSource | None, *, world_size: int, num_rows: int, max_seq_len: int,
    block_size: int, device: torch.device,
) -> RowTracker | None:  # fmt: skip
    """The tracker of an engine whose steps with drafts overlap with the host; None if the host reads each step before it plans the next.

    That is so on a CPU, for trees, for recurrent states, for ranks, and for drafts of requests.
    """
    looks_up = config.speculate == "ngram"
    overlaps = config.overlap and device.type != "cpu" and world_size == 1
    if not overlaps or config.tree is not None or model.has_state or model.requires_whole_prompt:
        return None
    if not looks_up and (drafter is None or drafter.has_state):
        return None
    return RowTracker(num_rows, max_seq_len, block_size, device, looks_up=looks_up)


def _wrapped(tokens: list[int], width: int) -> np.ndarray:
    """int32 [min(tokens, width)]: the newest tokens, position p at p mod width."""
    newest = np.array(tokens[-width:], dtype=np.int32)
    return np.roll(newest, len(tokens) % width) if len(tokens) > width else newest
