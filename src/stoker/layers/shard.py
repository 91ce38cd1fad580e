"""How declared weights are split over tensor-parallel ranks. Pure arithmetic on specs."""

from __future__ import annotations

import msgspec

from stoker.base.errors import ConfigError
from stoker.layers.specs import LinearSpec, TensorSpec


def local_spec(spec: LinearSpec, size: int) -> LinearSpec:
    """The spec of one rank's share of `spec` among `size` ranks."""
    if size == 1 or spec.split == "none":
        return spec
    if spec.split in ("row", "row_heads"):
        return msgspec.structs.replace(spec, in_features=_share(spec.name, spec.in_features, size))
    return msgspec.structs.replace(spec, parts=tuple(_share(spec.name, rows, size) for rows in spec.parts))


def local_shape(spec: TensorSpec, size: int) -> tuple[int, ...]:
    """The shape of one rank's share of a plain tensor."""
    if size == 1 or spec.split == "none":
        return spec.shape
    return (_share(spec.name, spec.shape[0], size), *spec.shape[1:])


def _share(name: str, rows: int, size: int) -> int:
    if rows % size:
        raise ConfigError(f"{name} has {rows} rows, which {size} ranks cannot share.", cure="Use a tensor_parallel that divides them.")
    return rows // size
