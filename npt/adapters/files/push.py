"""Publish a saved adapter: check its files and upload them, without the base, to a model hub."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from npt.adapters.files.adapter_files import (
    CARD_NAME,
    FILES,
    WEIGHTS_NAME,
    StoredAdapter,
    find_adapter,
)
from npt.adapters.files.card import card
from npt.adapters.files.hub import is_hub_id, on_hub
from npt.errors import AdapterFileError, ConfigError
from npt.files import write_json, write_text
from npt.stored import non_finite, read_headers, read_json, read_tensors

_BASE = "base_model_name_or_path"


def push_to_hub(
    adapter: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a saved adapter to a repository on the Hub; create the repository if it is missing.

    Args:
        adapter: a folder written by `npt.save_adapter`, a run folder (its best student, else its
            last), or a checkpoint.
        repo_id: USER/NAME.
        private: make a new repository private. An existing repository keeps its visibility.
        revision: an existing branch; default the main one.
        token: access token for the Hub; default the one that `hf auth login` stored.

    Returns:
        The URL of the commit.

    Raises:
        AdapterFileError: the folder holds no adapter, or a damaged or non-finite one.
        ConfigError: `repo_id` does not have the form USER/NAME.
        HubError: the Hub cannot be reached or refuses the upload.
    """
    if not is_hub_id(repo_id):
        raise ConfigError(
            f"--repo_id is {repo_id!r}: write USER/NAME with letters, digits, '.', '-' and '_'"
        )
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="npt-push-") as scratch:
        _copy(find_adapter(adapter), Path(scratch), repo_id)

        def upload() -> Any:
            api.create_repo(repo_id, private=private, exist_ok=True)
            return api.upload_folder(  # one commit: all or nothing
                repo_id=repo_id,
                folder_path=scratch,
                allow_patterns=list(FILES),
                commit_message="NPT adapter",
                revision=revision,
            )

        return str(on_hub(f"the adapter could not be pushed to {repo_id}", upload).commit_url)


def _copy(stored: StoredAdapter, folder: Path, repo_id: str) -> None:
    """Check an adapter and copy its files, without local paths of the base and with a card."""
    weights = stored.folder / WEIGHTS_NAME
    headers = read_headers(weights, AdapterFileError)
    if bad := non_finite(read_tensors(weights, headers, AdapterFileError)):
        raise AdapterFileError(
            f"{weights}: {bad} has a non-finite value; the adapter is not pushed"
        )
    base = str(stored.record[_BASE])
    text = card({**stored.record, _BASE: _public(base)})
    for name in FILES:
        source = stored.folder / name
        if not source.is_file():
            continue
        if source.suffix == ".json":
            record = read_json(source, AdapterFileError)
            record[_BASE] = _public(str(record.get(_BASE)))
            write_json(folder / name, record)
        elif name == CARD_NAME:
            text = source.read_text(encoding="utf-8")
            if "/" in base:  # without one it is no path, and may be a word of the card
                text = text.replace(base, _public(base))
        else:
            shutil.copyfile(source, folder / name)
    # the card loads the adapter from its own folder; readers of the Hub have none
    write_text(folder / CARD_NAME, text.replace('"."', f'"{repo_id}"'))


def _public(base: str) -> str:
    """Return the name of a base without the path of a local folder."""
    return Path(base).name if Path(base).is_absolute() or base.startswith((".", "~")) else base
