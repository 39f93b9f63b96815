"""The built-in text: the source of the Python standard library found on this machine.

Why this text: every machine that runs Python has it, it is about 12 MB of real, varied, structured writing, and nothing
has to be downloaded. Tests and vendored packages are left out. A file is held out by a hash of its path, so the same
file is held out on every machine and for every Python version, and the embedded model (trained on the `train` split
only) has never seen it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from npt.errors import DataError

SPLITS = ("train", "heldout")
_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_vendor", "ensurepip"})
_HELDOUT_ONE_IN = 20


def is_heldout(relative_path: str) -> bool:
    """True for the one file in twenty that training never sees; a function of the POSIX path below the stdlib only."""
    digest = hashlib.sha256(relative_path.encode("utf-8")).digest()
    return int.from_bytes(digest[:4], "big") % _HELDOUT_ONE_IN == 0


def builtin_files(split: str, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (relative POSIX path, text) of one split in path order.

    Raises:
        DataError: unknown split, or no source below `root` (a Python without its standard library's .py files).
    """
    if split not in SPLITS:
        raise DataError(f"built-in text has no split {split!r}; choose one of {', '.join(SPLITS)}")
    root = root if root is not None else Path(sysconfig.get_paths()["stdlib"])
    found = False
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if _EXCLUDED.intersection(relative.parts) or is_heldout(relative.as_posix()) != (split == "heldout"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a handful of stdlib files are deliberately in other encodings
        if text.strip():
            found = True
            yield relative.as_posix(), text
    if not found:
        raise DataError(f"no Python source below {root}; pass --dataset_name FILE instead of the built-in text")


def builtin_text(split: str = "train", root: Path | None = None) -> Iterator[dict[str, str]]:
    """The split as records {"text", "path"}: what `--dataset_name builtin` (the default) reads."""
    for relative, text in builtin_files(split, root):
        yield {"text": text, "path": relative}
