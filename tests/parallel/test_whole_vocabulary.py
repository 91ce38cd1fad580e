"""The embedding and the head that a rank loads for draft heads equal those of an engine of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import GROUPED
from oracles import hf_model

from stoker.base.config import Limits, Mapping
from stoker.base.nodes import leader
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.distributed.pipeline import ALONE, Stage
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder
from stoker.runtime.heads.whole_vocabulary import whole_vocabulary

# With the number of tables of 101 tokens that the rank which samples loads, if the head is the embedding, and if it is not.
MAPPINGS = (
    (Mapping(), 0, 0),
    (Mapping(tensor_parallel=2), 1, 1),
    (Mapping(pipeline_parallel=2), 1, 1),
    (Mapping(tensor_parallel=2, pipeline_parallel=2), 1, 2),
)


class LastStage(Stage):
    """The second of two stages, without a link to the first."""

    index, num_stages = 1, 2


@pytest.mark.parametrize("tied", [False, True])
def test_parts_of_ranks_are_joined(tied: bool, tmp_path: Path, tokenizer: Path) -> None:
    """With 101 tokens, of which the second rank has one less."""
    hf_model("Llama", **GROUPED | {"vocab_size": 101, "tie_word_embeddings": tied}).save_pretrained(tmp_path / "hf")
    found = []
    for i, (mapping, *counts) in enumerate(MAPPINGS):
        config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=Limits(max_input_len=64), mapping=mapping)
        engine = Engine.open(build(tmp_path / "hf", tmp_path / str(i), config, verify="none").path)
        model = Decoder(engine.config.model, engine.loader(leader(mapping)), 64, LastStage() if mapping.pipeline_parallel > 1 else ALONE)
        embedding, head, num_bytes = whole_vocabulary(engine, model)
        assert num_bytes == counts[not tied] * 101 * model.config.hidden_size * 4
        x = torch.linspace(-1, 1, model.config.hidden_size)[None]
        found.append((embedding(torch.arange(101, dtype=torch.int32), torch.float32), head(x)))
    for embedded, logits in found[1:]:
        assert torch.equal(embedded, found[0][0])
        torch.testing.assert_close(logits, found[0][1])
