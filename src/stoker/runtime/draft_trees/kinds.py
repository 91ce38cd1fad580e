"""Creates the object that drafts trees of one kind."""

from __future__ import annotations

import torch

from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.runtime.draft_trees.dynamic_drafts import DynamicDrafts
from stoker.runtime.draft_trees.level_drafts import LevelDrafts, LevelModel, StaticDrafts


def make_drafts(model: LevelModel, tree: DraftTree | DynamicTree, device: torch.device) -> LevelDrafts:
    """Drafts of the form of `tree` with `model`."""
    return DynamicDrafts(model, tree, device) if isinstance(tree, DynamicTree) else StaticDrafts(model, tree, device)
