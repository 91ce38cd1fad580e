"""The model of token ids."""

from __future__ import annotations

import numpy as np

from stoker.base.errors import RequestError
from stoker.base.types import SamplingParams
from stoker.frontend.service import Service
from stoker.server.protocols.kserve.inference import Tensors
from stoker.server.protocols.kserve.models import sampling
from stoker.server.protocols.kserve.models.generating import Generating, Planned
from stoker.server.protocols.kserve.models.results import Part
from stoker.server.protocols.kserve.tensors.row import Row


class TensorrtLLM(Generating):
    """input_ids in, output_ids out: [beams, tokens], with the prompt in front unless it is excluded or the answer is streamed."""

    own = ("output_ids", "sequence_length")

    def plan(self, row: Row, service: Service) -> tuple[list[int], SamplingParams, list[tuple[int, ...]]]:
        ids, length = row.ids("input_ids"), row.value("input_lengths", 0)
        if not 0 <= length <= len(ids):
            raise RequestError("input_lengths", length, f"the row has {len(ids)} input_ids")
        if len(row.ids("decoder_input_ids")) > 1:  # preprocessing sends the one pad id of a decoder without an encoder
            raise RequestError("decoder_input_ids", row.ids("decoder_input_ids"), "there is no encoder", cure="Leave it out.")
        params, stop_words = sampling.of_tokens(row, service, self._options)
        return ids[:length], params, stop_words

    def tensors(self, planned: Planned, parts: list[Part], prompt_ids: list[int], service: Service) -> Tensors:
        rows = [[*prompt_ids, *part.token_ids] for part in parts]
        if len(rows) == 1:
            return {"output_ids": np.array([rows], np.int32), "sequence_length": np.array([[len(rows[0])]], np.int32)}
        lengths = [len(row) for row in rows]
        ids = np.zeros((1, len(rows), max(lengths)), np.int32)
        for beam, row in enumerate(rows):
            ids[0, beam, : len(row)] = row
        return {"output_ids": ids, "sequence_length": np.array([lengths], np.int32)}
