"""Sums over ranks through inboxes (`distributed.inbox`), with the residual add and the norm in the same kernel.

A program has one unit of the message: a row when it is normed, else UNIT_BYTES. One-shot: it sends its part to every rank and sums what
arrives. Two-shot: parts go to the unit's owner, which sums them and sends the sum to every rank; less is sent, with one trip more.
Every rank has the same bits: one-shot sums in the same order everywhere, two-shot once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.base.logging import get_logger
from stoker.distributed.group import Group
from stoker.distributed.inbox import EMPTY, TURNS, UNIT_BYTES, Inbox, Inboxes
from stoker.kernels.reference import all_reduce as reference
from stoker.kernels.triton import norm as norms
from stoker.kernels.triton.all_reduce_kernel import exchange_kernel
from stoker.kernels.triton.chain import chained

log = get_logger(__name__)

FOR_EVER = (1 << 31) - 1
CHECK_LOOKS = 1 << 22  # about two seconds
MOST_WARPS = 16
MOST_BYTES = 1 << 16  # a quarter of a multiprocessor's registers, for parts that one program waits for together
MOST_ROW_BYTES = 1 << 14  # wider rows spill: they are summed in pieces, and normed after that
BITS = {2: tl.int16, 4: tl.int32}  # what holds a value's bits, by its size
EMPTY_HALF = -(1 << 15)  # EMPTY is this, twice


def all_reduce(x: Tensor, group: Group, residual: Tensor | None = None) -> Tensor:
    """See `ops.all_reduce`."""
    inbox = group.inbox(x.numel() * x.element_size())
    if inbox is None or x.element_size() not in BITS:
        return reference.all_reduce(x, group, residual)
    return exchange(x, residual, inbox)[1]


def all_reduce_norm(
    x: Tensor, group: Group, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """See `ops.all_reduce_norm`."""
    row_bytes = x.shape[-1] * x.element_size()
    inbox = group.inbox(x.numel() * x.element_size(), row_bytes) if row_bytes <= MOST_ROW_BYTES else None
    if inbox is None or x.element_size() not in BITS:
        return norms.add_norm(all_reduce(x, group), residual, weight, bias, eps, kind)
    return exchange(x, residual, inbox, weight, bias if kind == "layer" else None, eps, kind)


def exchange(
    x: Tensor, residual: Tensor | None, inbox: Inbox, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0.0,
    kind: str | None = None, patience: int = FOR_EVER,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the norm of the second, with `kind`; the ranks' x summed, + residual). Sums that do not arrive in time are garbage."""
    x = x.contiguous()
    stream = torch.empty_like(x)
    out = torch.empty_like(x) if kind is not None else stream
    num_values, bits = x.numel(), BITS[x.element_size()]
    if num_values == 0:
        return out, stream
    size = x.element_size()
    unit = inbox.unit_bytes // size
    block = triton.next_power_of_2(unit)
    exchange_kernel[(triton.cdiv(num_values, unit),)](
        x, residual if residual is None else residual.contiguous(), weight, bias, out, stream,
        inbox.addresses, inbox.addresses[inbox.rank], inbox.turns, inbox.rank, num_values, eps, patience,
        UNIT=unit, BLOCK=block, RANKS=inbox.num_ranks, GROUP=min(inbox.num_ranks, max(MOST_BYTES // (block * size), 1)),
        UNITS=inbox.num_units, TWO_SHOT=inbox.is_two_shot, NORM=kind, BITS=bits, EMPTY=EMPTY if bits is tl.int32 else EMPTY_HALF,
        TURNS=TURNS, num_warps=min(MOST_WARPS, max(4, block * size // 512)), **chained(x),
    )  # fmt: skip
    return out, stream


def check_inboxes(group: Group) -> None:
    """Leave a group's inboxes unused where sums through them do not arrive or are wrong. Every rank calls it once, at start."""
    for looks in (0, CHECK_LOOKS):  # a rank that still compiles is not waited for with patience
        if group.inboxes is None:
            return
        try:
            good, reason = sums_arrive(group.inboxes, group.device, looks), "sums through them are wrong"
        except Exception as error:  # a driver or a compiler that cannot: whatever it is, NCCL can
            good, reason = False, str(error)
        if not group.smallest(good):
            log.warning("peers' inboxes are not used: %s", "another rank's do not work" if good else reason)
            group.inboxes = None


def sums_arrive(inboxes: Inboxes, device: torch.device, looks: int) -> bool:
    """Whether this rank gets the right sums both ways, turn after turn, within so many looks. 0: only compile, and wait for nobody."""
    ranks = inboxes.num_ranks
    values = torch.arange(UNIT_BYTES * 3 // 4, device=device) % 16  # a unit and a half, of sums that bfloat16 holds
    wanted = (values * ranks + (ranks - 1) * ranks // 2).float()
    for is_two_shot in (False, True):
        inbox = inboxes.get(UNIT_BYTES, is_two_shot)
        assert inbox is not None
        for _ in range(2 * TURNS if looks else 1):
            found = exchange((values + inboxes.rank).bfloat16(), None, inbox, patience=looks)[1]
            if looks and not torch.equal(found.float(), wanted):
                return False
    return True
