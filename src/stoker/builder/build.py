"""The build: checkpoint in, engine directory out, nothing half-made in between."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from stoker import __version__
from stoker.base.config import check_choice
from stoker.base.errors import ConfigError, EngineError
from stoker.base.logging import get_logger
from stoker.builder.checkpoint import Checkpoint, open_checkpoint
from stoker.builder.config import VERIFY, BuildConfig, fit_limits
from stoker.builder.convert import Layouts, convert, file_order, layouts
from stoker.builder.fetch import fetch
from stoker.builder.generation import write_generation
from stoker.builder.names import Making, plan
from stoker.builder.tokenizer import write_tokenizer
from stoker.builder.verify import verify_files, verify_tokens
from stoker.engine.config import EngineConfig, Origin, Target, encode
from stoker.engine.reader import CONFIG, Engine, is_engine, rank_file
from stoker.engine.tensor_file import FileRecord, TensorFileWriter, num_bytes
from stoker.layers.config import ModelConfig
from stoker.models import ARCHITECTURES, Architecture
from stoker.quant.recipe import Recipe

log = get_logger(__name__)

# (what is being done, how much is done, of how much): bytes for weights, else steps.
Progress = Callable[[str, int, int], None]


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a byte is written."""

    checkpoint: Checkpoint
    architecture: Architecture
    config: EngineConfig
    makings: dict[str, Making]  # empty for dummy weights

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)


def build(
    source: str | Path,
    out: str | Path,
    config: BuildConfig = BuildConfig(),
    *,
    force: bool = False,
    verify: str = "auto",
    progress: Progress | None = None,
) -> Engine:
    """Build the engine of checkpoint `source` in directory `out`, which appears whole or not at all.

    `force` replaces an engine that is there. `verify`: files (re-read what was written), auto (and compare greedy tokens with the
    checkpoint's where that is quick), full (compare always), none. Raises CheckpointError, ConfigError or EngineError; `out` is
    untouched then.
    """
    check_choice("verify", verify, VERIFY)
    out, report = Path(out), progress or _silent
    _check_out(out, force)
    prepared = prepare(source, config)
    with _workspace(out) as work:
        write(prepared, config, work, report)
        check(prepared, config, work, verify, report)
        _publish(work, out)
    return Engine.open(out)


def prepare(source: str | Path, config: BuildConfig) -> Prepared:
    """Open the checkpoint and decide everything: sizes, dtype, formats, and which tensors make which."""
    path, name = fetch(source)
    checkpoint = open_checkpoint(path, name, weights=not config.dummy_weights)
    architecture, model = read_model(checkpoint)
    target = _target(config)
    engine = EngineConfig(
        stoker_version=__version__,
        model=model,
        limits=fit_limits(config.limits, model.max_positions),
        dtype=config.dtype or ("float32" if target.device == "cpu" else own_dtype(checkpoint)),
        mapping=config.mapping,
        recipe=find_recipe(config.quantization),
        target=target,
        weights="dummy" if config.dummy_weights else "files",
        checkpoint=Origin(name=name, fingerprint=""),
    )
    if config.mapping.world_size > 1:
        raise ConfigError(f"an engine for {config.mapping.world_size} ranks is not built yet.", cure="Use --tensor-parallel 1.")
    makings = {} if config.dummy_weights else plan(architecture, model, checkpoint.weights)
    return Prepared(checkpoint=checkpoint, architecture=architecture, config=engine, makings=makings)


def read_model(checkpoint: Checkpoint) -> tuple[Architecture, ModelConfig]:
    """The architecture that config.json names, and the model it describes."""
    names = checkpoint.config.get("architectures") or []
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(f"{checkpoint.name}: config.json names no architectures.", cure=f"Known: {', '.join(ARCHITECTURES)}.")
    architecture = ARCHITECTURES.get(names[0])
    try:
        return architecture, architecture.config(checkpoint.config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
        raise ConfigError(f"{checkpoint.name}: config.json is not a whole {architecture.name} ({problem!r}).", cure="Correct it.") from None


def own_dtype(checkpoint: Checkpoint) -> str:
    """The dtype config.json names, else that of the most bytes; float32 for anything else."""
    named = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "").removeprefix("torch.")
    if named in ("float32", "float16", "bfloat16"):
        return named
    totals: dict[str, int] = {}
    for stored in checkpoint.weights.stored.values():
        key = str(stored.dtype).removeprefix("torch.")
        totals[key] = totals.get(key, 0) + stored.num_bytes
    most = max(totals, key=lambda name: totals[name], default="float32")
    return most if most in ("float32", "float16", "bfloat16") else "float32"


def find_recipe(name: str | None) -> Recipe:
    """The recipe of a quantization name. Raises ConfigError with the nearest names."""
    from stoker.builder.recipes import RECIPES

    return RECIPES.get(name or "NO_QUANT")


def write(prepared: Prepared, config: BuildConfig, work: Path, progress: Progress) -> EngineConfig:
    """Write every file of the engine into `work`, config.json last."""
    checkpoint, engine = prepared.checkpoint, prepared.config
    files: dict[str, FileRecord] = {}
    if not config.dummy_weights:
        files[rank_file(0)] = write_weights(prepared, work / rank_file(0), progress)
    if has_tokenizer(checkpoint, config):
        write_tokenizer(checkpoint, config.tokenizer, work, trust_remote_code=config.trust_remote_code)
    write_generation(checkpoint, work)
    for file in sorted(work.iterdir()):
        if file.name not in files:
            files[file.name] = record(file)
    origin = msgspec.structs.replace(engine.checkpoint, fingerprint=checkpoint.fingerprint())
    done = msgspec.structs.replace(engine, files=files, checkpoint=origin)
    _write_whole(work / CONFIG, encode(done))
    return done


def check(prepared: Prepared, config: BuildConfig, work: Path, verify: str, progress: Progress) -> None:
    """Verify what was written, and add the findings to config.json."""
    if verify == "none":
        return
    progress("verify", 0, 2)
    verify_files(work, {} if config.dummy_weights else rank_layouts(prepared.config))
    found = {"files": "verified"}
    if verify != "files":
        progress("verify", 1, 2)
        greedy = verify_tokens(work, prepared.checkpoint, ask=verify == "full", trust_remote_code=config.trust_remote_code)
        found["greedy"] = msgspec.to_builtins(greedy)
    done = Engine.open(work).config
    _write_whole(work / CONFIG, encode(msgspec.structs.replace(done, checks=found)))
    progress("verify", 2, 2)


def has_tokenizer(checkpoint: Checkpoint, config: BuildConfig) -> bool:
    """A dummy build needs no tokenizer: a config.json alone is enough."""
    return not config.dummy_weights or config.tokenizer is not None or (checkpoint.path / "tokenizer.json").is_file()


def write_weights(prepared: Prepared, path: Path, progress: Progress) -> FileRecord:
    """Stream the tensors of the one rank."""
    model, recipe, dtype = prepared.config.model, prepared.config.recipe, prepared.dtype
    specs, stored = file_order(model, recipe, dtype), rank_layouts(prepared.config)
    total, done = sum(num_bytes(*layout) for layout in stored.values()), 0
    writer = TensorFileWriter(path, stored)
    for name, tensor in convert(specs, prepared.makings, prepared.checkpoint.weights, model, recipe, dtype):
        writer.write(name, tensor)
        done += tensor.numel() * tensor.element_size()
        progress("weights", done, total)
    return writer.close()


def rank_layouts(config: EngineConfig) -> Layouts:
    """The stored tensors of a rank's file, in order."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    specs = file_order(config.model, config.recipe, dtype)
    return {name: layout for spec in specs for name, layout in layouts(spec, config.recipe, dtype).items()}


def record(file: Path) -> FileRecord:
    with file.open("rb") as opened:
        return FileRecord(file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest())


def _target(config: BuildConfig) -> Target:
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    capability = config.compute_capability
    if device == "cuda" and capability is None and torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return Target(device=device, compute_capability=capability if device == "cuda" else None)


def _check_out(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_engine(out):
        raise EngineError(f"{out} exists and is not an engine.", cure="Name another directory with --output.")
    if not force:
        raise EngineError(f"{out} holds an engine already.", cure="Name another directory, or replace it with --force.")


@contextlib.contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """A directory beside `out`, gone when the block ends. What dead builds of this machine left there is removed first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    for old in out.parent.glob(f".{out.name}.building-{host}-*"):
        if not Path(f"/proc/{old.name.rpartition('-')[2]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    work = out.parent / f".{out.name}.building-{host}-{os.getpid()}"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, out: Path) -> None:
    """Put the finished directory in its place; an engine that is there goes only when the new one is whole."""
    if out.exists():
        old = work.with_name(work.name + "-old")
        out.rename(old)
        work.rename(out)
        shutil.rmtree(old)
    else:
        work.rename(out)


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file that is either the old one or the new one, whenever the machine stops."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _silent(stage: str, done: int, total: int) -> None:
    pass
