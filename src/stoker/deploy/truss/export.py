"""Writes an engine as a Truss: config.yaml, model/model.py that forwards requests to Stoker, and packages/ with a Triton repository."""

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
from stoker.deploy.model_name import model_name_of
from stoker.deploy.triton.export import export_triton

REPOSITORY = Path("packages") / "tensorrt_llm_model_repository"
_ENGINE = Path("tensorrt_llm") / "1"  # in the repository; the server of the second Truss generation moves it there
_PROGRAM = Path("model") / "model.py"
_ACCELERATOR = "A100"
_TRUSS_OPTIONS = ("model_name", "accelerator")


def export_truss(engine: EngineInfo, path: Path, options: Environment[str, str]) -> list[Path]:
    """Write the Truss and return its files.

    `options`: model_name; accelerator, the name of the GPU (one per rank is requested) or `none`; and the options of export_triton for
    the repository, such as max_tokens_in_paged_kv_cache. `stoker serve` serves the folder. The server of the truss package runs model.py,
    which starts Stoker. Weight files are hard links if the file system supports them. Raises ConfigError when `path` is not empty or an
    option is unknown. A failed export leaves no files.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not an empty folder.", cure="Name a new directory.")
    try:
        return _write_truss(engine, path, options)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # it did not exist or was empty
        raise


def _write_truss(engine: EngineInfo, path: Path, options: Environment[str, str]) -> list[Path]:
    """Write all files of the Truss, and return them."""
    repository, folder = path / REPOSITORY, Path(engine.path)
    files = [
        file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()
    ]  # listed before writing, because `path` can be in it
    relative = msgspec.structs.replace(engine, path=_ENGINE.as_posix())
    triton_options = {"decoupled_mode": "true"} | {name: value for name, value in options.items() if name not in _TRUSS_OPTIONS}
    written = export_triton(relative, repository, triton_options)
    written += [_link_or_copy(folder / file, repository / _ENGINE / file) for file in files]
    written.append(_write(path / "config.yaml", yaml.safe_dump(_config(engine, options), sort_keys=False)))
    written.append(_write(path / "model" / "__init__.py", ""))
    return [*written, _write(path / _PROGRAM, _template(_PROGRAM.name))]


def _template(name: str) -> str:
    """The text of a template file."""
    return resources.files("stoker.deploy.truss").joinpath("templates", f"{name}.txt").read_text(encoding="utf-8")


def _config(engine: EngineInfo, options: Environment[str, str]) -> dict[str, Any]:
    """The content of config.yaml, which the current truss accepts.

    Its trt_llm section does not support finished engines, so the keys of the oldest generation name the engine.
    """
    ranks, location = engine.mapping.world_size, (REPOSITORY / _ENGINE).as_posix()
    kind = options.get("accelerator") or _ACCELERATOR
    return {
        "model_name": options.get("model_name") or model_name_of(engine.path),
        "python_version": "py311",
        "requirements": ["stoker", "httpx"],
        "resources": {"use_gpu": False} if kind == "none" else {"accelerator": f"{kind}:{ranks}", "use_gpu": True},
        "secrets": {"hf_access_token": None},
        "runtime": {"predict_concurrency": 1024},
        "model_metadata": {
            "tags": ["openai-compatible"],
            "engine_repository": location,
            "tokenizer_repository": location,
            "tensor_parallelism": ranks,
            "max_tokens_counts_prompt": False,
        },
    }


def _link_or_copy(source: Path, target: Path) -> Path:
    """Create a hard link, or a copy where links are not supported. Returns the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _write(path: Path, text: str) -> Path:
    """Write a text file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
