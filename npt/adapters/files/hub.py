"""Adapters from a model hub: their own files are fetched, then read as those of any folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from npt.adapters.files.run_layout import adapter_places
from npt.errors import HubError

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_hub_id(name: str) -> bool:
    """Return whether a name is of the form USER/NAME."""
    return _ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def adapter_folder(name: str | Path, files: Sequence[str], revision: str | None = None) -> Path:
    """Return the folder of a name, fetched from the hub if it is not on disk.

    name: an adapter's folder, a run's (its best adapter, else its last, else that of its last
    checkpoint), a checkpoint, or USER/NAME. files: names that are fetched; the first must exist.
    """
    path = Path(name)
    if path.exists() or not is_hub_id(str(name)):
        return next((place for place in adapter_places(path) if (place / files[0]).is_file()), path)
    from huggingface_hub import snapshot_download

    def fetch() -> str:
        return snapshot_download(str(name), revision=revision, allow_patterns=list(files))

    return Path(on_hub(f"there is no folder {name}, and", fetch))


def on_hub(where: str, call: Callable[[], T]) -> T:
    """Call something of huggingface_hub; whatever it raises becomes a HubError of one line, which
    begins with `where`.
    """
    try:
        return call()
    # the network's failures come through several libraries, each with its own classes
    except Exception as error:
        raise HubError(f"{where} {_explained(error)}") from error


def _explained(error: Exception) -> str:
    """Return what went wrong, and the remedy."""
    from huggingface_hub import errors as hub

    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = (line or type(error).__name__)[:200]
    match error:
        case hub.GatedRepoError():
            return "the repository is gated; ask for access on its page, and log in"
        case hub.RevisionNotFoundError():
            return "the repository has no such revision; check --revision"
        case hub.RepositoryNotFoundError():
            return (
                "the hub has no such repository, or it is private; check the name, and log in with"
                " `hf auth login`"
            )
        case hub.HfHubHTTPError():
            status = error.response.status_code if error.response is not None else "no status"
            return (
                f"the hub answers {status}: {line}; log in with `hf auth login`, and check that you"
                " may write there"
            )
        case hub.HFValidationError():
            return f"{line}; write USER/NAME"
        case _:
            return (
                f"the hub cannot be reached: {line}; check the network (HF_ENDPOINT,"
                " HF_HUB_OFFLINE)"
            )
