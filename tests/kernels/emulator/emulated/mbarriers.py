"""mbarriers: initialization, arrivals of threads and of their copies, and waits. Each phase is counted by `queues.Arrivals`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emulated.operands import Mask, Step, addresses_of, read, write
from emulated.parse import Address, Instruction
from emulated.queues import Arrivals

if TYPE_CHECKING:
    from emulated.program import Program


def mbarriers(instruction: Instruction, parts: list[str]) -> Step | None:
    """mbarrier.init, .arrive, .arrive.expect_tx and .try_wait, and cp.async.mbarrier.arrive.noinc."""
    if parts[:4] == ["cp", "async", "mbarrier", "arrive"]:
        return _arrive_after_copies(instruction, parts)
    if parts[0] != "mbarrier":
        return None
    place = next(operand for operand in instruction.operands if isinstance(operand, Address))
    at, kind = addresses_of(place, "u32"), parts[1]
    last = instruction.operands[-1]
    number_of = read(1 if isinstance(last, Address) else last, "u32")  # of arrivals or bytes, or a parity

    def run(program: Program, mask: Mask) -> None:
        threads = program.thread if mask is None else np.flatnonzero(mask)
        history, addresses = program.shared.history, at(program)
        numbers = np.broadcast_to(number_of(program), program.num_threads)
        if kind == "init":
            zeros, ones = (make((len(threads), 8), np.uint8) for make in (np.zeros, np.ones))
            history.store(program.clock, threads, addresses[threads], zeros, ones)
        else:
            history.load(program.clock, threads, addresses[threads], 8)
        for thread in threads if kind != "try_wait" else ():
            address, number = int(addresses[thread]), int(numbers[thread])
            if kind == "init":
                program.arrivals[address] = Arrivals(number, len(program.clock.observed))
                program.clock.observed.append(np.zeros(program.num_threads, bool))
            elif "expect_tx" in parts:
                program.arrivals[address].expect(number)
            else:
                program.arrivals[address].arrive(number)
        if kind == "try_wait":
            write(program, instruction.operands[0], _has_ended(program, threads, addresses, numbers), mask)

    return run


def _has_ended(
    program: Program, threads: NDArray[np.int64], addresses: NDArray[np.int64], parities: NDArray[np.uint32]
) -> NDArray[np.bool_]:
    """For each thread of the CTA, whether the phase of its mbarrier with its parity has ended; False for those not in `threads`."""
    passed, ended = np.zeros(program.num_threads, bool), dict[int, bool]()
    for thread in threads:
        address = int(addresses[thread])
        if address not in ended:
            ended[address] = program.arrivals[address].has_ended(int(parities[thread]))
        passed[thread] = ended[address]
        program.clock.observed[program.arrivals[address].number][thread] |= ended[address]
    return passed


def _arrive_after_copies(instruction: Instruction, parts: list[str]) -> Step:
    """The arrival of each thread when all cp.async that it has issued are complete. They complete when the phase is polled."""
    assert parts[4] == "noinc" and isinstance(instruction.operands[0], Address), instruction.text
    at = addresses_of(instruction.operands[0], "u32")

    def run(program: Program, mask: Mask) -> None:
        threads = program.thread if mask is None else np.flatnonzero(mask)
        addresses = at(program)[threads]
        assert (addresses == addresses[0]).all()
        copies = program.copies.pending(mask)

        def copy() -> None:
            for action in copies:
                action()

        program.arrivals[int(addresses[0])].issue_copy(0, copy, len(threads))

    return run
