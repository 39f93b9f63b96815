"""Resume a run: find its checkpoint and folder, and check that settings and data still match."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from npt.adapters.files.run_layout import CHECKPOINTS
from npt.config import DataConfig, NPTConfig, flag_of
from npt.data.source import Record, is_sequence
from npt.data.templates import plain
from npt.distributed.processes import ProcessGroup
from npt.errors import CheckpointError, ConfigError
from npt.manifest import MANIFEST
from npt.runs.checkpoint import Checkpoint, newest_good, read_checkpoint
from npt.runs.progress import RunProgress
from npt.runs.run_folder import check_free, default_folder, is_run, tidy
from npt.stored import shown

AUTO = "auto"

_SAMPLED = 16  # records to hash, spread evenly over a sequence

_MATTERS = {
    **{f.name: flag_of(f) for cls in (NPTConfig, DataConfig) for f in fields(cls)},
    "seed": "seed",
    "use_quantization": "use_quantization",
    "quant_type": "quant_type",
    "compute_dtype": "compute_dtype",
    "teacher_precision": "teacher_precision",
    "teacher": "teacher (its hash)",
}
"""Settings of adapters, base and sample order, which must not change on a resume."""

_SOURCES = ("dataset_name", "replay_dataset")

_OF_ONE_START = {"resume", "output_dir"}

_RECORDED = {"adapter", "processes", "teacher", "teacher_attention", *_OF_ONE_START}
"""Entries among a run's settings that need not be settings of every run."""


@dataclass(frozen=True)
class RunOrigin:
    """The folder and step at which a run begins.

    Attributes:
        checkpoint: checkpoint to resume from; None to begin at step 0.
        goes_on: the run resumes in its own folder, not in a new one.
        broken: newer checkpoints that fail verification, and why.
    """

    folder: Path
    checkpoint: Checkpoint | None = None
    goes_on: bool = False
    broken: Mapping[Path, str] = field(default_factory=dict)

    @property
    def progress(self) -> RunProgress:
        """How far the run had come."""
        return RunProgress() if self.checkpoint is None else self.checkpoint.progress

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def resume_at(self) -> int | None:
        """The step at which a run resumes in its own folder; None in a new folder."""
        return self.step if self.goes_on else None


def find_origin(resume: str | None, output_dir: str | None, processes: ProcessGroup) -> RunOrigin:
    """Return where a run begins: in a new folder, or at the checkpoint that `--resume` names. That
    is `auto` (the newest good checkpoint in `output_dir`), a run folder or a checkpoint.

    Raises:
        ConfigError: the folder cannot be used.
        CheckpointError: there is nothing to resume, or it is damaged.
    """
    if resume is None and not output_dir:
        output_dir = None  # a new run without a name gets a new folder
    to = None if output_dir is None else Path(output_dir)
    try:
        origin = processes.first(lambda: _origin(resume, to))
    except OSError as error:
        raise CheckpointError(
            f"--resume {resume}: cannot read {error.filename or 'it'}: {error.strerror}; check its"
            " permissions"
        ) from error
    if processes.main or origin.checkpoint is None:
        return origin
    # every process reads the checkpoint itself; process 0 sets broken ones aside
    return RunOrigin(origin.folder, read_checkpoint(origin.checkpoint.folder), origin.goes_on)


def _origin(resume: str | None, to: Path | None) -> RunOrigin:
    if resume == AUTO:
        return _continued(to)
    if resume is not None:
        return _resumed(resume, to)
    folder = to or default_folder()
    check_free(folder)
    return RunOrigin(folder)


def _continued(to: Path | None) -> RunOrigin:
    """Return where `--resume auto` begins."""
    if to is None:
        raise ConfigError(
            "--resume auto looks for checkpoints in --output_dir; add --output_dir RUN_FOLDER"
        )
    # nothing has run here yet: one command starts a run and resumes it
    if not to.is_dir() or not any(to.iterdir()):
        check_free(to)
        return RunOrigin(to, goes_on=True)
    if not is_run(to):
        raise ConfigError(
            f"--output_dir {to} holds something other than a run; choose another folder"
        )
    tidy(to)
    chosen, broken = newest_good(to / CHECKPOINTS)
    if chosen is None and broken:
        raise _none_good(to, broken)
    return RunOrigin(to, chosen, True, broken)


def _resumed(resume: str, to: Path | None) -> RunOrigin:
    path = Path(resume).expanduser()
    run: Path | None = path
    if not (path / CHECKPOINTS).is_dir():
        named = (path / MANIFEST).exists() or path.name.startswith("step-")
        if not (path.is_dir() and named):
            raise CheckpointError(
                f"--resume {resume} is neither a checkpoint nor a run folder with checkpoints; pass"
                " one, or auto"
            )
        # a checkpoint may have been copied out of its run
        above = path.resolve().parent
        run = above.parent if above.name == CHECKPOINTS else None
    folder, goes_on = _ready(resume, run, to)
    if run != path:
        return RunOrigin(folder, read_checkpoint(path), goes_on)
    chosen, broken = newest_good(path / CHECKPOINTS)
    if chosen is None:
        raise _none_good(path, broken)
    return RunOrigin(folder, chosen, goes_on, broken)


def _none_good(run: Path, broken: Mapping[Path, str]) -> CheckpointError:
    faults = "; ".join(broken.values()) or "there is none"
    return CheckpointError(
        f"no checkpoint in {run} can be resumed: {faults}; start again in another folder"
    )


def _ready(resume: str, run: Path | None, to: Path | None) -> tuple[Path, bool]:
    """Return the folder to continue a run in, free or tidied, and whether it is the run's own."""
    folder = run if to is None else to
    if folder is None:
        raise ConfigError(
            f"--resume {resume} is not inside a run folder; choose a folder to continue in with"
            " --output_dir"
        )
    goes_on = run is not None and run.resolve() == folder.resolve()
    if goes_on:
        tidy(folder)
    else:
        check_free(folder)
    return folder, goes_on


def changed_settings(
    recorded: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, as (old, new).

    Raises:
        CheckpointError: one must not change, or a recorded one is unknown here: its default might
            mean another model or other data.
    """
    known = {*now, *_RECORDED}
    unknown = []
    for name, value in recorded.items():
        # what an unknown setting has switched off cannot be missed
        if name not in known and value not in (None, False, "", [], {}):
            unknown.append(f"{shown(name)} {shown(value)}")
    if unknown:
        listed = ", ".join(unknown[:5])
        raise CheckpointError(
            f"the checkpoint was trained with settings that this version does not know: {listed};"
            " resume with the version of npt that wrote it, or start a new run"
        )
    changed: dict[str, tuple[Any, Any]] = {}
    for name in sorted(recorded.keys() & now.keys() - _OF_ONE_START):
        old = recorded[name]
        new = _listed(now[name])
        # A path may be relative to another folder; fingerprints compare the content.
        moved = name in _SOURCES and Path(str(old)).name == Path(str(new)).name
        if old == new or moved:
            continue
        if name in _MATTERS:
            raise CheckpointError(
                f"the checkpoint was trained with --{_MATTERS[name]} {shown(old)}, but this run"
                f" has {shown(new)}; resume with {shown(old)} or start a new run"
            )
        changed[name] = (old, new)
    return changed


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _listed(value) for name, value in settings.items()}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def data_fingerprint(records: Iterable[Record] | None) -> dict[str, Any]:
    """Return the number of `records` and the `sha256` of some of them, for JSON; None if unknown.

    It detects a wrong file, not every edit. It reads only the first record of a stream, and none of
    a generator, which can be read only once.
    """
    if records is None:
        return {"records": 0, "sha256": None}
    size: int | None = None
    if is_sequence(records):
        every: Any = records
        size = len(every)
        # from the first to the last, without repeats if there are few
        indices = {i * (size - 1) // (_SAMPLED - 1) for i in range(_SAMPLED)}
        sampled: list[Any] = [every[index] for index in sorted(indices)] if size else []
    elif iter(records) is records:
        return {"records": None, "sha256": None}
    else:
        sampled = list(itertools.islice(records, 1))
    digest = hashlib.sha256()
    for record in sampled:
        line = json.dumps(record, sort_keys=True, default=plain) + "\n"
        digest.update(line.encode())
    return {"records": size, "sha256": digest.hexdigest()}


def check_same_data(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the known `data_fingerprint` of a dataset has changed."""
    for name, new in now.items():
        old = recorded.get(name)
        if isinstance(old, Mapping) and _differ(old, new):
            raise CheckpointError(
                f"the checkpoint was trained on {name} of {_described(old)}, but this run has"
                f" {_described(new)}; resume with the same data or start a new run"
            )


def _differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    known = [key for key in new if None not in (old.get(key), new[key])]
    return any(old[key] != new[key] for key in known)


def _described(fingerprint: Mapping[str, Any]) -> str:
    records = fingerprint.get("records")
    count = "an unknown number of" if records is None else str(records)
    return f"{count} records (sha256 {shown(str(fingerprint.get('sha256'))[:12])[1:-1]})"
