"""Names in a run's folder, for all that writes it, resumes from it or loads from it."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS, BEST, ADAPTER = "checkpoints", "best", "adapter"
"""`checkpoints/step-00000500/adapter`, `best/adapter`, and `adapter`, the last one."""

_STEP = re.compile(r"step-([0-9]{8,18})")


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints below `folder`, oldest first, without links."""
    if not folder.is_dir():
        return []
    named = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))
    ]
    return [path for _, path in sorted(named) if path.is_dir() and not path.is_symlink()]


def adapter_places(folder: Path) -> list[Path]:
    """Return the places of an adapter in its own folder, a run's or a checkpoint's, best first."""
    newest = reversed(checkpoints(folder / CHECKPOINTS))
    return [folder, *(each / ADAPTER for each in (folder / BEST, folder, *newest))]
