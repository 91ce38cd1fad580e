"""Combining the responses of several rows: as they arrive, or all in one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np

from stoker.server.protocols.kserve.inference import TEXT, Response, Responses

_PADDED_WITH_ID = ("output_ids",)


async def merge_responses(streams: Sequence[Responses]) -> Responses:
    """The responses of all rows as they arrive. The last one is final. The first error cancels all rows and is raised."""
    arrived: asyncio.Queue[list[Response] | Exception] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(stream, arrived)) for stream in streams]
    left = len(tasks)
    try:
        while left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            for response in item:
                left -= response.final
                response.final = not left
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(stream: Responses, arrived: asyncio.Queue[list[Response] | Exception]) -> None:
    """Put the responses of one row into the queue as they arrive, or the exception that ends them."""
    try:
        async with aclosing(stream) as batches:
            async for batch in batches:
                arrived.put_nowait(batch)
    except Exception as error:
        arrived.put_nowait(error)


async def gather_responses(stream: Responses, pad_id: int) -> Responses:
    """One response with all rows along axis 0 and the sequences of a row along axis 1. text_output has one axis with all of them.

    An output that only some of the rows have is left out.
    """
    async with aclosing(stream) as batches:
        responses = [response async for batch in batches for response in batch]
    for response in responses:
        response.outputs, response.text = response.tensors(), None
    rows: dict[int, list[Response]] = {}
    for response in responses:
        rows.setdefault(response.row, []).append(response)
    ordered = [sorted(rows[row], key=lambda response: response.index) for row in sorted(rows)]
    common = [name for name in responses[0].outputs if all(name in response.outputs for response in responses)]
    outputs = {name: _concatenate_output(name, ordered, pad_id) for name in common}
    yield [Response(outputs=outputs, parameters=responses[-1].parameters, final=True)]


def _concatenate_output(name: str, rows: list[list[Response]], pad_id: int) -> np.ndarray:
    """One output of all responses. `rows` holds the responses of each row; `pad_id` pads token ids."""
    pad = pad_id if name in _PADDED_WITH_ID else 0
    if name in ("batch_index", "sequence_index"):
        return _stack([row[0].outputs[name] for row in rows], 0, pad)
    if name == TEXT:
        return _stack([response.outputs[name] for row in rows for response in row], 0, pad)
    return _stack([_stack([response.outputs[name] for response in row], 1, pad) for row in rows], 0, pad)


def _stack(arrays: list[np.ndarray], axis: int, pad: int) -> np.ndarray:
    """Concatenate along `axis`. Smaller arrays are padded at the end of all other axes."""
    if len(arrays) == 1:
        return arrays[0]
    shape = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    shape[axis] = sum(array.shape[axis] for array in arrays)
    result = np.full(shape, b"" if arrays[0].dtype == object else pad, arrays[0].dtype)
    at = 0
    for array in arrays:
        place = [slice(0, size) for size in array.shape]
        place[axis] = slice(at, at + array.shape[axis])
        result[tuple(place)] = array
        at += array.shape[axis]
    return result
