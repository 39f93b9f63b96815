"""Where a run's folder has its adapters: what writes it, resumes from it and loads from it goes by
these names.
"""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS, BEST, ADAPTER = "checkpoints", "best", "adapter"
"""Below a run's folder: `checkpoints/step-00000500/adapter`, `best/adapter`, and `adapter`, the one
that it ended with.
"""

_STEP = re.compile(r"step-([0-9]{8,18})")


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders below `folder`, oldest first; half-written ones, those set aside and
    links are none.
    """
    if not folder.is_dir():
        return []
    named = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))
    ]
    return [path for _, path in sorted(named) if path.is_dir() and not path.is_symlink()]


def adapter_places(folder: Path) -> list[Path]:
    """Where below a run's folder, or a checkpoint's, an adapter may be; the one that is meant goes
    first.
    """
    newest = reversed(checkpoints(folder / CHECKPOINTS))
    return [
        folder,
        folder / BEST / ADAPTER,
        folder / ADAPTER,
        *(checkpoint / ADAPTER for checkpoint in newest),
    ]
