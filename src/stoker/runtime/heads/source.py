"""Draft heads as a `DraftSource`: what is checked before they are loaded, and the memory that their KV cache needs."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from stoker.base.config import MAX_DRAFT_TOKENS
from stoker.base.draft_tree import MAX_TREE_NODES, PARENT_SHIFT, DraftTree, DynamicTree
from stoker.base.errors import CheckpointError, ConfigError
from stoker.core.model_config import AttentionConfig, ModelConfig
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.quant.formats.dense import Dense
from stoker.runtime.heads.drafter import ParallelDrafter, RecurrentDrafter
from stoker.runtime.heads.folder import WEIGHT_FILES, HeadFolder
from stoker.runtime.heads.head import ParallelHead, RecurrentHead, Target
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
        if isinstance(tree, DynamicTree):
            _check_dynamic(path, self.head, model.config.vocab_size)
        elif isinstance(self.head, ParallelHead) and max(tree.depths) > self.head.num_drafts:
            if not tree.is_chain:
                limit = f"draft_tree is {max(tree.depths)} tokens deep, and {path} has {self.head.num_drafts} heads"
                raise ConfigError(f"{limit}.", cure="Leave out the paths that are longer than the number of heads.")
            tree = tree.prefix(self.head.num_drafts)
        _check_ranks(path, tree, self.head.target_ids, model.config.vocab_size)
        self.tree, self.num_drafts = tree, len(tree)
        self.num_bytes, self.draft_bytes = self.head.num_bytes + num_bytes, self.head.draft_bytes
        self.engine, self.model = engine, model
        self.layers = self.head.layers if isinstance(self.head, RecurrentHead) else ()
        self.name = kind_of(HeadFolder.open(path))

    @property
    def _block_size(self) -> int:
        """The number of tokens of a block, which is that of the model."""
        return self.engine.config.limits.tokens_per_block

    @property
    def _num_places(self) -> int:
        """The number of keys that the head stores after the last valid one of a sequence, or more."""
        return max(self.num_drafts, self.tree.num_expanded) if isinstance(self.tree, DynamicTree) else self.num_drafts

    def block_bytes(self) -> int:
        """The heads' KV cache has the engine's dtype, also if that of the model is quantized."""
        return 0 if isinstance(self.head, ParallelHead) else block_bytes(self.head.config, self._block_size, self.engine.dtype)

    def spare_bytes(self, num_rows: int) -> int:
        return (num_rows + 1) * num_spare_blocks(self._num_places, self._block_size) * self.block_bytes()

    def drafter(self, num_blocks: int, num_rows: int) -> Drafter:
        if isinstance(self.head, ParallelHead):
            assert isinstance(self.tree, DraftTree)
            return ParallelDrafter(self.model, self.head, self.tree)
        spare = SpareBlocks(num_blocks, num_rows, self._num_places, self._block_size, self.model.device)
        config, count = self.head.config, num_blocks + spare.blocks.numel()
        caches = make_caches(config, count, self._block_size, self.engine.dtype, self.model.device)
        return RecurrentDrafter(self.model, self.head, caches, spare, self.tree)


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


def _check_dynamic(path: Path, head: ParallelHead | RecurrentHead, vocab_size: int) -> None:
    """Raise ConfigError if heads or a vocabulary do not support dynamic trees."""
    if isinstance(head, ParallelHead):
        limit = f"draft_tree is dynamic, and {path} has Medusa heads, which draft static trees"
        raise ConfigError(f"{limit}.", cure="Use a list of paths, or mc_sim_7b_63.")
    if vocab_size > 1 << PARENT_SHIFT:
        raise ConfigError(f"draft_tree is dynamic, and {vocab_size} tokens are more than {1 << PARENT_SHIFT}.", cure="Use a list of paths.")


def _check_ranks(path: Path, tree: DraftTree | DynamicTree, target_ids: Tensor | None, vocab_size: int) -> None:
    """Raise ConfigError or CheckpointError if heads cannot draft as many different tokens as the tree has after one node."""
    size = vocab_size if target_ids is None else len(target_ids)
    rank = tree.width - 1 if isinstance(tree, DynamicTree) else max(tree.ranks)
    if rank >= size:
        raise ConfigError(f"draft_tree has the rank {rank}, and the heads of {path} have {size} tokens.", cure="Use lower ranks.")
    if target_ids is not None and rank > 0 and len(target_ids.unique()) != size:
        raise CheckpointError(f"{path}: ids of the draft vocabulary occur twice, and a tree needs different ones.", cure="Use a chain.")


def check_tree(model: ModelConfig, window: int | None) -> None:
    """Raise ConfigError if the attention of a model does not support trees of drafts. `window`: that of the runtime settings."""
    reason = None
    for layer in model.layers:
        attention = layer.attention
        windows = [size for size in (window, getattr(attention, "window", None)) if size is not None]
        if isinstance(attention, AttentionConfig) and (attention.chunk is not None or attention.alibi):
            reason = "has ALiBi" if attention.alibi else f"attends in chunks of {attention.chunk} tokens"
        elif windows and min(windows) <= MAX_TREE_NODES:
            reason = f"attends to a window of {min(windows)} tokens, and trees need more than {MAX_TREE_NODES}"
    if reason is not None:
        raise ConfigError(f"draft_tree is refused: {model.architecture} {reason}.", cure="Leave draft_tree out: a chain is supported.")
