"""Write files and folders atomically: a reader never sees an incomplete one."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of temporary names: of what is written, and of what it replaces."""

_LEFT_OVER = re.compile(
    rf"\.(?P<name>.+)\.[a-z0-9_]{{8}}(?P<kind>{re.escape(PARTIAL)}|{re.escape(OLD)})", re.DOTALL
)

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.ENOSYS)
"""Errors of a file system without locks."""


def finite_or_null(value: Any) -> Any:
    """Replace every NaN and infinity, at any depth, by None, since JSON cannot hold them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON, with non-finite numbers as null."""
    return json.dumps(finite_or_null(value), indent=indent, allow_nan=False)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically: write a temporary file, sync it and rename it.

    Raises:
        OSError: writing failed, or `path` is a device, a pipe or a folder.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # renaming would replace even /dev/null
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = _hidden(path, PARTIAL)
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, atomically. What UTF-8 cannot hold, as in the name of a
    folder that is not UTF-8, is escaped.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which becomes `path` if the block ends without an error.

    An existing `path` is renamed, then removed. Modes follow the umask. If the process is killed,
    `clean` removes the temporary folder, or gives the old folder its name back.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise OSError(errno.ENOTDIR, "not a folder", str(path))
    # parents of new folders, to be synced too
    made = [folder.parent for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = _hidden(path, PARTIAL), _hidden(path, OLD)
    temporary.mkdir()
    try:
        yield temporary
        mode = temporary.stat().st_mode & 0o777
        for item in [temporary, *temporary.rglob("*")]:
            item.chmod(mode if item.is_dir() else mode & 0o666)  # safetensors writes mode 0600
            _sync(item)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except BaseException:
            if old.exists():
                os.replace(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)
        for folder in (path.parent, *made):
            _sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(path: Path) -> None:
    """Rename a folder, then remove it, so that no reader sees a part of it under its name.

    Raises:
        OSError: renaming failed, and the folder still exists.
    """
    temporary = _hidden(path, PARTIAL)
    os.replace(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def lock_folder(path: Path) -> int | None:
    """Lock a folder until the process ends or the handle is closed.

    Returns:
        The handle (without a lock if the file system has none), or None if the folder is locked.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return handle
        os.close(handle)
        return None
    return handle


def clean(folder: Path) -> None:
    """Remove what killed processes left directly in a folder that nobody is writing to. A folder
    whose replacement was not completed gets its name back.
    """
    for item in sorted(Path(folder).iterdir()):
        match = _LEFT_OVER.fullmatch(item.name)
        if match is None:
            continue
        if match["kind"] == OLD and not (item.parent / match["name"]).exists():
            os.replace(item, item.parent / match["name"])
        elif item.is_dir() and not item.is_symlink():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)


def _hidden(path: Path, suffix: str) -> Path:
    """Return a temporary name beside a path, which `_LEFT_OVER` matches."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
