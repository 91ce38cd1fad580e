"""What is wrong, or surprising, in a model repository: every finding, where `load` stops at the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import Origin, PlacedError
from stoker.deploy.triton import fields, repository, tensors
from stoker.deploy.triton.keys import KEYS, names
from stoker.deploy.triton.load import Reading, load
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.shape import check_field
from stoker.server.protocols.kserve.model_config import KINDS


class Finding(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """error: `stoker serve` refuses the repository; warning: it may not mean what was meant; info: a key has no effect."""

    file: str
    line: int
    severity: Literal["error", "warning", "info"]
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{Origin(self.file, self.line)}: {self.severity}: {self.text} {self.cure}".rstrip()


def lint(repo: Path) -> list[Finding]:
    """Every finding, by file and line. Raises ConfigError only when `repo` holds no models."""
    lines = _Lint(repo)
    for path in repository.config_files(repo):
        lines.attempt(lines.check_file, path)
    if not any(finding.severity == "error" for finding in lines.findings):
        lines.attempt(load, repo, {})  # what shows only when all files are seen together
    for kind in sorted(set(KINDS) - lines.kinds):
        lines.add(str(repo), 0, "info", f"no model plays {kind}; it will not be served.")
    return sorted(lines.findings)


class _Lint:
    def __init__(self, repo: Path) -> None:
        self.repo = repo
        self.findings: set[Finding] = set()
        self.kinds: set[str] = set()

    def add(self, file: str, line: int, severity: Literal["error", "warning", "info"], text: str, cure: str = "") -> None:
        self.findings.add(Finding(file=file, line=line, severity=severity, text=text, cure=cure))

    def attempt(self, check: Callable[..., Any], *args: Any) -> None:
        """Run one check; its refusal is a finding."""
        try:
            check(*args)
        except PlacedError as error:
            self.add(error.origin.source, error.origin.line, "error", error.what, error.cure)
        except ConfigError as error:
            self.add(str(self.repo), 0, "error", error.message, error.cure)

    def check_file(self, path: Path) -> None:
        file = repository.read_model(path)
        if file.kind is None:
            return self.add(file.file, 1, "warning", f"{file.name} is none of the five models; it is not served.")
        self.kinds.add(file.kind)
        reading = Reading()
        self.check_fields(file, reading)
        self.check_parameters(file, reading)
        for note in reading.notes:
            self.add(note.origin.source, note.origin.line, note.severity, f"{note.key}: {note.text}")
        return None

    def check_fields(self, file: ModelFile, reading: Reading) -> None:
        for field in file.message.fields:
            self.attempt(check_field, file, field, reading.notes)
        for side in ("input", "output"):
            for message in file.message.messages(side):
                self.attempt(tensors.read_one, file, message, side, reading.notes)
        self.attempt(fields.check_name, file)
        for check in (fields.max_batch_size, fields.decoupled, fields.instances, fields.queue):
            self.attempt(check, file, reading.notes)

    def check_parameters(self, file: ModelFile, reading: Reading) -> None:
        given = dict(file.parameters)
        for name, scalar in file.parameters:
            if given[name] is not scalar:
                self.add(file.file, scalar.line, "warning", f"{name}: the key is given more than once; the last counts")
            self.attempt(reading.parameter, file, name, scalar)
        for name in names(file.kind or ""):
            if name not in given:
                self.attempt(reading.unset, file, KEYS[file.kind or "", name], None)
