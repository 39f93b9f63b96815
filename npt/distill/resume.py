"""Taking a run up again: which checkpoint, in which folder, and whether its settings go with those asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from npt.config import DataConfig, NPTConfig, flag_of
from npt.distill.checkpoint import MANIFEST, Checkpoint, newest_good, read_checkpoint
from npt.errors import CheckpointError, ConfigError

AUTO = "auto"

_MATTERS = {
    **{f.name: flag_of(f) for cls in (NPTConfig, DataConfig) for f in fields(cls)},
    "seed": "seed",
}
"""Settings that a run cannot go on with in another form: the adapters', and what the order of its samples is made of."""


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from. folder: the run's, which it goes on in. checkpoint: None where a run is to start anew in it.
    problems: of checkpoints that were set aside."""

    folder: Path
    checkpoint: Checkpoint | None
    problems: tuple[str, ...] = ()


def find_resumed(resume: str, output_dir: str | None) -> Resumed:
    """The checkpoint that `--resume` means.

    Args:
        resume: `auto` for the newest good one below `output_dir`; else a run folder, or one checkpoint of it.
        output_dir: of the run. A path without it goes on in the folder that it lies in.

    Raises:
        ConfigError: `auto` without a folder.
        CheckpointError: there is none, or none that verifies.
    """
    if resume == AUTO:
        if output_dir is None:
            raise ConfigError("--resume auto looks for checkpoints below --output_dir; name that folder")
        run = Path(output_dir)
        checkpoint, problems = newest_good(run / "checkpoints")
        if checkpoint is None and problems:
            raise CheckpointError(f"no checkpoint below {run} verifies: {'; '.join(problems)}; start anew in another folder")
        return Resumed(run, checkpoint, tuple(problems))
    path = Path(resume)
    if (path / MANIFEST).is_file() or path.name.startswith("step-"):
        checkpoint, problems, run = read_checkpoint(path), [], path.absolute().parent.parent
    elif (path / "checkpoints").is_dir():
        checkpoint, problems = newest_good(path / "checkpoints")
        run = path
    else:
        raise CheckpointError(f"--resume {resume} is neither a checkpoint nor a run folder with checkpoints; name one, or auto")
    if checkpoint is None:
        raise CheckpointError(f"no checkpoint below {path} verifies: {'; '.join(problems) or 'there is none'}")
    return Resumed(run if output_dir is None else Path(output_dir), checkpoint, tuple(problems))


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ between a checkpoint's run and this one, with both values.

    Raises:
        CheckpointError: one that matters differs.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for name in sorted(set(before) | set(now)):
        old, new = _plain(before.get(name)), _plain(now.get(name))
        if old == new or name in ("resume", "output_dir"):
            continue
        if name in _MATTERS:
            raise CheckpointError(
                f"the checkpoint was trained with --{_MATTERS[name]} {_shown(old)}, this run asks for {_shown(new)}; resume with the same, "
                "or start a new run"
            )
        changed[name] = (old, new)
    return changed


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back."""
    return {name: _plain(value) for name, value in settings.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
