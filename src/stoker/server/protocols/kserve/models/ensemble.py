"""The models with text input and output: the ensemble, which runs as one step, and tensorrt_llm_bls."""

from __future__ import annotations

from stoker.base.types import Delta, SamplingParams
from stoker.frontend.service import Service
from stoker.server.protocols.kserve.inference import Tensors
from stoker.server.protocols.kserve.models import sampling
from stoker.server.protocols.kserve.models.generating import GeneratingModel, PlannedRow
from stoker.server.protocols.kserve.models.results import SequencePart
from stoker.server.protocols.kserve.tensors.dtypes import text_array
from stoker.server.protocols.kserve.tensors.input_row import InputRow


class Ensemble(GeneratingModel):
    """text_input to text_output [beams]. The service tokenizes and detokenizes, so no tensors are passed between models."""

    def plan(self, row: InputRow, service: Service) -> tuple[str, SamplingParams, list[tuple[int, ...]]]:
        """The text, its sampling parameters, and no stop words: the service finds these in the text."""
        params = sampling.text_params(row, service, self._options, skip_special_tokens=self._settings.skip_special_tokens)
        return row.value("text_input", ""), params, []

    def tensors(self, planned: PlannedRow, parts: list[SequencePart], prompt_ids: list[int], service: Service) -> Tensors:
        """text_output: the texts of all beams."""
        texts = [self.text(planned, part, prompt_ids, service) for part in parts]
        return {"text_output": text_array([text.encode() for text in texts], (len(texts),))}

    def is_shown(self, delta: Delta) -> bool:
        """Whether the delta has new text, or ends its sequence."""
        return bool(delta.text) or delta.finish_reason is not None

    def text(self, planned: PlannedRow, part: SequencePart, prompt_ids: list[int], service: Service) -> str:
        """The text of the part.

        With prompt_ids, prompt and answer are decoded together, and a stop word or end id is removed from the end.
        """
        if not prompt_ids:
            return part.text
        skip = self._settings.skip_special_tokens
        whole = service.decode([*prompt_ids, *part.token_ids], skip_special_tokens=skip)
        if not part.stopped:
            return whole
        num_cut = len(service.decode(part.token_ids, skip_special_tokens=skip)) - len(part.text)
        return whole[: len(whole) - num_cut]


class BLS(Ensemble):
    """An ensemble. With the option accumulate_tokens, each streamed text_output contains all text so far."""

    def text(self, planned: PlannedRow, part: SequencePart, prompt_ids: list[int], service: Service) -> str:
        """The new text, or all text so far with accumulate_tokens."""
        text = super().text(planned, part, prompt_ids, service)
        if planned.streaming and self._options.accumulate_tokens:
            text = planned.texts[part.index] = planned.texts.get(part.index, "") + text
        return text
