"""Lints the deployment files in deploy/ and the workflows: `make check-deploy`. Needs no network and no cluster.

The Dockerfile is checked with hadolint, compose files and workflows with their JSON schemas, the chart with Helm's own linter, and what it
renders for several values with the schemas of Kubernetes. systemd-analyze checks the unit where it is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "stoker"
KUBERNETES_VERSION = "1.37"
BIN = Path(sys.executable).parent
# Values with which the chart is rendered: the least, and every option.
VALUES: dict[str, dict[str, Any]] = {
    "least": {"model": "org/name"},
    "all": {
        "model": "/models/engine",
        "args": ["--kv-cache-fraction", 0.8],
        "replicas": 2,
        "strategy": "RollingUpdate",
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}, "grpc": {"enabled": True}},
        "hubToken": {"secret": "hub"},
        "apiKeys": {"secret": "keys", "key": "all"},
        "env": [{"name": "STOKER_LOG", "value": "debug"}],
        "cache": {"persistent": False},
        "serviceAccount": {"name": "existing"},
        "podAnnotations": {"c": "d"},
        "imagePullSecrets": [{"name": "registry"}],
        "extraVolumes": [{"name": "models", "hostPath": {"path": "/srv/models"}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    },
}


def render(values: dict[str, Any], release: str = "demo") -> list[dict[str, Any]]:
    """The Kubernetes objects of the chart. Raises HelmError for values that its schema refuses."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=release, namespace="default")
    return [found for name, text in sorted(files.items()) if name.endswith(".yaml") for found in yaml.safe_load_all(text) if found]


def check_dockerfile() -> Iterator[str]:
    """hadolint's findings."""
    yield from _run(BIN / "hadolint", "--no-color", DEPLOY / "docker" / "Dockerfile")


def check_schemas() -> Iterator[str]:
    """What does not match the schemas of compose and of workflows."""
    yield from _run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *(DEPLOY / "docker").glob("*.yaml"))
    yield from _run(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *(ROOT / ".github/workflows").glob("*.yml"))


def check_chart() -> Iterator[str]:
    """What Helm's linter and the schemas of Kubernetes find."""
    found = helm_python.lint(CHART, VALUES["least"])
    yield from (f"{message['path']}: {message['error']}" for message in found["messages"] if message["severity"] > 1)
    for name, values in VALUES.items():
        for item in render(values):
            try:
                kubernetes_validate.validate(item, KUBERNETES_VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{item['kind']} of the values {name!r}: {error.message}"


def check_unit() -> Iterator[str]:
    """What systemd-analyze finds, with an existing program in place of the one that the unit starts."""
    if shutil.which("systemd-analyze") is None:
        print("skipped: systemd-analyze is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "stoker.service"
        unit.write_text((DEPLOY / "systemd" / unit.name).read_text().replace("/opt/stoker/bin/stoker", sys.executable))
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
        yield from (line for line in done.stderr.splitlines() if unit.name in line)  # other lines are about units of this machine


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (check_dockerfile, check_schemas, check_chart, check_unit)


def _run(*command: str | Path) -> Iterator[str]:
    """The output of a command that fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        yield from (done.stdout + done.stderr).splitlines()


def main() -> int:
    """Print all findings. Returns 1 if there are any."""
    problems = [problem for check in CHECKS for problem in check()]
    print("\n".join(problems) or "deploy/: no problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
