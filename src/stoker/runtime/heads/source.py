"""Draft heads as a `DraftSource`: what is checked before they are loaded, and the memory that their KV cache needs."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from stoker.base.config import MAX_DRAFT_TOKENS
from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.base.errors import CheckpointError, ConfigError
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.quant.formats.dense import Dense
from stoker.runtime.draft_trees.checks import check_ids
from stoker.runtime.heads.drafter import ParallelDrafter, RecurrentDrafter
from stoker.runtime.heads.folder import WEIGHT_FILES, HeadFolder
from stoker.runtime.heads.head import ParallelHead, RecurrentHead, Target
from stoker.runtime.heads.head_passes import HeadPasses
from stoker.runtime.heads.kinds import kind_of, load_heads
from stoker.runtime.heads.whole_vocabulary import whole_vocabulary
from stoker.runtime.worker.draft_batch import SpareBlocks, num_spare_blocks
from stoker.runtime.worker.drafter import Drafter, DraftSource
from stoker.runtime.worker.memory import block_bytes, make_caches


class HeadSource(DraftSource):
    """Heads in the memory of the device."""

    catches_up = False  # heads need the hidden states of the model, which only the step has

    def __init__(self, path: Path, engine: Engine, model: Decoder, max_seq_len: int, tree: DraftTree | DynamicTree) -> None:
        """Load the heads in a directory for the model of an engine. Raises CheckpointError, or ConfigError if they do not fit.

        A chain that is longer than the number of parallel heads is cut.
        """
        is_quantized = not isinstance(engine.config.recipe.default, Dense)
        embedding, output, num_bytes = whole_vocabulary(engine, model)
        self.head = load_heads(path, Target(model, max_seq_len + MAX_DRAFT_TOKENS + 1, is_quantized, embedding, output))
        if isinstance(self.head, ParallelHead):
            tree = _parallel_tree(path, self.head, tree)
        check_ids(path, tree, model.config.vocab_size if self.head.target_ids is None else len(self.head.target_ids))
        _check_distinct(path, tree, self.head.target_ids)
        self.tree, self.num_drafts = tree, len(tree)
        self.num_bytes, self.draft_bytes = self.head.num_bytes + num_bytes, self.head.draft_bytes
        self.engine, self.model = engine, model
        self.layers = self.head.layers if isinstance(self.head, RecurrentHead) else ()
        self.name = kind_of(HeadFolder.open(path))

    @property
    def _block_size(self) -> int:
        """The number of tokens of a block, which is that of the model."""
        return self.engine.config.limits.tokens_per_block

    def block_bytes(self) -> int:
        """The heads' KV cache has the engine's dtype, also if that of the model is quantized."""
        return 0 if isinstance(self.head, ParallelHead) else block_bytes(self.head.config, self._block_size, self.engine.dtype)

    def spare_bytes(self, num_rows: int) -> int:
        return (num_rows + 1) * num_spare_blocks(self.tree.num_places, self._block_size) * self.block_bytes()

    def drafter(self, num_blocks: int, num_rows: int) -> Drafter:
        if isinstance(self.head, ParallelHead):
            return ParallelDrafter(self.model, self.head, self.tree)
        spare = SpareBlocks(num_blocks, num_rows, self.tree.num_places, self._block_size, self.model.device)
        config, count = self.head.config, num_blocks + spare.blocks.numel()
        caches = make_caches(config, count, self._block_size, self.engine.dtype, self.model.device)
        return RecurrentDrafter(self.model, HeadPasses(self.head, caches, spare, self.model.config.vocab_size), self.tree)


def has_heads(path: Path) -> bool:
    """Whether a directory has files of weights, and is then checked for draft heads."""
    return path.is_dir() and any(file for pattern in WEIGHT_FILES for file in path.glob(pattern))


def is_head_folder(path: Path) -> bool:
    """Whether a directory has draft heads of a known kind. False for a checkpoint of a model."""
    try:
        kind_of(HeadFolder.open(path))
    except CheckpointError:
        return False
    return True


def check_heads(path: Path, engine: Engine) -> None:
    """Raise CheckpointError or ConfigError unless a directory has draft heads of a known kind, and the engine can have heads."""
    kind_of(HeadFolder.open(path))
    model = engine.config.model
    if model.requires_whole_prompt or model.embed_size is not None or model.altup is not None:
        kind = "has several residual streams" if model.altup is not None else "is a prefix LM, or projects its embeddings"
        raise ConfigError(
            f"speculate={str(path)!r} is refused: {model.architecture} {kind}.",
            cure="Use --speculate ngram.",
        )


def _parallel_tree(path: Path, head: ParallelHead, tree: DraftTree | DynamicTree) -> DraftTree | DynamicTree:
    """The tree of parallel heads, of which a chain is cut to the number of heads. Raises ConfigError for one that is too deep."""
    if not tree.is_chain and tree.max_depth > head.num_drafts:
        limit = f"draft_tree is {tree.max_depth} tokens deep, and {path} has {head.num_drafts} heads"
        raise ConfigError(f"{limit}.", cure="Use a tree that is at most as deep as the number of heads.")
    return tree.prefix(head.num_drafts) if tree.is_chain else tree


def _check_distinct(path: Path, tree: DraftTree | DynamicTree, target_ids: Tensor | None) -> None:
    """Raise CheckpointError if heads can draft the same token twice after one node of the tree."""
    if target_ids is not None and tree.max_rank > 0 and len(target_ids.unique()) != len(target_ids):
        raise CheckpointError(f"{path}: ids of the draft vocabulary occur twice, and a tree needs different ones.", cure="Use a chain.")
