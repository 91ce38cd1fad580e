"""The groups of arguments of the attention kernels.

Named tuples of tensors and integers are runtime arguments; named tuples of plain Python values are passed as one `tl.constexpr` and
compiled in. Inside a kernel a field of the latter is a plain Python value: where Triton needs a constant (the shape of a tensor, an
argument that is None or a string), it is first bound to a local `NAME: tl.constexpr`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class NewTokens(NamedTuple):
    """Runtime: the keys and values of the tokens of a decode step, which are not in the cache yet. Strides are in elements.

    `head_features.HeadFeatures` are the constants that belong to them.
    """

    keys_ptr: Tensor  # [T, kv_heads, size], not yet normalized and rotated
    values_ptr: Tensor  # [T, kv_heads, value_size]
    positions_ptr: Tensor  # int32 [T]
    cos_sin_ptr: Tensor | None  # float32 [max_positions, 2 × half]: cosines, then sines
    slots_ptr: Tensor  # int32 [T]: block × block_size + place; -1 stores nowhere
    q_norm_ptr: Tensor | None  # [size]: the weight of the norm of each query head; None: no weight, or no norm
    k_norm_ptr: Tensor | None  # of each key head
    key_balance_ptr: Tensor | None  # float32 [kv_heads, 2, size]: factors of keys, of queries; None: no transform
    stride_key_token: int
    stride_key_head: int
    stride_value_token: int
    stride_value_head: int


class SplitScratch(NamedTuple):
    """Runtime: memory through which the splits of a query tile are combined (see `split_combine`). None: not used by this launch."""

    partial_ptr: Tensor | None  # float32 [tiles, num_splits, tile rows, value_size]: each split's normalized result
    lse_ptr: Tensor | None  # float32 [tiles, num_splits, tile rows]: its log2-sum-exp2 of the scores
    finished_ptr: Tensor  # int32 [..]: splits of a tile that have finished; zero between launches
    words_ptr: Tensor | None  # int64 [..]: results with flags; zero between launches


class HeadShape(NamedTuple):
    """Constants: the heads of a layer.

    The features of a head are processed in two parts, each padded to a power of two of at least 16 (80 = 64 + 16, 192 = 128 + 64,
    576 = 512 + 64), because the sides of a tile are powers of two: padding 80 features to 128 would load and multiply 60 % more.
    A second part of zero width is not compiled.
    """

    num_heads: int  # query heads
    group: int  # query heads per KV head (GQA)
    size: int  # features of a query or key head
    value_size: int  # features of a value head
    block_size: int  # tokens of a block of the cache
    part1: int
    part2: int
    value_part1: int
    value_part2: int


class QueryTile(NamedTuple):
    """Constants: the tile of one CTA. Its rows are the queries of `heads` query heads of one KV head, for `tokens` tokens of a sequence."""

    block_m: int  # rows, padded to a power of two of at least 16
    block_n: int  # keys per iteration
    heads: int
    tokens: int


class ScoreOptions(NamedTuple):
    """Constants: optional changes of the scores. None: absent."""

    softcap: float | None  # cap × tanh(score ÷ cap)
    window: int | None  # a query sees itself and window - 1 keys before it
    chunk: int | None  # a query sees keys of its own chunk of positions only


class TreePages(NamedTuple):
    """Runtime: the trees of draft tokens of a step (`core.forward_batch.TreeMask`)."""

    masks_ptr: Tensor  # int64 [T]
    starts_ptr: Tensor  # int32 [R]
    positions_ptr: Tensor  # int32 [T]: of the queries of trees


class TreeRows(NamedTuple):
    """The tree of the sequence of a query tile, of M rows."""

    start: Any  # the position of its first node; after all keys if the sequence has no tree
    masks: Any  # int64 [M]: bit i is set if the row attends to the key at `start` + i


class OperandFormat(NamedTuple):
    """Constants: the precision of matrix products, and how 8-bit operands are loaded and unpacked."""

    precision: str  # of tl.dot on float32: "tf32" or "tf32x3"
    pairs: str | None  # 8-bit cache read as int16 pairs of features: "e4m3" or "bytes"; see `paired_8bit`
    packed: bool  # True on a GPU: operands are unpacked, and keys prefetched, by inline PTX; False in the interpreter, which has none


class SplitShape(NamedTuple):
    """Constants of the combination of splits (see `split_combine`)."""

    power: int  # the number of splits rounded up to a power of two; 1: nothing is combined
    combine_rows: int  # rows that the last split combines at a time
    columns: int  # columns of a head that one split combines; 0: the last split combines everything


class HeadPages(NamedTuple):
    """The pages of one KV head of one sequence."""

    keys_ptr: Any  # the head's page in block 0
    values_ptr: Any  # likewise; None: the keys are the values
    means_ptr: Any  # the head's rows of `KVPages.key_mean_ptr`, or None
    stride_key_block: Any
    stride_value_block: Any
    block_table_ptr: Any  # the sequence's row of the block table


class SoftmaxState(NamedTuple):
    """The running softmax of a query tile (FlashAttention-2, arXiv 2307.08691), of M rows.

    Scores are multiplied by log2(e), so that exponentials are exp2. `highest` and `total` describe the keys so far:
    total = Σ exp2(score - highest), and acc = Σ exp2(score - highest) × value.
    """

    acc1: Any  # float32 [M, value_part1]
    acc2: Any  # float32 [M, value_part2]
    highest: Any  # float32 [M]
    total: Any  # float32 [M]


class TileOrigin(NamedTuple):
    """The position of a query tile: its heads and tokens."""

    kv_head: Any
    group_start: Any  # the first of its query heads within the group of `kv_head`
    first_token: Any  # the sequence's first query in q
    tile_start: Any  # the tile's first query within the sequence
    num_queries: Any  # of the sequence in this step


class TileRows(NamedTuple):
    """The M rows of a query tile. Row m is token m // TILE.heads and head m % TILE.heads of the tile."""

    token: Any  # int64 [M]: index in q and out
    head: Any  # int32 [M]: query head
    position: Any  # int32 [M]: of the query in its sequence
    inside: Any  # bool [M]: False for padding
