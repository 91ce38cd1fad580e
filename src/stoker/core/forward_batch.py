"""The input of one forward pass, and the KV cache of one layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class RankCounts(NamedTuple):
    """The sizes of the parts of a step that the data-parallel ranks compute, by rank. Each has at least one token, if only padding."""

    tokens: tuple[int, ...]
    logits: tuple[int, ...]  # tokens whose logits are computed
    sampled: tuple[int, ...]  # those of them that are sampled, which come first; the others are tokens of prompts


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Which keys the tokens of draft trees attend to.

    The keys of row r from position starts[r] on are those of its tree, in the order of its nodes. A token of the row attends to all keys
    before it, and to the nodes whose bits are set in its mask: itself and its ancestors. In these rows, `ForwardBatch.positions` is
    starts[r] + the depth of the node, and differs from the position at which its key is stored.
    """

    masks: Tensor  # [T] int64; read for the tokens of trees only
    starts: Tensor  # [R] int32; NO_TREE for a row without a tree, which attends causally


NO_TREE = 2**31 - 1


class VerifiedRows(NamedTuple):
    """The rows of a step that verify draft tokens. They follow the rows with one token."""

    num_rows: int  # including padding, which has no tokens
    num_tokens: int
    max_tokens: int  # upper bound of the tokens of a row


@dataclass(slots=True)
class ForwardBatch:
    """The T tokens of a step, which belong to R rows. Rows with one token come first, then prefill chunks.

    The tokens of row r are query_starts[r] : query_starts[r + 1]. They are the last ones of the seq_lens[r] tokens that the row attends to.
    All index tensors are int32 on the model's device; on the CPU, token_ids and slots may be int64.
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, position of each token in its sequence
    slots: Tensor  # [T] int32, where keys and values are stored: block_id * block_size + offset; -1: nowhere (padding)
    query_starts: Tensor  # [R + 1] int32, index of the first token of each row, and T
    seq_lens: Tensor  # [R] int32, number of keys that each row attends to, including those of this step
    block_tables: Tensor  # [R, B] int32, block ids in order; entries beyond the length of a row are undefined
    num_decodes: int  # rows 0 : num_decodes have exactly one token
    max_query_len: int  # largest number of tokens of a row
    max_seq_len: int  # upper bound of seq_lens; in a captured graph, that of its bucket
    logits_idx: Tensor | None = None  # [L] int32, tokens whose logits are computed; None: the last token of each row
    prefix_lens: Tensor | None = None  # [R] int32, prefix LM: tokens below this position attend in both directions
    block_positions: Tensor | None = None  # [T] int32, prefix LM: the second position of each token
    state_slots: Tensor | None = None  # [R] int32, slot of each row in the recurrent states; None: the model has none
    verified: VerifiedRows | None = None  # None: no row verifies drafts
    tree: TreeMask | None = None  # None: no row has a tree
    adapter_ids: Tensor | None = None  # [T] int32, the low-rank adapter of each token; -1: none. None: no token has an adapter
    split_tokens: Tensor | None = None  # int32 [1], the least tokens of a split of a decode row, chosen for seq_lens; None: not chosen
    # A captured step with prompts has any number of rows up to R, which is on the device:
    decode_count: Tensor | None = None  # int32 [1], the number of decodes, while num_decodes is 0; None: num_decodes is valid
    row_count: Tensor | None = None  # int32 [1], the number of rows before those of padding, which have no tokens; None: R
    ranks: RankCounts | None = None  # of the step on all data-parallel ranks; None: there is only one
    shared: dict[str, object] = field(default_factory=dict)  # values that one layer computes for all layers (masks, indices)

    @property
    def num_tokens(self) -> int:
        """The number T of tokens."""
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        """The number R of rows."""
        return self.seq_lens.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether every row has exactly one token."""
        return self.num_decodes == self.num_rows


@dataclass(slots=True)
class LayerState:
    """The recurrent states of one layer, for each slot: that of the convolution, and that of the recurrence.

    A row whose first token is the first of its sequence does not read the state of its slot, whatever the slot contains.

    A row that verifies drafts (`ForwardBatch.verified`) does not replace the state of its slot, because drafts may be rejected: the state
    after token t of the step is stored in slot -1 - t, counted from the end.
    """

    conv: Tensor  # [slots, channels, kernel - 1], the last inputs of the convolution, in the model's dtype
    recurrent: Tensor  # float32 [slots, heads, …], see `StateConfig.state_shape`


@dataclass(slots=True)
class KVCache:
    """The paged KV cache of one layer.

    `keys` and `values` are [num_blocks, kv_heads, block_size, head_size]. For MLA there is one head, `keys` holds the rotary part and then
    the latent, and `values` is None. A quantized cache (int8, float8_e4m3fn) has scales, float32 [kv_heads]: real = stored × scale.

    `key_balance`, float32 [kv_heads, 2, head_size], if present, multiplies keys ([:, 0]) and queries ([:, 1]) before both are transformed
    by the same orthonormal matrix, which leaves their products unchanged and spreads large features over others (`quant.key_spreading`).

    `key_mean`, float32 [kv_heads, means, head_size] in units of the scale, if present, is subtracted from stored keys, and attention adds
    the product of each query with it. The key at position p uses mean p // MEAN_TOKENS; the first key of a sequence is stored unchanged.
    """

    keys: Tensor
    values: Tensor | None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    key_balance: Tensor | None = None
    key_mean: Tensor | None = None
    state: LayerState | None = None  # of a layer with a recurrent state; its keys have no heads

    @property
    def block_size(self) -> int:
        """The number of token positions of one block."""
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        """The size of keys and values in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values) if isinstance(t, torch.Tensor))
