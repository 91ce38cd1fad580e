"""The smoke test (`scripts/smoke.py`) with the lowest and with the highest allowed version of every direct dependency: `make bounds`.

    python scripts/bounds.py [--only lowest|highest] [--folder .cache/bounds]

Two virtual environments are created. The lowest one has, of each package that pyproject.toml names for users (not `dev` and `docs`), the
version of its lower bound; the highest one has the newest version that pip finds. Packages that these need in turn are the newest in both.

torch is exempt: both environments have the version of constraints.txt, because other builds of it download gigabytes of CUDA libraries.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("gpu", "grpc", "guided", "otel", "s3", "route", "ray")
EXEMPT = ("torch",)
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[[\w,]+\])?(?:>=(?P<lowest>[\w.]+))?")


def requirements(extras: tuple[str, ...] = EXTRAS) -> dict[str, tuple[str, str | None]]:
    """name → (its extras in brackets, the lower bound) of the direct dependencies and of those of `extras`.

    Raises ValueError for a requirement that is anything but a name with a lower bound, or with none.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for text in [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]:
        match = _REQUIREMENT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} in pyproject.toml is not a name with a lower bound, such as numpy>=1.26")
        found[normalized(match["name"])] = match["extras"] or "", match["lowest"]
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_versions() -> dict[str, str]:
    """Package → version in constraints.txt."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {normalized(name): version for name, _, version in (line.partition("==") for line in lines)}


def install(folder: Path, lowest: bool) -> Path:
    """Create a virtual environment with Stoker and its dependencies. Returns its Python."""
    venv.create(folder, clear=True, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *(f"{name}=={pinned_versions()[name]}" for name in EXEMPT)], check=True)
    bounds = {name: bound for name, bound in requirements().items() if name not in EXEMPT}
    wanted = [f"{name}{extras}" + (f"=={version}" if lowest and version else "") for name, (extras, version) in bounds.items()]
    subprocess.run([*pip, "setuptools>=77", *wanted], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(ROOT)], check=True)
    return python


def installed_versions(folder: Path) -> dict[str, str]:
    (packages,) = folder.glob("lib/python*/site-packages")
    return {normalized(one.metadata["Name"]): one.version for one in distributions(path=[str(packages)])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["lowest", "highest"])
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "bounds")
    options = parser.parse_args()
    failed = []
    for which in [options.only] if options.only else ["lowest", "highest"]:
        folder = options.folder / which
        python = install(folder, which == "lowest")
        versions = installed_versions(folder)
        print(f"{which}: " + ", ".join(f"{name} {versions[name]}" for name in requirements()), flush=True)
        print(f"{which}: exempt from the lowest version: {', '.join(EXEMPT)}", flush=True)
        if subprocess.run([python, ROOT / "scripts" / "smoke.py"], check=False, cwd=folder).returncode:
            failed.append(which)
    print(f"failed: {', '.join(failed)}" if failed else "passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
