"""Settings that depend on one another: batching and policy, beams and decoding mode, ensembles and their members."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.deploy.deployment import Note
from stoker.deploy.pbtxt import Scalar
from stoker.deploy.triton.keys import BLS, LLM
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.scalars import warn
from stoker.server.protocols.kserve.model_config import NO_QUEUE_LIMIT, TritonModel, TritonOptions


class Found(msgspec.Struct, kw_only=True):
    """What the files said. `values` maps targets of the key table ("runtime.policy") to values."""

    files: dict[str, ModelFile]  # by kind
    models: tuple[TritonModel, ...]
    values: dict[str, Any]
    notes: list[Note]

    def section(self, section: str) -> dict[str, Any]:
        return {to.partition(".")[2]: value for to, value in self.values.items() if to.startswith(f"{section}.")}


def options(found: Found) -> TritonOptions:
    _check_bls_target(found)
    _check_steps(found)
    chosen = TritonOptions(models=_with_ensembles(found.models), **found.section("options"))
    return msgspec.structs.replace(chosen, decoding_mode=_decoding_mode(found, chosen.max_beam_width))


def runtime(found: Found, gpus: int) -> RuntimeConfig:
    """Policy static for V1, whose batches are the ones Triton makes; the queue's limit is the engine model's. `gpus` are visible."""
    chosen = found.section("runtime")
    if "devices" in chosen and not gpus:
        _note(found, "gpu_device_ids", "no GPU is visible; every rank runs on the CPU")
        del chosen["devices"]
    llm = next(model for model in found.models if model.kind == LLM)
    if found.values["batching"] in ("V1", "v1"):
        if "policy" in chosen:
            _note(found, "batch_scheduler_policy", "it has no effect: gpt_model_type V1 runs whole batches")
        chosen["policy"] = "static"
        chosen["max_batch_size"] = llm.max_batch_size or 1
    if llm.queue is not None and _says_queue_size(found.files[LLM]):
        chosen["max_queue_size"] = min(llm.queue.max_queue_size or NO_QUEUE_LIMIT, NO_QUEUE_LIMIT)
    if llm.queue is not None and (llm.queue.max_queue_delay_us or llm.queue.preferred_batch_sizes):
        note = "requests join the running batch at its next step; nothing waits for a batch to fill"
        line = found.files[LLM].message.message("dynamic_batching").line
        found.notes.append(Note(severity="info", key="dynamic_batching", text=note, origin=found.files[LLM].origin(line)))
    return RuntimeConfig(**chosen)


def _check_bls_target(found: Found) -> None:
    bls, llm = found.files.get(BLS), found.files[LLM]
    target = found.values.get("bls_target", LLM)
    if bls is not None and target != llm.name:
        line = dict(bls.parameters).get("tensorrt_llm_model_name", Scalar("", 1)).line
        raise bls.error(line, f"tensorrt_llm_model_name is {target!r}; no such model is here.", f"Use {llm.name}.")


def _check_steps(found: Found) -> None:
    """An ensemble's steps are models of this repository."""
    names = {model.name for model in found.models}
    for model in found.models:
        for step in model.steps:
            if step.model_name not in names:
                file = found.files[model.kind]
                line = file.message.message("ensemble_scheduling").line
                raise file.error(
                    line, f"a step runs {step.model_name!r}; no such model is here.", f"Use one of: {', '.join(sorted(names))}."
                )


def _with_ensembles(models: tuple[TritonModel, ...]) -> tuple[TritonModel, ...]:
    """An ensemble is decoupled when one of its members is."""
    decoupled = {model.name for model in models if model.decoupled}
    return tuple(
        msgspec.structs.replace(model, decoupled=any(step.model_name in decoupled for step in model.steps)) if model.steps else model
        for model in models
    )


def _decoding_mode(found: Found, max_beam_width: int) -> str:
    """Beams and decoding_mode agree; where they don't, the width decides, as in TensorRT-LLM."""
    asked = found.values.get("options.decoding_mode")
    meant = "beam_search" if max_beam_width > 1 else "top_k_top_p"
    if asked is None or (asked == "beam_search") == (max_beam_width > 1):
        return asked or meant
    _note(found, "decoding_mode", f"{asked} does not go with max_beam_width {max_beam_width}; {meant} counts")
    return meant


def _says_queue_size(file: ModelFile) -> bool:
    size = file.message.message("dynamic_batching").message("default_queue_policy").scalar("max_queue_size")
    return size is not None and not size.unfilled


def _note(found: Found, key: str, text: str) -> None:
    file = found.files[LLM]
    warn(found.notes, file, dict(file.parameters)[key].line, key, text)
