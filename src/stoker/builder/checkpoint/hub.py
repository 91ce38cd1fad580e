"""Finds a checkpoint on the local disk, or downloads it from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.base import env
from stoker.base.errors import CheckpointError, first_line

_PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.model", "*.jinja", "*.txt", "*.tiktoken", "*.gguf"]
_REPLACED_BY_SAFETENSORS = ("*.bin", "*.gguf")


def locate_checkpoint(source: str | Path, revision: str | None = None) -> tuple[Path, str]:
    """(local path, name) of a checkpoint that is given as a path or a hub id.

    Raises CheckpointError when it is neither a local path nor available on the hub.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path, path.resolve().name
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)) or str(source).startswith("."):
        raise CheckpointError(f"{source} does not exist.", cure="Name a checkpoint directory, a .gguf file or a hub id.")
    return _download(str(source), revision), str(source)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    token = env.hub_token()
    http_error = getattr(errors, "HTTPError", OSError)  # httpx's own class, which huggingface_hub 1.0 and later raise
    connection_errors: tuple[type[Exception], ...] = (LocalEntryNotFoundError, HfHubHTTPError, OSError, http_error)
    try:
        has_safetensors = _has_safetensors(repo, revision, token)
        patterns = [pattern for pattern in _PATTERNS if not (has_safetensors and pattern in _REPLACED_BY_SAFETENSORS)]
        return Path(snapshot_download(repo, revision=revision, token=token, allow_patterns=patterns))
    except GatedRepoError:
        raise CheckpointError(f"{repo} is gated on the hub.", cure="Accept its terms there and set HF_TOKEN.") from None
    except (RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(
            f"{repo} is not a local path, and the hub has no such model (or no access).", cure="Check the id, or set HF_TOKEN."
        ) from None
    except connection_errors as problem:
        raise CheckpointError(
            f"{repo} is not a local path, and the hub cannot be reached ({first_line(problem)}).",
            cure="Download the checkpoint elsewhere and name its directory, or name a .gguf file.",
        ) from None


def _has_safetensors(repo: str, revision: str | None, token: str | None) -> bool:
    from huggingface_hub import HfApi

    return any(name.endswith(".safetensors") for name in HfApi(token=token).list_repo_files(repo, revision=revision))
