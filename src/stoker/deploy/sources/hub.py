"""Fetches repositories of the Hugging Face hub with huggingface_hub, into its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.deploy.secrets import Secret
from stoker.deploy.sources.store import Store

# Files that no build reads: those of other frameworks, and pictures.
_NEVER = (
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.tflite",
    "*.onnx",
    "onnx/*",
    "openvino/*",
    "coreml/*",
    "original/*",
    "consolidated*",
    "*.pdf",
    "*.png",
    "*.jpg",
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class AccessError(CheckpointError):
    """The repository does not exist, or the token has no access to it."""


def fetch(repository: str, revision: str | None, token: Secret | None, store: Store) -> Path:
    """The local snapshot of a model repository, without files that no build reads (such as pickles next to safetensors).

    Without a network, the snapshot in the cache of the hub is used. Raises CheckpointError with the repository and local alternatives.
    """
    from huggingface_hub import HfApi, errors, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    value = token.reveal() if token else None
    network: tuple[type[Exception], ...] = (OSError, getattr(errors, "HTTPError", OSError))
    try:
        info = HfApi(token=value).model_info(repository, revision=revision, files_metadata=True)
        ignored = _ignored([file.rfilename for file in info.siblings or []])
        sizes = [file.size or 0 for file in info.siblings or []]
        store.check_size(repository, sum(sizes), len(sizes))
        wanted = set(filter_repo_objects([file.rfilename for file in info.siblings or []], ignore_patterns=ignored))
        num_bytes = sum(file.size or 0 for file in info.siblings or [] if file.rfilename in wanted)
        bar = _progress_class(lambda done: store.progress(repository, done, num_bytes))
        folder = snapshot_download(repository, revision=info.sha, token=value, ignore_patterns=ignored, tqdm_class=bar)
    except CheckpointError:
        raise
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise _access_error(repository, isinstance(error, errors.GatedRepoError), token) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repository} has no revision {revision}.", cure="Correct the revision, or leave it out.") from None
    except network as error:
        return _cached_snapshot(repository, revision, error)
    return Path(folder)


def _ignored(files: list[str]) -> list[str]:
    return [*_NEVER, *(_PICKLES if any(name.endswith((".safetensors", ".gguf")) for name in files) else ())]


def _access_error(repository: str, gated: bool, token: Secret | None) -> AccessError:
    if gated:
        problem, cure = "is gated, and access is not granted", "Accept its terms on the hub, and set HF_TOKEN."
    else:
        problem, cure = "does not exist, or is private", "Correct the name, or set HF_TOKEN to a token with access to it."
    if token is not None:
        cure = "The token has no access to it." if not gated else "Accept its terms on the hub with the token's account."
    return AccessError(f"{repository} {problem}.", cure=cure)


def _cached_snapshot(repository: str, revision: str | None, error: Exception) -> Path:
    """The complete snapshot in the cache of the hub. Raises CheckpointError without one."""
    from huggingface_hub import snapshot_download

    for ignored in ([*_NEVER, *_PICKLES], list(_NEVER)):
        try:
            folder = Path(snapshot_download(repository, revision=revision, local_files_only=True, ignore_patterns=ignored))
        except (OSError, ValueError):
            continue
        if any(folder.rglob("*.safetensors")) or any(folder.rglob("*.gguf")) or ignored == list(_NEVER):
            return folder
    raise CheckpointError(
        f"the hub cannot be reached for {repository} ({type(error).__name__}), and its cache has no complete copy.",
        cure="Name a local directory or s3://BUCKET/PREFIX, or set HF_HOME to a cache with a copy.",
    ) from None


def _progress_class(report: Callable[[int], None]) -> Any:
    """A tqdm class without output that calls `report` with the number of bytes so far.

    huggingface_hub has bars of the same bytes, for those that are received and those that are written: the largest count is reported.
    """
    from tqdm.auto import tqdm

    lock, counts = Lock(), [0]

    class Reporter(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes, self._done = kwargs.get("unit") == "B", 0
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_bytes and n:
                with lock:
                    self._done += int(n)
                    if self._done > counts[0]:
                        counts[0] = self._done
                        report(self._done)
            return bool(super().update(n))

    return Reporter
