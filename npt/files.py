"""Write files and folders so that a reader never sees half of one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of temporary names: of a file or folder being made, and of one being replaced by it."""

_LEFT_OVER = re.compile(
    rf"\.(?P<name>.+)\.[a-z0-9_]{{8}}(?P<kind>{re.escape(PARTIAL)}|{re.escape(OLD)})", re.DOTALL
)

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.ENOSYS)
"""What a file system without locks answers."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2(2)


def finite_or_null(value: Any) -> Any:
    """Replace every NaN and infinity, at any depth, by None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON, non-finite numbers as null."""
    return json.dumps(finite_or_null(value), indent=indent, allow_nan=False)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically: a temporary file next to it, synced, then renamed.

    Raises:
        OSError: it could not be written, or `path` is a device, a pipe or a folder.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a rename would destroy /dev/null as gladly as a file
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_room(path: Path, size: int) -> None:
    """Raise the OSError that making a file or folder of so many bytes at `path` would meet."""
    path = Path(path).absolute()
    above = next(parent for parent in path.parents if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=PARTIAL, dir=above):
            pass
    except OSError as error:  # names the temporary folder
        raise OSError(error.errno, error.strerror, str(path)) from error
    if shutil.disk_usage(above).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which becomes `path` if the block ends without an error.

    An existing `path` is replaced as a whole, in one operation if the file system can exchange two
    names. Modes follow the umask. A process that is killed here may leave the temporary folder, or
    the old one under another name: `clean` removes the one and restores the other.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise OSError(errno.ENOTDIR, "not a folder", str(path))
    made = _make_parents(path.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
    try:
        yield temporary
        umask = _umask()
        for item in [temporary, *temporary.rglob("*")]:
            item.chmod((0o777 if item.is_dir() else 0o666) & ~umask)
            _sync(item)
        if path.exists() and _exchange(temporary, path):
            shutil.rmtree(temporary, ignore_errors=True)
        elif path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=OLD, dir=path.parent))
            os.replace(path, old / path.name)
            try:
                os.replace(temporary, path)
            except BaseException:
                os.replace(old / path.name, path)
                old.rmdir()
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, path)
        for folder in (path.parent, *made):
            _sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder so that nobody ever sees half of it under its name.

    Raises:
        OSError: it could not be renamed, and still exists.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    os.replace(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def lock_folder(path: Path) -> int | None:
    """Lock a folder until the process ends, however that ends, or the handle is closed.

    Returns:
        The handle, of no lock if the file system has none; None if another process holds the lock.
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


def clean(folder: Path) -> list[str]:
    """Remove what killed processes left directly below a folder that nobody else is writing to.

    A folder whose successor never took its name gets the name back.

    Returns:
        The names that were restored.
    """
    back: list[str] = []
    for item in sorted(Path(folder).iterdir()):
        match = _LEFT_OVER.fullmatch(item.name)
        if match is None:
            continue
        if (
            match["kind"] == OLD
            and (item / match["name"]).exists()
            and not (item.parent / match["name"]).exists()
        ):
            os.replace(item / match["name"], item.parent / match["name"])
            back.append(match["name"])
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)
    return back


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one operation; False if the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder and those above it; return those in which one was made, which must be
    synced.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return [path.parent for path in missing]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
