"""The table of what drafts on the device. Its kinds are directories that `--speculate` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from stoker.base.config import MAX_DRAFT_TOKENS, PROPOSERS
from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.base.errors import ConfigError
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.runtime.draft_trees.checks import check_ids, check_tree
from stoker.runtime.heads.source import HeadSource, check_heads, has_heads, is_head_folder
from stoker.runtime.worker.draft_engine import EngineSource, check_draft_engine, is_engine
from stoker.runtime.worker.drafter import DraftSource


@dataclass(frozen=True, slots=True)
class DraftTask:
    """What a drafter is loaded for."""

    path: Path  # the directory that `--speculate` names
    target: Engine
    device: torch.device
    max_seq_len: int  # the longest sequence
    num_drafts: int  # the largest number of drafts per sequence
    window: int | None  # attend only to this number of most recent tokens
    max_batch_size: int  # the largest number of rows of a step
    tree: DraftTree | DynamicTree | None = None  # the tree of the drafts; None: a chain

    @property
    def shape(self) -> DraftTree | DynamicTree:
        """The tree, or the chain."""
        return self.tree or DraftTree.chain(self.num_drafts)


class DraftKind(NamedTuple):
    """A kind of directory: how it is recognized, what is checked before anything is loaded, and how it is loaded beside the model."""

    applies: Callable[[Path], bool]
    check: Callable[[DraftTask], None]
    load: Callable[[DraftTask, Decoder], DraftSource]


def _check_engine(task: DraftTask) -> None:
    draft, target = Engine.open(task.path), task.target
    check_draft_engine(draft, target, task.device, task.max_seq_len)
    if task.tree is not None:
        if draft.config.model.has_state:
            limit = f"the recurrent states of the draft engine {draft.path} follow one chain of drafts"
            raise ConfigError(f"draft_tree is refused: {limit}.", cure="Leave it out, and use draft_tokens.")
        for engine in (target, draft):
            check_tree(engine.path, engine.config.model, task.window)
        check_ids(task.path, task.tree, min(engine.config.model.vocab_size for engine in (target, draft)))


def _load_engine(task: DraftTask, model: Decoder) -> DraftSource:
    positions = task.max_seq_len + MAX_DRAFT_TOKENS + 1
    draft = Engine.open(task.path)
    return EngineSource(draft, task.target.config, task.device, positions, task.shape, task.window, task.max_batch_size)


def _check_heads(task: DraftTask) -> None:
    check_heads(task.path, task.target)
    if task.tree is not None:
        check_tree(task.target.path, task.target.config.model, task.window)


def _load_heads(task: DraftTask, model: Decoder) -> DraftSource:
    return HeadSource(task.path, task.target, model, task.max_seq_len, task.shape)


DRAFT_KINDS = {
    "engine": DraftKind(is_engine, _check_engine, _load_engine),
    "heads": DraftKind(has_heads, _check_heads, _load_heads),
}


def is_drafter(path: Path) -> bool:
    """Whether a directory can draft as it is. A checkpoint of a model cannot: an engine is built from it first."""
    return is_engine(path) or is_head_folder(path)


def draft_kind(path: Path) -> str:
    """The name of the kind of a directory. Raises ConfigError if it has none."""
    for name, kind in DRAFT_KINDS.items():
        if kind.applies(path):
            return name
    problem = "is not a directory" if not path.is_dir() else "is no engine, and has no weights of draft heads"
    cure = f"Use {', '.join(PROPOSERS)}, or the directory of a draft engine, which `stoker build` writes, or of draft heads."
    raise ConfigError(f"speculate={str(path)!r} {problem}.", cure=cure)


def check_drafter(task: DraftTask) -> None:
    """Raise ConfigError, EngineError or CheckpointError for a directory that cannot draft for the engine. Loads nothing."""
    DRAFT_KINDS[draft_kind(task.path)].check(task)


def load_drafter(task: DraftTask, model: Decoder) -> DraftSource:
    """Load the weights of a checked directory. `model` is the one that verifies. Raises the same errors as `check_drafter`."""
    return DRAFT_KINDS[draft_kind(task.path)].load(task, model)
