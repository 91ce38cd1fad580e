"""Writes docs/compatibility.md from a run of the tests that have the marker `compatibility`.

    python scripts/compatibility.py                                # runs all of them, several minutes
    python scripts/compatibility.py tests/triton -k "grpc"         # runs some; the other rows keep their results
    python scripts/compatibility.py --results build/junit.xml      # reads the results of an earlier run (pytest --junitxml)

One row of the page is one combination of the marker's arguments:

    @pytest.mark.compatibility(protocol="Triton", client="tritonclient", feature="unary and streamed requests over gRPC")

`client` is the name of an installed package, whose version is shown, or of something else with `version="..."`. All arguments are
literals, because the rows are also read from the source: rows without a marker are removed, and markers without a result are added.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
TESTS = ROOT / "tests"
PROTOCOLS = ("OpenAI", "Anthropic", "Ollama", "Triton", "LMI and SageMaker", "Truss", "Command line", "Python API")
NOT_RUN = "not run"
_PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
_HEAD = """# Compatibility

This page is generated from a test run with `python scripts/compatibility.py`. Each row is a client, or requests and configurations as their
publisher wrote them, that tests run without changes. Versions of Python packages are those of `constraints.txt`.

*Passed* counts tests. *Skipped* tests need something that the machine of the run did not have, such as a package registry. Intended
differences are listed on the pages of the protocols: [OpenAI](openai.md), [Anthropic](anthropic.md), [Ollama](ollama.md),
[Triton](triton.md), [LMI and SageMaker](sagemaker.md), [Truss](truss.md).
"""


class Row(NamedTuple):
    """The arguments of one marker. `version` is None for an installed package."""

    protocol: str
    client: str
    version: str | None
    feature: str


def marked_rows(folder: Path = TESTS) -> dict[Row, list[str]]:
    """The rows of all markers in the source of the tests, with the files that contain them, relative to the repository."""
    found: dict[Row, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)] if "mark.compatibility(" in text else []
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "compatibility":
                row = _row(call, name)
                if name not in found[row]:
                    found[row].append(name)
    return dict(found)


def _row(call: ast.Call, name: str) -> Row:
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    literals = all(isinstance(value, ast.Constant) and isinstance(value.value, str) for value in arguments.values())
    if call.args or not literals or not {"protocol", "client", "feature"} <= set(arguments) <= set(Row._fields):
        raise ValueError(f"{name}:{call.lineno}: write compatibility(protocol=, client=, feature=) and perhaps version=, as literals")
    values = {key: ast.literal_eval(value) for key, value in arguments.items() if key is not None}
    row = Row(values["protocol"], values["client"], values.get("version"), values["feature"])
    if row.protocol not in PROTOCOLS or any("|" in text or "\n" in text for text in row if text):
        raise ValueError(f"{name}:{call.lineno}: protocol is one of {', '.join(PROTOCOLS)}, and no argument contains | or a line break")
    return row


def pinned_versions() -> dict[str, str]:
    """The version of each package in constraints.txt."""
    return dict(_PIN.findall((ROOT / "constraints.txt").read_text(encoding="utf-8")))


def results(junit: Path) -> dict[tuple[Row, str], Counter[str]]:
    """Number of passed, failed and skipped tests for each row and version of a JUnit file that pytest wrote."""
    found: dict[tuple[Row, str], Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(junit).iter("testcase"):
        outcomes = {child.tag for child in case}
        outcome = "failed" if outcomes & {"failure", "error"} else "skipped" if "skipped" in outcomes else "passed"
        for item in case.iter("property"):
            if item.get("name") == "compatibility":
                values = json.loads(item.get("value") or "{}")
                row = Row(values["protocol"], values["client"], values.get("version"), values["feature"])
                found[row, values["installed"]][outcome] += 1
    return dict(found)


def committed() -> dict[tuple[str, ...], str]:
    """The result of each row of the page as it is; keys are (protocol, client, version, feature)."""
    found, protocol = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else ():
        if line.startswith("## "):
            protocol = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] not in ("client", "---"):
            found[protocol, cells[0], cells[1], cells[2]] = cells[4]
    return found


def page(rows: Mapping[Row, Iterable[str]], outcomes: Mapping[tuple[str, ...], str]) -> str:
    """The text of the page. A row without an outcome is "not run"."""
    pins = pinned_versions()
    parts = [_HEAD]
    for protocol in PROTOCOLS:
        lines = []
        for row, files in rows.items():
            if row.protocol == protocol:
                version = row.version or pins[row.client]
                result = outcomes.get((protocol, row.client, version, row.feature), NOT_RUN)
                names = ", ".join(f"`{name}`" for name in files)
                lines.append(f"| {row.client} | {version} | {row.feature} | {names} | {result} |")
        if lines:
            head = f"## {protocol}\n\n| client | version | what runs | tests | result |\n|---|---|---|---|---|\n"
            parts.append(head + "\n".join(sorted(lines, key=str.lower)) + "\n")
    return "\n".join(parts)


def _run(arguments: list[str]) -> Path:
    junit = Path(tempfile.mkdtemp(prefix="compatibility")) / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "compatibility", "-p", "no:cacheprovider", f"--junitxml={junit}", *arguments]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status not in (0, 1):
        raise SystemExit(status)
    return junit


def main() -> int:
    """Update the page. Returns 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="JUnit file of an earlier run; without it, the tests run now")
    options, arguments = parser.parse_known_args()
    counted = results(options.results or _run(arguments or ["tests"]))
    outcomes = committed()
    for (row, version), counts in counted.items():
        text = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name])
        outcomes[row.protocol, row.client, version, row.feature] = text
    PAGE.write_text(page(marked_rows(), outcomes), encoding="utf-8")
    return int(any(counts["failed"] for counts in counted.values()))


if __name__ == "__main__":
    sys.exit(main())
