"""stoker-tritonserver as a process, for a repository of a tiny engine."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.prepare_server import engine_info
from stoker.deploy.triton.export import export_triton

SETTINGS = {"decoupled_mode": "true", "max_tokens_in_paged_kv_cache": "4096"}


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A repository for a tiny engine of one or two ranks."""
    import tiny

    folder = tmp_path_factory.mktemp("tritonserver")
    checkpoint = tiny.save(tiny.model(), folder / "checkpoint")
    limits = Limits(max_batch_size=8, max_input_len=128, max_output_len=128, max_num_tokens=256, tokens_per_block=16)

    @functools.cache
    def create(ranks: int) -> Path:
        config = BuildConfig(dtype="float32", device="cpu", limits=limits, mapping=Mapping(tensor_parallel=ranks))
        engine = build(checkpoint, folder / f"engine-{ranks}", config, verify="files").path
        export_triton(engine_info(engine), folder / f"repo-{ranks}", SETTINGS)
        config = folder / f"repo-{ranks}" / "postprocessing" / "config.pbtxt"
        config.write_text(re.sub(r"count: 1\b", "count: 2", config.read_text()))
        return folder / f"repo-{ranks}"

    return create


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The console script stoker-tritonserver, as an installation writes it."""
    script = tmp_path / "stoker-tritonserver"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom stoker.cli.commands.tritonserver import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return script


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[tuple[dict[str, str], subprocess.Popen[str], list[str]]]:
    """(addresses by service, process, log lines) of a server once it is ready. At the end it is stopped and must leave no process."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    lines: list[str] = []
    addresses: dict[str, str] = {}
    try:
        assert process.stdout is not None
        while len(addresses) < 3:
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
            if found := re.search(r"Started (\w+)(?: Service)? at ([\d.]+:\d+)", lines[-1]):
                addresses[found[1]] = found[2]
        yield addresses, process, lines
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        lines += rest.splitlines(keepends=True)
