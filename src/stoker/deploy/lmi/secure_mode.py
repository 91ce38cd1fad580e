"""The secure mode of SageMaker: checks of model files and options from untrusted sources, which the platform requests with variables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from collections.abc import Mapping as Environment
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.deploy.collected_settings import CollectedSettings, invalid_value
from stoker.deploy.engine import MAX_CONFIG_BYTES

_ENABLED, _TRUSTED = "SAGEMAKER_SECURE_MODE", "SAGEMAKER_TRUSTED_CHANNELS"
_UNTRUSTED, _CONTROLS = "SAGEMAKER_UNTRUSTED_CHANNELS", "SAGEMAKER_SECURITY_CONTROLS"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"


def check_secure_mode(settings: CollectedSettings, environment: Environment[str, str]) -> None:
    """Raise ConfigError for a file or setting that a security control forbids. Does nothing without SAGEMAKER_SECURE_MODE=true.

    Files are searched in the directories of SAGEMAKER_UNTRUSTED_CHANNELS.
    """
    if environment.get(_ENABLED, "").strip().lower() != "true":
        return
    for name in (_TRUSTED, _UNTRUSTED, _CONTROLS):
        if name not in environment:
            raise ConfigError(f"{_ENABLED} is true, and {name} is not set.", cure=f"Set {name}.")
    controls, channels = _items(environment[_CONTROLS]), [Path(item) for item in _items(environment[_UNTRUSTED])]
    unknown = [name for name in controls if name not in (*_FILE_CHECKS, *_OTHER_CHECKS)]
    if unknown:
        known = ", ".join((*_FILE_CHECKS, *_OTHER_CHECKS))
        raise ConfigError(f"{_CONTROLS}: the control {unknown[0][:80]} is unknown.", cure=f"Use some of {known}.")
    if _REMOTE_CODE in controls:
        _check_remote_code(settings, [Path(item) for item in _items(environment[_TRUSTED])])
    for channel in channels:
        _check_files(channel, [name for name in controls if name in _FILE_CHECKS])


def _items(text: str) -> list[str]:
    """The non-empty items of a list separated by commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def _check_remote_code(settings: CollectedSettings, trusted: list[Path]) -> None:
    """Raise ConfigError if a file outside the trusted channels allows the checkpoint's Python code to run."""
    if not settings.get("build.trust_remote_code"):
        return
    setting = settings.setting("build.trust_remote_code")
    if not any(Path(setting.origin.source).is_relative_to(channel) for channel in trusted):
        raise invalid_value(setting.origin, setting.key, setting.value, f"{_CONTROLS} has {_REMOTE_CODE}", "Set it to false.")


def _check_files(channel: Path, controls: list[str]) -> None:
    """Raise ConfigError for a file in an untrusted channel that one of the controls forbids."""
    if not channel.is_dir():
        raise ConfigError(f"{_UNTRUSTED}: {channel} is not a directory.", cure="Correct the path.")
    for file in _files(channel):
        for name in controls:
            if _FILE_CHECKS[name](file):
                raise ConfigError(f"{file} is refused: {_CONTROLS} has {name}.", cure="Remove the file, or use a checkpoint without it.")


def _files(folder: Path) -> Iterator[Path]:
    """All files in a folder and its sub-folders. Raises ConfigError for a linked or unreadable folder, whose files cannot be checked."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.", cure="Correct its permissions.") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        for link in (Path(parent) / name for name in sorted(folders)):
            if link.is_symlink():
                raise ConfigError(f"{link} is a linked folder: {_CONTROLS} needs its files.", cure="Replace the link by a folder.")
        yield from (Path(parent) / name for name in sorted(names))


def _is_chat_template(file: Path) -> bool:
    """Whether a file is a chat template, or a tokenizer_config.json with one. An unreadable one counts as having one."""
    if file.name != "tokenizer_config.json":
        return file.name in ("chat_template.jinja", "chat_template.json")
    try:
        return file.stat().st_size > MAX_CONFIG_BYTES or "chat_template" in json.loads(file.read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return True


# Control → whether it forbids a file.
_FILE_CHECKS: dict[str, Callable[[Path], bool]] = {
    "DISALLOW_REQUIREMENTS_TXT": lambda file: file.name == "requirements.txt",
    "DISALLOW_PICKLE_FILES": lambda file: file.suffix.lower() in _PICKLE_SUFFIXES,
    "DISALLOW_CHAT_TEMPLATE": _is_chat_template,
}
_OTHER_CHECKS = (_REMOTE_CODE, "DISALLOW_CUSTOM_ENTRYPOINT")  # custom handlers are always refused
