"""The tensors of one step as the model sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class ForwardBatch:
    """A step's flat token list. Decode rows (one token each) come first, then prefill chunks.

    T tokens of R rows; a row's queries are tokens query_starts[r] : query_starts[r + 1] and they sit at the end of
    its seq_lens[r] keys. All index tensors are int32 on the model's device, except token_ids and slots (int64 on the CPU path is
    accepted everywhere).
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, position of each token in its sequence
    slots: Tensor  # [T] int32, block_id * block_size + offset where each token's keys and values go; -1: nowhere (padding)
    query_starts: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32, keys each row attends to, its own queries included
    block_tables: Tensor  # [R, B] int32, block ids in order; entries past a row's length are undefined
    num_decodes: int  # rows 0 : num_decodes have exactly one query
    max_query_len: int  # longest row's queries
    max_seq_len: int  # an upper bound of seq_lens; in a captured graph, the bucket's bound
    logits_idx: Tensor | None = None  # [L] int32 tokens whose logits are wanted; None: the last of each row
    prefix_lens: Tensor | None = None  # [R] int32: prefix-LM models attend in both directions below this position
    block_positions: Tensor | None = None  # [T] int32: second position of 2-D position models
    shared: dict[str, object] = field(default_factory=dict)  # per-step values that layers compute once (masks, gather indices)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def is_decode(self) -> bool:
        """Every row has one token, and each wants its logits."""
        return self.num_decodes == self.num_rows


@dataclass(slots=True)
class KVCache:
    """One layer's share of the paged cache.

    keys [num_blocks, kv_heads, block_size, head_size] and values likewise (MLA: keys hold the rope part, then the latent; one head, and
    values is None). Quantized caches (int8, float8_e4m3fn) carry a scale a head, float32 [kv_heads]: real = stored × scale.

    With `key_balance`, float32 [kv_heads, 2, head_size], keys are stored in other coordinates, to which `ops.rope_store` takes queries too:
    attention sees the scores that it would see (`quant.keys`). With `key_mean` too, float32 [kv_heads, means, head_size] in units of the
    scale, the key at a position, but for the first, is stored less mean number position ÷ MEAN_TOKENS, which attention adds again.
    """

    keys: Tensor
    values: Tensor | None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    key_balance: Tensor | None = None  # what a head's keys, and the queries that see them, are multiplied by before they are spread
    key_mean: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values) if isinstance(t, torch.Tensor))
