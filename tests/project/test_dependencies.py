"""Declared dependencies: their bounds parse, each is pinned and documented, and the source imports what is declared and nothing else."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
IMPORT_NAMES = {
    "pyyaml": "yaml", "pyzmq": "zmq", "protobuf": "google", "grpcio": "grpc", "boto3": "botocore", "google-re2": "re2",
    "opentelemetry-sdk": "opentelemetry", "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}  # fmt: skip
PROVIDED_BY_HOSTS = {"triton_python_backend_utils"}  # modules of the server that runs an exported model
NEEDS_CUDA = {"nixl"}  # the extra depends on torch for CUDA, so that scripts/bounds.py does not install it


@pytest.fixture
def bounds(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("bounds")


def test_every_bound_of_users_packages_parses(bounds: ModuleType) -> None:
    declared = bounds.requirements()
    assert len(declared) > 20
    for name, (extras, lowest) in declared.items():
        assert lowest is not None, f"{name} has no lower bound"
        assert Version(lowest) in Requirement(f"{name}{extras}>={lowest}").specifier


def test_other_forms_of_requirements_are_rejected(bounds: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["numpy>=1,<2"]\n[project.optional-dependencies]\n')
    monkeypatch.setattr(bounds, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"'numpy>=1,<2' in pyproject\.toml is not a name with a lower bound"):
        bounds.requirements(())


def test_every_package_is_pinned_at_or_above_its_bound(bounds: ModuleType) -> None:
    pinned = bounds.pinned_versions()
    for name, (_, lowest) in bounds.requirements(("grpc", "guided", "otel", "s3", "route", "nixl", "dev")).items():
        if name != "triton":  # torch for CUDA brings its own; see the Makefile
            assert name in pinned, f"{name} is not in constraints.txt"
            assert lowest is None or Version(pinned[name]) >= Version(lowest)


def test_the_extra_grpc_has_both_clients_of_triton(bounds: ModuleType) -> None:
    """`stoker client --protocol http` imports tritonclient.http, which needs packages of that extra."""
    extras, _ = bounds.requirements(("grpc",))["tritonclient"]
    assert extras == "[grpc,http]"
    needed = [Requirement(text) for text in requires("tritonclient") or []]
    of_http = {bounds.normalized(r.name) for r in needed if r.marker is not None and r.marker.evaluate({"extra": "http"})}
    assert {"geventhttpclient", "aiohttp"} <= of_http <= set(bounds.pinned_versions())


def test_every_package_is_documented(bounds: ModuleType) -> None:
    named = {bounds.normalized(word) for word in re.findall(r"[\w.-]+", (ROOT / "docs" / "dependencies.md").read_text())}
    assert sorted(set(bounds.requirements()) - named) == []


def test_the_source_imports_the_declared_packages_and_no_others(bounds: ModuleType) -> None:
    imported = set()
    for path in (ROOT / "src" / "stoker").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.partition(".")[0])
    foreign = {bounds.normalized(name) for name in imported - set(sys.stdlib_module_names) - {"stoker"} - PROVIDED_BY_HOSTS - NEEDS_CUDA}
    declared = set(bounds.requirements())
    modules = {IMPORT_NAMES.get(name, name) for name in declared} | {"boto3"}
    assert sorted(foreign - modules) == [] and sorted(modules - foreign) == []
