"""Writes an engine as a Truss: config.yaml, model/model.py that proxies to Stoker, packages/engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping as Environment
from importlib import resources
from pathlib import Path

import yaml

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import EngineInfo

_ENGINE = Path("packages") / "engine"
_ACCELERATOR = "A100"


def export(engine: EngineInfo, path: Path, options: Environment[str, str]) -> list[Path]:
    """Write the Truss and return its files. `options`: model_name, and accelerator (H100), whose count is the engine's number of ranks.

    The folder is served by `stoker serve`, and by the truss package, whose server then starts Stoker behind model.py. Weight files are
    hard links where the file system allows. Raises ConfigError when `path` holds something already, or an option is unknown.
    """
    unknown = set(options) - {"model_name", "accelerator"}
    if unknown:
        raise ConfigError(f"unknown option {sorted(unknown)[0]}.", cure="Use model_name or accelerator.")
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty.", cure="Name a new directory.")
    (path / "model").mkdir(parents=True, exist_ok=True)
    written = [_write(path / "config.yaml", yaml.safe_dump(_config(engine, options), sort_keys=False))]
    written.append(_write(path / "model" / "__init__.py", ""))
    template = resources.files("stoker.deploy").joinpath("templates", "truss", "model.py.txt")
    written.append(_write(path / "model" / "model.py", template.read_text(encoding="utf-8")))
    shutil.copytree(engine.path, path / _ENGINE, copy_function=_link)
    return written + sorted(p for p in (path / _ENGINE).rglob("*") if p.is_file())


def _config(engine: EngineInfo, options: Environment[str, str]) -> dict:
    """A config that today's truss accepts: its trt_llm section knows no finished engines, so the first generation's keys name it."""
    ranks = engine.mapping.world_size
    return {
        "model_name": options.get("model_name") or Path(engine.path).name,
        "python_version": "py311",
        "requirements": ["stoker", "httpx"],
        "resources": {"accelerator": f"{options.get('accelerator') or _ACCELERATOR}:{ranks}", "use_gpu": True},
        "secrets": {"hf_access_token": None},
        "runtime": {"predict_concurrency": 1024},
        "model_metadata": {
            "tags": ["openai-compatible"],
            "engine_repository": _ENGINE.as_posix(),
            "tokenizer_repository": _ENGINE.as_posix(),
            "tensor_parallelism": ranks,
        },
    }


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
