"""Checks the declared inputs and outputs of a model against the table of tensors."""

from __future__ import annotations

from stoker.deploy.deployment import Note
from stoker.deploy.syntax.pbtxt import Message, Scalar
from stoker.deploy.triton import ensemble
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.scalars import did_you_mean, flag_field, text_field, warn, warn_unfilled
from stoker.server.protocols.kserve.model_config import Tensor
from stoker.server.protocols.kserve.tensors.table import TENSORS, TensorRow

# dtype of the table → dtypes that a model may declare. v0.5 has unsigned counts and ids; logits and tables have the dtype of the engine.
_ALTERNATIVES = {"INT32": ("INT32", "UINT32"), "FP16": ("FP16", "FP32", "BF16"), "FP32": ("FP32", "FP16", "BF16")}


def read_tensors(file: ModelFile, side: str, notes: list[Note]) -> tuple[Tensor, ...]:
    """The declared inputs or outputs that Stoker supports. Only the first of several with the same name is used."""
    found: dict[str, Tensor] = {}
    for message in file.message.messages(side):
        tensor = read_tensor(file, message, side, notes)
        if tensor is not None and tensor.name in found:
            warn(notes, file, message.line, tensor.name, f"the {side} is declared twice; the first is used")
        elif tensor is not None:
            found[tensor.name] = tensor
    return tuple(found.values())


def read_tensor(file: ModelFile, message: Message, side: str, notes: list[Note]) -> Tensor | None:
    """One declared tensor, or None for an unknown optional one. Raises PlacedError."""
    rows = {name: row for row in TENSORS[file.kind or ""][side == "output"] for name in (row.name, row.renamed) if name}
    name = text_field(message, "name")
    if not name:
        raise file.error(message.line, f"an {side} has no name.", 'Write name: "…".')
    row = rows.get(name) or next((rows[role] for role in _connected(file, side, name) if role in rows), None)
    if row is not None:
        return _tensor(file, message, row, side, notes)
    _unknown(file, message, name, side, list(rows), notes)
    return None


def _connected(file: ModelFile, side: str, name: str) -> list[str]:
    """The v0.18 names of an ensemble's tensor, from the maps of its steps: v0.5 calls text_input INPUT_0."""
    steps = [step for scheduling in file.message.messages("ensemble_scheduling") for step in scheduling.messages("step")]
    entries = [entry for step in steps for entry in step.messages(f"{side}_map")]
    return [ensemble.role(side, text_field(entry, "key")) for entry in entries if text_field(entry, "value") == name]


def _unknown(file: ModelFile, message: Message, name: str, side: str, known: list[str], notes: list[Note]) -> None:
    """Warn about an unknown tensor. Raises PlacedError if it is a required input."""
    if side == "input" and not flag_field(file, message, "optional", notes):
        raise file.error(message.line, f"unknown required input {name!r} of {file.kind}.", did_you_mean(name, known))
    effect = "requests with it are refused" if side == "input" else "it is never sent"
    warn(notes, file, message.line, name, f"unknown {side}; {effect}. {did_you_mean(name, known)}")


def _tensor(file: ModelFile, message: Message, row: TensorRow, side: str, notes: list[Note]) -> Tensor:
    """The declared tensor. Raises PlacedError if it does not agree with the table."""
    scalar = message.scalar("data_type")
    dtype = row.dtype
    if scalar is not None and not scalar.unfilled:
        dtype = scalar.text.removeprefix("TYPE_")
    elif scalar is not None:
        warn_unfilled(notes, file, scalar, f"{row.name}.data_type", f"TYPE_{dtype}")
    if dtype not in _ALTERNATIVES.get(row.dtype, (row.dtype,)):
        raise file.error(message.line, f"{side} {row.name!r} has data_type TYPE_{dtype}.", f"Declare it TYPE_{row.dtype}.")
    return Tensor(
        name=text_field(message, "name"),
        dtype=dtype,
        dims=tuple(_dim(file, dim) for dim in message.scalars("dims")),
        optional=side == "input" and flag_field(file, message, "optional", notes),
        ragged=flag_field(file, message, "allow_ragged_batch", notes),
        scalar=any(not shape.scalars("shape") for shape in message.messages("reshape")),
        role=row.name,
    )


def _dim(file: ModelFile, scalar: Scalar) -> int:
    """One of the dims. Raises PlacedError for anything but -1 and whole numbers."""
    dim = scalar.text
    if not (dim == "-1" or (dim.isascii() and dim.isdigit() and len(dim) < 10 and int(dim) > 0)):
        raise file.error(scalar.line, f"dims contains {dim[:40]!r}.", "Use -1 or a whole number of at least 1.")
    return int(dim)
