"""What can be imported from `stoker`, without torch until an engine is loaded."""

from __future__ import annotations

import inspect
import subprocess
import sys

import stoker
from stoker.base import errors


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in stoker.__all__ if not hasattr(stoker, name)] == []
    assert set(stoker.__all__) <= set(dir(stoker))
    assert {"Completion", "Delta", "Guide", "LLM", "RuntimeConfig", "SamplingParams"} <= set(stoker.__all__)


def test_all_errors_are_public() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.StokerError)}
    assert defined <= set(stoker.__all__)


def test_results_and_errors_are_imported_without_torch() -> None:
    code = "import sys; from stoker import Completion, Delta, Guide, RuntimeConfig, StokerError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_other_names_do_not_exist() -> None:
    assert not hasattr(stoker, "Llm")
