"""Publishing a saved adapter: its folder, put into a repository of a model hub.

It is checked first, as loading would; a poisoned or incomplete adapter is not pushed. The base
itself is never part of it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from npt.adapters.files.adapter_files import (
    CARD_NAME,
    CONFIG_NAME,
    FILES,
    WEIGHTS_NAME,
    find_adapter,
)
from npt.adapters.files.card import card
from npt.adapters.files.consolidated_files import HISTORY_NAME
from npt.adapters.files.hub import is_hub_id, on_hub
from npt.errors import AdapterFileError, ConfigError
from npt.files import write_json, write_text
from npt.stored import non_finite, read_headers, read_json, read_tensors


def push_to_hub(
    adapter: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Put a saved adapter into a repository of the hub, which is made if it does not exist.

    Args:
        adapter: a folder of `npt.save_adapter`, a run's folder (its best student, else its last),
            or a checkpoint.
        repo_id: USER/NAME.
        private: of a repository that is made; one that exists stays what it is.
        revision: branch, which must exist; default the main one.
        token: of the hub; default the one of `hf auth login`.

    Returns:
        The address of the commit.

    Raises:
        AdapterFileError: the folder holds no adapter that could be loaded.
        ConfigError: the repository's name is none.
        HubError: the hub cannot be reached, or refuses.
    """
    if not is_hub_id(repo_id):
        raise ConfigError(
            f"--repo_id is {repo_id!r}; write USER/NAME in letters, digits, '.', '-' and '_'"
        )
    with tempfile.TemporaryDirectory(prefix="npt-push-") as scratch:
        folder = Path(scratch, "adapter")
        _copy(find_adapter(adapter).folder, folder)
        _hide_paths(folder)
        text = (folder / CARD_NAME).read_text(encoding="utf-8")
        write_text(folder / CARD_NAME, text.replace('"."', f'"{repo_id}"'))
        from huggingface_hub import HfApi

        api = HfApi(token=token)

        def upload() -> Any:
            api.create_repo(repo_id, private=private, exist_ok=True)
            return api.upload_folder(  # one commit: all or nothing
                repo_id=repo_id,
                folder_path=folder,
                allow_patterns=list(FILES),
                commit_message="NPT adapter",
                revision=revision,
            )

        return str(on_hub(f"{repo_id} is not pushed to", upload).commit_url)


def _copy(source: Path, folder: Path) -> None:
    """Copy an adapter's files, unless numbers are missing or not finite."""
    weights = source / WEIGHTS_NAME
    headers = read_headers(weights, AdapterFileError)
    bad = non_finite(read_tensors(weights, headers, AdapterFileError))
    if bad is not None:
        raise AdapterFileError(
            f"{weights}: {bad} holds a non-finite value; the adapter is not pushed"
        )
    folder.mkdir()
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _hide_paths(folder: Path) -> None:
    """Leave out a base's path on this machine; write a card if there is none."""
    record = dict(find_adapter(folder).record)
    base = str(record["base_model_name_or_path"])
    local = Path(base).is_absolute() or base.startswith((".", "~"))
    if local:
        record["base_model_name_or_path"] = Path(base).name
        for path in (folder / CONFIG_NAME, folder / HISTORY_NAME):
            if path.is_file():
                entries = read_json(path, AdapterFileError)
                write_json(path, entries | {"base_model_name_or_path": Path(base).name})
    path = folder / CARD_NAME
    if not path.is_file() or (local and "/" not in base):
        write_text(path, card(record))
    elif local:
        text = path.read_text(encoding="utf-8")
        write_text(path, text.replace(base, Path(base).name))
