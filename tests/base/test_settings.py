"""Settings: every field is documented, and values out of range are refused with the field, the value and the cure."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import msgspec
import pytest

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.registry import Registry, nearest
from stoker.builder.config import BuildConfig
from stoker.engine.config import CheckpointOrigin, EngineConfig, Target

DOCUMENTED = (Limits, Mapping, RuntimeConfig, BuildConfig, EngineConfig, Target, CheckpointOrigin)


@pytest.mark.parametrize("config", DOCUMENTED, ids=lambda config: config.__name__)
def test_every_field_has_a_docstring(config: type[msgspec.Struct]) -> None:
    (definition,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(definition, ast.ClassDef)
    documented = {
        field.target.id
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    assert documented == set(config.__struct_fields__)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (Limits, {"max_batch_size": 0}, r"max_batch_size=0 is refused\. Use a whole number from 1 to 65536\."),
        (Limits, {"max_batch_size": True}, "max_batch_size=True is refused"),
        (Limits, {"tokens_per_block": 48}, r"tokens_per_block=48 is refused\. Use one of: 16, 32, 64, 128\."),
        (Mapping, {"tensor_parallel": 1025}, "tensor_parallel=1025 is refused"),
        (RuntimeConfig, {"policy": "fifo"}, "policy='fifo' is refused.*guaranteed_no_evict, max_utilization, static"),
        (RuntimeConfig, {"kv_cache_fraction": 0.0}, r"kv_cache_fraction=0.0 is outside \(0, 1\]"),
        (RuntimeConfig, {"step_timeout_s": 0.5}, "step_timeout_s=0.5 is refused.*seconds, from 1 to 86400"),
        (RuntimeConfig, {"devices": (-1,)}, "devices=-1 is refused"),
    ],
)
def test_values_out_of_range_are_refused(config: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (Limits, {"max_batch_size": "8"}, "max_batch_size='8' is refused"),
        (RuntimeConfig, {"num_threads": 1.5}, r"num_threads=1\.5 is refused: it must be a whole number\."),
        (RuntimeConfig, {"kv_cache_fraction": "0.5"}, r"kv_cache_fraction='0\.5' is refused: it must be a number\."),
        (RuntimeConfig, {"overlap": "yes"}, r"overlap='yes' is refused: it must be True or False\."),
        (RuntimeConfig, {"devices": 0}, r"devices=0 is refused: it must be a list of whole numbers\."),
        (RuntimeConfig, {"policy": None}, r"policy=None is refused: it must be a string\."),
    ],
)
def test_values_of_a_wrong_type_are_type_errors(config: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message) as refused:
        config(**fields)
    assert isinstance(refused.value, ConfigError)


def test_the_registry_suggests_names() -> None:
    registry: Registry[int] = Registry("policy")
    registry.add("static", 1)
    registry.add("max_utilization", 2)
    assert list(registry) == registry.names() == ["static", "max_utilization"] and len(registry) == 2 and "static" in registry
    with pytest.raises(ConfigError, match=r"unknown policy 'Statik'\. Use one of: static\."):
        registry.get("Statik")
    with pytest.raises(ConfigError, match=r"unknown policy 'xyz'\. Use one of: static, max_utilization\."):
        registry.get("xyz")
    with pytest.raises(ValueError, match="policy 'static' is registered twice"):
        registry.add("static", 3)
    assert nearest("STATIC", ["static", "dynamic"])[0] == "static"
