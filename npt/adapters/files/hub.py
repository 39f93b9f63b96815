"""Adapters from a model hub: a name that is no folder is looked for there, and nothing but an
adapter's own files is fetched.

They are read as those of any folder: JSON and safetensors, checked before they are used; no pickle
and no code.
"""

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
    """Whether a name is of the form USER/NAME."""
    return _ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def adapter_folder(name: str | Path, files: Sequence[str], revision: str | None = None) -> Path:
    """The folder that a name means: one that is there, one inside it where it is of a run, or a
    copy of what the hub has under it.

    Args:
        name: a folder, or USER/NAME on the hub. What is there on disk goes first. Of a run's folder
            its best adapter is meant, else its last, else that of its last checkpoint; of a
            checkpoint its adapter.
        files: names that are fetched, where they exist; an adapter's folder has the first.
        revision: branch, tag or commit on the hub.

    Raises:
        HubError: not on disk, and the hub cannot be reached or has no such repository.
    """
    path = Path(name)
    if path.exists() or not is_hub_id(str(name)):
        return _inside(path, files[0])
    from huggingface_hub import snapshot_download

    return Path(
        on_hub(
            f"there is no folder {name}, and",
            lambda: snapshot_download(str(name), revision=revision, allow_patterns=list(files)),
        )
    )


def _inside(path: Path, mark: str) -> Path:
    """The adapter's folder in or below a folder; the folder itself where there is none."""
    return next((place for place in adapter_places(path) if (place / mark).is_file()), path)


def on_hub(where: str, call: Callable[[], T]) -> T:
    """Call something that speaks with the hub, and say in one line what goes wrong.

    Args:
        where: what the message begins with.
        call: of huggingface_hub.

    Raises:
        HubError: whatever the library or the network raised.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return call()
    except GatedRepoError as error:
        reason, remedy = "the repository is gated", "ask for access on its page, and log in"
        cause: Exception = error
    except RevisionNotFoundError as error:
        reason, remedy = "the repository has no such revision", "check --revision"
        cause = error
    except RepositoryNotFoundError as error:
        reason, remedy = (
            "the hub has no such repository, or it is private",
            "check the name, and log in with `hf auth login`",
        )
        cause = error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        reason, remedy = (
            f"the hub answers {status}: {_line(error)}",
            "log in with `hf auth login`, and check that you may write there",
        )
        cause = error
    except HFValidationError as error:
        reason, remedy, cause = _line(error), "write USER/NAME", error
    # the network as it comes up through several libraries, each with its own classes
    except Exception as error:
        reason, remedy, cause = (
            f"the hub cannot be reached: {_line(error)}",
            "check the network (HF_ENDPOINT, HF_HUB_OFFLINE)",
            error,
        )
    raise HubError(f"{where} {reason}; {remedy}") from cause


def _line(error: Exception) -> str:
    text = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    return text[:200]
