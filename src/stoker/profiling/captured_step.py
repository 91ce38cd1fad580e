"""Measures one captured decode step: the replay of its CUDA graph, without the loop around it."""

from __future__ import annotations

import statistics

import numpy as np
import torch

from stoker.runtime.executor import Executor
from stoker.runtime.worker.cuda_graphs import CapturedStep, Graphs
from stoker.runtime.worker.inputs import Shape, split_buffer

REPLAYS = 30


def capture_step(executor: Executor, rows: int, context: int, drafts: int = 0) -> CapturedStep:
    """Capture a greedy decode of `rows` rows with `context` tokens and `drafts` draft tokens each, and fill its inputs.

    Discards the graphs that were captured before. The executor must run on a GPU with CUDA graphs.
    """
    graphs = executor.runner.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, Graphs)
    shape = Shape(rows * (1 + drafts), rows, is_decode=not drafts, max_drafts=drafts)
    graphs._captured.clear()
    graphs.capture(shape)
    fill_inputs(graphs, shape, context, executor.info.limits.tokens_per_block, executor.info.kv_cache_tokens)
    return graphs._captured[shape, True]


def replay_ms(captured: CapturedStep) -> float:
    """The median duration of a replay in milliseconds."""
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def fill_inputs(graphs: Graphs, shape: Shape, context: int, block_size: int, num_tokens: int) -> None:
    """Fill the static buffers of a graph: rows of `context` tokens in scattered blocks, each followed by its new tokens.

    `num_tokens`: the size of the KV cache, which must have room for all rows. Token ids are random, because equal ones would select the
    same experts.
    """
    rows, each = shape.rows, shape.tokens // shape.rows
    width = -(-(context + each) // block_size)
    tables = np.random.default_rng(0).permutation(num_tokens // block_size)[: rows * width].reshape(rows, width)
    positions = np.tile(np.arange(context, context + each), rows)
    owners = np.repeat(np.arange(rows), each)
    slots = tables[owners, positions // block_size] * block_size + positions % block_size
    ids = np.random.default_rng(1).integers(10, 30_000, shape.tokens)
    starts = np.arange(rows + 1) * each
    parts = [ids, positions, slots, starts, np.full(rows, context + each), np.arange(shape.tokens), owners, positions + 1]
    if shape.max_drafts:
        nodes = np.arange(each)
        parts += [starts, owners, np.arange(rows), np.tile(np.maximum(nodes - 1, 0), rows), np.tile((2 << nodes) - 1, rows).view(np.int32)]
    else:
        parts.append(np.arange(rows))  # slots of recurrent states, which drafts exclude
    for buffer, part in zip(split_buffer(graphs._static, tuple(map(len, parts))), parts, strict=True):
        buffer.copy_(torch.from_numpy(part.astype(np.int32)))
    graphs._tables[:rows, :width].copy_(torch.from_numpy(tables.astype(np.int32)))
