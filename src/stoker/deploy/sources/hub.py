"""Repositories of the Hugging Face hub, through huggingface_hub and its own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.deploy.secrets import Secret
from stoker.deploy.sources.store import Counter, Store

# what other frameworks read, and pictures
_NEVER = (
    "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.onnx", "onnx/*", "openvino/*", "coreml/*", "original/*", "consolidated*",
    "*.pdf", "*.png", "*.jpg",
)  # fmt: skip
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class ClosedError(CheckpointError):
    """The hub shows the repository to nobody, or not to this token."""


def fetch(repository: str, revision: str | None, token: Secret | None, store: Store) -> Path:
    """The local snapshot of a model repository, without files that no build reads (other frameworks; pickles where safetensors exist).

    Without a network, what the hub's cache holds already is used. Raises CheckpointError naming the repository, and the local alternatives.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    value = token.reveal() if token else None
    network: tuple[type[Exception], ...] = (OSError, getattr(errors, "HTTPError", OSError))
    try:
        info = HfApi(token=value).model_info(repository, revision=revision, files_metadata=True)
        ignored = _ignored([file.rfilename for file in info.siblings or []])
        sizes = [file.size or 0 for file in info.siblings or []]
        store.check_size(repository, sum(sizes), len(sizes))
        bar = _reporter(repository, store)
        folder = snapshot_download(repository, revision=info.sha, token=value, ignore_patterns=ignored, tqdm_class=bar)
    except CheckpointError:
        raise
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise _closed(repository, isinstance(error, errors.GatedRepoError), token) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repository} has no revision {revision}.", cure="Correct the revision, or leave it out.") from None
    except network as error:
        return _cached(repository, revision, error)
    return Path(folder)


def _ignored(files: list[str]) -> list[str]:
    return [*_NEVER, *(_PICKLES if any(name.endswith((".safetensors", ".gguf")) for name in files) else ())]


def _closed(repository: str, gated: bool, token: Secret | None) -> ClosedError:
    if gated:
        what, cure = "is gated, and access is not granted", "Accept its terms on the hub, and set HF_TOKEN."
    else:
        what, cure = "does not exist, or is private", "Correct the name, or set HF_TOKEN to a token that may read it."
    if token is not None:
        cure = "The token that was given may not read it." if not gated else "Accept its terms on the hub with the token's account."
    return ClosedError(f"{repository} {what}.", cure=cure)


def _cached(repository: str, revision: str | None, error: Exception) -> Path:
    """The snapshot in the hub's cache, whole; else the error that names what may be used instead."""
    from huggingface_hub import snapshot_download

    for ignored in ([*_NEVER, *_PICKLES], list(_NEVER)):
        try:
            folder = Path(snapshot_download(repository, revision=revision, local_files_only=True, ignore_patterns=ignored))
        except (OSError, ValueError):
            continue
        if any(folder.rglob("*.safetensors")) or any(folder.rglob("*.gguf")) or ignored == list(_NEVER):
            return folder
    raise CheckpointError(
        f"the hub cannot be reached for {repository} ({type(error).__name__}), and its cache does not hold it whole.",
        cure="Name a local directory or s3://BUCKET/PREFIX, or point HF_HOME to a cache that holds it.",
    ) from None


def _reporter(repository: str, store: Store) -> Any:
    """A tqdm class that reports bytes to the store's progress and draws nothing."""
    from tqdm.auto import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counter = Counter(repository, kwargs.get("total") or None, store.progress) if kwargs.get("unit") == "B" else None
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counter is not None and n:
                self._counter.add(int(n))
            return super().update(n)

    return Reporter
