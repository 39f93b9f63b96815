"""Fetch the files of an adapter from a model hub into a local folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from npt.adapters.files.run_layout import adapter_places
from npt.errors import HubError, first_line

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form USER/NAME."""
    return _ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def adapter_folder(name: str | Path, files: Sequence[str], revision: str | None = None) -> Path:
    """Return the local folder of an adapter; fetch it from the Hub if `name` is not on disk.

    Args:
        name: an adapter's folder, a run folder (its best adapter, else its last, else that of its
            last checkpoint), a checkpoint, or USER/NAME.
        files: names of the files to fetch; the first must exist.
        revision: branch, tag or commit on the Hub.
    """
    path = Path(name)
    if path.exists() or not is_hub_id(str(name)):
        places = adapter_places(path)
        return next((place for place in places if (place / files[0]).is_file()), path)
    from huggingface_hub import snapshot_download

    def fetch() -> str:
        return snapshot_download(str(name), revision=revision, allow_patterns=list(files))

    failure = f"there is no folder {name}, and the Hub returned no adapter of this name"
    return Path(on_hub(failure, fetch))


def on_hub(failure: str, call: Callable[[], T]) -> T:
    """Call huggingface_hub; turn whatever it raises into a HubError of one line."""
    try:
        return call()
    # errors of the network come from several libraries
    except Exception as error:
        raise HubError(
            f"{failure}: {type(error).__name__}: {first_line(error)[:200]}; check the name, the"
            " revision, the network (HF_ENDPOINT, HF_HUB_OFFLINE) and your login (`hf auth login`)"
        ) from error
