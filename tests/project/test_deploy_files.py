"""The files in deploy/ agree with `stoker serve`, with each other, and with their linters."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import stoker
from stoker.base import env
from stoker.cli.command_table import command_group
from stoker.cli.commands import COMMANDS
from stoker.cli.main import SUMMARY, global_options
from stoker.server.protocols.health.protocol import Health
from stoker.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["stoker"]
UNIT = (DEPLOY / "systemd" / "stoker.service").read_text()
UNIT_ENVIRONMENT = dict(re.findall(r"^#?(\w+)=(.*)$", (DEPLOY / "systemd" / "stoker.env").read_text(), re.MULTILINE))
CACHE = "/var/cache/stoker"
IMAGE_ENVIRONMENT = dict(re.findall(r"(?:^ENV|^   ) (\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
OPEN_PATHS = {endpoint.path for endpoint in Health.endpoints(Health.__new__(Health)) if endpoint.open}


@pytest.fixture(scope="module")
def check_deploy(script: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("helm_python", reason="make check-deploy installs Helm")
    pytest.importorskip("kubernetes_validate")
    return script("check_deploy")


def options_of(arguments: list[str]) -> dict[str, Any]:
    """The options of a `stoker serve` command line. Raises a usage error for one that does not exist."""
    group: Any = command_group("stoker", COMMANDS, SUMMARY, global_options)
    command, *rest = arguments
    assert command == "serve"
    found = group.get_command(group.make_context("stoker", ["serve"], resilient_parsing=True), command)
    return dict(found.make_context("serve", rest).params)


def objects(check_deploy: ModuleType, values: str) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in check_deploy.render(check_deploy.VALUES[values])}


def test_the_linters_find_nothing(check_deploy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_deploy.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "old", "new", "finding"),
    [
        ("docker/Dockerfile", "USER 10001:10001", "USER root", "Last USER should not be root"),
        ("docker/compose.yaml", "    restart:", "    restarts:", "'restarts' was unexpected"),
        ("helm/stoker/templates/deployment.yaml", "periodSeconds", "periodSecond", "'periodSecond' was unexpected"),
        ("systemd/stoker.service", "KillMode=", "KillModes=", "Unknown key"),
    ],
)
def test_the_linters_find_errors(
    check_deploy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, finding: str
) -> None:
    if file.endswith(".service") and shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    monkeypatch.setattr(check_deploy, "DEPLOY", copy)
    monkeypatch.setattr(check_deploy, "CHART", copy / "helm" / "stoker")
    assert finding in "\n".join(problem for check in check_deploy.CHECKS for problem in check())


def test_compose_runs_the_server() -> None:
    options = options_of(
        [argument.replace("${MODEL:?a hub id, an address or a folder in /models}", "m") for argument in COMPOSE["command"]]
    )
    assert options["model"] == "m" and options["host"] == "0.0.0.0"
    assert [port.rsplit(":", 1)[1] for port in COMPOSE["ports"]] == [str(options["http_port"]), str(options["grpc_port"])]
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["ports"])
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", COMPOSE["healthcheck"]["test"][-1])
    assert url is not None and int(url[1]) == options["http_port"] and url[2] in OPEN_PATHS
    assert "cache:" + CACHE in COMPOSE["volumes"]


def test_the_unit_runs_the_server() -> None:
    start = re.search(r"^ExecStart=/opt/stoker/bin/stoker (.*)$", UNIT, re.MULTILINE)
    assert start is not None
    arguments = start[1].replace("${MODEL}", UNIT_ENVIRONMENT["MODEL"]).replace("$OPTIONS", UNIT_ENVIRONMENT["OPTIONS"])
    options = options_of(shlex.split(arguments))
    assert options["model"] == UNIT_ENVIRONMENT["MODEL"] and options["host"] == "127.0.0.1"
    own = dict(re.findall(r"^Environment=(\w+)=(\S+)$", UNIT, re.MULTILINE))
    assert own["STOKER_CACHE"] == CACHE == "/var/cache/" + re.findall(r"^CacheDirectory=(\w+)$", UNIT, re.MULTILINE)[0]


@pytest.mark.parametrize("values", ["least", "all"])
def test_the_chart_runs_the_server(check_deploy: ModuleType, values: str) -> None:
    found = objects(check_deploy, values)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = options_of(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert options["host"] == "0.0.0.0" and ports["http"] == options["http_port"] and ports.get("grpc") == options["grpc_port"]
    assert [port["targetPort"] for port in found["Service"]["spec"]["ports"]] == list(ports)
    probes = {container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes == {"/health/live", "/health/ready"} <= OPEN_PATHS
    assert all(container[f"{name}Probe"]["httpGet"]["port"] == "http" for name in ("startup", "liveness", "readiness"))
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert {CACHE, "/tmp", "/dev/shm"} <= set(mounts)  # the root file system is read-only
    assert (options["api_keys"] is not None) == ("/etc/stoker/api-keys" in mounts)
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == found["Service"]["spec"]["selector"]
    assert ("PersistentVolumeClaim" in found) == (values == "least")


def test_the_chart_refuses_wrong_values(check_deploy: ModuleType) -> None:
    for values in ({}, {"model": "m", "replica": 2}, {"model": "m", "service": {"port": "http"}}):
        with pytest.raises(check_deploy.helm_python.HelmError):
            check_deploy.render(values)


def test_the_schema_of_the_chart_has_every_value() -> None:
    values = yaml.safe_load((DEPLOY / "helm/stoker/values.yaml").read_text())
    schema = json.loads((DEPLOY / "helm/stoker/values.schema.json").read_text())["properties"]
    assert set(schema) == {*values, "global"}
    for name, value in values.items():
        if "properties" in schema[name]:
            assert set(schema[name]["properties"]) == set(value)


def test_stopping_takes_longer_than_draining(check_deploy: ModuleType) -> None:
    drain_s = ServerSettings().drain_timeout_s
    pod = objects(check_deploy, "least")["Deployment"]["spec"]["template"]["spec"]
    times = [
        int(COMPOSE["stop_grace_period"].removesuffix("s")),
        int(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0]),
        pod["terminationGracePeriodSeconds"],
    ]
    assert all(time >= drain_s + 10 for time in times)
    (container,) = pod["containers"]
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert options_of(container["args"])["drain_timeout_s"] == drain_s
    assert command == "sleep" and times[-1] >= int(seconds) + drain_s + 10, "preStop counts towards the grace period"


def test_the_unit_uses_what_the_server_reports() -> None:
    """The notifications themselves are tested in tests/server/test_executor_restarts.py."""
    unit = dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line and not line.startswith("#"))
    assert unit["Type"] == "notify" and unit["NotifyAccess"] == "main" and unit["Restart"] == "on-failure"
    assert unit["TimeoutStartSec"] == "infinity", "a download and a build take longer than the default of 90 s"
    assert int(unit["WatchdogSec"]) >= 30


def test_environment_variables_are_documented(check_deploy: ModuleType) -> None:
    container = objects(check_deploy, "all")["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    used = {
        *IMAGE_ENVIRONMENT,
        *COMPOSE["environment"],
        *UNIT_ENVIRONMENT,
        *re.findall(r"^Environment=(\w+)=", UNIT, re.MULTILINE),
        *(item["name"] for item in container["env"]),
    }
    page = (ROOT / "docs" / "environment.md").read_text()
    files_own = {"MODEL", "OPTIONS", "PYTHONUNBUFFERED", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    assert {name for name in used - files_own if name not in env.VARIABLES and f"`{name}`" not in page} == set()
    assert IMAGE_ENVIRONMENT["STOKER_CACHE"] == CACHE and IMAGE_ENVIRONMENT["HF_HOME"].startswith(CACHE)


def test_the_image(check_deploy: ModuleType) -> None:
    ports = {int(port) for port in re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)[0].split()}
    assert ports == {ServerSettings().http_port, 8001, 8080}  # 8080: tests/deploy/test_lmi_load.py
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0]
    security = objects(check_deploy, "least")["Deployment"]["spec"]["template"]["spec"]["securityContext"]
    assert (str(security["runAsUser"]), str(security["runAsGroup"])) == user and f"--uid {user[0]}" in DOCKERFILE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"stoker-\*\.whl\)\[([\w,]+)\]", DOCKERFILE)[0].split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)).split()
    in_context = re.findall(r"^!(\S+)$", (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(in_context) and all((ROOT / name).exists() for name in copied)


def test_the_chart_has_the_version_of_stoker() -> None:
    chart = yaml.safe_load((DEPLOY / "helm" / "stoker" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == stoker.__version__
