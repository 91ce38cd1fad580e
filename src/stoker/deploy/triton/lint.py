"""Finds all errors and possible mistakes in a model repository. `load_repository` stops at the first error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import Origin, PlacedError
from stoker.deploy.triton import model_config
from stoker.deploy.triton.load import CollectedParameters, load_repository, unset_rows
from stoker.deploy.triton.proto_fields import check_field
from stoker.deploy.triton.repository import ModelFile, config_files, read_model
from stoker.deploy.triton.tensors import read_tensor
from stoker.server.protocols.kserve.model_config import KINDS

FindingSeverity = Literal["error", "warning", "info"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One finding.

    error: `stoker serve` refuses the repository. warning: a possible mistake. info: a key has no effect.
    """

    file: str
    line: int
    severity: FindingSeverity
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{Origin(self.file, self.line)}: {self.severity}: {self.text} {self.cure}".rstrip()


def lint_repository(repo: Path) -> list[Finding]:
    """All findings, sorted by file and line. Raises ConfigError only when `repo` contains no models."""
    linter = _Linter(repo)
    for path in config_files(repo):
        linter.attempt(linter.check_file, path)
    if not any(finding.severity == "error" for finding in linter.findings):
        linter.attempt(load_repository, repo, {})  # errors between files
    for kind in sorted(set(KINDS) - linter.kinds):
        linter.add(str(repo), 0, "info", f"the repository has no model {kind}; it is not served.")
    return sorted(linter.findings)


class _Linter:
    """Collects the findings of all checks."""

    def __init__(self, repo: Path) -> None:
        self.repo = repo
        self.findings: set[Finding] = set()
        self.kinds: set[str] = set()

    def add(self, file: str, line: int, severity: FindingSeverity, text: str, cure: str = "") -> None:
        """Add a finding."""
        self.findings.add(Finding(file=file, line=line, severity=severity, text=text, cure=cure))

    def attempt(self, check: Callable[..., Any], *args: Any) -> None:
        """Run one check, and add its ConfigError as a finding."""
        try:
            check(*args)
        except PlacedError as error:
            self.add(error.origin.source, error.origin.line, "error", error.description, error.cure)
        except ConfigError as error:
            self.add(str(self.repo), 0, "error", error.message, error.cure)

    def check_file(self, path: Path) -> None:
        """Check one config.pbtxt."""
        file = read_model(path)
        if file.kind is None:
            return self.add(file.file, 1, "warning", f"{file.name} is none of the five models and is not served.")
        self.kinds.add(file.kind)
        collected = CollectedParameters()
        self.check_fields(file, collected)
        self.check_parameters(file, collected)
        for note in collected.notes:
            self.add(note.origin.source, note.origin.line, note.severity, f"{note.key}: {note.text}")
        return None

    def check_fields(self, file: ModelFile, collected: CollectedParameters) -> None:
        """Check the fields of a file other than its parameters."""
        for field in file.message.fields:
            self.attempt(check_field, file, field, collected.notes)
        for side in ("input", "output"):
            for message in file.message.messages(side):
                self.attempt(read_tensor, file, message, side, collected.notes)
        self.attempt(model_config.check_name, file)
        for check in (model_config.max_batch_size, model_config.decoupled, model_config.instances, model_config.queue):
            self.attempt(check, file, collected.notes)

    def check_parameters(self, file: ModelFile, collected: CollectedParameters) -> None:
        """Check the parameters of a file."""
        last = dict(file.parameters)
        for name, scalar in file.parameters:
            if last[name] is not scalar:
                self.add(file.file, scalar.line, "warning", f"{name}: the key occurs more than once; the last value is used")
            self.attempt(collected.add, file, name, scalar)
        for row in unset_rows(file):
            self.attempt(collected.add_unset, file, row, None)
