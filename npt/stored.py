"""Read JSON and safetensors files from untrusted sources: sizes are bounded, every fault is a line,
and names in the files are never used as paths.
"""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError, safe_open

from npt.errors import NPTError, kind_of, printable

if TYPE_CHECKING:  # command lines are read before torch is loaded
    from torch import Tensor

JSON_BYTES = 64 << 20
"""Size limit of JSON files. The record of a large model takes a few megabytes."""

RESTORE = "restore it from the original"

Header = tuple[str, tuple[int, ...]]
"""Dtype, by its name in safetensors, and shape."""


def read_bytes(path: Path, most: int = JSON_BYTES) -> bytes:
    """Return the content of a file, never waiting for a pipe; OSError if it cannot be read, is not
    a regular file, or has more than `most` bytes.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if status.st_size > most:
        large = f"it has {status.st_size} bytes, more than the limit of {most}"
        raise OSError(errno.EFBIG, large, str(path))
    return path.read_bytes()


def read_json(path: Path, error: type[NPTError]) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        `error`: the file is unreadable, too large, not strict JSON, or not an object.
    """

    try:
        text = read_bytes(path).decode()
    except (OSError, ValueError) as problem:
        raise _unreadable(path, problem, error) from problem
    return parse_json(text, path, error)


def parse_json(text: str, path: Path, error: type[NPTError]) -> dict[str, Any]:
    """Return the object that is the text of a file, or of an entry in it.

    Raises:
        `error`: the text is not strict JSON, or not an object.
    """

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    def whole(digits: str) -> int:
        if len(digits) > 20:
            raise ValueError(f"the number {digits[:20]}... has too many digits")
        return int(digits)

    try:
        value = json.loads(text, parse_constant=refuse, parse_int=whole)
    except (ValueError, RecursionError) as problem:
        raise _unreadable(path, problem, error) from problem
    if not isinstance(value, dict):
        raise error(f"{path} holds {kind_of(value)}, not an object; {RESTORE}")
    return value


def _unreadable(path: Path, problem: Exception, error: type[NPTError]) -> NPTError:
    reason = getattr(problem, "strerror", None) or problem
    return error(f"{path} is damaged or unreadable: {reason}; {RESTORE}")


def require_file(path: Path, remedy: str, error: type[NPTError]) -> None:
    """Raise `error` if the file is missing; the message names the folder and the remedy."""
    folder = path.parent
    if path.is_file():
        return
    if folder.is_dir():
        raise error(f"{folder} has no {path.name}: {remedy}")
    what = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
    raise error(f"{what}: {remedy}")


def check_entries(
    path: Path,
    prefix: str,
    entries: Mapping[str, Any],
    wanted: Mapping[str, tuple[type, ...]],
    error: type[NPTError],
    exact: bool = True,
) -> None:
    """Check that an object has the wanted entries, each with a wanted type.

    Args:
        path, prefix: the file and the start of an entry's name, for the message.
        entries: the object.
        wanted: the allowed types of each entry; a `bool` does not count as an `int`.
        error: the type to raise.
        exact: refuse other entries too.
    """
    missing = wanted.keys() - entries.keys()
    unknown = entries.keys() - wanted.keys() if exact else set()
    for kind, odd in (("missing", missing), ("unknown", unknown)):
        if odd:
            name = f"{prefix}{shown(min(odd))}"
            raise error(f"{path}: the entry {name} is {kind} ({len(odd)} in all); {RESTORE}")
    for key, kinds in wanted.items():
        value = entries[key]
        # exactly, since True is an int too
        if type(value) not in kinds:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise error(f"{path}: {prefix}{key} is {shown(value)}, expected {names}; {RESTORE}")


def check_names(
    path: Path, names: Iterable[str], wanted: Iterable[str], error: type[NPTError]
) -> None:
    """Check that a file holds exactly the wanted tensors; the error names the first difference."""
    have = set(names)
    need = set(wanted)
    for kind, odd in (("lacks the", need - have), ("has the extra", have - need)):
        if odd:
            raise error(f"{path} {kind} tensor {shown(min(odd))} ({len(odd)} in all); {RESTORE}")


def check_tensors(
    path: Path,
    headers: Mapping[str, Header],
    wanted: Mapping[str, tuple[int, ...]],
    error: type[NPTError],
    dtype: str = "F32",
) -> None:
    """Check that a file holds exactly the wanted tensors, with these shapes and this dtype; the
    error names the first difference.
    """
    check_names(path, headers, wanted, error)
    for name, shape in wanted.items():
        if headers[name] != (dtype, shape):
            raise error(
                f"{path}: {name} is {described(headers[name])}, the model needs {dtype}"
                f" {list(shape)}"
            )


def non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a non-finite value, or None."""
    return next((n for n, tensor in tensors.items() if not tensor.isfinite().all()), None)


def described(header: Header) -> str:
    """Return a tensor's dtype and shape, for a message."""
    return f"{shown(header[0])[1:-1]} {list(header[1])}"


def read_headers(path: Path, error: type[NPTError]) -> dict[str, Header]:
    """Return dtype and shape of each tensor in a safetensors file, without reading the tensors."""
    with opened(path, error) as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def read_tensors(path: Path, names: Iterable[str], error: type[NPTError]) -> dict[str, Tensor]:
    """Return these tensors of a safetensors file, on the CPU."""
    with opened(path, error) as stored:
        return {name: stored.get_tensor(name) for name in names}


@contextmanager
def opened(path: Path, error: type[NPTError]) -> Iterator[Any]:
    """Open a safetensors file; raise the library's errors as `error`."""
    try:
        if not path.is_file():  # reading a pipe would wait
            raise FileNotFoundError("missing or not a regular file")
        with safe_open(path, framework="pt") as stored:
            yield stored
    except (SafetensorError, OSError) as problem:
        reason = printable(str(problem)[:200], one_line=True)  # it may quote the file
        raise error(f"{path} is damaged or unreadable: {reason}; {RESTORE}") from problem


def shown(value: Any) -> str:
    """Return the repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
