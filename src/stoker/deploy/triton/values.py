"""Value types of `parameters` in a config.pbtxt, where all values are text."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.draft_tree import parse_tree
from stoker.base.errors import ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import Choice, Flag, Real, Text, Whole
from stoker.base.nodes import MAX_NODES

TEXT = Text()
WHOLE = Whole(0, (1 << 63) - 1)
NUMBER = Real(-1e12, 1e12)
BOOLEAN = Flag({"True": True, "true": True, "TRUE": True, "1": True, "False": False, "false": False, "FALSE": False, "0": False}, True)
# The spellings of Python's strtobool, which the BLS model uses.
STRTOBOOL = Flag(
    {"true": True, "yes": True, "1": True, "t": True, "y": True, "on": True}
    | {"false": False, "no": False, "0": False, "f": False, "n": False, "off": False}
)
MAX_DEVICES = 1024
LOOKAHEAD = "lookahead"  # speculative decoding by prompt lookup
DRAFT_HEAD_MODES = ("medusa", "eagle")  # heads in the folder DRAFT_HEADS of the engine
DRAFT_HEADS = "draft_heads"


class GptModelType(msgspec.Struct, frozen=True):
    """A batching strategy. The error contains the words of tensorrtllm_backend, which programs search for."""

    names: tuple[str, ...]

    def check(self, value: Any) -> str:
        if value not in self.names:
            raise InvalidValueError(value, f"Invalid gpt_model_type; it must be one of {', '.join(self.names)}")
        return str(value)

    def parse(self, text: str) -> str:
        return self.check(text)


class DecodingMode(Choice, frozen=True):
    """A decoding mode; one that needs a recurrent drafter has its own error."""

    def check(self, value: Any) -> Any:
        if value == "redrafter":
            raise InvalidValueError(
                value, "recurrent drafters of this kind are not served", cure=f"Use one of: {', '.join(self.meanings)}."
            )
        return super().check(value)


class AttentionWindow(msgspec.Struct, frozen=True):
    """One attention window in tokens, or a list with one per layer in which all are equal."""

    def check(self, value: Any) -> int:
        sizes = {WHOLE.parse(part) for part in str(value).split(",")}
        if len(sizes) > 1:
            raise InvalidValueError(value, "windows that differ by layer are read from the config of the model", cure="Set one size.")
        return int(sizes.pop())

    def parse(self, text: str) -> int:
        return self.check(text)


class DeviceIndices(msgspec.Struct, frozen=True):
    """Indices of the visible devices that one model instance uses, separated by commas, such as "0,1"."""

    def check(self, value: Any) -> tuple[int, ...]:
        """The indices as a tuple. Raises InvalidValueError for text that is not a list of different indices below MAX_DEVICES."""
        text = str(value)
        if ";" in text:
            cure = "Name the devices of one instance, and start a server for each further one."
            raise InvalidValueError(value, "a repository runs one instance", cure=cure)
        ids = tuple(int(WHOLE.parse(part)) for part in text.split(","))
        if len(set(ids)) != len(ids) or len(ids) > MAX_DEVICES or max(ids) >= MAX_DEVICES:
            raise InvalidValueError(value, f"it must be different devices below {MAX_DEVICES}")
        return ids

    def parse(self, text: str) -> tuple[int, ...]:
        """The indices in the text, as `check` returns them."""
        return self.check(text)


class ParticipantIds(msgspec.Struct, frozen=True):
    """The processes of an MPI or Slurm job that hold ranks, separated by commas, such as "0,1"."""

    def check(self, value: Any) -> tuple[int, ...]:
        """The ids as a tuple. Raises InvalidValueError for text that is not a list of different ids below MAX_NODES."""
        ids = tuple(int(WHOLE.parse(part)) for part in str(value).split(","))
        if len(set(ids)) != len(ids) or max(ids) >= MAX_NODES:
            raise InvalidValueError(value, f"it must be different ids of processes below {MAX_NODES}")
        return ids

    def parse(self, text: str) -> tuple[int, ...]:
        """The ids in the text, as `check` returns them."""
        return self.check(text)


class DraftChoices(msgspec.Struct, frozen=True):
    """The paths of a draft tree, such as {0},{0,0},{1}, or the name of a tree."""

    def check(self, value: Any) -> str:
        try:
            parse_tree(str(value))
        except ConfigError as error:
            raise InvalidValueError(value, error.message.replace("draft_tree=", "the tree ").rstrip("."), cure=error.cure) from None
        return str(value)

    def parse(self, text: str) -> str:
        return self.check(text)


def decoding_mode(*names: str) -> DecodingMode:
    """The type of a value that is one of these decoding modes."""
    return DecodingMode({name: name for name in names}, exact_case=True)
