"""The model with token ids as input and output."""

from __future__ import annotations

import numpy as np

from stoker.base.errors import RequestError
from stoker.base.types import SamplingParams
from stoker.frontend.service import Service
from stoker.server.protocols.kserve.inference import Tensors
from stoker.server.protocols.kserve.models import sampling
from stoker.server.protocols.kserve.models.generating import GeneratingModel, PlannedRow
from stoker.server.protocols.kserve.models.results import SequencePart
from stoker.server.protocols.kserve.tensors.input_row import InputRow


class TensorrtLLM(GeneratingModel):
    """input_ids to output_ids [1, beams, tokens] and sequence_length [1, beams].

    output_ids contain the prompt unless it is excluded or the answer is streamed.
    """

    def plan(self, row: InputRow, service: Service) -> tuple[list[int], SamplingParams, list[tuple[int, ...]]]:
        """The first input_lengths of input_ids, their sampling parameters, and the stop words that have several tokens."""
        length = row.value("input_lengths", 0)
        if not 0 <= length <= row.size("input_ids"):
            raise RequestError("input_lengths", length, f"the row has {row.size('input_ids')} input_ids")
        if length > service.max_seq_len:
            raise RequestError("input_lengths", length, f"a sequence has at most {service.max_seq_len} tokens", cure="Shorten the prompt.")
        ids = row.ids("input_ids", length)
        if (lowest := min(ids, default=0)) < 0:
            raise RequestError("input_ids", lowest, "a token id is a whole number from 0")
        if (size := row.size("decoder_input_ids")) > 1:  # preprocessing sends one pad id
            raise RequestError("decoder_input_ids", f"{size} ids", "there is no encoder", cure="Leave it out.")
        params, stop_words = sampling.token_params(row, service, self._options)
        return ids, params, stop_words

    def tensors(self, planned: PlannedRow, parts: list[SequencePart], prompt_ids: list[int], service: Service) -> Tensors:
        """output_ids, padded to the longest beam, and the length of each beam."""
        rows = [[*prompt_ids, *part.token_ids] for part in parts]
        if len(rows) == 1:
            return {"output_ids": np.array([rows], np.int32), "sequence_length": np.array([[len(rows[0])]], np.int32)}
        lengths = [len(row) for row in rows]
        ids = np.full((1, len(rows), max(lengths)), planned.padding, np.int32)
        for beam, row in enumerate(rows):
            ids[0, beam, : len(row)] = row
        return {"output_ids": ids, "sequence_length": np.array([lengths], np.int32)}
