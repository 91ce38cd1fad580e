"""The interfaces of heads, and what they share with the model whose tokens they draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import ModelConfig
from stoker.layers.decoder import Decoder
from stoker.layers.vocabulary import Embedding, Head


@dataclass(frozen=True, slots=True)
class Target:
    """The model whose tokens are drafted. Heads use its embedding, its final norm and its output head."""

    model: Decoder
    num_positions: int  # the longest sequence
    quantized: bool  # whether the engine's linears are quantized
    embedding: Embedding  # of all tokens
    head: Head  # of the whole vocabulary

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings [T, hidden] of int32 `token_ids` [T]."""
        return self.embedding(token_ids, self.model.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [T, vocab] of states that were normalized already."""
        return self.head(x)


class ParallelHead(ABC):
    """Heads that compute all drafts from one state after the final norm, such as Medusa's. They have no KV cache."""

    num_drafts: int  # the number of heads
    num_bytes: int  # size of the loaded linears
    draft_bytes: int  # size of the weights that one draft reads
    target_ids: Tensor | None  # int32 [draft vocabulary], the ids of the model; None: logits have the vocabulary of the model

    @abstractmethod
    def logits(self, i: int, x: Tensor) -> Tensor:
        """Logits [S, draft vocabulary] of draft i after the newest token, from the states `x` [S, hidden] of the token before it."""


class RecurrentHead(ABC):
    """A head that drafts one token after another, with layers and a KV cache of its own.

    At each position it reads a hidden state and the embedding of the following token. Its output is the hidden state of the next draft.
    """

    config: ModelConfig  # of its layers, as of a model that consists of them
    target_ids: Tensor | None = None  # int32 [draft vocabulary], the ids of the model; None: logits have the vocabulary of the model
    num_bytes: int  # size of the loaded linears and embedding, without those of the model
    draft_bytes: int  # size of the weights that one draft reads, with the output head
    layers: tuple[int, ...] = ()  # the model layers before which it reads the hidden states; empty: after the final norm

    @abstractmethod
    def begin(self, x: Tensor) -> Tensor:
        """States [T, hidden] from those of the model: [T, hidden], or [T, len(layers) × hidden] of several layers."""

    @abstractmethod
    def __call__(self, x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        """The output [T, hidden] from states `x` [T, hidden] and the following tokens, which are `batch.token_ids`."""

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Logits [S, draft vocabulary] of the tokens after the outputs `x` [S, hidden]."""


def check_equal(path: object, what: str, found: int, expected: int) -> None:
    """Raise ConfigError if a size of heads differs from that of the model."""
    if found != expected:
        raise ConfigError(
            f"{path} does not fit: the {what} of its heads is {found}, and that of the model is {expected}.",
            cure="Use heads that were trained for this model.",
        )
