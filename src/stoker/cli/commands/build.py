"""`stoker build`: converts a checkpoint to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base.config import Limits, Mapping, check_choice
from stoker.base.errors import ConfigError
from stoker.builder.config import VERIFY, BuildConfig
from stoker.cli.engines import fetch_checkpoint
from stoker.cli.output.tables import format_size

if TYPE_CHECKING:
    from stoker.builder.estimate import Estimate
    from stoker.engine.reader import Engine

_DEFAULTS = Limits()


def build(
    checkpoint: Annotated[str, typer.Argument(help="A Hugging Face directory, a .gguf file, a hub id, an archive or an address.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The engine directory to write.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16. Default: the checkpoint's, or float32 for a CPU.")
    ] = None,
    quantize: Annotated[str | None, typer.Option(help="Name of a quantization, such as FP8. Default: NO_QUANT.")] = None,
    quantize_setting: Annotated[
        list[str] | None, typer.Option(help="A setting of the quantization as NAME=VALUE, such as group_size=64. Repeatable.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, int8 or float8_e4m3fn. Default: chosen by the quantization.")] = None,
    calibration_data: Annotated[
        str | None, typer.Option(help="A text file, folder or hub dataset for calibration. Default: the text in this package.")
    ] = None,
    calibration_size: Annotated[
        int | None,
        typer.Option(help="Number of text windows that calibration reads. Default: 8 for FP8 with an unquantized KV cache, else 32."),
    ] = None,
    calibration_seq_len: Annotated[int, typer.Option(help="Tokens per calibration window.")] = 512,
    max_perplexity_increase: Annotated[
        float | None,
        typer.Option(help="Fail when quantization raises perplexity by more than this percentage. Default: chosen by the quantization."),
    ] = None,
    max_batch_size: Annotated[int, typer.Option(help="Maximum number of sequences per step.")] = _DEFAULTS.max_batch_size,
    max_input_len: Annotated[int, typer.Option(help="Maximum number of prompt tokens per request.")] = _DEFAULTS.max_input_len,
    max_output_len: Annotated[int, typer.Option(help="Maximum number of new tokens per request.")] = _DEFAULTS.max_output_len,
    max_total_len: Annotated[
        int | None, typer.Option(help="Maximum number of prompt and new tokens together. Default: the sum of the two limits.")
    ] = None,
    max_beam_width: Annotated[int, typer.Option(help="Maximum number of beams per request.")] = _DEFAULTS.max_beam_width,
    max_num_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per step.")] = _DEFAULTS.max_num_tokens,
    tokens_per_block: Annotated[int, typer.Option(help="Tokens per KV cache block: 16, 32, 64 or 128.")] = _DEFAULTS.tokens_per_block,
    tensor_parallel: Annotated[int, typer.Option(help="Number of devices that each layer is split over.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="Number of devices that the layers are distributed over.")] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Give each device whole experts instead of a slice of every expert.")
    ] = False,
    data_parallel: Annotated[
        int, typer.Option(help="Number of devices with their own sequences and complete attention weights; requires --expert-parallel.")
    ] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda when a GPU is present.")] = None,
    compute_capability: Annotated[
        str | None, typer.Option(help="Compute capability of the target GPU, such as 9.0. Default: this machine's.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A directory to read the tokenizer from. Default: the checkpoint.")] = None,
    rotary_base: Annotated[float | None, typer.Option(help="Replaces the checkpoint's rope_theta.")] = None,
    rotary_dim: Annotated[int | None, typer.Option(help="Rotated features per head; must equal the checkpoint's.")] = None,
    rotary_scaling_type: Annotated[str | None, typer.Option(help="linear or dynamic; requires --rotary-scaling-factor.")] = None,
    rotary_scaling_factor: Annotated[float | None, typer.Option(help="Factor by which positions are scaled; above 1.")] = None,
    model_version: Annotated[
        list[str] | None,
        typer.Option(help="A model version as NAME=VALUE, such as chatglm_model_version=chatglm2_6b_32k; must match config.json."),
    ] = None,
    ignore_config_key: Annotated[
        list[str] | None,
        typer.Option(help="A key of config.json that has no effect on the model and that Stoker does not know. Repeatable."),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="Device memory to assume with --dry-run, for a device that this machine lacks.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and the largest batch that fits, and write nothing.")] = False,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Read config.json only; the engine gets random weights when it is loaded.")
    ] = False,
    verify: Annotated[str, typer.Option(help="Checks after writing: files, auto, full or none.")] = "auto",
    no_kernels: Annotated[
        bool, typer.Option("--no-kernels", help="Do not compile GPU kernels now. The first start then compiles them one after another.")
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Same as --verify none.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing engine.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Allow Python code from the checkpoint to run.")] = False,
) -> None:
    """Build an engine from a checkpoint.

    The engine directory holds everything that `stoker serve` needs: weights, tokenizer, limits, and for a GPU compiled kernels.

    Examples:

      stoker build ./Llama-3.1-8B-Instruct -o engine

      stoker build SmolLM2-135M-Instruct.Q4_1.gguf -o smol --max-batch-size 64

      stoker build ./Llama-3.1-8B --dry-run --device cuda --memory-gib 80
    """
    if no_verify and verify not in ("auto", "none"):
        raise ConfigError(f"--verify {verify} and --no-verify contradict each other.", cure="Leave out one of them.")
    verify = "none" if no_verify else verify
    check_choice("verify", verify, VERIFY)
    if verify == "none" and max_perplexity_increase is not None:
        raise ConfigError("--max-perplexity-increase has no effect without verification.", cure="Leave out one of the two options.")
    if memory_gib is not None and not dry_run:
        raise ConfigError(f"--memory-gib {memory_gib:g} has no effect without --dry-run.", cure="Add --dry-run, or leave it out.")
    if memory_gib is not None and not 0 < memory_gib < 1 << 20:
        raise ConfigError(f"--memory-gib {memory_gib:g} is refused.", cure="Use a number above 0, such as 80.")
    limits = Limits(
        max_batch_size=max_batch_size, max_input_len=max_input_len, max_output_len=max_output_len, max_total_len=max_total_len,
        max_beam_width=max_beam_width, max_num_tokens=max_num_tokens, tokens_per_block=tokens_per_block,
    )  # fmt: skip
    config = BuildConfig(
        dtype=dtype, quantization=quantize, limits=limits, quantization_settings=_parse_pairs(quantize_setting, "--quantize-setting"),
        kv_cache_dtype=kv_cache_dtype, calibration_data=calibration_data, calibration_size=calibration_size,
        calibration_seq_len=calibration_seq_len,
        max_perplexity_increase=None if max_perplexity_increase is None else max_perplexity_increase / 100,
        mapping=Mapping(
            tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, expert_parallel=expert_parallel,
            data_parallel=data_parallel,
        ),
        device=device, compute_capability=compute_capability, dummy_weights=dummy_weights, trust_remote_code=trust_remote_code,
        tokenizer=tokenizer, versions=_parse_pairs(model_version, "--model-version"), ignored_config_keys=tuple(ignore_config_key or ()),
        rotary_base=rotary_base, rotary_dim=rotary_dim,
        rotary_scaling_type=rotary_scaling_type, rotary_scaling_factor=rotary_scaling_factor,
    )  # fmt: skip
    if dry_run:
        _dry_run(checkpoint, config, memory_gib)
    elif output is None:
        raise typer.BadParameter("name the engine directory, or use --dry-run", param_hint="--output")
    else:
        _build(checkpoint, output, config, force=force, verify=verify, kernels=not no_kernels)


def _build(checkpoint: str, output: Path, config: BuildConfig, *, force: bool, verify: str, kernels: bool) -> None:
    """Build the engine with progress bars, and print a summary."""
    from rich.console import Console

    from stoker.api.progress import shown_progress

    with shown_progress("building") as progress:
        from stoker.engine.publish import check_output

        check_output(output, force)
        path, name = fetch_checkpoint(checkpoint, config, progress)
        from stoker.builder.build import build as build_engine
        from stoker.runtime.aot import compile_kernels

        compile_now = compile_kernels if kernels else None
        engine = build_engine(path, output, config, name=name, force=force, verify=verify, progress=progress, kernels=compile_now)
    Console(stderr=True).print(_summary(engine), markup=False, soft_wrap=True)


def _summary(engine: Engine) -> str:
    """A description of the built engine, and the results of its checks."""
    from stoker.cli.output.build_checks import describe_checks

    config = engine.config
    size = sum(record.size for record in config.files.values())
    description = f"{config.model.architecture}, {config.dtype}, {config.recipe.name}, {size / 2**20:,.0f} MiB for {config.target.device}"
    lines = [f"{engine.path}: {description}"]
    lines += [f"{sentence}." for name, sentence in describe_checks(config.checks).items() if name != "files"]
    lines.append(f"Serve it: stoker serve {engine.path}")
    return "\n".join(lines)


def _parse_pairs(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """NAME=VALUE pairs as a dictionary of texts, which the settings parse later. Raises ConfigError; `option` is the name in messages."""
    for pair in pairs or []:
        if "=" not in pair:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint=option)
    return dict(pair.split("=", 1) for pair in pairs or [])


def _dry_run(checkpoint: str, config: BuildConfig, memory_gib: float | None) -> None:
    """Print the estimate. Raises ConfigError if nothing fits."""
    from rich.console import Console

    from stoker.api.progress import shown_progress
    from stoker.cli.output.tables import name_value_table

    with shown_progress("reading") as progress:
        from stoker.builder.estimate import estimate
        from stoker.builder.prepare import prepare

        path, name = fetch_checkpoint(checkpoint, config, progress)
        prepared = prepare(path, config, name)
    sizes = estimate(prepared.config, None if memory_gib is None else int(memory_gib * 2**30))
    Console().print(name_value_table(f"Engine of {prepared.config.checkpoint.name}", _estimate_rows(sizes, prepared.config.limits)))
    if not sizes.fits:
        raise ConfigError(_why_nothing_fits(sizes, prepared.config.limits), cure=_MORE_MEMORY)


_MORE_MEMORY = "Use more devices (--tensor-parallel, --pipeline-parallel), a quantization with fewer bits, or a lower --max-input-len."


def _why_nothing_fits(sizes: Estimate, limits: Limits) -> str:
    """An error message that compares the memory that one sequence of full length needs with the device's memory."""
    parts = f"weights {format_size(sizes.weights)}, activations {format_size(sizes.activations)}"
    need = f"{parts} and the KV cache of one sequence of {limits.max_seq_len} tokens {format_size(sizes.kv_sequence)}"
    return f"the engine does not fit: {need} per device, which has {format_size(sizes.memory or 0)}, of which a part stays unused."


def _estimate_rows(sizes: Estimate, limits: Limits) -> list[tuple[str, str]]:
    """(name, value) rows of the printed estimate."""
    memory = "unknown: set --memory-gib" if sizes.memory is None else format_size(sizes.memory)
    batch = "unknown" if sizes.largest_batch is None else f"{sizes.largest_batch} of {limits.max_batch_size}"
    return [
        ("parameters", f"{sizes.parameters:,}"),
        *((f"file {name}", format_size(size)) for name, size in sizes.files.items()),
        ("device memory: weights", format_size(sizes.weights)),
        (f"device memory: activations of {limits.max_num_tokens} tokens", format_size(sizes.activations)),
        ("KV cache per token", format_size(sizes.kv_token)),
        (f"KV cache per sequence of {limits.max_seq_len} tokens", format_size(sizes.kv_sequence)),
        (f"KV cache of {limits.max_batch_size} such sequences", format_size(sizes.kv_limits)),
        ("memory of the device", memory),
        ("largest batch of full sequences that fits", batch),
    ]
