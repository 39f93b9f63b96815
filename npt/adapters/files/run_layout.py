"""Names of the folders in a run folder."""

from __future__ import annotations

import re
from pathlib import Path

# adapters are in `checkpoints/step-00000500/adapter`, `best/adapter` and `adapter` (the last)
CHECKPOINTS = "checkpoints"
BEST = "best"
ADAPTER = "adapter"

_STEP = re.compile(r"step-([0-9]{8,18})")


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first, without symbolic links."""
    if not folder.is_dir():
        return []
    found = []
    # not `glob`, to which a folder that cannot be read is empty
    for path in folder.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def adapter_places(folder: Path) -> list[Path]:
    """Return where to look for an adapter in a run folder, checkpoint or its own, best first."""
    newest = reversed(checkpoints(folder / CHECKPOINTS))
    return [folder, *(each / ADAPTER for each in (folder / BEST, folder, *newest))]
