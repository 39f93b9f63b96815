"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def finite_or_null(value: Any) -> Any:
    """`value` with every NaN and infinity, at any depth, replaced by None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """Standard JSON, non-finite numbers as null."""
    return json.dumps(finite_or_null(value), indent=indent, allow_nan=False)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically: a sibling temporary file, synced, then renamed over it."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
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


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a sibling temporary folder to fill; it becomes `path` when the block ends well, and is removed when it does not.

    An existing `path` is replaced as a whole. Files come out with the modes that the umask gives.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield temporary
        umask = _umask()
        for item in [temporary, *temporary.rglob("*")]:
            item.chmod((0o777 if item.is_dir() else 0o666) & ~umask)
            _sync(item)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
            os.replace(path, old / path.name)
            try:
                os.replace(temporary, path)
            except BaseException:
                os.replace(old / path.name, path)
                old.rmdir()
                raise
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
