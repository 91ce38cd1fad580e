"""A draft engine as a `DraftSource`: what is checked before it is loaded, and the memory that its caches and states need."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.base.errors import ConfigError
from stoker.engine.config import EngineConfig
from stoker.engine.config_file import CONFIG_FILE
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.layers.state_cache import StateCache, state_bytes
from stoker.runtime.worker.draft_batch import SpareBlocks, num_spare_blocks
from stoker.runtime.worker.drafter import Drafter, DraftSource
from stoker.runtime.worker.engine_drafter import EngineDrafter
from stoker.runtime.worker.memory import block_bytes, make_caches, num_verified_slots
from stoker.runtime.worker.recurrent_engine_drafter import RecurrentEngineDrafter

_TOKENIZER = "tokenizer.json"


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
        max_batch_size: int,
    ) -> None:
        """Load the weights. `num_positions`: the length of the longest sequence. `window`: an attention window. `max_batch_size`: the
        largest number of rows of a step. Raises EngineError."""
        self.engine, self.target, self.device, self.tree, self.num_drafts = engine, target, device, tree, len(tree)
        config = engine.config.model
        self.has_state, self._max_batch_size = config.has_state, max_batch_size
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
        spare = (num_rows + 1) * num_spare_blocks(self.tree.num_places, self._block_size) * self.block_bytes()
        config = self.engine.config.model
        slot = state_bytes(config, range(config.num_layers), 1, self.engine.dtype) if self.has_state else 0
        return spare + self._num_slots(num_rows) * slot

    def _num_slots(self, num_rows: int) -> int:
        """The number of slots of recurrent states: two for each row and for padding, and those of the tokens of a step with drafts."""
        return 2 * (num_rows + 1) + num_verified_slots(self._max_batch_size, self.num_drafts)

    def drafter(self, num_blocks: int, num_rows: int) -> Drafter:
        spare = SpareBlocks(num_blocks, num_rows, self.tree.num_places, self._block_size, self.device)
        config, states = self.engine.config.model, None
        if self.has_state:
            states = StateCache(config, range(config.num_layers), 1, self._num_slots(num_rows), self.engine.dtype, self.device)
        count = num_blocks + spare.blocks.numel()
        caches = make_caches(config, count, self._block_size, self.engine.kv_dtype, self.device, states=states)
        self.model.complete_caches(caches)
        num_ids = min(config.vocab_size, self.target.model.vocab_size)
        if states is None:
            return EngineDrafter(self.model, caches, spare, self.tree, num_ids)
        return RecurrentEngineDrafter(self.model, caches, spare, self.tree, num_ids, states)


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
    for engine in (draft, target):
        if engine.config.model.requires_whole_prompt:
            raise ConfigError(
                f"speculate={str(draft.path)!r} is refused: the tokens of a prompt of {engine.path} attend to later ones.",
                cure="Use --speculate ngram.",
            )
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
