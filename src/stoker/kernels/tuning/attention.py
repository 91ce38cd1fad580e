"""Attention tiles as data: an ordered list of rows, of which the first that matches a launch is used."""

from __future__ import annotations

from typing import Literal

import msgspec

from stoker.kernels.tuning.tiles import Stages, Warps

AttentionDtype = Literal["float32", "16-bit", "8-bit"]


class AttentionRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tile and the launches that it is for. A condition that is absent always holds."""

    op: Literal["decode", "prefill"]
    dtypes: tuple[AttentionDtype, ...]
    """float32 or 16-bit queries over a cache of that width; `8-bit`: 16-bit queries over an 8-bit cache."""

    block_n: Literal[16, 32, 64, 128]
    """Keys of a tile."""

    num_warps: Warps
    num_stages: Stages
    block_m: Literal[16, 32, 64, 128] | None = None
    """Query rows of a tile. None, for decodes: the heads that share a KV head, 16 or 32."""

    max_head_size: int | None = None
    max_rows: int | None = None
    """Query rows (tokens × heads that share a KV head) of the longest sequence."""

    tiles_below: int | None = None
    """The launch has fewer query tiles than this × the number of SMs."""

    tiles_above: int | None = None
    """The launch has more query tiles than this × the number of SMs."""

    def matches(self, op: str, dtype: str, head_size: int, rows: int, num_tiles: int, num_sms: int) -> bool:
        """Whether the row is for a launch of `num_tiles` query tiles of `rows` rows."""
        return (
            self.op == op
            and dtype in self.dtypes
            and (self.max_head_size is None or head_size <= self.max_head_size)
            and (self.max_rows is None or rows <= self.max_rows)
            and (self.tiles_below is None or num_tiles < self.tiles_below * num_sms)
            and (self.tiles_above is None or num_tiles > self.tiles_above * num_sms)
        )
