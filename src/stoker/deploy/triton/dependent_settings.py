"""Settings of a repository that depend on each other: batching and policy, beams and decoding mode, ensembles and their members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.deploy.deployment import Note
from stoker.deploy.syntax.pbtxt import Scalar
from stoker.deploy.triton.keys import BLS, LLM
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.scalars import warn
from stoker.deploy.triton.values import DRAFT_HEAD_MODES, DRAFT_HEADS, LOOKAHEAD
from stoker.server.protocols.kserve.model_config import NO_QUEUE_LIMIT, TritonModel, TritonOptions


class RepositoryContent(msgspec.Struct, kw_only=True):
    """The content of all files. `values` maps targets of the parameter tables, such as runtime.policy, to values."""

    files: dict[str, ModelFile]  # by kind
    models: tuple[TritonModel, ...]
    values: dict[str, Any]
    notes: list[Note]

    def section(self, section: str) -> dict[str, Any]:
        """The values of all targets SECTION.NAME, by name."""
        return {to.partition(".")[2]: value for to, value in self.values.items() if to.startswith(f"{section}.")}


def triton_options(content: RepositoryContent) -> TritonOptions:
    """The options of the KServe protocol. Raises ConfigError when models do not fit together."""
    _check_bls_target(content)
    _check_steps(content)
    options = TritonOptions(models=_with_ensembles(content.models), **content.section("options"))
    return msgspec.structs.replace(options, decoding_mode=_decoding_mode(content, options.max_beam_width))


def runtime_config(content: RepositoryContent, gpus: int, engine: str) -> RuntimeConfig:
    """The runtime settings. Batching V1 has the policy static. The limit of the queue is that of tensorrt_llm.

    `gpus` is the number of visible GPUs, `engine` the location of the engine.
    """
    settings = content.section("runtime")
    if "devices" in settings and not gpus:
        _note(content, "gpu_device_ids", "no GPU is visible; all ranks run on the CPU")
        del settings["devices"]
    if content.values.get("decoding_mode") == LOOKAHEAD:
        settings["speculate"] = "ngram"
    elif content.values.get("decoding_mode") in DRAFT_HEAD_MODES:
        settings["speculate"] = _draft_heads(content, engine)
    for mode in DRAFT_HEAD_MODES:
        key = f"{mode}_choices"
        if key in content.values and content.values.get("decoding_mode") == mode:
            settings["draft_tree"] = content.values[key]
        elif key in content.values:
            _note(content, key, f"it has no effect without decoding_mode {mode}")
    llm = next(model for model in content.models if model.kind == LLM)
    if content.values.get("batching") in ("V1", "v1"):
        if "policy" in settings:
            _note(content, "batch_scheduler_policy", "it has no effect, because gpt_model_type V1 runs whole batches")
        settings["policy"] = "static"
        settings["max_batch_size"] = llm.max_batch_size or 1
    if llm.queue is not None and _sets_queue_size(content.files[LLM]):
        settings["max_queue_size"] = min(llm.queue.max_queue_size or NO_QUEUE_LIMIT, NO_QUEUE_LIMIT)
    if llm.queue is not None and (llm.queue.max_queue_delay_us or llm.queue.preferred_batch_sizes):
        note = "requests are admitted at the next step and do not wait for a full batch"
        line = content.files[LLM].message.message("dynamic_batching").line
        content.notes.append(Note(severity="info", key="dynamic_batching", text=note, origin=content.files[LLM].origin(line)))
    return RuntimeConfig(**settings)


def _check_bls_target(content: RepositoryContent) -> None:
    """Raise ConfigError if tensorrt_llm_bls calls a model that is not in the repository."""
    bls, llm = content.files.get(BLS), content.files[LLM]
    target = content.values.get("bls_target", LLM)
    if bls is not None and target != llm.name:
        line = dict(bls.parameters).get("tensorrt_llm_model_name", Scalar("", 1)).line
        raise bls.error(line, f"tensorrt_llm_model_name is {target!r}, and the repository has no such model.", f"Use {llm.name}.")


def _check_steps(content: RepositoryContent) -> None:
    """Raise ConfigError when a step of an ensemble runs a model that is not in the repository."""
    names = {model.name for model in content.models}
    for model in content.models:
        for step in model.steps:
            if step.model_name not in names:
                file = content.files[model.kind]
                line = file.message.message("ensemble_scheduling").line
                raise file.error(
                    line,
                    f"a step runs {step.model_name!r}, and the repository has no such model.",
                    f"Use one of: {', '.join(sorted(names))}.",
                )


def _with_ensembles(models: tuple[TritonModel, ...]) -> tuple[TritonModel, ...]:
    """The models, where an ensemble is decoupled if one of its members is."""
    decoupled = {model.name for model in models if model.decoupled}
    return tuple(
        msgspec.structs.replace(model, decoupled=any(step.model_name in decoupled for step in model.steps)) if model.steps else model
        for model in models
    )


def _draft_heads(content: RepositoryContent, engine: str) -> str:
    """The folder of the draft heads. TensorRT-LLM has them in its engine file. Raises PlacedError if the engine has none."""
    path = Path(engine) / DRAFT_HEADS
    if not path.is_dir():
        file, mode = content.files[LLM], content.values["decoding_mode"]
        line = dict(file.parameters)["decoding_mode"].line
        raise file.error(line, f"decoding_mode {mode} needs draft heads, and {path} does not exist.", "Copy the heads to it.")
    return str(path)


def _decoding_mode(content: RepositoryContent, max_beam_width: int) -> str:
    """The decoding mode. If decoding_mode contradicts max_beam_width, the latter decides, as in TensorRT-LLM."""
    requested = content.values.get("decoding_mode")
    mode = "beam_search" if max_beam_width > 1 else "top_k_top_p"
    if requested in (None, "auto", LOOKAHEAD, *DRAFT_HEAD_MODES):
        return mode
    if (requested == "beam_search") == (max_beam_width > 1):
        return str(requested)
    _note(content, "decoding_mode", f"{requested} contradicts max_beam_width {max_beam_width}; the mode is {mode}")
    return mode


def _sets_queue_size(file: ModelFile) -> bool:
    """Whether a config.pbtxt sets max_queue_size in dynamic_batching.default_queue_policy, other than by an unfilled variable."""
    size = file.message.message("dynamic_batching").message("default_queue_policy").scalar("max_queue_size")
    return size is not None and not size.unfilled


def _note(content: RepositoryContent, key: str, text: str) -> None:
    """Add a warning about a parameter of tensorrt_llm."""
    file = content.files[LLM]
    warn(content.notes, file, dict(file.parameters)[key].line, key, text)
