"""The check of other packages' private parts: what it reports, that the installed versions pass, and what it costs."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from stoker.base import private_api
from stoker.base.errors import StokerError, UnsupportedVersionError
from stoker.base.private_api import PRIVATE_APIS, TESTED, PrivateAPI, VersionRange, check_private_api

ROOT = Path(__file__).parents[2]
MAX_CHECK_S = 0.005
USERS = sorted({row.used_by for row in PRIVATE_APIS})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package without a class of its module, and a row of the table that requires it."""
    module = ModuleType("fakelib.parts")
    monkeypatch.setitem(sys.modules, "fakelib", ModuleType("fakelib"))
    monkeypatch.setitem(sys.modules, "fakelib.parts", module)
    monkeypatch.setattr(private_api, "PRIVATE_APIS", (PrivateAPI("fakelib", "fakelib.parts", ("Reader._start",), "stoker.x", "reads"),))
    monkeypatch.setitem(TESTED, "fakelib", VersionRange("2.1", "3.4"))
    monkeypatch.setattr(private_api.importlib.metadata, "version", lambda package: "4.0")
    return module


@pytest.mark.usefixtures("fake")
def test_a_missing_attribute_is_reported_in_one_line() -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        check_private_api("stoker.x")
    assert str(caught.value) == (
        "fakelib 4.0 is not supported: it has no fakelib.parts.Reader._start. Stoker was tested with 2.1 to 3.4. "
        "Run: pip install 'fakelib>=2.1,<=3.4'."
    )


def test_a_missing_module_is_reported(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, fake.__name__)
    with pytest.raises(StokerError, match=r"fakelib 4\.0 is not supported: it has no fakelib\.parts\."):
        check_private_api("stoker.x")


def test_a_present_attribute_passes(fake: ModuleType) -> None:
    fake.Reader = SimpleNamespace(_start=print)  # type: ignore[attr-defined]
    check_private_api("stoker.x")


@pytest.mark.parametrize("user", USERS)
def test_the_installed_versions_pass_quickly(user: str) -> None:
    check_private_api(user)  # imports the modules, which `user` does anyway
    started = time.process_time()
    check_private_api(user)
    assert time.process_time() - started < MAX_CHECK_S


@pytest.mark.parametrize("user", USERS)
def test_every_user_is_checked_by_its_package(user: str) -> None:
    assert importlib.util.find_spec(user) is not None
    calls = [path for path in (ROOT / "src").rglob("*.py") if f'check_private_api("{user}")' in path.read_text()]
    assert len(calls) == 1


def test_lowest_tested_versions_are_the_bounds_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = " ".join([*project["dependencies"], *project["optional-dependencies"]["gpu"]])
    for package, tested in TESTED.items():
        if package != "torch":  # exempt in scripts/bounds.py: one version of it is available to the tests
            assert f"{package}>={tested.lowest}" in declared.replace("[standard]", "")


def test_a_frontend_process_reports_an_unsupported_version_in_one_line() -> None:
    """As a process: with uvicorn's protocol class renamed, it ends with status 1 and one line."""
    code = (
        "import sys, uvicorn.protocols.http.httptools_impl as impl; del impl.HttpToolsProtocol._start_asgi_task\n"
        "from stoker.server.processes.frontend_entry import main; sys.exit(main())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert ran.returncode == 1 and len(ran.stderr.splitlines()) == 1, ran.stderr
    assert "has no uvicorn.protocols.http.httptools_impl.HttpToolsProtocol._start_asgi_task" in ran.stderr
