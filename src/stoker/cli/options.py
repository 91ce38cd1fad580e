"""Options that commands share: each is a field of the value that it sets, checked where that value is made."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.types import SamplingParams

RUNTIME = {
    "device": "cpu or cuda. Default: what the engine was built for.",
    "devices": "The GPU of each rank, by index among the visible ones: 0,1. Default: the first ones.",
    "policy": "Who is admitted: guaranteed_no_evict, max_utilization or static.",
    "max_batch_size": "Sequences that compute in one step; at most the engine's.",
    "max_num_sequences": "Sequences that hold KV blocks at once. Default: max_batch_size.",
    "max_num_tokens": "Tokens of one step; at most the engine's.",
    "chunked_prefill": "Split prompts over steps, mixed with decodes.",
    "prefix_reuse": "Keep KV blocks for later prompts that begin alike.",
    "kv_cache_tokens": "Token places of the KV cache.",
    "kv_cache_fraction": "KV cache as a fraction of the memory that is free. With --kv-cache-tokens, the smaller wins.",
    "max_queue_size": "Waiting requests; more are refused with 429.",
    "overlap": "Plan a step while the one before it runs. GPU only.",
    "cuda_graphs": "Replay captured steps. GPU only.",
    "custom_all_reduce": "Sum short messages of several GPUs in each other's memory; else all go through NCCL.",
    "attention_window": "Keep at most so many tokens of a sequence visible.",
    "step_timeout_s": "A step that takes longer hangs: not ready. Default: 30 on a GPU, 120 on a CPU.",
    "num_threads": "CPU threads for arithmetic. Default: all cores.",
}
SAMPLING = {
    "max_tokens": "New tokens, at most.",
    "min_tokens": "New tokens before an end may come.",
    "n": "Answers for each prompt.",
    "temperature": "0 is greedy.",
    "top_k": "Sample from the k best tokens; 0 is off.",
    "top_p": "Sample from the best tokens of this total probability; 1 is off.",
    "min_p": "Drop tokens below this fraction of the best one's probability; 0 is off.",
    "seed": "The same seed gives the same tokens.",
    "repetition_penalty": "Above 1 discourages tokens that were there.",
    "presence_penalty": "Subtracted once for each token that was generated.",
    "frequency_penalty": "Subtracted each time a token was generated.",
    "stop": "A string that ends the answer. May be repeated.",
    "ignore_eos": "Go on after the model's end token.",
}

Function = Callable[..., Any]
_INDICES = tuple[int, ...] | None  # one option, with commas


def fields(struct: type[msgspec.Struct], name: str, helps: dict[str, str], **defaults: Any) -> Callable[[Function], Function]:
    """Give a command an option for each field of `struct` in `helps`; it receives the struct as keyword argument `name`.

    `defaults` differ from the struct's own. Raises what the struct raises for a bad value.
    """
    options = [_option(struct, field, text, defaults) for field, text in helps.items()]

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            values = {option.name: _value(struct, option.name, given.pop(option.name)) for option in options}
            return command(**given, **{name: struct(**values)})

        own = [parameter for parameter in _signature(command) if parameter.name != name]
        run.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in own + options}
        return run

    return decorate


def _signature(command: Function) -> list[inspect.Parameter]:
    """Parameters with evaluated annotations: those of this module's decorators are values, those of commands are text."""
    hints = typing.get_type_hints(command, include_extras=True) if not hasattr(command, "__signature__") else {}
    kind = inspect.Parameter.KEYWORD_ONLY
    return [p.replace(annotation=hints.get(p.name, p.annotation), kind=kind) for p in inspect.signature(command).parameters.values()]


def _option(struct: type[msgspec.Struct], name: str, text: str, defaults: dict[str, Any]) -> inspect.Parameter:
    field = next(field for field in msgspec.structs.fields(struct) if field.name == name)
    default = defaults.get(name, field.default)
    kind: Any = typing.get_type_hints(struct)[name]
    if typing.get_origin(kind) is tuple:
        kind, default = list[str], list(default)
    if kind == _INDICES:
        kind = str | None
    option = typer.Option(f"--{_flag(name, kind)}", help=text, show_default=default not in (None, []))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _flag(name: str, kind: Any) -> str:
    flag = {"http_port": "port", "protocols": "protocol", "cors_origins": "cors-origin"}.get(name, name.replace("_", "-"))
    return f"{flag}/--no-{flag}" if kind is bool else flag


def _value(struct: type[msgspec.Struct], name: str, value: Any) -> Any:
    if isinstance(value, str) and typing.get_type_hints(struct)[name] == _INDICES:
        return _indices(name, value)
    return tuple(value) if isinstance(value, list) else value


def _indices(name: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise ConfigError(f"{name}={text!r} is refused.", cure="Write indices with commas between them: 0,1.")
    return tuple(map(int, parts))


def given(context: typer.Context) -> frozenset[str]:
    """Names of the parameters that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def lines_of(path: Path, what: str) -> list[str]:
    """The non-empty lines of a UTF-8 text file, one at least. Raises ConfigError that names the file and what it was to hold."""
    cure = f"Name a UTF-8 text file with one {what} a line."
    try:
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", cure=cure) from None
    if not found:  # no key at all would let everybody in
        raise ConfigError(f"{path} holds no {what}.", cure=cure)
    return found


def sampling_options(**defaults: Any) -> Callable[[Function], Function]:
    """The options of SamplingParams, as `params`."""
    return fields(SamplingParams, "params", SAMPLING, **defaults)


runtime_options = fields(RuntimeConfig, "runtime", RUNTIME)
