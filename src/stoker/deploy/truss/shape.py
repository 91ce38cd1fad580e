"""Checks the structure of a Truss config.yaml: build or serve, required keys of a generation, allowed keys of an inference stack."""

from __future__ import annotations

from stoker.base.errors import ConfigError
from stoker.base.yaml_tree import Node
from stoker.deploy.deployment import Origin
from stoker.deploy.truss.keys import (
    CHECKPOINT_TO_BUILD,
    ENGINE_SCRIPT,
    FINISHED_ENGINES,
    FIRST_GENERATION_REQUIRED,
    TABLE,
    V1_ONLY,
    V2_BUILD,
    V2_BUILD_DEFAULTS,
    V2_ONLY,
)

# Keys that contain other keys.
SECTIONS = {row.name.rpartition(".")[0] for row in TABLE} | {row.name.split(".")[0] for row in TABLE if "." in row.name}


def check_shape(root: Node, file: str) -> None:
    """Raise ConfigError for a wrong structure. Removes from `root` the defaults that truss writes for stack v2."""
    section, finished = _at(root, "trt_llm"), next((name for name in FINISHED_ENGINES if _at(root, name) is not None), None)
    if section is None:
        if finished is None and not any(_at(root, name) is not None for name in (CHECKPOINT_TO_BUILD, ENGINE_SCRIPT)):
            raise ConfigError(
                f"{file} has neither trt_llm nor {' or '.join(FINISHED_ENGINES)}.",
                cure="Add trt_llm.build or trt_llm.serve; a Truss with a custom model.py runs with the truss package.",
            )
        return
    if finished is not None:
        raise _refuse(file, section, "trt_llm", f"{finished} names an engine already", "Keep one of the two.")
    build, serve = _at(root, "trt_llm.build"), _at(root, "trt_llm.serve")
    if build is not None and serve is not None:
        text = f"trt_llm.build (line {build.line}) and trt_llm.serve (line {serve.line}) exclude each other"
        raise _refuse(file, section, "trt_llm", text, "Keep build to build an engine, or serve to use an existing one.")
    if build is None and serve is None:
        raise _refuse(file, section, "trt_llm", "it has neither build nor serve", "Add trt_llm.build or trt_llm.serve.")
    if serve is not None and _at(root, "trt_llm.serve.engine_repository") is None:
        raise _refuse(file, serve, "trt_llm.serve", "engine_repository is missing", "Name the engine.")
    if build is not None:
        _check_build(root, build, file)
    _check_stack(root, file)


def _at(root: Node, path: str) -> Node | None:
    """The node at a dotted path, or None."""
    node: Node | None = root
    for name in path.split("."):
        node = node.value.get(name) if node is not None and isinstance(node.value, dict) else None
    return node if node is not None and node.value is not None else None


def _check_build(root: Node, build: Node, file: str) -> None:
    """Raise ConfigError if trt_llm.build lacks the required keys of its generation."""
    first = _at(root, "trt_llm.build.base_model_architecture") or _at(root, "trt_llm.build.huggingface_ckpt_repository")
    repository = _at(root, "trt_llm.build.checkpoint_repository.repo")
    if repository is None and first is None:
        raise _refuse(
            file, build, "trt_llm.build", "checkpoint_repository.repo is missing", "Add checkpoint_repository with source and repo."
        )
    missing = [key for key in FIRST_GENERATION_REQUIRED if _at(root, key) is None]
    unknown = [name for name, _ in _entries(build) if not _is_known(f"trt_llm.build.{name}")]  # reported later, with the nearest names
    if repository is None and missing and not unknown:
        names = ", ".join(key.rpartition(".")[2] for key in missing)
        raise _refuse(file, build, "trt_llm.build", f"required keys are missing: {names}", "Add them.")


def _check_stack(root: Node, file: str) -> None:
    """Raise ConfigError for keys that the inference stack does not have."""
    stack = _at(root, "trt_llm.inference_stack")
    second = stack is not None and stack.value == "v2"
    runtime, build = _at(root, "trt_llm.runtime"), _at(root, "trt_llm.build")
    for name, child in _entries(runtime):
        if f"trt_llm.runtime.{name}" in (V1_ONLY if second else V2_ONLY):
            limit = f"inference_stack {'v2' if second else 'v1'} has no such key"
            raise _refuse(
                file, child, f"trt_llm.runtime.{name}", limit, f"Remove it, or set trt_llm.inference_stack: {'v1' if second else 'v2'}."
            )
    if second and build is not None:
        _check_second_build(build, file)


def _check_second_build(build: Node, file: str) -> None:
    """Remove defaults without effect, and raise ConfigError for keys that stack v2 has under trt_llm.runtime."""
    for name, child in _entries(build):
        key = f"trt_llm.build.{name}"
        if not _is_known(key):
            continue
        if child.value is None or (name in V2_BUILD_DEFAULTS and child.plain() == V2_BUILD_DEFAULTS[name]):
            del build.value[name]
        elif name not in V2_BUILD:
            raise _refuse(file, child, key, "inference_stack v2 sets this under trt_llm.runtime", "Move it to trt_llm.runtime.")


def _is_known(key: str) -> bool:
    """Whether a dotted key is in the field table."""
    return key in TABLE or key in SECTIONS


def _entries(node: Node | None) -> list[tuple[str, Node]]:
    """(key, node) of a mapping; empty for other nodes."""
    return list(node.value.items()) if node is not None and isinstance(node.value, dict) else []


def _refuse(file: str, node: Node, key: str, limit: str, cure: str) -> ConfigError:
    """The error for a node."""
    return ConfigError(f"{Origin(file, node.line)}: {key} is refused: {limit}.", cure=cure)
