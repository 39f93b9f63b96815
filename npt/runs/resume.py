"""Resume a run: find the checkpoint and the folder, and compare the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from npt.adapters.files.run_layout import CHECKPOINTS, checkpoints
from npt.config import DataConfig, NPTConfig, flag_of
from npt.errors import CheckpointError, ConfigError
from npt.runs.checkpoint import Checkpoint, newest_good, read_checkpoint
from npt.runs.manifest import MANIFEST
from npt.runs.run_folder import check_free, is_run, tidy
from npt.stored import shown

AUTO = "auto"

_MATTERS = {
    **{f.name: flag_of(f) for cls in (NPTConfig, DataConfig) for f in fields(cls)},
    "seed": "seed",
    "use_quantization": "use_quantization",
    "quant_type": "quant_type",
    "compute_dtype": "compute_dtype",
    "teacher_precision": "teacher_precision",
    "teacher": "teacher (its hash)",
}
"""Settings that must stay as they were: the adapters', the base's, and those that decide the order
of samples.
"""

_OF_ONE_START = ("resume", "output_dir")


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from; finding it has changed nothing.

    folder: the run's. checkpoint: None if a run is to start anew in it. goes_on: the folder is the
    checkpoint's own, or that of a run without checkpoints; otherwise it is a new one. broken: newer
    checkpoints that do not verify, and why. seen: the names of all checkpoints there.
    """

    folder: Path
    checkpoint: Checkpoint | None
    goes_on: bool
    broken: Mapping[Path, str] = field(default_factory=dict)
    seen: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_resumed(resume: str, output_dir: str | None) -> Resumed:
    """Return the checkpoint that `--resume` means.

    Args:
        resume: `auto` for the newest good one below `output_dir`; else a run folder, or one
            checkpoint of it.
        output_dir: of the run; default the folder of the checkpoint's run.

    Raises:
        ConfigError: `auto` without a folder, or with one that holds something other than a run; a
            checkpoint that lies in no run folder without `output_dir`; another process is writing
            the folder.
        CheckpointError: there is none, or none that verifies, or it cannot be read.
    """
    try:
        return _find(resume, output_dir)
    except OSError as error:
        raise CheckpointError(
            f"--resume {resume}: {error.filename or 'it'} cannot be read: {error.strerror}; check"
            " its rights"
        ) from error


def _find(resume: str, output_dir: str | None) -> Resumed:
    if resume == AUTO:
        if output_dir is None:
            raise ConfigError(
                "--resume auto looks for checkpoints below --output_dir; name that folder"
            )
        return _newest(Path(output_dir), Path(output_dir), required=False)
    path = Path(resume).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint or run folder {resume}; check --resume")
    if (path / CHECKPOINTS).is_dir():
        return _newest(path, path if output_dir is None else Path(output_dir), required=True)
    if not ((path / MANIFEST).exists() or path.name.startswith("step-")):
        raise CheckpointError(
            f"--resume {resume} is neither a checkpoint nor a run folder with checkpoints; name"
            " one, or auto"
        )
    above = path.resolve().parent
    if above.name != CHECKPOINTS and output_dir is None:
        raise ConfigError(
            f"the checkpoint {resume} lies in no run folder; name one to go on in with --output_dir"
        )
    run = above.parent if output_dir is None else Path(output_dir)
    goes_on = above.name == CHECKPOINTS and _same(run, above.parent)
    if goes_on:
        tidy(run)
    return _placed(run, read_checkpoint(path), goes_on, {})


def _newest(run: Path, to: Path, *, required: bool) -> Resumed:
    """Return the newest good checkpoint of a run folder, to resume in the folder `to`."""
    goes_on = _same(run, to)
    if not run.is_dir() or not any(run.iterdir()):
        check_free(run)
        return Resumed(run, None, goes_on)
    if not is_run(run):
        raise ConfigError(
            f"--output_dir {run} holds something other than a run; choose another folder"
        )
    if goes_on:
        tidy(run)
    checkpoint, broken = newest_good(run / CHECKPOINTS)
    if checkpoint is None and (broken or required):
        raise CheckpointError(
            f"no checkpoint below {run} verifies: {'; '.join(broken.values()) or 'there is none'};"
            " start anew in another folder"
        )
    return _placed(to, checkpoint, goes_on, broken)


def _placed(
    run: Path, checkpoint: Checkpoint | None, goes_on: bool, broken: Mapping[Path, str]
) -> Resumed:
    if not goes_on:
        check_free(run)
        return Resumed(run, checkpoint, False, broken)
    return Resumed(
        run, checkpoint, True, broken, tuple(path.name for path in checkpoints(run / CHECKPOINTS))
    )


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def changed_settings(
    recorded: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between a checkpoint's run and this one, with both values;
    those that only one of them has are not compared.

    Raises:
        CheckpointError: one that must stay differs.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for name in sorted(set(recorded) & set(now) - set(_OF_ONE_START)):
        old, new = _plain(recorded[name]), _plain(now[name])
        if old == new:
            continue
        if name in _MATTERS:
            raise CheckpointError(
                f"the checkpoint was trained with --{_MATTERS[name]} {_shown(old)}, this run asks"
                f" for {_shown(new)}; resume with the same, or start a new run"
            )
        changed[name] = (old, new)
    return changed


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON gives them back."""
    return {name: _plain(value) for name, value in settings.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) and value.isprintable() else shown(value)
