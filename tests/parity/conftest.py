"""Makes the modules of this directory importable by name, and saves the tiny checkpoint of each row of the architecture table."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "builder"))
sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, FIRST


@pytest.fixture(scope="session", params=FIRST)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a row's checkpoint, which tests do not change. Tests of one row run one after the other."""
    folder = tmp_path_factory.mktemp("row") / str(request.param)
    CASES[FIRST[request.param]]().save(folder)
    return folder
