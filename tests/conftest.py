"""Fixtures that several folders use. Engines are built once for all test processes."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent
RARE_COLLECTIONS = str(Path(__file__).parent / "rare_collections")
BUILD_SOURCES = ("base", "core", "quant", "layers", "models", "engine", "builder")  # packages that determine the content of an engine

# Several test processes run in parallel, so each computes on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No time limits, because other processes may use the machine.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")
# What tests write does not have to survive a power failure. Each build waits for the disk some fourteen times.
os.fsync = lambda fd: None
# Reading the certificates of all authorities takes 16 ms, and each client of httpx does it: clients that name the same file share them.
_default_context = ssl.create_default_context
_context_of_file = cache(lambda cafile: _default_context(cafile=cafile))
ssl.create_default_context = lambda *args, **files: (
    _context_of_file(files["cafile"]) if not args and files.keys() == {"cafile"} else _default_context(*args, **files)
)
# What importing and collecting creates stays until the end, so the garbage collector does not traverse it: neither while tests are
# collected, nor while they run.
gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m slow`, import only the modules that have slow tests. The imports of all others take each test process 5 s."""
    if config.option.markexpr != "slow" or collection_path.suffix != ".py":
        return None
    return "mark.slow" not in collection_path.read_text() or None


def pytest_collection_finish() -> None:
    """Exclude what exists now from garbage collection, and enable it for the tests."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write the markers `compatibility` to JUnit reports, where scripts/compatibility.py reads them."""
    for item in items:
        for mark in item.iter_markers("compatibility"):
            installed = mark.kwargs.get("version") or version(mark.kwargs["client"])
            item.user_properties.append(("compatibility", json.dumps({**mark.kwargs, "installed": installed})))


@pytest.fixture(autouse=True)
def restore_process_state() -> Iterator[None]:
    """Restore loggers, signal handlers and variables of the log, which a command that runs inside a test changes."""
    variables = {name: os.environ.get(name) for name in ("STOKER_LOG", "STOKER_LOG_FILE", "STOKER_LOG_FORMAT")}
    root = logging.getLogger("stoker")
    level, handlers, propagate, terminate = root.level, root.handlers[:], root.propagate, signal.getsignal(signal.SIGTERM)
    yield
    root.setLevel(level)
    root.handlers[:], root.propagate = handlers, propagate
    signal.signal(signal.SIGTERM, terminate)
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """Imports a program in scripts/ by name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def uninterpreted() -> Callable[..., str]:
    """Runs Python in a process that compiles kernels, even if this one interprets them. Returns its output."""

    def run(*args: str | Path, **variables: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": os.pathsep.join([RARE_COLLECTIONS, *sys.path]), **variables}
        ran = subprocess.run([sys.executable, *map(str, args)], env=environment, capture_output=True, text=True, timeout=110)
        assert ran.returncode == 0, ran.stdout[-200:] + ran.stderr[-3000:]
        return ran.stdout

    return run


@pytest.fixture(scope="session")
def new_cache() -> Callable[[Path], Path]:
    """Makes a directory for STOKER_CACHE with the C kernels, which the processes of a test would each take seconds to compile."""
    from stoker.kernels.native.build import KernelsUnavailable, built_library

    try:
        library = built_library()
    except KernelsUnavailable:
        library = None

    def make(path: Path) -> Path:
        folder = path / "native"
        path.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        if library is not None:
            shutil.copy(library, folder)
        return path

    return make


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a minimal tokenizer, for tests that build engines and use token ids only."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("tokenizer")
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of single characters and 96 ids, for builds that calibrate on text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("letters")
    vocab = {"<unk>": 0} | {chr(32 + i): i + 1 for i in range(95)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The checkpoint of the default model, downloaded once per user."""
    from stoker.cli.default_model import default_checkpoint

    return default_checkpoint()


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_gguf: Path) -> Path:
    """SmolLM2-135M-Instruct for the CPU, in float32 with blocks of 16 tokens. Read-only.

    It is reused until a source file changes that determines the content of engines. Another process builds it, so that its memory is freed.
    """
    folder = ROOT / ".cache" / "tests"
    engine = folder / f"smollm2-{_sources()}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "smollm2.lock"):
        if not (engine / "config.json").exists():
            for old in folder.glob("smollm2-*"):
                shutil.rmtree(old)
            command = [
                sys.executable, "-m", "stoker", "build", str(smollm2_gguf), "-o", str(engine), "--device", "cpu", "--verify", "files",
                "--quantize", "NO_QUANT", "--tokens-per-block", "16", "--max-batch-size", "32", "--max-num-tokens", "2048",
            ]  # fmt: skip
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return engine


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers in float32, with a byte-level tokenizer and blocks of 16 tokens. Its output is noise. Read-only."""
    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    sys.path.insert(0, str(Path(__file__).parent / "builder"))
    import tiny

    folder = tmp_path_factory.mktemp("tiny")
    checkpoint = tiny.save(tiny.model(), folder / "checkpoint")
    limits = Limits(max_batch_size=8, max_input_len=180, max_output_len=64, max_num_tokens=128, tokens_per_block=16)
    return build(checkpoint, folder / "engine", BuildConfig(device="cpu", limits=limits), verify="files").path


def _sources() -> str:
    """Digest of the source files that determine the content of engines."""
    digest = hashlib.sha256()
    for area in BUILD_SOURCES:
        for path in sorted((ROOT / "src/stoker" / area).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
