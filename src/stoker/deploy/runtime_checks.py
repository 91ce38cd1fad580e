"""Rejects runtime settings that an engine or this machine cannot satisfy, before anything is fetched, built or started. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping as Environment
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import Limits, RuntimeConfig, check_within_limits
from stoker.base.draft_settings import check_draft_settings, without_unused_drafts
from stoker.base.errors import ConfigError
from stoker.deploy.deployment import BuildOptions, Deployment, EngineSource
from stoker.deploy.devices import visible_gpus
from stoker.deploy.engine import read_config
from stoker.runtime.transfer.nixl_library import check_backend

DXG = Path("/dev/dxg")  # the GPU of the Windows Subsystem for Linux, which has no /dev/nvidia0


def check_runtime(deployment: Deployment, environment: Environment[str, str]) -> None:
    """Raise ConfigError when runtime settings exceed the limits of the local engine, or name an absent device.

    Raises DependencyError for transfers by a package that is not installed. An engine that is not local yet is checked when it is loaded.
    """
    runtime, source = deployment.runtime, deployment.source
    check_device(runtime.device, environment)
    check_backend(runtime)
    config = read_config(Path(source.location).expanduser()) if isinstance(source, EngineSource) else {}
    try:
        limits = msgspec.convert(config["limits"], Limits)
        target = str(config["target"]["device"])
    except (KeyError, TypeError, msgspec.ValidationError):  # absent or damaged: opening the engine says what is wrong
        return
    check_within_limits(limits, runtime)
    if runtime.device is not None and runtime.device != target:
        message = f"device={runtime.device!r} is refused: {deployment.path} is an engine for {target}."
        raise ConfigError(message, cure=f"Leave it out, or build an engine with --device {runtime.device}.")
    if target == "cuda" and not _has_gpu(environment):
        message = f"{deployment.path} is an engine for cuda, and no GPU is visible on this machine."
        raise ConfigError(message, cure="Build an engine with --device cpu, or run stoker doctor to see why.")


def override_runtime(folder: RuntimeConfig, changed: dict[str, Any]) -> RuntimeConfig:
    """The settings of a deployment folder with the `changed` ones of a user.

    Settings of drafts that have no effect then are refused if they are the user's, and reset if they are the folder's: speculate="none"
    turns off all that the folder sets. Raises ConfigError.
    """
    merged = msgspec.structs.replace(folder, **changed)
    check_draft_settings(merged, changed.keys())
    return without_unused_drafts(merged)


def check_device(device: str | None, environment: Environment[str, str]) -> None:
    """Raise ConfigError for cuda on a machine without a visible GPU."""
    if device == "cuda" and not _has_gpu(environment):
        raise ConfigError(
            "device='cuda' is refused: no GPU is visible on this machine.",
            cure="Use --device cpu with an engine or checkpoint for the CPU, or run stoker doctor to see why.",
        )


def _has_gpu(environment: Environment[str, str]) -> bool:
    """Whether the process can use a GPU, without loading a GPU library."""
    return visible_gpus(environment) > 0 or DXG.exists()


def with_runtime_limits(deployment: Deployment, runtime: RuntimeConfig) -> Deployment:
    """A copy of the deployment in which the limits of the build are at least the batch sizes that `runtime` requests."""
    source = deployment.source
    if not isinstance(source, BuildOptions):
        return deployment
    raised = {
        name: max(getattr(source.limits, name), getattr(runtime, name))
        for name in ("max_batch_size", "max_num_tokens")
        if getattr(runtime, name) is not None
    }
    limits = msgspec.structs.replace(source.limits, **raised)
    return msgspec.structs.replace(deployment, source=msgspec.structs.replace(source, limits=limits))
