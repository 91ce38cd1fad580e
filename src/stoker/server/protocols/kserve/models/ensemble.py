"""The models of text: the ensemble, fused into one step, and tensorrt_llm_bls."""

from __future__ import annotations

from stoker.base.types import Delta, SamplingParams
from stoker.frontend.service import Service
from stoker.server.protocols.kserve.inference import Tensors
from stoker.server.protocols.kserve.models import sampling
from stoker.server.protocols.kserve.models.generating import Generating, Planned
from stoker.server.protocols.kserve.models.results import Part
from stoker.server.protocols.kserve.tensors.dtypes import text_array
from stoker.server.protocols.kserve.tensors.row import Row


class Ensemble(Generating):
    """Text in, text out. The service tokenizes and detokenizes, so no tensor passes between stages."""

    own = ("text_output",)

    def plan(self, row: Row, service: Service) -> tuple[str, SamplingParams, list[tuple[int, ...]]]:
        params = sampling.of_text(row, service, self._options, skip_special_tokens=self._settings.skip_special_tokens)
        return row.value("text_input", ""), params, []

    def tensors(self, planned: Planned, parts: list[Part], prompt_ids: list[int], service: Service) -> Tensors:
        texts = [self.text(planned, part, prompt_ids, service) for part in parts]
        return {"text_output": text_array([text.encode() for text in texts], (1, len(texts)))}

    def shows(self, delta: Delta) -> bool:
        return bool(delta.text) or delta.finish_reason is not None

    def text(self, planned: Planned, part: Part, prompt_ids: list[int], service: Service) -> str:
        """The prompt's tokens, if any are to be shown, and the new ones decoded as one text, less what a stop word or end id cut off."""
        if not prompt_ids:
            return part.text
        skip = self._settings.skip_special_tokens
        whole = service.decode([*prompt_ids, *part.token_ids], skip_special_tokens=skip)
        if not part.stopped:
            return whole
        num_cut = len(service.decode(part.token_ids, skip_special_tokens=skip)) - len(part.text)
        return whole[: len(whole) - num_cut]


class BLS(Ensemble):
    """With accumulate_tokens each streamed text_output holds all text so far."""

    def text(self, planned: Planned, part: Part, prompt_ids: list[int], service: Service) -> str:
        text = super().text(planned, part, prompt_ids, service)
        if planned.streaming and self._options.accumulate_tokens:
            text = planned.texts[part.index] = planned.texts.get(part.index, "") + text
        return text
