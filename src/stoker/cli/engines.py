"""Finds the engine of a command's MODEL argument, which is fetched and built if necessary, with progress on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.base import env
from stoker.base.config import RuntimeConfig
from stoker.deploy.build_settings import BuildSettings

if TYPE_CHECKING:
    from stoker.api.llm import LLM
    from stoker.builder.config import BuildConfig
    from stoker.deploy.prepare import Progress

MODEL_HELP = (
    "An engine or its name in `stoker list`, a checkpoint folder, a .gguf file, a deployment folder, a hub id, an archive or an address."
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]


def prepare_engine(model: str, runtime: RuntimeConfig | None, build: BuildSettings = BuildSettings()) -> Path:
    """The engine directory of `model`, with progress on stderr. Raises the errors of `deploy.local_engine.find_engine`."""
    from stoker.api.progress import shown_progress

    with shown_progress("preparing") as progress:
        from stoker.deploy.local_engine import find_engine

        return find_engine(model, runtime=runtime, build=build, progress=progress)


def prepare_files(model: str) -> Path:
    """The local path of the files of `model`, which are fetched if necessary, with progress on stderr. No engine is built."""
    from stoker.api.progress import shown_progress
    from stoker.deploy.prepare import local_path

    with shown_progress("fetching") as progress:
        return local_path(model, env.child_environment(), progress)


@contextmanager
def loading(model: str, runtime: RuntimeConfig, build: BuildSettings) -> Iterator[Path]:
    """Yield the engine directory of `model`, and show progress until the end of the block, which loads the engine."""
    from stoker.api.progress import shown_progress

    with shown_progress("preparing") as progress:
        from stoker.deploy.local_engine import find_engine

        engine = find_engine(model, runtime=runtime, build=build, progress=progress)
        progress.set_status("loading")
        yield engine


@contextmanager
def running_llm(model: str, runtime: RuntimeConfig, build: BuildSettings) -> Iterator[LLM]:
    """Yield the engine of `model`, loaded in this process. Progress is shown until it is loaded."""
    with loading(model, runtime, build) as engine:
        from stoker.api.llm import LLM

        llm = LLM(engine, progress=False, **msgspec.structs.asdict(runtime))
    with llm:
        yield llm


def fetch_checkpoint(location: str, config: BuildConfig, progress: Progress) -> tuple[Path, str]:
    """(local path, name) of the checkpoint of a build, which is fetched if necessary.

    The settings are checked first: raises ConfigError for an unknown quantization, and the errors of `deploy.sources.resolve`.
    """
    from stoker.builder.recipe import check_recipe
    from stoker.deploy.model_name import checkpoint_name_of
    from stoker.deploy.prepare import local_path

    check_recipe(config.quantization, config.quantization_settings, config.kv_cache_dtype)
    return local_path(location, env.child_environment(), progress), checkpoint_name_of(location)
