"""Names of files and folders in a run folder, for code that writes, resumes or loads a run."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS, BEST, ADAPTER = "checkpoints", "best", "adapter"
"""The adapters of a run: `checkpoints/step-00000500/adapter`, `best/adapter` and `adapter`, its
last.
"""

_STEP = re.compile(r"step-([0-9]{8,18})")


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first, without symbolic links."""
    if not folder.is_dir():
        return []
    named = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))
    ]
    return [path for _, path in sorted(named) if path.is_dir() and not path.is_symlink()]


def adapter_places(folder: Path) -> list[Path]:
    """Return the folders that may hold the adapter of `folder`, best first. `folder` is an
    adapter's own, a run folder or a checkpoint.
    """
    newest = reversed(checkpoints(folder / CHECKPOINTS))
    return [folder, *(each / ADAPTER for each in (folder / BEST, folder, *newest))]
