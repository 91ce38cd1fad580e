"""All-reduce over NVLink through inboxes in peer memory (`distributed.inbox`), with the residual added in the same kernel.

Each CTA handles one unit of 2 KiB of the message (`all_reduce_kernel`). One-shot: it sends the unit to all other ranks, and sums what
arrives. Two-shot: it sends the unit to its owner, which sums the ranks' units and sends the sum to every rank; that sends less, with one
trip more. All ranks get the same bits: one-shot sums in the same order everywhere, two-shot sums once.

The norm that follows is a separate kernel. Within this one a CTA would need a whole row, which eight CTAs and more share now: one row of
8,192 on four H200s took 7.4 µs instead of 4.0, 32 rows 9.8 instead of 7.3.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stoker.base.logging import get_logger
from stoker.distributed.group import Group
from stoker.distributed.inbox import EMPTY, TURNS, UNIT_BYTES, Inbox, Inboxes
from stoker.kernels.reference import all_reduce as reference
from stoker.kernels.triton.all_reduce_kernel import Choices, all_reduce_kernel
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_options

log = get_logger(__name__)

UNLIMITED_POLLS = (1 << 31) - 1
CHECK_POLLS = 1 << 22  # about two seconds
BITS = {2: tl.int16, 4: tl.int32}  # the integer type of a value's bits, by its size in bytes
EMPTY_HALF = -(1 << 15)  # either half of EMPTY


def all_reduce(x: Tensor, group: Group, residual: Tensor | None = None) -> Tensor:
    """The sum over the ranks of a group (`ops.all_reduce`). A tensor that is too large for the inboxes uses the group's own all-reduce."""
    inbox = group.inbox(x.numel() * x.element_size())
    if inbox is None or x.element_size() not in BITS:
        return reference.all_reduce(x, group, residual)
    return sum_through_inbox(x, residual, inbox)


def all_reduce_choices(y: Tensor, choices: Choices, group: Group, residual: Tensor | None) -> Tensor | None:
    """The sum over the ranks of each token's choices, whose results y [T × k, size] experts have computed, + residual: [T, size].

    None if one launch cannot compute it: a message that is too large for the inboxes, or rows that are no whole units.
    """
    tokens, size = choices.weights_ptr.shape[0], y.shape[1]
    inbox = group.inbox(tokens * size * y.element_size())
    if inbox is None or y.element_size() not in BITS or size % (UNIT_BYTES // y.element_size()):
        return None
    return sum_through_inbox(y, residual, inbox, choices=choices)


def sum_through_inbox(
    x: Tensor, residual: Tensor | None, inbox: Inbox, max_polls: int = UNLIMITED_POLLS, choices: Choices | None = None
) -> Tensor:
    """The sum of x over all ranks, + residual, in one launch. With `choices`, the sum of x [T × k, size] by token.

    A CTA gives up waiting for its peers after `max_polls` loads; its results are undefined then.
    """
    x = x.contiguous()
    tokens, top_k = (x.shape[0], 0) if choices is None else choices.weights_ptr.shape
    out = torch.empty((tokens, *x.shape[1:]), dtype=x.dtype, device=x.device)
    num_values, bits = out.numel(), BITS[x.element_size()]
    unit = UNIT_BYTES // x.element_size()
    all_reduce_kernel[(cdiv(num_values, unit),)](
        x,
        choices or Choices(None, None),
        residual if residual is None else residual.contiguous(),
        out,
        inbox.addresses,
        inbox.addresses[inbox.rank],
        inbox.turns,
        inbox.rank,
        num_values,
        max_polls,
        UNIT=unit,
        RANKS=inbox.num_ranks,
        UNITS=inbox.num_units,
        TWO_SHOT=inbox.is_two_shot,
        BITS=bits,
        EMPTY=EMPTY if bits is tl.int32 else EMPTY_HALF,
        TURNS=TURNS,
        SIZE=x.shape[-1] if top_k else 0,
        TOP_K=top_k,
        num_warps=4,
        **pdl_launch_options(x),
    )
    return out


def check_inboxes(group: Group) -> None:
    """Compile the kernel, test sums through a group's inboxes, and disable the inboxes if sums do not arrive or are wrong.

    Every rank calls this once, at start.
    """
    for polls in (0, CHECK_POLLS):  # compile first: a rank that still compiles would exceed the number of polls
        if group.inboxes is None:
            return
        try:
            works, reason = check_sums(group.inboxes, group.device, polls), "sums through them are wrong"
        except Exception as error:  # of the driver or the compiler: NCCL works without either
            works, reason = False, str(error)
        if not group.smallest(works):
            log.warning("peers' inboxes are not used: %s", "another rank's do not work" if works else reason)
            group.inboxes = None
    if group.inboxes is not None:
        group.inboxes.num_ctas = group.smallest(num_sms(group.device))


def check_sums(inboxes: Inboxes, device: torch.device, max_polls: int) -> bool:
    """Whether this rank gets the right sums by each algorithm, over several turns. `max_polls` 0 only compiles the kernels."""
    ranks = inboxes.num_ranks
    values = torch.arange(UNIT_BYTES * 3 // 4, device=device) % 16  # a unit and a half; bfloat16 represents the sums exactly
    wanted = (values * ranks + (ranks - 1) * ranks // 2).float()
    for inbox in inboxes.all_reduces:
        for _ in range(2 * TURNS if max_polls else 1):
            found = sum_through_inbox((values + inboxes.rank).bfloat16(), None, inbox, max_polls)
            if max_polls and not torch.equal(found.float(), wanted):
                return False
    return True
