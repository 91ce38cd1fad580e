"""A model repository → Deployment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from stoker.base.errors import ConfigError
from stoker.base.registry import nearest
from stoker.deploy.deployment import Deployment, EngineSource, Note, Setting
from stoker.deploy.devices import visible_gpus
from stoker.deploy.pbtxt import Scalar
from stoker.deploy.triton import fields, repository, resolve
from stoker.deploy.triton.keys import KEYS, LLM, Key, names
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.scalars import warn
from stoker.server.settings import ServerSettings

# Fields outside `parameters` that the "understood" tables show.
_SHOWN = {"max_batch_size", "decoupled", "count", "max_queue_size", "max_queue_delay_microseconds", "preferred_batch_size",
          "default_timeout_microseconds", "allow_timeout_override", "priority_levels", "default_priority_level"}  # fmt: skip
_EXPORT = "Make a repository with: stoker export triton ENGINE REPO."


class Reading:
    """What one pass over the files found: targets of the key table with their values, settings and notes."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.settings: list[Setting] = []
        self.values: dict[str, Any] = {}

    def parameters(self, file: ModelFile) -> None:
        """Every key of one model, given or not."""
        given = dict(file.parameters)
        for name, scalar in file.parameters:
            if given[name] is not scalar:
                warn(self.notes, file, scalar.line, name, "the key is given more than once; the last counts")
        for name, scalar in given.items():
            self.parameter(file, name, scalar)
        for name in names(file.kind or ""):
            if name not in given:
                self.unset(file, KEYS[file.kind or "", name], None)

    def parameter(self, file: ModelFile, name: str, scalar: Scalar) -> None:
        key = KEYS.get((file.kind or "", name))
        if key is None and scalar.unfilled:
            warn(self.notes, file, scalar.line, name, f"unknown key, never filled. {cure_of_unknown(file, name)}")
        elif key is None:
            raise file.error(scalar.line, f"unknown key {name!r} of {file.kind}.", cure_of_unknown(file, name))
        elif scalar.unfilled or not scalar.text:
            self.unset(file, key, scalar)
        else:
            self.set(file, key, scalar)

    def set(self, file: ModelFile, key: Key, scalar: Scalar) -> None:
        try:
            value = key.value(scalar.text)
        except ConfigError as error:
            if not key.lenient:
                raise file.error(scalar.line, error.message, error.cure) from None
            warn(self.notes, file, scalar.line, key.name, f"{scalar.text[:40]!r} is no boolean; {key.default} counts")
            return
        if key.handling == "ignored":
            self.notes.append(Note(severity="warning" if key.warn else "info", key=key.name, text=key.why, origin=file.origin(scalar.line)))
        elif key.to:
            self.keep(file, key, value, scalar)

    def keep(self, file: ModelFile, key: Key, value: Any, scalar: Scalar) -> None:
        if self.values.setdefault(key.to, value) != value:
            raise file.error(scalar.line, f"{key.name}={value!r}, but {self.values[key.to]!r} elsewhere.", "Make the two equal.")
        section, _, field = key.to.partition(".")
        table: Literal["runtime", "server"] = "runtime" if section in ("runtime", "engine", "batching") else "server"
        self.settings.append(Setting(section=table, name=field or section, value=value, origin=file.origin(scalar.line), key=key.name))

    def unset(self, file: ModelFile, key: Key, scalar: Scalar | None) -> None:
        line = scalar.line if scalar else 1
        if key.name == "gpt_model_type":
            raise file.error(line, "Invalid gpt_model_type: it is not set.", "Use inflight_fused_batching.")
        if key.required:
            raise file.error(line, f"{key.name} is not set.", f'Add parameters {{ key: "{key.name}" value {{ string_value: "…" }} }}.')
        if scalar and scalar.unfilled:
            warn(self.notes, file, line, key.name, f"{scalar.text} was never filled; {key.default or 'the default'} counts")
        elif key.warn and key.handling == "honoured":
            warn(self.notes, file, line, key.name, f"not set; {key.default} counts")

    def shown(self, file: ModelFile) -> None:
        """Settings outside `parameters`, for the tables."""
        for field in file.message.walk():
            if field.name in _SHOWN and isinstance(field.value, Scalar) and not field.value.unfilled:
                name, origin = f"{file.name}.{field.name}", file.origin(field.value.line)
                self.settings.append(Setting(section="server", name=name, value=field.value.text, origin=origin))


def load(path: Path, env: Mapping[str, str]) -> Deployment:
    """Read a repository; of `env`, which GPUs are visible. Raises ConfigError naming file, line, key and cure."""
    reading = Reading()
    files = _one_of_a_kind(repository.read(path), reading.notes)
    if LLM not in files:
        raise ConfigError(f"{path} has no model that takes input_ids.", cure="Add the tensorrt_llm model.")
    _refuse_other_backends(files[LLM])
    models = tuple(fields.read(file, reading.notes) for file in files.values())
    for file in files.values():
        reading.parameters(file)
        reading.shown(file)
    found = resolve.Found(files=files, models=models, values=reading.values, notes=reading.notes)
    options, runtime = resolve.options(found), resolve.runtime(found, visible_gpus(env))
    server = ServerSettings(grpc_port=8001, metrics_port=8002, protocols=("kserve",), options=options, **found.section("server"))
    return Deployment(
        format="triton",
        path=str(path),
        source=EngineSource(location=_inside(path, found.values["engine"])),
        tokenizer=_inside(path, found.values["tokenizer"]) if "tokenizer" in found.values else None,
        runtime=runtime,
        server=server,
        settings=tuple(reading.settings),
        notes=tuple(reading.notes),
    )


def _one_of_a_kind(files: list[ModelFile], notes: list[Note]) -> dict[str, ModelFile]:
    seen: dict[str, ModelFile] = {}
    for file in files:
        if file.kind is None:
            warn(notes, file, 1, file.name, "it is none of the five models; it is not served")
        elif file.kind in seen:
            raise file.error(1, f"{file.name} and {seen[file.kind].name} are both {file.kind}.", "Serve a repository for each engine.")
        else:
            seen[file.kind] = file
    return seen


def cure_of_unknown(file: ModelFile, name: str) -> str:
    """The nearest key of this model, or the model the key belongs to."""
    owners = [kind for kind, known in KEYS if known == name]
    if owners:
        return f"It belongs to {' and '.join(owners)}."
    near = nearest(name, names(file.kind or ""))
    return f"Did you mean {' or '.join(near)}?" if near else "Remove it."


def _refuse_other_backends(file: ModelFile) -> None:
    inputs = {scalar.text for tensor in file.message.messages("input") for scalar in tensor.scalars("name")}
    given = {name for name, _ in file.parameters}
    if "input_ids" not in inputs and "text_input" in inputs:
        raise file.error(1, "this is the llmapi model, set up by model.yaml.", _EXPORT)
    if "engine_dir" in given and "gpt_model_path" not in given:
        raise file.error(1, "this is the Python gpt model (engine_dir).", _EXPORT)


def _inside(repo: Path, location: str) -> str:
    """A relative path is looked for in the repository first, then where the server starts, as Triton does."""
    inside = repo / location
    return str(inside.resolve()) if not Path(location).is_absolute() and inside.is_dir() else location
