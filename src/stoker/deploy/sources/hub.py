"""Fetches repositories from the Hugging Face hub into its cache, with huggingface_hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.deploy.secrets import Secret
from stoker.deploy.sources.store import Store, is_inside

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
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_NAMES = 12  # of files in a message


class AccessError(CheckpointError):
    """The repository does not exist, or the token has no access to it."""


def fetch(repository: str, revision: str | None, token: Secret | None, store: Store, variant: str | None = None) -> Path:
    """The local snapshot of a model repository, without files that no build reads (such as pickles next to safetensors).

    `variant` is a part of the name of one GGUF file, such as Q4_K_M; the path of that file is then returned. A repository with several GGUF
    files requires it. Without a network, the snapshot in the cache of the hub is used. Raises CheckpointError with the repository and local
    alternatives.
    """
    from huggingface_hub import HfApi, errors, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    value = token.reveal() if token else None
    network: tuple[type[Exception], ...] = (OSError, getattr(errors, "HTTPError", OSError))
    try:
        info = HfApi(token=value).model_info(repository, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        chosen = choose_gguf(repository, list(sizes), variant)
        ignored = _ignored(list(sizes))
        wanted = _parts(chosen, list(sizes)) if chosen else list(filter_repo_objects(sizes, ignore_patterns=ignored))
        num_bytes = sum(sizes[name] for name in wanted)
        store.check_size(repository, num_bytes, len(wanted))
        bar = _progress_class(lambda done: store.progress(repository, done, num_bytes))
        allowed, ignored = (wanted, []) if chosen else (None, ignored)
        # The name of the revision, not its commit: only then can the snapshot be found by name without a network.
        folder = snapshot_download(
            repository, revision=revision, token=value, tqdm_class=bar, allow_patterns=allowed, ignore_patterns=ignored
        )
    except CheckpointError:
        raise
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise _access_error(repository, isinstance(error, errors.GatedRepoError), token) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repository} has no revision {revision}.", cure="Correct the revision, or leave it out.") from None
    except network as error:
        return _cached_snapshot(repository, revision, error, variant)
    return Path(folder) / chosen if chosen else Path(folder)


def choose_gguf(repository: str, files: list[str], variant: str | None) -> str | None:
    """The name of the GGUF file to fetch among the repository's `files`; None for a repository without GGUF weights.

    Of a split file, it is the first part. Raises CheckpointError when no file, or more than one, has `variant` in its name, and when there
    are several without a variant.
    """
    models = (name for name in files if name.endswith(".gguf") and not Path(name).name.startswith("mmproj"))
    found = [name for name in models if _is_first_part(name)]
    if variant is None and (len(found) < 2 or any(name.endswith(".safetensors") for name in files)):
        return None
    matches = [name for name in found if _has_variant(name, variant)] if variant else []
    if len(matches) == 1:
        return matches[0]
    problem = f"{len(found)} GGUF files" if variant is None else f"{len(matches) or 'no'} GGUF files named {variant}"
    names = ", ".join(sorted(matches or found)[:MAX_NAMES]) or "none"
    raise CheckpointError(f"{repository} has {problem}: {names}.", cure=f"Name one, such as {repository}:Q4_K_M.")


def _is_first_part(name: str) -> bool:
    """Whether a GGUF file is whole, or the first part of a split one (NAME-00001-of-00003.gguf)."""
    part = _PART.fullmatch(name)
    return part is None or int(part[2]) == 1


def _parts(name: str, files: list[str]) -> list[str]:
    """All parts of the GGUF file whose first part is `name`, in order; `name` alone if it is whole."""
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    others = [(found, other) for other in files if (found := _PART.fullmatch(other))]
    return sorted(other for found, other in others if (found[1], found[3]) == (part[1], part[3]))


def _has_variant(name: str, variant: str) -> bool:
    """Whether `variant` is the name or a whole part of the name: Q4_K of x.Q4_K.gguf, but not of x.Q4_K_M.gguf."""
    if variant == name:
        return True
    return re.search(rf"(?<![a-z0-9_]){re.escape(variant.lower())}(?![a-z0-9_])", Path(name).stem.lower()) is not None


def _ignored(files: list[str]) -> list[str]:
    """The patterns of files that are not downloaded."""
    has_safetensors = any(name.endswith(".safetensors") for name in files)
    replaced = (*_PICKLES, "*.gguf") if has_safetensors else _PICKLES if any(name.endswith(".gguf") for name in files) else ()
    return [*_NEVER, *replaced]


def _access_error(repository: str, gated: bool, token: Secret | None) -> AccessError:
    """The error for a repository that does not exist or is not accessible."""
    if gated:
        problem, cure = "is gated, and access is not granted", "Accept its terms on the hub, and set HF_TOKEN."
    else:
        problem, cure = "does not exist, or is private", "Correct the name, or set HF_TOKEN to a token with access to it."
    if token is not None:
        cure = "The token has no access to it." if not gated else "Accept its terms on the hub with the token's account."
    return AccessError(f"{repository} {problem}.", cure=cure)


def _cached_snapshot(repository: str, revision: str | None, error: Exception, variant: str | None) -> Path:
    """The complete snapshot, or the GGUF file `variant`, in the cache of the hub. Raises CheckpointError if it is not there."""
    from huggingface_hub import snapshot_download

    if variant is not None and (snapshot := _snapshot_folder(repository, revision)) is not None:
        names = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf")]
        if any(_has_variant(name, variant) for name in names) and (chosen := choose_gguf(repository, names, variant)) is not None:
            return snapshot / chosen
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


def _snapshot_folder(repository: str, revision: str | None) -> Path | None:
    """The folder of a snapshot in the hub's cache, complete or not; None if there is none."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    if not is_inside(revision or "main"):
        return None
    reference = root / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or ""
    folder = root / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


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
