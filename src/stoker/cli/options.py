"""Command-line options that several commands share.

Most options are the fields of a settings struct: `struct_options` makes one option per field, and the struct checks the values. To add an
option for a new field of RuntimeConfig or SamplingParams, add its help text to RUNTIME_HELP or SAMPLING_HELP.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from stoker.base.config import POLICIES, RuntimeConfig
from stoker.base.errors import ConfigError, reason_of
from stoker.base.types import SamplingParams
from stoker.deploy.build_settings import BuildSettings

# Field of RuntimeConfig: help text of its option.
RUNTIME_HELP = {
    "device": "cpu or cuda. Default: the device that the engine was built for.",
    "devices": "GPU index of each rank, among the visible GPUs, such as 0,1. Default: the first ones.",
    "policy": f"Scheduling policy: {', '.join(POLICIES[:-1])} or {POLICIES[-1]}.",
    "max_batch_size": "Maximum number of sequences per step; at most the engine's. An engine of a checkpoint is built for it.",
    "max_num_sequences": "Maximum number of sequences that hold KV blocks. Default: max_batch_size.",
    "max_num_tokens": "Maximum number of tokens per step; at most the engine's. An engine of a checkpoint is built for it.",
    "chunked_prefill": "Split long prompts over several steps and batch them with decodes.",
    "target_itl_ms": "Target of the inter-token latency in milliseconds: limits the prompt tokens of a step with decodes.",
    "target_ttft_ms": "Target of the time to the first token in milliseconds: late prompts wait behind those that can reach it.",
    "prefix_reuse": "Reuse cached KV blocks for prompts with the same beginning.",
    "kv_cache_tokens": "Size of the KV cache in tokens.",
    "kv_cache_fraction": "Size of the KV cache as a fraction of free memory. With --kv-cache-tokens, the smaller size is used.",
    "max_queue_size": "Maximum number of waiting requests; further requests are rejected with status 429.",
    "guide_timeout_s": "Seconds for compiling the grammar of a guided request, which is refused with status 400 after them.",
    "guide_queue_size": "Maximum number of grammars that wait for compilation; further ones are rejected with status 503.",
    "overlap": "Schedule the next step while the current one runs. GPU only.",
    "cuda_graphs": "Run decodes and short steps with prompts as CUDA graphs. GPU only.",
    "custom_all_reduce": "Sum short messages of several GPUs through peer memory. Without it, all messages go through NCCL.",
    "attention_window": "Maximum number of previous tokens that attention reads.",
    "speculate": "Speculative decoding: ngram copies drafts from the prompt, request verifies the drafts of requests, and a directory is "
    "that of a draft engine or of draft heads. Default: none.",
    "draft_tokens": "Maximum number of draft tokens per sequence and step. Default: all nodes of --draft-tree, or 7 without one.",
    "draft_tree": "Tree of the drafts of a draft engine or heads: paths of ranks such as [0],[0,0],[1], mc_sim_7b_63, or "
    "dynamic:DEPTH,WIDTH,TOKENS. Default: one chain.",
    "adaptive_drafts": "Verify fewer draft tokens where it is faster.",
    "step_timeout_s": "Seconds after which a step counts as hung and the server as not ready. Default: 30 on a GPU, 120 on a CPU.",
    "kv_events": "ZeroMQ address for events about KV cache blocks, such as tcp://*:5557, which routers read. They contain prompts.",
    "kv_events_replay": "ZeroMQ address for requests to repeat those events, such as tcp://*:5558.",
    "kv_events_topic": "Topic of those events. Default: empty.",
    "transfer": "HOST:PORT for transfers of KV cache blocks between servers, such as 0.0.0.0:5600. Needs STOKER_CLUSTER_TOKEN.",
    "role": "What routers use a server with --transfer for: prefill, decode or both.",
    "transfer_backend": "How blocks are copied: auto, nixl or tcp. auto uses NIXL if it is installed.",
    "transfer_timeout_s": "Seconds after which a transfer without progress fails, and unread blocks are released.",
    "num_threads": "Number of CPU threads for computation. Default: all cores.",
}
# Field of SamplingParams: help text of its option.
SAMPLING_HELP = {
    "max_tokens": "Maximum number of new tokens.",
    "min_tokens": "Minimum number of new tokens before the answer may end.",
    "n": "Number of answers per prompt.",
    "temperature": "Sampling temperature; 0 is greedy.",
    "top_k": "Sample from the k most likely tokens; 0 turns it off.",
    "top_p": "Sample from the most likely tokens with this total probability; 1 turns it off.",
    "min_p": "Drop tokens below this fraction of the highest probability; 0 turns it off.",
    "seed": "Seed of the random generator; the same seed gives the same tokens.",
    "repetition_penalty": "Above 1, tokens that are already in the text become less likely.",
    "presence_penalty": "Subtracted once from the logits of each generated token.",
    "frequency_penalty": "Subtracted from a token's logit each time it was generated.",
    "stop": "A string that ends the answer. Repeatable.",
    "ignore_eos": "Continue after the model's end token.",
}
# Field of BuildSettings: help text of its option. They apply when MODEL is a checkpoint.
BUILD_HELP = {
    "quantization": "For a checkpoint: name of a quantization, such as FP8.",
    "dtype": "For a checkpoint: float32, float16 or bfloat16. Default: the checkpoint's, or float32 for a CPU.",
    "kv_cache_dtype": "For a checkpoint: auto, int8 or float8_e4m3fn. Default: chosen by the quantization.",
    "max_input_len": "For a checkpoint: maximum number of prompt tokens per request.",
    "max_output_len": "For a checkpoint: maximum number of new tokens per request.",
    "max_total_len": "For a checkpoint: maximum number of prompt and new tokens together.",
    "max_beam_width": "For a checkpoint: maximum number of beams per request.",
    "tensor_parallel": "For a checkpoint: number of devices that each layer is split over.",
    "pipeline_parallel": "For a checkpoint: number of devices that the layers are distributed over.",
    "data_parallel": "For a checkpoint: number of devices with their own sequences; requires --expert-parallel.",
    "expert_parallel": "For a checkpoint: give each device whole experts instead of a slice of every expert.",
    "trust_remote_code": "For a checkpoint: allow Python code from it to run.",
}
TEMPLATE_SETTINGS = typer.Option("--set", help="A template variable or parameter as name:value; separate several with commas. Repeatable.")

Function = Callable[..., Any]
_STRINGS = str | Sequence[str]  # a field of this type is a repeatable option
_INDICES = tuple[int, ...] | None  # a field of this type is one option with commas
_FLAGS = {
    "quantization": "quantize",
    "http_port": "port",
    "protocols": "protocol",
    "cors_origins": "cors-origin",
    "console": "console/--no-console",
    "test_models": "with-test-models/--without-test-models",
}  # fields whose option has another name


def struct_options(struct: type[msgspec.Struct], name: str, helps: dict[str, str], **defaults: Any) -> Callable[[Function], Function]:
    """Decorate a command with an option for each field of `struct` in `helps`. The command receives the struct as keyword `name`.

    `defaults` replace the struct's own defaults. A bad value raises what the struct's constructor raises.
    """
    options = [_option(struct, field, text, defaults) for field, text in helps.items()]

    def decorate(command: Function) -> Function:
        """The command with the options."""

        @functools.wraps(command)
        def run(**arguments: Any) -> Any:
            """Call the command with the struct."""
            values = {option.name: arguments.pop(option.name) for option in options}
            return command(**arguments, **{name: _struct_of(struct, values)})

        own = [parameter for parameter in _parameters(command) if parameter.name != name]
        run.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
        run.structs = {**getattr(command, "structs", {}), name: (struct, set(helps))}  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in own + options}
        return run

    return decorate


def structs_of(command: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The structs that `struct_options` would pass to a command, by their keywords. Options that are not in `values` have their defaults.

    Raises what the constructors of the structs raise.
    """
    return {
        keyword: _struct_of(struct, {name: values[name] for name in names & values.keys()})
        for keyword, (struct, names) in command.structs.items()
    }


def explicit_parameters(context: typer.Context) -> dict[str, str]:
    """The origin of each parameter that was set: "command line" or the file of --config. Parameters at their default are left out."""
    origins = {"COMMANDLINE": "command line", "DEFAULT_MAP": str(context.params.get("config"))}
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: origins[source.name] for name, source in sources.items() if source is not None and source.name in origins}


def read_lines(path: Path, what: str) -> list[str]:
    """The non-empty lines of a UTF-8 text file. Raises ConfigError when there are none; `what` describes a line in messages."""
    cure = f"Name a UTF-8 text file with one {what} a line."
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}.", cure=cure) from None
    if not lines:  # an empty list of API keys would turn authentication off
        raise ConfigError(f"{path} holds no {what}.", cure=cure)
    return lines


def parse_template_settings(settings: list[str]) -> dict[str, str]:
    """The values of --set as a dictionary; each is "name:value", or several joined by commas. Raises ConfigError."""
    pairs = [pair for text in settings for pair in text.split(",") if pair]
    if wrong := next((pair for pair in pairs if ":" not in pair), None):
        raise ConfigError(f"--set {wrong!r} has no value.", cure="Write name:value.")
    return dict(pair.split(":", 1) for pair in pairs)


def _parameters(command: Function) -> list[inspect.Parameter]:
    """The parameters of a command with evaluated annotations."""
    hints = typing.get_type_hints(command, include_extras=True) if not hasattr(command, "__signature__") else {}
    kind = inspect.Parameter.KEYWORD_ONLY
    return [p.replace(annotation=hints.get(p.name, p.annotation), kind=kind) for p in inspect.signature(command).parameters.values()]


def _option(struct: type[msgspec.Struct], name: str, text: str, defaults: dict[str, Any]) -> inspect.Parameter:
    """The option for one field of a struct, as a parameter of the command function."""
    field = next(field for field in msgspec.structs.fields(struct) if field.name == name)
    default = defaults.get(name, field.default)
    annotation: Any = typing.get_type_hints(struct)[name]
    if typing.get_origin(annotation) is tuple or annotation == _STRINGS:
        annotation, default = list[str], list(default)
    if annotation == _INDICES:
        annotation = str | None
    option = typer.Option(f"--{_flag(name, annotation)}", help=text, show_default=default not in (None, []))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option])


def _flag(name: str, annotation: Any) -> str:
    """The flag of a field, such as --kv-cache-fraction or --overlap/--no-overlap."""
    flag = _FLAGS.get(name, name.replace("_", "-"))
    if annotation == (bool | None):
        return flag
    return f"{flag}/--no-{flag}" if annotation is bool and "/" not in flag else flag


def _struct_of(struct: type[msgspec.Struct], values: dict[str, Any]) -> msgspec.Struct:
    """The struct with the values of its options, and defaults for other fields. Raises what its constructor raises."""
    return struct(**{name: _field_value(struct, name, value) for name, value in values.items()})


def _field_value(struct: type[msgspec.Struct], name: str, value: Any) -> Any:
    """The value of an option, converted to the type of the struct's field. Raises ConfigError."""
    if isinstance(value, str) and typing.get_type_hints(struct)[name] == _INDICES:
        return _parse_indices(name, value)
    return tuple(value) if isinstance(value, list) else value


def _parse_indices(name: str, text: str) -> tuple[int, ...]:
    """Indices separated by commas. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise ConfigError(f"{name}={text!r} is refused.", cure="Write indices with commas between them: 0,1.")
    return tuple(map(int, parts))


def sampling_options(**defaults: Any) -> Callable[[Function], Function]:
    """Decorate a command with the options of SamplingParams, which it receives as `params`."""
    return struct_options(SamplingParams, "params", SAMPLING_HELP, **defaults)


build_options = struct_options(BuildSettings, "build", BUILD_HELP)
runtime_options = struct_options(RuntimeConfig, "runtime", RUNTIME_HELP)
