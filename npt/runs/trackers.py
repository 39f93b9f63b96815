"""Weights & Biases and TensorBoard, through accelerate's tracker classes. They only observe.

These classes run without `Accelerator`, which would also manage devices, precision and processes.
Environment variables such as `WANDB_PROJECT`, `WANDB_RUN_ID` and `WANDB_MODE` override our
settings, so `wandb agent` works.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy

from npt.adapters.files.run_layout import ADAPTER, BEST
from npt.config import TrainConfig
from npt.distributed.processes import ProcessGroup
from npt.errors import CheckpointError, ConfigError, first_line
from npt.extras import require
from npt.files import check_folder
from npt.random_state import kept_random_state
from npt.runs.run_folder import REPORT, RUN
from npt.stored import read_json

_PAGES = (REPORT, "trace/health.html", "trace/health.png")


def check_trackers(config: TrainConfig) -> list[str]:
    """Return the trackers to use. ConfigError if one is not installed, if wandb has no API key, or
    if wandb could not use a variable of the environment.
    """
    names = [name for name in ("wandb", "tensorboard") if getattr(config, f"use_{name}")]
    for name in names:
        require(name, f"--use_{name}")
    if "wandb" in names:
        _check_wandb()
    return names


def _check_wandb() -> None:
    import wandb

    _check_environment()
    try:
        online = wandb.setup().settings.mode == "online"
        logged_in = not online or wandb.login(prompt=False, verify=False)
    except Exception as error:  # wandb has errors of its own
        raise _not_started(first_line(error)) from error
    if not logged_in:
        raise _not_started("there is no API key")


def _check_environment() -> None:
    """Raise ConfigError for the first variable that wandb refuses, or a WANDB_DIR that cannot be
    written, for which wandb would take a temporary folder.
    """
    import wandb

    for name, value in os.environ.items():
        if not name.startswith("WANDB_"):
            continue
        # one by one, to name the one at fault
        try:
            wandb.Settings().update_from_env_vars({name: value})
        except Exception as error:  # pydantic's ends in a link to its documentation
            errors: list[Any] = getattr(error, "errors", list)()
            why = errors[0]["msg"] if errors else first_line(error)
            raise ConfigError(f"{name} is {value!r}: {why}; correct or unset it") from error
    place = os.environ.get("WANDB_DIR")
    if place:
        try:
            os.makedirs(place, exist_ok=True)
            with TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise ConfigError(
                f"WANDB_DIR is {place!r}, which cannot be written: {error.strerror}; name another"
                " folder or unset it"
            ) from error


def start_trackers(
    processes: ProcessGroup, config: TrainConfig, folder: Path, *, resume_at: int | None = None
) -> Trackers:
    """Start the trackers of a run on process 0; the other processes have none. If that fails, raise
    ConfigError on process 0 and ProcessError on the others.
    """
    started: list[Trackers] = []
    run = known_run(folder) if resume_at is not None else None
    processes.first(lambda: started.append(Trackers(config, folder, run=run, resume_at=resume_at)))
    return started[0] if started else Trackers(TrainConfig(), folder)


class Trackers:
    """The trackers of one run; a context that closes them.

    A tracker that cannot start raises ConfigError. A call that fails later only warns, and the run
    continues with the same random numbers.

    Args:
        run: id of the Weights & Biases run to continue.
        resume_at: step from which the run in `folder` resumes. TensorBoard drops later steps.
            Weights & Biases keeps its first figures, which differ only if settings changed.

    Attributes:
        warn: called with a message when a tracker fails for the first time.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        run: str | None = None,
        resume_at: int | None = None,
    ):
        self.folder = folder
        self.warn: Callable[[str], None] = lambda message: None
        self._trackers: dict[str, Any] = {}
        self._failed: set[str] = set()
        names = check_trackers(config)
        if not names:
            return
        from accelerate.state import PartialState
        from accelerate.tracking import TensorBoardTracker

        PartialState()  # accelerate's trackers need it
        if "wandb" in names:
            self._trackers["wandb"] = _started_wandb(config, folder, run)
        if "tensorboard" in names:
            check_folder(folder / "npt", "--use_tensorboard:", in_place=True)
            purged = None if resume_at is None else resume_at + 1
            tensorboard = TensorBoardTracker("npt", str(folder), purge_step=purged)
            tensorboard.start()
            self._trackers["tensorboard"] = tensorboard

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(0 if error is None else getattr(error, "exit_status", 1))

    @property
    def run_id(self) -> str | None:
        return self._trackers["wandb"].tracker.id if "wandb" in self._trackers else None

    def describe(self, values: Mapping[str, Any]) -> None:
        """Store settings and other facts known before the first step; values may be nested."""
        plain = {k: v if isinstance(v, int | float) else str(v) for k, v in values.items()}
        self._tell(
            wandb=lambda tracker: tracker.store_init_configuration(dict(values)),
            tensorboard=lambda tracker: tracker.store_init_configuration(plain),
        )

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the finite numbers among `metrics` at `step`."""
        numbers = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self._tell(**dict.fromkeys(self._trackers, lambda tracker: tracker.log(numbers, step=step)))

    def alert(self, title: str, text: str) -> None:
        self._tell(wandb=lambda x: x.tracker.alert(title=title, text=text, level="ERROR"))

    def files(self, record: Mapping[str, Any]) -> None:
        """Upload the report and the adapters, with `record` as metadata, to Weights & Biases."""
        self._tell(wandb=lambda tracker: _log_files(tracker.tracker, self.folder, record))

    def close(self, status: int = 0) -> None:
        self._tell(
            wandb=lambda tracker: tracker.tracker.finish(exit_code=status),
            tensorboard=lambda tracker: tracker.finish(),
        )
        self._trackers = {}

    def _tell(self, **acts: Callable[[Any], Any]) -> None:
        for name in acts.keys() & self._trackers.keys():
            try:
                with undisturbed():
                    acts[name](self._trackers[name])
            except Exception as error:  # no tracker may end the run, whatever it raises
                if name not in self._failed:
                    self._failed.add(name)
                    self.warn(
                        f"{name} failed: {first_line(error)}; the run continues, but its {name}"
                        " record may be incomplete"
                    )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random states of torch, Python and numpy on exit."""
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    try:
        with kept_random_state():
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def known_run(folder: Path) -> str | None:
    """Return the Weights & Biases id of this folder's run, or None."""
    try:
        run = read_json(folder / RUN, CheckpointError).get("wandb_run")
    except CheckpointError:
        return None
    valid = isinstance(run, str) and re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}", run)
    return run if valid else None


def _started_wandb(config: TrainConfig, folder: Path, run: str | None) -> Any:
    """Start a Weights & Biases run, or raise ConfigError."""
    from accelerate.tracking import WandBTracker

    continued = None if "WANDB_RUN_ID" in os.environ else run
    tracker = WandBTracker(
        None if {"WANDB_PROJECT", "WANDB_SWEEP_ID"} & os.environ.keys() else "npt",
        name=config.run_name or os.environ.get("WANDB_NAME") or folder.name,
        dir=os.environ.get("WANDB_DIR") or str(folder),
        id=continued,
        resume="allow" if continued else None,
    )
    try:
        with undisturbed():
            folder.mkdir(parents=True, exist_ok=True)
            tracker.start()
    except Exception as error:  # wandb has errors of its own
        with suppress(OSError):  # wandb may have left files in it
            folder.rmdir()
        raise _not_started(first_line(error)) from error
    return tracker


def _not_started(why: str) -> ConfigError:
    return ConfigError(
        f"cannot start wandb: {why}; run wandb login, set WANDB_MODE=offline or remove --use_wandb"
    )


def _log_files(run: Any, folder: Path, record: Mapping[str, Any]) -> None:
    """Upload pages and pictures as a `report` artifact, and the adapters as `best` and `last`."""
    import wandb

    pages = [folder / name for name in _PAGES if (folder / name).is_file()]
    if pages:
        report = wandb.Artifact(f"npt-report-{run.id}", "report")
        for page in pages:
            report.add_file(str(page), name=page.name)
        run.log_artifact(report)
    for path, alias in ((folder / BEST, "best"), (folder, "last")):
        if (path / ADAPTER).is_dir():
            adapter = wandb.Artifact(f"npt-adapter-{run.id}", "model", metadata=dict(record))
            adapter.add_dir(str(path / ADAPTER))
            run.log_artifact(adapter, aliases=[alias])
