"""Writes an engine as a Truss: config.yaml, model/model.py that proxies to Stoker, packages/ with a Triton repository and the engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping as Environment
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import EngineInfo
from stoker.deploy.triton.export import export_triton

REPOSITORY = Path("packages") / "tensorrt_llm_model_repository"
_ENGINE = Path("tensorrt_llm") / "1"  # in the repository, where the second document's server moves it
_PROGRAMS = (Path("model") / "model.py", Path("packages") / "stoker_tensors.py")
_ACCELERATOR = "A100"
_OWN = ("model_name", "accelerator")


def export(engine: EngineInfo, path: Path, options: Environment[str, str]) -> list[Path]:
    """Write the Truss and return its files.

    `options`: model_name; accelerator (H100), whose count is the engine's number of ranks, or none; and whatever export_triton takes
    for the repository (max_tokens_in_paged_kv_cache). The folder is served by `stoker serve`, and by the truss package, whose server
    then starts Stoker behind model.py. Weight files are hard links where the file system allows. Raises ConfigError when `path` holds
    something already, or an option is unknown. What fails leaves nothing behind.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not an empty folder.", cure="Name a new directory.")
    try:
        return _written(engine, path, options)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # it was absent or empty
        raise


def _written(engine: EngineInfo, path: Path, options: Environment[str, str]) -> list[Path]:
    repository, folder = path / REPOSITORY, Path(engine.path)
    files = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]  # before `path`, which may lie in there
    inside = msgspec.structs.replace(engine, path=_ENGINE.as_posix())
    given = {"decoupled_mode": "true"} | {name: value for name, value in options.items() if name not in _OWN}
    written = export_triton(inside, repository, given)
    written += [_link(folder / file, repository / _ENGINE / file) for file in files]
    written.append(_write(path / "config.yaml", yaml.safe_dump(_config(engine, options), sort_keys=False)))
    written.append(_write(path / "model" / "__init__.py", ""))
    return [*written, *(_write(path / file, _template(file.name)) for file in _PROGRAMS)]


def _template(name: str) -> str:
    return resources.files("stoker.deploy").joinpath("templates", "truss", f"{name}.txt").read_text(encoding="utf-8")


def _config(engine: EngineInfo, options: Environment[str, str]) -> dict[str, Any]:
    """A config that today's truss accepts: its trt_llm section knows no finished engines, so the first generation's keys name it."""
    ranks, inside = engine.mapping.world_size, (REPOSITORY / _ENGINE).as_posix()
    kind = options.get("accelerator") or _ACCELERATOR
    return {
        "model_name": options.get("model_name") or Path(engine.path).name,
        "python_version": "py311",
        "requirements": ["stoker[grpc]", "httpx"],
        "resources": {"use_gpu": False} if kind == "none" else {"accelerator": f"{kind}:{ranks}", "use_gpu": True},
        "secrets": {"hf_access_token": None},
        "runtime": {"predict_concurrency": 1024},
        "model_metadata": {
            "tags": ["openai-compatible"],
            "engine_repository": inside,
            "tokenizer_repository": inside,
            "tensor_parallelism": ranks,
            "max_tokens_counts_prompt": False,
        },
    }


def _link(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
