"""A test program for an interpreter with truss: prints the dotted path of every field of TrussConfig and of its models."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import pydantic
from truss.base import trt_llm_config, truss_config

MAX_DEPTH = 5


def models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    """The models in a type such as Optional[Model] or dict[str, Model]."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def print_fields(model: type[pydantic.BaseModel], prefix: str, depth: int = 0) -> None:
    for name, field in model.model_fields.items():
        print(prefix + name)
        for inner in models_in(field.annotation):
            if depth < MAX_DEPTH and not issubclass(inner, pydantic.RootModel):
                print_fields(inner, f"{prefix}{name}.", depth + 1)


trt_llm_config.TrussTRTLLMBuildConfiguration.model_rebuild(force=True)  # resolves the name of a model that is defined after it
print_fields(truss_config.TrussConfig, "")
print_fields(trt_llm_config.TRTLLMConfigurationV1, "trt_llm.")
print_fields(trt_llm_config.TRTLLMConfigurationV2, "trt_llm.")
