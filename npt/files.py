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

from npt.errors import FULL, ConfigError

PARTIAL = ".partial"
OLD = ".old"
"""Suffixes of temporary names: of what is written, and of what it replaces."""

_LEFT_OVER = re.compile(
    rf"\.(?P<name>.+)\.[a-z0-9_]{{8}}(?P<kind>{re.escape(PARTIAL)}|{re.escape(OLD)})", re.DOTALL
)

_PROBE = b" " * 4096
"""Written and removed again to see whether a disk has room; a file system counts in such blocks."""

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.ENOSYS)
"""Errors of a file system without locks."""


def check_file(path: Path, flag: str, *, parents: bool = False) -> None:
    """Raise ConfigError unless `write_bytes` can write a file at `path`, the value of a flag. Call
    it before the work whose result the file will hold.

    Args:
        parents: missing folders above the file will be made.
    """
    with about_output(path, flag):
        if path.is_dir():
            raise ConfigError("is a folder: name a file")
        if path.exists() and not path.is_file():
            raise ConfigError("is not a regular file: name another file")
        if not (parents or path.parent.exists()):
            raise ConfigError(f"cannot be written: the folder {path.parent} does not exist")
        _probe(path)


def check_folder(
    path: Path, flag: str, *, empty: bool = False, in_place: bool = False, size: int = 0
) -> None:
    """Raise ConfigError unless `new_folder` can write a folder at `path`, the value of a flag. Call
    it before the work whose result the folder will hold.

    Args:
        empty: the folder must be new or empty.
        in_place: files will be written into the folder, which may exist, and not by `new_folder`.
        size: bytes that it will hold, at least.
    """
    with about_output(path, flag):
        if path.exists():
            if not path.is_dir():
                raise ConfigError("is a file: name a folder")
            if empty and any(path.iterdir()):
                raise ConfigError("exists and is not empty; choose another folder")
        if not in_place and (path.name in ("", "..") or path.is_mount()):
            raise ConfigError("cannot be replaced as a whole: name a folder in it")
        _probe(path / PARTIAL if in_place else path, size)


@contextmanager
def about_output(path: Path, flag: str) -> Iterator[None]:
    """Raise every problem with an output as a ConfigError that names the flag and the path."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{flag} {path} {error}".strip()) from error
    except (OSError, ValueError) as error:  # ValueError: the path holds a null character
        why = getattr(error, "strerror", None) or str(error)
        remedy = "choose another place"
        if getattr(error, "errno", None) in FULL:
            remedy = f"free disk space or {remedy}"
        raise ConfigError(f"{flag} {path} cannot be written: {why}; {remedy}".strip()) from error


def _probe(path: Path, size: int = 0) -> None:
    """Write a file beside `path`, or beside the first missing folder above it, and remove it again:
    only writing finds a disk that is full or read-only, or a name that is too long.

    Raises:
        ConfigError: `path` lies below a file.
        OSError: the file cannot be written, or `size` bytes are not free.
    """
    missing = path.absolute()
    while not missing.parent.exists():
        missing = missing.parent
    if not missing.parent.is_dir():
        raise ConfigError(f"cannot be written: {missing.parent} is not a folder")
    probe = _hidden(missing, PARTIAL)
    try:
        with probe.open("xb") as stream:
            stream.write(_PROBE)
    finally:
        probe.unlink(missing_ok=True)
    if shutil.disk_usage(missing.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
    except OSError as error:  # of a full disk it names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


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
    temporary = _hidden(path, PARTIAL)
    old = _hidden(path, OLD)
    temporary.mkdir()
    try:
        yield temporary
        mode = temporary.stat().st_mode & 0o777
        for item in [temporary, *temporary.rglob("*")]:
            item.chmod(mode if item.is_dir() else mode & 0o666)  # safetensors writes mode 0600
            _sync(item)
        # a rename cannot replace a folder with content, so for a moment there is none
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
        replaced = item.parent / match["name"]
        if match["kind"] == OLD and not replaced.exists():
            os.replace(item, replaced)
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
