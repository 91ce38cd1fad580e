"""Where a checkpoint is: a local path, or a hub id when the hub can be reached."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.base import env
from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import reason

WANTED = ["*.json", "*.safetensors", "*.bin", "*.model", "*.jinja", "*.txt", "*.tiktoken", "*.gguf"]


def fetch(source: str | Path, revision: str | None = None) -> tuple[Path, str]:
    """(local path, name) of a checkpoint. Raises CheckpointError when it is neither here nor on a reachable hub."""
    path = Path(source).expanduser()
    if path.exists():
        return path, path.resolve().name
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)) or str(source).startswith("."):
        raise CheckpointError(f"{source} does not exist.", cure="Name a checkpoint directory, a .gguf file or a hub id.")
    return _from_hub(str(source), revision), str(source)


def _from_hub(repo: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    token = env.hub_token()
    http_error = getattr(errors, "HTTPError", OSError)  # httpx's, since hub 1.0
    unreachable: tuple[type[Exception], ...] = (LocalEntryNotFoundError, HfHubHTTPError, OSError, http_error)
    try:
        files = [*WANTED] if not _has_safetensors(repo, revision, token) else [name for name in WANTED if name not in ("*.bin", "*.gguf")]
        return Path(snapshot_download(repo, revision=revision, token=token, allow_patterns=files))
    except GatedRepoError:
        raise CheckpointError(f"{repo} is gated on the hub.", cure="Accept its terms there and set HF_TOKEN.") from None
    except (RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(
            f"{repo} is not a local path, and the hub has no such model (or no access).", cure="Check the id, or set HF_TOKEN."
        ) from None
    except unreachable as problem:
        raise CheckpointError(
            f"{repo} is not a local path, and the hub cannot be reached ({reason(problem)}).",
            cure="Download the checkpoint elsewhere and name its directory, or name a .gguf file.",
        ) from None


def _has_safetensors(repo: str, revision: str | None, token: str | None) -> bool:
    from huggingface_hub import HfApi

    return any(name.endswith(".safetensors") for name in HfApi(token=token).list_repo_files(repo, revision=revision))
