"""Reads traces of requests: Azure's LLM inference traces, Mooncake's, and BurstGPT's."""

from __future__ import annotations

import csv
import itertools
import mmap
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import msgspec

from stoker.base.errors import ConfigError, reason_of
from stoker.runtime.kv.events.wire import hashes_of_digests
from stoker.runtime.kv.prefix_index import ID_BYTES, extend_digests, pack, root_digest

FORMATS = ("azure", "mooncake", "burstgpt")
FORMATS_WITH_PREFIXES = ("mooncake",)  # prompts of the others have no common blocks
MOONCAKE_BLOCK = 512  # tokens of one hash id
VOCAB_SIZE = 1 << 30  # of the tokens that stand for unknown texts
NUM_COUNTS = 67_108_859  # a prime number of bytes that count block ids
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


class PromptBlocks(msgspec.Struct, frozen=True):
    """Leading full blocks of a prompt, as `pack_blocks` and `block_digests` compute them from its token ids."""

    packed: Seq[bytes]
    digests: Seq[bytes]  # of these blocks; of the first one, if there is none
    hashes: tuple[int, ...]  # of the digests


class Arrival(msgspec.Struct, frozen=True):
    """One request of a trace. Prompts with the same beginning have equal token ids there."""

    at_s: float  # after the start of the trace
    prompt_ids: list[int]
    max_tokens: int
    session: str = ""
    blocks: PromptBlocks | None = None  # if they are known already


class TracedRequest(msgspec.Struct, frozen=True):
    """One request of a trace in little memory. Its prompt consists of blocks; texts of equal blocks at the same place are equal."""

    at_s: float
    block_ids: Seq[int]
    tokens_per_block: int
    num_prompt: int
    max_tokens: int

    def arrival(self, tokens_per_block: int | None = None, repeated: RepeatedBlocks | None = None, rate: float = 1.0) -> Arrival:
        """The request with the token ids of its prompt. Of each block, only the first id depends on the block.

        `rate`: by which the time is divided.
        `tokens_per_block`: of a KV cache, whose blocks the arrival then contains, up to the first one that is not among the `repeated`
        ones. A block of the trace that is not the last one of its prompt has a multiple of it.
        """
        prompt_ids = [0] * self.num_prompt
        for first, block_id in zip(range(0, self.num_prompt, self.tokens_per_block), self.block_ids, strict=False):
            prompt_ids[first] = block_id % VOCAB_SIZE
        blocks = self._blocks(tokens_per_block, repeated) if tokens_per_block is not None else None
        return Arrival(self.at_s / rate, prompt_ids, self.max_tokens, "", blocks)

    def _blocks(self, tokens_per_block: int, repeated: RepeatedBlocks | None) -> PromptBlocks:
        """The leading full blocks of the KV cache that other prompts may have."""
        digest, each = root_digest(""), max(self.tokens_per_block // tokens_per_block, 1)
        num_blocks = self.num_prompt // tokens_per_block
        block_ids = self.block_ids if repeated is None else self.block_ids[: repeated.num_leading(self.block_ids)]
        if num_blocks and not block_ids:
            digests = extend_digests(digest, (_first_block(self.block_ids[0] % VOCAB_SIZE, tokens_per_block),))
            return PromptBlocks((), digests, hashes_of_digests(digests))
        parts = list[PromptBlocks]()
        for first, block_id in zip(range(0, num_blocks, each), block_ids, strict=False):
            parts.append(_kv_blocks(digest, block_id % VOCAB_SIZE, min(num_blocks - first, each), tokens_per_block))
            digest = parts[-1].digests[-1]
        return parts[0] if len(parts) == 1 else _joined(parts)


class RepeatedBlocks:
    """The block ids that occur at least twice in a trace. The others cannot be reused.

    Ids with the same remainder count as the same, which costs time and changes no result.
    """

    def __init__(self) -> None:
        self._counts = mmap.mmap(-1, NUM_COUNTS)  # 0, 1, or 2 for more; only pages in use take memory

    def add(self, block_ids: Seq[int]) -> None:
        """Count the blocks of a prompt."""
        counts = self._counts
        for block_id in block_ids:
            place = block_id % VOCAB_SIZE % NUM_COUNTS
            if counts[place] < 2:
                counts[place] += 1

    def num_leading(self, block_ids: Seq[int]) -> int:
        """The number of blocks before the first one that occurs once."""
        counts, num_leading = self._counts, 0
        for block_id in block_ids:
            if counts[block_id % VOCAB_SIZE % NUM_COUNTS] < 2:
                break
            num_leading += 1
        return num_leading


@lru_cache(1 << 13)
def _kv_blocks(digest: bytes, first_id: int, count: int, tokens_per_block: int) -> PromptBlocks:
    """`count` blocks of the KV cache after the one with this digest. All their token ids are 0, except for the first one."""
    packed = [_first_block(first_id, tokens_per_block)] + [_zeros(tokens_per_block)] * (count - 1)
    digests = extend_digests(digest, packed)
    return PromptBlocks(packed, digests, hashes_of_digests(digests))


def _joined(parts: Seq[PromptBlocks]) -> PromptBlocks:
    """The blocks of a prompt, from consecutive parts of them."""
    return PromptBlocks(
        [block for part in parts for block in part.packed],
        [digest for part in parts for digest in part.digests],
        tuple(value for part in parts for value in part.hashes),
    )


def _first_block(first_id: int, tokens_per_block: int) -> bytes:
    """A packed block whose token ids are 0, except for the first one."""
    return pack((first_id,)) + _zeros(tokens_per_block)[ID_BYTES:]


@lru_cache(8)
def _zeros(tokens_per_block: int) -> bytes:
    """A packed block of zeros; all prompts share it."""
    return bytes(tokens_per_block * ID_BYTES)


class _MooncakeLine(msgspec.Struct):
    """A line of a Mooncake trace. `timestamp` is in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(file: Path, trace_format: str, wanted: Seq[bool] = (True,)) -> Iterator[TracedRequest | None]:
    """The requests of a trace in the order of the file. Raises ConfigError with the line for one that is malformed.

    `wanted`: for as many requests as it has elements, whether each is wanted, and again for the next ones. The others are None, and
    need not be well-formed.
    """
    if trace_format not in FORMATS:
        raise ConfigError(f"format={trace_format!r} is refused.", cure=f"Use one of: {', '.join(FORMATS)}.")
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            match trace_format:
                case "azure":
                    yield from _rows(file, lines, _AZURE, wanted)
                case "burstgpt":
                    yield from _rows(file, lines, _BURSTGPT, wanted)
                case _:
                    yield from _mooncake(file, lines, wanted)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace={file} cannot be read: {reason_of(error)}.", cure="Name a file of the trace.") from None


def _rows(file: Path, lines: Iterator[str], columns: tuple[str, str, str], wanted: Seq[bool]) -> Iterator[TracedRequest | None]:
    """The requests of a CSV file with columns for time, prompt tokens and generated tokens. Their prompts have nothing in common."""
    reader = csv.reader(lines)
    names = next(reader, [])
    if missing := [name for name in columns if name not in names]:
        raise ConfigError(f"trace={file} has no column {missing[0]}.", cure="Choose another --format.")
    time, prompt, output = map(names.index, columns)
    first: float | None = None
    turns = itertools.cycle(wanted)
    for number, row in enumerate(row for row in reader if row):
        try:
            at_s = _seconds(row[time])
            num_prompt, num_output = int(row[prompt]), int(row[output])
            _check(at_s, num_prompt, num_output)
        except (IndexError, ValueError) as error:
            problem = _wrong_value(names, row, columns) or str(error)
            raise ConfigError(f"{file}:{reader.line_num}: {problem}.", cure="Correct or remove the line.") from None
        if num_output:  # BurstGPT contains failed requests without an answer
            first = at_s if first is None else first
            yield TracedRequest(max(0.0, at_s - first), (number,), num_prompt, num_prompt, num_output) if next(turns) else None


def _wrong_value(names: list[str], row: list[str], columns: tuple[str, str, str]) -> str | None:
    """The first value of a line that is missing or malformed, with its column; None if each can be read."""
    readers: tuple[Callable[[str], float], ...] = (_seconds, int, int)
    for name, read, accepted in zip(columns, readers, ("a time", "a whole number", "a whole number"), strict=True):
        place = names.index(name)
        if place >= len(row):
            return f"the column {name} is missing"
        try:
            read(row[place])
        except ValueError:
            return f"{name}={row[place][:60]!r} is not {accepted}"
    return None


def _mooncake(file: Path, lines: Iterator[str], wanted: Seq[bool]) -> Iterator[TracedRequest | None]:
    """The requests of a JSON lines file, whose hash ids stand for blocks of 512 tokens."""
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    turns = itertools.cycle(wanted)
    for number, line in enumerate(lines):
        if line.isspace():
            continue
        if not next(turns):
            yield None
            continue
        try:
            request = decode(line)
            _check(request.timestamp, request.input_length, request.output_length)
            if len(request.hash_ids) * MOONCAKE_BLOCK < request.input_length:
                raise ValueError(f"{len(request.hash_ids)} hash ids are too few for {request.input_length} tokens")
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"{file}:{number + 1}: {error}.", cure="Correct or remove the line.") from None
        blocks, count = request.hash_ids, request.input_length
        yield TracedRequest(request.timestamp / 1000, blocks, MOONCAKE_BLOCK, count, max(1, request.output_length))


def _check(at_s: float, num_prompt: int, num_output: int) -> None:
    """Raise ValueError for values out of range."""
    if not 0 <= at_s < 1e12 or not 1 <= num_prompt <= 1 << 24 or not 0 <= num_output <= 1 << 24:
        raise ValueError(f"time {at_s}, {num_prompt} prompt tokens and {num_output} new tokens are out of range")


def _seconds(text: str) -> float:
    """A time in seconds: a number, or a date with a time. Fractions beyond microseconds are cut off."""
    try:
        return float(text)
    except ValueError:
        whole, dot, fraction = text.strip().partition(".")
        return datetime.fromisoformat(f"{whole}{dot}{fraction[:6].ljust(6, '0')}" if dot else whole).timestamp()
