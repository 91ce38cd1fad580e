"""A draft engine: a second, smaller engine that drafts tokens for the first one, in the same executor.

After each step, the draft engine computes the tokens of the step and the newest token of each sequence in one pass, which yields the first
draft, and then one pass for each further draft of a chain, or for each further depth of a tree (`draft_trees/level_drafts.py`). A draft is
sampled with the parameters of the sequence and with the random number of its position. The model samples the same position with the same
number, so that both choose the same token where their distributions agree. The tokens are those of plain decoding with the same seed, and
so is their distribution.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.base.errors import ConfigError
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.engine.config import EngineConfig
from stoker.engine.reader import CONFIG_FILE, Engine
from stoker.layers.decoder import Decoder
from stoker.runtime.draft_trees.kinds import make_drafts
from stoker.runtime.draft_trees.level_drafts import DraftStep, LevelModel
from stoker.runtime.worker.accepted_batch import accepted_batch
from stoker.runtime.worker.draft_batch import SpareBlocks, num_spare_blocks, without_logits
from stoker.runtime.worker.drafter import Drafter, DraftInputs, DraftSource
from stoker.runtime.worker.memory import block_bytes, make_caches

_TOKENIZER = "tokenizer.json"


class EngineDrafter(Drafter, LevelModel):
    """Drafts with the model of an engine. Its caches have the blocks of the model that verifies, and spare blocks."""

    def __init__(self, model: Decoder, caches: list[KVCache], spare: SpareBlocks, tree: DraftTree | DynamicTree, num_ids: int) -> None:
        """`num_ids`: the smaller one of the vocabularies of both models. Larger ids are padding, which is never drafted."""
        self.model, self.caches, self.num_ids, self.block_size = model, caches, num_ids, spare.block_size
        self.num_drafts, self.is_tree = len(tree), not tree.is_chain
        self._spare, self._drafts, self._limit = spare, make_drafts(self, tree, model.device), model.config.max_positions

    def compute(self, inputs: DraftInputs) -> tuple[DraftStep, Tensor] | None:
        """Where drafts are computed, and the logits of the first ones; None if no sequence samples."""
        if not len(inputs.rows):
            self.catch_up(inputs.batch)
            return None
        batch, step = self._spare.first_pass(inputs, accepted_batch(inputs), self._limit)
        return step, self._logits(batch)

    def drafts(self, inputs: DraftInputs, computed: tuple[DraftStep, Tensor]) -> Iterator[Tensor]:
        step, logits = computed
        return self._drafts.drafts(inputs, step, logits.new_empty(len(logits), 0), logits)

    def compute_level(self, states: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """No states: the keys of the ancestors are all that a node needs. Nodes behind the last position are never verified."""
        batch.positions = batch.positions.clamp(max=self._limit - 1)
        if not batch.is_decode:
            batch.logits_idx = torch.arange(batch.num_tokens, dtype=torch.int32, device=states.device)
        return states.new_empty(batch.num_tokens, 0), self._logits(batch)

    def catch_up(self, batch: ForwardBatch) -> None:
        self._logits(without_logits(batch))

    def _logits(self, batch: ForwardBatch) -> Tensor:
        """Logits after a batch. Ids that the draft engine does not have are padding of the model's vocabulary; it reads another id."""
        batch.token_ids = batch.token_ids.clamp(max=self.model.config.vocab_size - 1)
        return self.model(batch, list(self.caches))[:, : self.num_ids]


class EngineSource(DraftSource):
    """The weights of a draft engine on the device."""

    name = "engine"
    catches_up = True

    def __init__(
        self,
        engine: Engine,
        target: EngineConfig,
        device: torch.device,
        num_positions: int,
        tree: DraftTree | DynamicTree,
        window: int | None,
    ) -> None:
        """Load the weights. `num_positions`: the length of the longest sequence. `window`: an attention window. Raises EngineError."""
        self.engine, self.target, self.device, self.tree, self.num_drafts = engine, target, device, tree, len(tree)
        config = engine.config.model
        self.model = Decoder(config if window is None else config.windowed(window), engine.loader(0, device), num_positions)
        self.num_bytes = engine.config.files["rank0.safetensors"].size if "rank0.safetensors" in engine.config.files else 0
        self.draft_bytes = max(self.num_bytes - self.model.lookup_bytes, 0)

    @property
    def _block_size(self) -> int:
        """The number of tokens of a block, which is that of the model."""
        return self.target.limits.tokens_per_block

    def block_bytes(self) -> int:
        return block_bytes(self.engine.config.model, self._block_size, self.engine.kv_dtype)

    def spare_bytes(self, num_rows: int) -> int:
        return (num_rows + 1) * num_spare_blocks(self.tree.num_places, self._block_size) * self.block_bytes()

    def drafter(self, num_blocks: int, num_rows: int) -> Drafter:
        spare = SpareBlocks(num_blocks, num_rows, self.tree.num_places, self._block_size, self.device)
        config = self.engine.config.model
        caches = make_caches(config, num_blocks + spare.blocks.numel(), self._block_size, self.engine.kv_dtype, self.device)
        self.model.complete_caches(caches)
        return EngineDrafter(self.model, caches, spare, self.tree, min(config.vocab_size, self.target.model.vocab_size))


def is_engine(path: Path) -> bool:
    """Whether a directory is an engine, and not a checkpoint."""
    try:
        with (path / CONFIG_FILE).open(encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "stoker_version" in found


def check_draft_engine(draft: Engine, target: Engine, device: torch.device, max_seq_len: int) -> None:
    """Raise ConfigError or EngineError unless `draft` can draft for `target` on `device`, with sequences of `max_seq_len` tokens."""
    draft.check_device(device)
    draft.check_rank(0)
    if draft.world_size != 1:
        raise ConfigError(
            f"speculate={str(draft.path)!r} is refused: a draft engine runs on one rank, and this one was built for {draft.world_size}.",
            cure="Build it with --tensor-parallel 1 --pipeline-parallel 1.",
        )
    if draft.config.model.has_state:
        raise ConfigError(
            f"speculate={str(draft.path)!r} is refused: its recurrent states cannot be taken back when a draft is rejected.",
            cure="Use a draft engine with attention in all layers.",
        )
    for engine in (draft, target):
        if engine.config.model.requires_whole_prompt:
            raise ConfigError(
                f"speculate={str(draft.path)!r} is refused: the tokens of a prompt of {engine.path} attend to later ones.",
                cure="Use --speculate ngram.",
            )
    if draft.config.model.has_state:
        limit = "the recurrent states of a draft engine cannot be taken back when a draft is rejected"
        raise ConfigError(f"speculate={str(draft.path)!r} is refused: {limit}.", cure="Use a draft engine without recurrent states.")
    if draft.config.model.max_positions < max_seq_len:
        positions = draft.config.model.max_positions
        raise ConfigError(
            f"speculate={str(draft.path)!r} is refused: it has {positions} positions, and sequences of {target.path} have {max_seq_len}.",
            cure=f"Build {target.path} with --max-total-len {positions}, or use another draft engine.",
        )
    _check_tokenizers(draft, target)


def _check_tokenizers(draft: Engine, target: Engine) -> None:
    """Raise ConfigError unless both engines give the same ids to the same tokens."""
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None:
        sizes = draft.config.model.vocab_size, target.config.model.vocab_size
        if sizes[0] != sizes[1]:
            raise _unfit(draft, f"its vocabulary has {sizes[0]} tokens, and that of {target.path} {sizes[1]}")
        return
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        raise _unfit(draft, f"its tokenizer has {len(theirs)} tokens, and that of {target.path} {len(ours)}")
    token = min(token for token, number in ours.items() if theirs.get(token) != number)
    raise _unfit(draft, f"token {token!r} has the id {theirs.get(token)} in its tokenizer, and {ours[token]} in that of {target.path}")


def _unfit(draft: Engine, reason: str) -> ConfigError:
    return ConfigError(
        f"speculate={str(draft.path)!r} is refused: {reason}.", cure="Use a draft engine of the same model family, with the same tokenizer."
    )


def _vocabulary(engine: Engine) -> dict[str, int] | None:
    """The ids of all tokens of an engine's tokenizer; None if the engine has no tokenizer.json."""
    file = engine.path / _TOKENIZER
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    found: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    return found
