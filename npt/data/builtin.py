"""The built-in text: the source of the Python standard library found on this machine.

Why this text: every machine that runs Python has it, it is about 12 MB of real, varied, structured
writing, and nothing has to be downloaded. Tests and vendored packages are left out. A file is held
out by a hash of its path, so the same file is held out on every machine and for every Python
version, and the embedded model (trained on the `train` split only) has never seen it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from npt.errors import DataError

SPLITS = ("train", "heldout")
_EXCLUDED = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_vendor",
        "ensurepip",
    }
)
_HELDOUT_ONE_IN = 20


def is_heldout(relative_path: str) -> bool:
    """True for the one file in twenty that training never sees; a function of the POSIX path below
    the stdlib only.
    """
    digest = hashlib.sha256(relative_path.encode("utf-8")).digest()
    return int.from_bytes(digest[:4], "big") % _HELDOUT_ONE_IN == 0


def builtin_files(split: str, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (relative POSIX path, text) of one split in path order.

    Raises:
        DataError: unknown split, or no source below `root` (a Python without its standard library's
            .py files).
    """
    if split not in SPLITS:
        raise DataError(f"built-in text has no split {split!r}; choose one of {', '.join(SPLITS)}")
    root = root if root is not None else Path(sysconfig.get_paths()["stdlib"])
    found = False
    for relative in sorted(_sources(root)):
        if is_heldout(relative) != (split == "heldout"):
            continue
        try:
            text = (root / relative).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a handful of stdlib files are deliberately in other encodings
        if text.strip():
            found = True
            yield relative, text
    if not found:
        raise DataError(
            f"no Python source below {root}; pass --dataset_name FILE instead of the built-in text"
        )


def _sources(root: Path) -> Iterator[str]:
    """POSIX paths below `root` of what is no test and of nobody else. What is left out is not
    walked: packages that are installed there may be many times the library, and every pass over the
    text would read all their folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        below = Path(folder).relative_to(root)
        yield from ((below / name).as_posix() for name in names if name.endswith(".py"))
