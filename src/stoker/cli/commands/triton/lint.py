"""`stoker triton lint`: the findings in a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def lint(repository: Annotated[Path, typer.Argument(help="A model repository.")]) -> None:
    """Print each finding in a model repository on a line: unfilled variables, unknown keys, likely misspellings.

    The exit status is 1 when one of the findings is an error, which is what `stoker serve` would refuse.

    Examples:

      stoker triton lint repo
    """
    from stoker.deploy.triton.lint import lint_repository

    findings = lint_repository(repository)
    for finding in findings:
        typer.echo(finding)
    raise typer.Exit(int(any(finding.severity == "error" for finding in findings)))
