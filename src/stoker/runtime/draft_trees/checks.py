"""What models and drafters must have for trees of drafts."""

from __future__ import annotations

from pathlib import Path

from stoker.base.draft_tree import MAX_TREE_NODES, PARENT_SHIFT, DraftTree, DynamicTree
from stoker.base.errors import ConfigError
from stoker.core.model_config import AttentionConfig, ModelConfig


def check_ids(path: Path, tree: DraftTree | DynamicTree, num_ids: int) -> None:
    """Raise ConfigError if what drafts, in the directory `path`, has fewer than the tree's different tokens after one node, or too many
    tokens for a dynamic tree. `num_ids`: the size of its vocabulary."""
    if tree.max_rank >= num_ids:
        raise ConfigError(f"draft_tree has the rank {tree.max_rank}, and {path} drafts {num_ids} tokens.", cure="Use lower ranks.")
    if isinstance(tree, DynamicTree) and num_ids > 1 << PARENT_SHIFT:
        raise ConfigError(f"draft_tree is dynamic, and {num_ids} tokens are more than {1 << PARENT_SHIFT}.", cure="Use a list of paths.")


def check_tree(path: Path, model: ModelConfig, window: int | None) -> None:
    """Raise ConfigError if the attention of the model in an engine directory does not support trees.

    `window`: that of the runtime settings.
    """
    reason = None
    for layer in model.layers:
        attention = layer.attention
        windows = [size for size in (window, getattr(attention, "window", None)) if size is not None]
        if isinstance(attention, AttentionConfig) and (attention.chunk is not None or attention.alibi):
            reason = "has ALiBi" if attention.alibi else f"attends in chunks of {attention.chunk} tokens"
        elif windows and min(windows) <= MAX_TREE_NODES:
            reason = f"attends to a window of {min(windows)} tokens, and trees need more than {MAX_TREE_NODES}"
    if reason is not None:
        refused = f"draft_tree is refused: {model.architecture} of {path} {reason}."
        raise ConfigError(refused, cure="Leave draft_tree out: a chain is supported.")
