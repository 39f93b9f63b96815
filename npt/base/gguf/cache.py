"""GGUF files as bases: each is written in 16 bit once, to a cache, and loaded from there."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from npt.base.gguf.convert import convert
from npt.base.gguf.file import MAGIC, SUFFIX, GGUFFile
from npt.errors import ModelError
from npt.files import clean, locked_folder

_FORM = "1"
"""Of the folders that are written; another one is another folder."""

_SAMPLES, _SAMPLE = 512, 4096  # number and bytes of the pieces by which a file is told from others
_ENDS = 1 << 20  # bytes at its beginning and end


def find_gguf(name: str) -> Path | None:
    """Return the GGUF file that a model's name means: a file, or the only one in a folder that
    holds no config.json; None if it means something else.

    Raises:
        ModelError: several such files in the folder, or there is no such file.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").exists():
            return None
        files = sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            raise ModelError(
                f"{name} holds {len(files)} GGUF files, {files[0].name} and {files[1].name} among"
                " them; name one of them"
            )
        return files[0] if files else None
    if path.is_file():
        return path if path.suffix == SUFFIX or _begins(path) else None
    if path.suffix == SUFFIX:
        raise ModelError(f"there is no file {name!r}; check --model_name")
    return None


def converted(file: Path) -> Path:
    """Return the folder that a GGUF file is loaded from, which is written if it does not exist.

    Of several processes one writes, and the others wait for it.

    Raises:
        ModelError, ConfigError: as `npt.import_base`.
    """
    folder = place_of(file)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked_folder(folder.parent) as alone:
            if not folder.is_dir():
                if alone:
                    clean(folder.parent)
                convert(GGUFFile(file), folder)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be written in 16 bit to {folder}: {error}; set NPT_CACHE to a folder"
            " for it"
        ) from error
    return folder


def place_of(file: Path) -> Path:
    """Return the folder in the cache for a GGUF file as it is now, whether it exists or not.

    It is told by the file's size, time of change and samples of its bytes, wherever it lies. To
    hash all of 40 GB would take every process of every run a minute.
    """
    digest = hashlib.sha256(_FORM.encode())
    try:
        with file.open("rb") as stream:
            found = os.fstat(stream.fileno())
            digest.update(f" {found.st_size} {found.st_mtime_ns};".encode())
            digest.update(stream.read(_ENDS))
            for number in range(_SAMPLES):
                stream.seek(found.st_size * number // _SAMPLES)
                digest.update(stream.read(_SAMPLE))
            stream.seek(max(0, found.st_size - _ENDS))
            digest.update(stream.read(_ENDS))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    name = re.sub(r"[^\w.-]", "_", file.stem)[:80]
    return cache_folder() / f"{name}-{digest.hexdigest()[:16]}"


def cache_folder() -> Path:
    """Return the folder for converted files: in NPT_CACHE, else in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("NPT_CACHE")
    if own:
        return Path(own).expanduser() / "gguf"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "npt" / "gguf"


def _begins(path: Path) -> bool:
    """Return whether a file of another name begins as a GGUF file does."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
