"""`stoker build`: a checkpoint becomes an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base.config import Limits, Mapping
from stoker.builder.config import BuildConfig

if TYPE_CHECKING:
    from stoker.builder.estimate import Estimate
    from stoker.engine.reader import Engine

_DEFAULT = Limits()


def build(
    checkpoint: Annotated[str, typer.Argument(help="A Hugging Face directory, a .gguf file, or a hub id.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The engine directory to make.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16. Default: the checkpoint's; float32 for the CPU.")] = None,
    quantize: Annotated[str | None, typer.Option(help="A quantization by name. Default: NO_QUANT.")] = None,
    quantize_setting: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the quantization: group_size=64. Repeatable.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, int8 or float8_e4m3fn. Default: as the quantization says.")] = None,
    calibration_data: Annotated[
        str | None, typer.Option(help="A text file, folder or hub dataset. Default: the text that comes along.")
    ] = None,
    calibration_size: Annotated[int, typer.Option(help="Windows of text that calibration reads.")] = 32,
    calibration_seq_len: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    max_perplexity_increase: Annotated[
        float | None, typer.Option(help="Percent above which the build refuses. Default: by quantization.")
    ] = None,
    max_batch_size: Annotated[int, typer.Option(help="Sequences that compute in one step.")] = _DEFAULT.max_batch_size,
    max_input_len: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = _DEFAULT.max_input_len,
    max_output_len: Annotated[int, typer.Option(help="New tokens of a request.")] = _DEFAULT.max_output_len,
    max_total_len: Annotated[int | None, typer.Option(help="Prompt and new tokens together. Default: the sum of the two.")] = None,
    max_beam_width: Annotated[int, typer.Option(help="Beams of a request.")] = _DEFAULT.max_beam_width,
    max_num_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = _DEFAULT.max_num_tokens,
    tokens_per_block: Annotated[int, typer.Option(help="KV cache block size: 16, 32, 64 or 128.")] = _DEFAULT.tokens_per_block,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share each layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="Devices that share the layers.")] = 1,
    expert_parallel: Annotated[bool, typer.Option("--expert-parallel", help="Each device has some experts whole.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    compute_capability: Annotated[str | None, typer.Option(help="Of the target GPU, as 9.0. Default: this machine's.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A directory to take the tokenizer from.")] = None,
    rotary_base: Annotated[float | None, typer.Option(help="In place of the checkpoint's rope_theta.")] = None,
    rotary_dim: Annotated[int | None, typer.Option(help="Rotated features of a head: checked against the checkpoint.")] = None,
    rotary_scaling_type: Annotated[str | None, typer.Option(help="linear or dynamic; with --rotary-scaling-factor.")] = None,
    rotary_scaling_factor: Annotated[float | None, typer.Option(help="How far positions are stretched; above 1.")] = None,
    model_version: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, as chatglm_model_version=chatglm2_6b_32k: checked against config.json.")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a device that is not here, for --dry-run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and the largest batch that fits; write nothing.")] = False,
    dummy_weights: Annotated[bool, typer.Option("--dummy-weights", help="From config.json alone: random weights made at load.")] = False,
    verify: Annotated[str, typer.Option(help="files, auto, full or none: what is checked after writing.")] = "auto",
    no_kernels: Annotated[
        bool, typer.Option("--no-kernels", help="Compile no GPU kernels now; the first start does, one after another.")
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="The same as --verify none.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the engine that is there.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Let the checkpoint's own Python code run.")] = False,
) -> None:
    """Build an engine from a checkpoint.

    Examples:

      stoker build ./Llama-3.1-8B-Instruct -o llama-engine

      stoker build SmolLM2-135M-Instruct.Q4_1.gguf -o smol --max-batch-size 64

      stoker build ./Llama-3.1-8B --dry-run --device cuda --memory-gib 80
    """
    limits = Limits(
        max_batch_size=max_batch_size, max_input_len=max_input_len, max_output_len=max_output_len, max_total_len=max_total_len,
        max_beam_width=max_beam_width, max_num_tokens=max_num_tokens, tokens_per_block=tokens_per_block,
    )  # fmt: skip
    config = BuildConfig(
        dtype=dtype, quantization=quantize, limits=limits, quantization_settings=_pairs(quantize_setting, "--quantize-setting"),
        kv_cache_dtype=kv_cache_dtype, calibration_data=calibration_data, calibration_size=calibration_size,
        calibration_seq_len=calibration_seq_len,
        max_perplexity_increase=None if max_perplexity_increase is None else max_perplexity_increase / 100,
        mapping=Mapping(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, expert_parallel=expert_parallel),
        device=device, compute_capability=compute_capability, dummy_weights=dummy_weights, trust_remote_code=trust_remote_code,
        tokenizer=tokenizer, versions=_pairs(model_version, "--model-version"), rotary_base=rotary_base, rotary_dim=rotary_dim,
        rotary_scaling_type=rotary_scaling_type, rotary_scaling_factor=rotary_scaling_factor,
    )  # fmt: skip
    if dry_run:
        _dry_run(checkpoint, config, memory_gib)
    elif output is None:
        raise typer.BadParameter("name the engine directory, or use --dry-run", param_hint="--output")
    else:
        _build(checkpoint, output, config, force=force, verify="none" if no_verify else verify, kernels=not no_kernels)


def _build(checkpoint: str, output: Path, config: BuildConfig, *, force: bool, verify: str, kernels: bool) -> None:
    from rich.console import Console

    from stoker.builder.build import build as run
    from stoker.cli.progress import Bars
    from stoker.runtime.aot import compile_kernels

    console = Console(stderr=True)
    with Bars(console) as bars:
        engine = run(checkpoint, output, config, force=force, verify=verify, progress=bars, kernels=compile_kernels if kernels else None)
    console.print(_summary(engine), markup=False, soft_wrap=True)


def _summary(engine: Engine) -> str:
    from stoker.cli.checks import sentences

    config = engine.config
    size = sum(record.size for record in config.files.values())
    what = f"{config.model.architecture}, {config.dtype}, {config.recipe.name}, {size / 2**20:,.0f} MiB for {config.target.device}"
    lines = [f"{engine.path}: {what}"]
    lines += [f"{sentence}." for name, sentence in sentences(config.checks).items() if name != "files"]
    lines.append(f"Serve it: stoker serve {engine.path}")
    return "\n".join(lines)


def _pairs(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """NAME=VALUE pairs; what takes them reads the values."""
    for pair in pairs or []:
        if "=" not in pair:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint=option)
    return dict(pair.split("=", 1) for pair in pairs or [])


def _dry_run(checkpoint: str, config: BuildConfig, memory_gib: float | None) -> None:
    from rich.console import Console

    from stoker.builder.estimate import estimate
    from stoker.builder.prepare import prepare
    from stoker.cli.tables import rows

    prepared = prepare(checkpoint, config)
    found = estimate(prepared.config, None if memory_gib is None else int(memory_gib * 2**30))
    Console().print(rows(f"Engine of {prepared.config.checkpoint.name}", _estimate_rows(found, prepared.config.limits)))
    if not found.fits:
        raise typer.Exit(1)


def _estimate_rows(found: Estimate, limits: Limits) -> list[tuple[str, str]]:
    memory = "unknown here: give --memory-gib" if found.memory is None else _size(found.memory)
    batch = "unknown" if found.largest_batch is None else f"{found.largest_batch} of {limits.max_batch_size}"
    return [
        ("parameters", f"{found.parameters:,}"),
        *((f"file {name}", _size(size)) for name, size in found.files.items()),
        ("device memory: weights", _size(found.weights)),
        (f"device memory: activations of {limits.max_num_tokens} tokens", _size(found.activations)),
        ("KV cache of a token", _size(found.kv_token)),
        (f"KV cache of a sequence of {limits.max_seq_len}", _size(found.kv_sequence)),
        (f"KV cache of {limits.max_batch_size} such sequences", _size(found.kv_limits)),
        ("memory of the device", memory),
        ("largest batch of full sequences that fits", batch),
    ]


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:,.2f} GiB"
