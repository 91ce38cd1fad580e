"""Reads the blocks of a prompt from the ranks of another engine into the cache of one rank."""

from __future__ import annotations

import msgspec
import torch

from stoker.runtime.transfer.layout import EngineLayout, LayerRead, RankLayout, ReadPlan, plan_reads
from stoker.runtime.transfer.messages import LAYER, MAX_BLOCKS, MAX_LAYER_BYTES, READ, Pull, Read, connect, receive
from stoker.runtime.transfer.nixl_agent import NixlAgent, NixlReader, Run, block_runs
from stoker.runtime.transfer.pages import RankPages
from stoker.runtime.transfer.progress import StepProgress
from stoker.runtime.worker_group.hosts.link import Link, LinkError


class Rank:
    """What transfers need of one rank of this engine. `dtype` is that of the cache."""

    def __init__(
        self,
        pages: RankPages,
        layout: RankLayout,
        dtype: torch.dtype,
        progress: StepProgress,
        key: bytes,
        timeout_s: float,
        nixl: NixlAgent | None,
    ) -> None:
        self.pages, self.layout, self.dtype, self.progress = pages, layout, dtype, progress
        self.key, self.timeout_s, self.nixl = key, timeout_s, nixl


class Puller:
    """The connections of one transfer to the ranks that one rank reads from. Used by one thread."""

    def __init__(self, rank: Rank, source: EngineLayout) -> None:
        """Connect to the ranks of `source`. Raises LinkError if one cannot be reached or the caches do not match."""
        self._rank = rank
        self._links: dict[int, Link] = {}
        self._readers: dict[int, NixlReader] = {}
        try:
            self._plan: ReadPlan = plan_reads(rank.layout, _name(rank.dtype), source)
            self._dtype = None if self._plan.is_raw else _plain_dtype(source.plain_dtype)
            for number in self._plan.reads:
                other = source.ranks[number]
                self._links[number] = connect(other.host, other.port, rank.key, rank.timeout_s)
                if rank.nixl is not None and self._plan.is_raw and other.nixl:
                    self._readers[number] = rank.nixl.open_reader(rank.layout, other)
        except ValueError as error:
            self.close()
            raise LinkError(f"has another KV cache: {error}") from None
        except BaseException:
            self.close()
            raise

    def pull(self, pull: Pull) -> int:
        """Read the blocks of the other engine, which a step computes, into the targets. Returns the number of bytes.

        Layers are read as soon as the step has computed them. Raises LinkError; the contents of the targets are then undefined.
        """
        blocks, targets = pull.blocks, pull.targets
        if len(blocks) != len(targets) or any(target >= self._rank.pages.num_blocks for target in targets):
            raise LinkError("names blocks outside the KV cache")
        if not self._rank.progress.wait_for_zeroing(pull.num_zeroed, self._rank.timeout_s):
            raise LinkError(f"was not read: the blocks for it were not zeroed within {self._rank.timeout_s:g} s")
        num_bytes, size = 0, self._blocks_per_read()
        for start in range(0, len(blocks), size):
            part = slice(start, start + size)
            num_bytes += self._pull_part(pull.step, pull.first_block + start, blocks[part], targets[part])
        return num_bytes

    def close(self) -> bool:
        """Abort reads that are not complete, and close the connections. False if a copy could not be aborted and may still write."""
        ended = [reader.close() for reader in self._readers.values()]
        self._readers.clear()
        for link in self._links.values():
            link.close()
        return all(ended)

    def _pull_part(self, step: int, first_block: int, blocks: list[int], targets: list[int]) -> int:
        """`pull` for blocks whose layers fit into one frame each."""
        num_bytes, runs = 0, block_runs(blocks, targets)
        are_computed = step == 0  # then the other rank has nothing to say before its pages are copied
        for number, reads in self._plan.reads.items():
            if are_computed and number in self._readers:
                continue
            layers = [(read.layer, read.heads) for read in reads]
            message = Read(step, first_block, blocks, layers, self._plan.is_raw, number not in self._readers)
            self._links[number].send(READ, msgspec.msgpack.encode(message))
        for number, reads in self._plan.reads.items():
            reader = self._readers.get(number)
            if are_computed and reader is not None:
                num_bytes += reader.copy(reads, runs)
                continue
            for read in reads:
                num_bytes += self._receive(number, read, first_block, targets, runs)
        for reader in self._readers.values():
            reader.wait(self._rank.timeout_s)
        return num_bytes

    def _receive(self, number: int, read: LayerRead, first_block: int, targets: list[int], runs: list[Run]) -> int:
        """Receive one layer from a rank, and store it."""
        data = receive(self._links[number], LAYER, self._rank.timeout_s)
        if (reader := self._readers.get(number)) is not None:
            return reader.copy([read], runs)
        try:
            self._rank.pages.write(read.own_layer, read.own_heads, targets, first_block, memoryview(bytearray(data)), self._dtype)
        except ValueError as error:
            raise LinkError(f"sent {error}") from None
        return len(data)

    def _blocks_per_read(self) -> int:
        """The number of blocks of which a layer fits into a frame."""
        if self._readers:
            return MAX_BLOCKS
        pages = self._rank.pages
        largest = max(
            pages.block_bytes(each.own_layer, len(each.heads), self._dtype) for reads in self._plan.reads.values() for each in reads
        )
        return max(1, MAX_LAYER_BYTES // largest)


def _name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def _plain_dtype(name: str) -> torch.dtype:
    """The dtype of converted values. Raises ValueError for an unknown one."""
    if name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"values of {name[:32]}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
