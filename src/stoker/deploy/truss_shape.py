"""The shape of a Truss config.yaml: build or serve, what each generation requires, what its inference stack allows."""

from __future__ import annotations

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import Origin
from stoker.deploy.truss_table import REQUIRED_BY_THE_FIRST, TABLE, V1_ONLY, V2_BUILD, V2_BUILD_DEFAULTS, V2_ONLY
from stoker.deploy.yaml_tree import Node

SECTIONS = {key.rpartition(".")[0] for key in TABLE} | {key.split(".")[0] for key in TABLE if "." in key}  # keys that hold others


def check_shape(root: Node, file: str) -> None:
    """Raises ConfigError. Takes out of `root` what the second stack writes and nobody asked for."""
    section = _at(root, "trt_llm")
    if section is None:
        if _at(root, "model_metadata.engine_repository") is None:
            raise ConfigError(
                f"{file} has neither trt_llm nor model_metadata.engine_repository.",
                cure="Add trt_llm.build or trt_llm.serve; a Truss with a model.py of your own runs with truss itself.",
            )
        return
    if _at(root, "model_metadata.engine_repository") is not None:
        raise _refuse(file, section, "trt_llm", "model_metadata.engine_repository names an engine already", "Keep one of the two.")
    build, serve = _at(root, "trt_llm.build"), _at(root, "trt_llm.serve")
    if build is not None and serve is not None:
        text = f"trt_llm.build (line {build.line}) and trt_llm.serve (line {serve.line}) exclude each other"
        raise _refuse(file, section, "trt_llm", text, "Keep build to make an engine, or serve to use one.")
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
    first = _at(root, "trt_llm.build.base_model_architecture") or _at(root, "trt_llm.build.huggingface_ckpt_repository")
    repository = _at(root, "trt_llm.build.checkpoint_repository.repo")
    if repository is None and first is None:
        raise _refuse(
            file, build, "trt_llm.build", "checkpoint_repository.repo is missing", "Add checkpoint_repository with source and repo."
        )
    missing = [key for key in REQUIRED_BY_THE_FIRST if _at(root, key) is None]
    misspelt = [name for name, _ in _entries(build) if f"trt_llm.build.{name}" not in SECTIONS | set(TABLE)]  # told with the nearest name
    if repository is None and missing and not misspelt:
        raise _refuse(file, build, "trt_llm.build", f"{', '.join(key.rpartition('.')[2] for key in missing)} missing", "Add them.")


def _check_stack(root: Node, file: str) -> None:
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
    """Take out what asks for nothing; refuse what the second stack sets elsewhere."""
    for name, child in _entries(build):
        key = f"trt_llm.build.{name}"
        if key not in TABLE and key not in SECTIONS:
            continue
        if child.value is None or (name in V2_BUILD_DEFAULTS and child.plain() == V2_BUILD_DEFAULTS[name]):
            del build.value[name]
        elif name not in V2_BUILD:
            raise _refuse(file, child, key, "inference_stack v2 sets this under trt_llm.runtime", "Move it to trt_llm.runtime.")


def _entries(node: Node | None) -> list[tuple[str, Node]]:
    return list(node.value.items()) if node is not None and isinstance(node.value, dict) else []


def _refuse(file: str, node: Node, key: str, limit: str, cure: str) -> ConfigError:
    return ConfigError(f"{Origin(file, node.line)}: {key} is refused: {limit}.", cure=cure)
