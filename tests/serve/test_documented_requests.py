"""Each curl command of README and docs/, unchanged except for its port and a name that its page gives the model, against one server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cli.server_process import running_server

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MODEL = "Qwen3-8B"
ADDRESS = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):\d+")


def commands(page: Path) -> list[str]:
    """The curl commands of the page's shell blocks, with continued lines joined."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    text = "\n".join(block for language, block in blocks if language in ("", "sh", "bash"))
    return [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("curl ") and "$" not in line]


def with_served_name(line: str, page: Path) -> str:
    """The line with the name of the test's model in place of those that commands of the page give their model with --model-name."""
    for name in set(re.findall(r"--model-name (\S+)", page.read_text())):
        line = line.replace(f'"{name}"', f'"{MODEL}"')
    return line


COMMANDS = [
    pytest.param(with_served_name(line, page), id=f"{page.stem}: {line.split('/', 3)[-1][:40]}")
    for page in PAGES
    for line in commands(page)
]


@pytest.fixture(scope="module")
def url(tiny_engine: Path) -> Iterator[str]:
    """A server with the name that the pages use."""
    with running_server(tiny_engine, ["--kv-cache-tokens", "2048", "--num-threads", "1", "--model-name", MODEL]) as address:
        yield address


@pytest.mark.compatibility(protocol="Command line", client="curl", version="7.88", feature="the requests of README and docs/")
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", COMMANDS)
def test_documented_requests(line: str, url: str) -> None:
    changed, count = ADDRESS.subn(url, line)
    assert count == 1
    ran = subprocess.run(["bash", "-c", f"{changed} --fail-with-body"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    events = [text.removeprefix("data:").strip() for text in ran.stdout.splitlines() if text.startswith("data:")]
    if "/ping" not in line and "model:predict" not in line:  # a Truss streams plain text
        bodies = [json.loads(text) for text in (events or ran.stdout.splitlines()) if text and text != "[DONE]"]
        assert bodies and not any("error" in body for body in bodies)


def test_pages_have_requests() -> None:
    assert len(COMMANDS) >= 8
