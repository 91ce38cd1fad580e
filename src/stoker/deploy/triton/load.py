"""Reads a model repository: converts its config.pbtxt files to a Deployment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.deploy.deployment import Deployment, EngineSource, Note, RequiredNodes, Section, Setting
from stoker.deploy.devices import visible_gpus
from stoker.deploy.syntax.pbtxt import Scalar
from stoker.deploy.triton.dependent_settings import RepositoryContent, runtime_config, triton_options
from stoker.deploy.triton.keys import ENGINE_DIR, KEYS, LLM, ParameterRow, models_with_key
from stoker.deploy.triton.model_config import frontends, read_model_config
from stoker.deploy.triton.repository import ModelFile, read_models
from stoker.deploy.triton.scalars import warn
from stoker.server.settings import ServerSettings

# Fields outside `parameters` that the report lists.
_REPORTED_FIELDS = {
    "max_batch_size",
    "decoupled",
    "count",
    "max_queue_size",
    "max_queue_delay_microseconds",
    "preferred_batch_size",
    "default_timeout_microseconds",
    "allow_timeout_override",
    "priority_levels",
    "default_priority_level",
}
_EXPORT = "Write a repository with: stoker export triton ENGINE REPO."


def unset_rows(file: ModelFile) -> list[ParameterRow]:
    """The keys that a file does not set. The Python gpt model has engine_dir instead of the required ones."""
    names = {name for name, _ in file.parameters}
    is_gpt = file.kind == LLM and ENGINE_DIR in names and "gpt_model_path" not in names
    return [row for row in KEYS[file.kind or ""] if row.name not in names and not (is_gpt and row.required)]


class CollectedParameters:
    """The values of `parameters` by target, with settings and notes for the report."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.settings: list[Setting] = []
        self.values: dict[str, Any] = {}

    def add_all(self, file: ModelFile) -> None:
        """Add the parameters of one model, including the defaults of those that it does not set."""
        last = dict(file.parameters)
        for name, scalar in file.parameters:
            if last[name] is not scalar:
                warn(self.notes, file, scalar.line, name, "the key occurs more than once; the last value is used")
        for name, scalar in last.items():
            self.add(file, name, scalar)
        for row in unset_rows(file):
            self.add_unset(file, row, None)

    def add(self, file: ModelFile, name: str, scalar: Scalar) -> None:
        """Check one parameter, and store its value or a note. Raises PlacedError."""
        row = KEYS[file.kind or ""].get(name)
        if row is None and scalar.unfilled:
            warn(self.notes, file, scalar.line, name, f"unknown key, not filled. {_cure_of_unknown(file, name)}")
        elif row is None:
            raise file.error(scalar.line, f"unknown key {name!r} of {file.kind}.", _cure_of_unknown(file, name))
        elif scalar.unfilled or not scalar.text:
            self.add_unset(file, row, scalar)
        else:
            self._add_value(file, row, scalar)

    def add_unset(self, file: ModelFile, row: ParameterRow, scalar: Scalar | None) -> None:
        """Handle a parameter without a value. Raises PlacedError if it is required, and warns if its default may be unexpected."""
        line = scalar.line if scalar else 1
        if row.name == "gpt_model_type":
            raise file.error(line, "Invalid gpt_model_type: it is not set.", "Use inflight_fused_batching.")
        if row.required or (scalar and row.name == ENGINE_DIR):
            raise file.error(line, f"{row.name} is not set.", f'Add parameters {{ key: "{row.name}" value {{ string_value: "…" }} }}.')
        if scalar and scalar.unfilled:
            warn(self.notes, file, line, row.name, f"{scalar.text} is not filled; the value is {row.default or 'the default'}")
        elif row.warn and row.status == "accepted":
            warn(self.notes, file, line, row.name, f"it is not set; the value is {row.default}")

    def _add_value(self, file: ModelFile, row: ParameterRow, scalar: Scalar) -> None:
        """Check and store the value of a parameter. Raises PlacedError."""
        origin = file.origin(scalar.line)
        try:
            value = row.parse(scalar.text)
        except InvalidValueError as error:
            if not row.lenient:
                raise file.value_error(scalar.line, row.name, error) from None
            warn(self.notes, file, scalar.line, row.name, f"{scalar.text[:40]!r} is not a boolean; the value is {row.default}")
            return
        if row.status == "no effect":
            self.notes.append(Note(severity="warning" if row.warn else "info", key=row.name, text=row.reason, origin=origin))
        elif row.target:
            self._store(file, row, value, scalar)

    def _store(self, file: ModelFile, row: ParameterRow, value: Any, scalar: Scalar) -> None:
        """Store a value and its setting. Raises PlacedError if the same target has another value already."""
        other = self.values.setdefault(row.target, value)
        if other != value:
            raise file.error(scalar.line, f"{row.name}={value!r}, and it is {other!r} elsewhere.", "Make the two equal.")
        target, _, field = row.target.partition(".")
        section: Section = "runtime" if target in ("runtime", "engine", "batching", "nodes") else "server"
        origin = file.origin(scalar.line)
        self.settings.append(Setting(section=section, name=field or target, value=value, origin=origin, key=row.name))

    def report_fields(self, file: ModelFile) -> None:
        """Add settings outside `parameters` to the report."""
        for field in file.message.walk():
            if field.name in _REPORTED_FIELDS and isinstance(field.value, Scalar) and not field.value.unfilled:
                name, origin = f"{file.name}.{field.name}", file.origin(field.value.line)
                self.settings.append(Setting(section="server", name=name, value=field.value.text, origin=origin))

    def add_frontends(self, files: Iterable[ModelFile]) -> None:
        """Set the number of frontend processes: the larger instance count of preprocessing and postprocessing."""
        found = [setting for file in files if (setting := frontends(file, [])) is not None]
        if found:
            self.settings.append(largest := max(found, key=lambda setting: setting.value))
            self.values["server.num_frontends"] = largest.value


def load_repository(path: Path, environment: Mapping[str, str]) -> Deployment:
    """Read the model repository at `path` and convert it to a Deployment.

    `environment` is that of the process: CUDA_VISIBLE_DEVICES limits the GPUs. Raises ConfigError, which names the file, line and key, and
    the fix.
    """
    collected = CollectedParameters()
    files = _by_kind(read_models(path), collected.notes)
    if LLM not in files:
        raise ConfigError(f"{path} has no model with the input input_ids.", cure="Add the tensorrt_llm model.")
    _refuse_other_backends(files[LLM])
    models = tuple(read_model_config(file, collected.notes) for file in files.values())
    for file in files.values():
        collected.add_all(file)
        collected.report_fields(file)
    collected.add_frontends(files.values())
    content = RepositoryContent(files=files, models=models, values=collected.values, notes=collected.notes)
    engine = _in_repository(path, content.values["engine"])
    options, runtime = triton_options(content), runtime_config(content, visible_gpus(environment), engine)
    server = ServerSettings(grpc_port=8001, metrics_port=8002, protocols=("kserve",), options=options, **content.section("server"))
    return Deployment(
        format="triton",
        path=str(path),
        source=EngineSource(location=engine),
        tokenizer=_in_repository(path, content.values["tokenizer"]) if "tokenizer" in content.values else None,
        runtime=runtime,
        server=server,
        nodes=RequiredNodes(origin=str(files[LLM].origin(0)), **content.section("nodes")),
        settings=tuple(collected.settings),
        notes=tuple(collected.notes),
    )


def _by_kind(files: list[ModelFile], notes: list[Note]) -> dict[str, ModelFile]:
    """The files by their kind of model. Raises ConfigError for two of one kind."""
    by_kind: dict[str, ModelFile] = {}
    for file in files:
        if file.kind is None:
            warn(notes, file, 1, file.name, "it is none of the five models and is not served")
        elif file.kind in by_kind:
            raise file.error(1, f"{file.name} and {by_kind[file.kind].name} are both {file.kind}.", "Write a repository per engine.")
        else:
            by_kind[file.kind] = file
    return by_kind


def _cure_of_unknown(file: ModelFile, name: str) -> str:
    """A hint for an unknown parameter: the models that have it, or similar parameters of this model."""
    if owners := models_with_key(name):
        return f"It belongs to {' and '.join(owners)}."
    return KEYS[file.kind or ""].suggestion(name, "Remove it.")


def _refuse_other_backends(file: ModelFile) -> None:
    """Raise ConfigError for the repository of TensorRT-LLM's llmapi backend."""
    inputs = {scalar.text for tensor in file.message.messages("input") for scalar in tensor.scalars("name")}
    if "input_ids" not in inputs and "text_input" in inputs:
        raise file.error(1, "this is the llmapi model, which model.yaml configures.", _EXPORT)


def _in_repository(repo: Path, location: str) -> str:
    """A location as an absolute path if it is a directory in the repository; else unchanged, relative to the working directory."""
    inside = repo / location
    return str(inside.resolve()) if not Path(location).is_absolute() and inside.is_dir() else location
