"""Trackers: Weights & Biases, TensorBoard and the others that accelerate opens. They only observe.

accelerate's classes are used without its `Accelerator`, which would also manage devices, precision
and processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy

from npt.config import TRACKERS, TrainConfig
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, first_line
from npt.evaluation.metrics import Figures
from npt.evaluation.modulation import Modulation
from npt.extras import EXTRAS, installed, require
from npt.random_state import kept_random_state
from npt.runs import wandb_run
from npt.runs.run_folder import TRACKED

LOST_AFTER = 20
"""Calls that fail in a row before a tracker is dropped: each may have waited for a network."""

_SUBFOLDER = "npt"
"""TensorBoard's folder below the run folder."""

_SUMMARY = ("perplexity", "perplexity_ratio", "kl", "top1", "acceptance")
"""Figures of a run as a whole."""

_LEAVE_OUT = "or leave it out (--report_to none)"
_REMEDIES = {
    "wandb": "log in first (wandb login), set WANDB_MODE=offline, ",
    "comet_ml": "log in first (comet login, COMET_API_KEY), ",
    "clearml": "set it up first (clearml-init), ",
    "mlflow": "check MLFLOW_TRACKING_URI, ",
    "swanlab": "log in first (swanlab login), ",
}


def check_trackers(config: TrainConfig) -> list[str]:
    """Return the trackers that the configuration asks for; ConfigError if one is not installed."""
    asked = config.report_to or ()
    if "none" in asked:
        return []
    if "all" in asked:
        chosen = [name for name in TRACKERS if installed(name)]
        if not chosen:
            raise ConfigError(
                f"--report_to is all, but none of {', '.join(TRACKERS)} is installed; pip install"
                " one, or drop it"
            )
        return chosen
    wanted = {"wandb": config.use_wandb, "tensorboard": config.use_tensorboard}
    flags = {name: f"--use_{name}" for name, use in wanted.items() if use}
    flags |= {name: f"--report_to {name}" for name in asked}
    for name, flag in flags.items():
        if name in EXTRAS:
            require(name, flag)
        elif not installed(name):
            raise ConfigError(
                f"{flag} needs {name}, which is not installed; pip install {name}, or leave it out"
            )
    return [name for name in TRACKERS if name in flags]


def start_trackers(
    processes: ProcessGroup, config: TrainConfig, folder: Path, *, resume_at: int | None = None
) -> Trackers:
    """Start a run's trackers on process 0, which alone has any; see `Trackers`.

    If one cannot start, ConfigError there and ProcessError on the other processes.
    """
    started: list[Trackers] = []
    run = wandb_run.known_run(folder) if resume_at is not None else None
    processes.first(lambda: started.append(Trackers(config, folder, run=run, resume_at=resume_at)))
    return started[0] if started else Trackers(TrainConfig(), folder)


class Trackers:
    """The trackers of one run, opened before its base is loaded; a context, which closes them.

    One that cannot be started is a ConfigError, and nothing is left over. One that fails later is
    warned of once and counted; the run continues with the same random numbers.

    run: the id in Weights & Biases; a known one is continued. resume_at: the step that the run
    in `folder` resumes from. TensorBoard forgets later steps; Weights & Biases keeps its first
    figures, which differ only if settings changed.
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
        """Called with a message about each failure."""
        self._trackers: dict[str, Any] = {}
        self._failed: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._described = self._made = False
        names = check_trackers(config)
        if not names:
            return
        self._made = _make(folder)
        try:
            for name in names:
                places, options = _opening(name, config, folder, resume_at)
                if name == "wandb":
                    options = wandb_run.options_of(config, folder, run)
                self._trackers[name] = _started(name, config, places, options)
        except BaseException:
            self.close(1)
            raise

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(0 if error is None else getattr(error, "exit_status", 1))

    @property
    def active(self) -> bool:
        """True while any tracker is open."""
        return bool(self._trackers)

    @property
    def run_id(self) -> str | None:
        """The run's id in Weights & Biases."""
        found = getattr(getattr(self._trackers.get("wandb"), "tracker", None), "id", None)
        return found if isinstance(found, str) else None

    def describe(self, values: Mapping[str, Any]) -> None:
        """Store settings and other facts known before the first step, nested or not.

        TensorBoard starts only here: a run that never starts keeps an earlier run's steps.
        """
        self._described = True
        flat = {
            name: value if isinstance(value, int | float | str | bool) else str(value)
            for name, value in _flat(values)
        }

        def store(name: str, tracker: Any) -> None:
            if name == "wandb":
                wandb_run.store_settings(tracker.tracker, _plain(values))
                return
            if name == "tensorboard":
                tracker.start()
            if flat:
                tracker.store_init_configuration(flat)

        self._each(store)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers at `step`, leaving out None and non-finite values."""
        numbers = _finite(values)
        self._each(lambda _, tracker: tracker.log(numbers, step=step))

    def summarize(self, figures: Mapping[str, Figures], step: int, **more: float) -> None:
        """Store figures of the whole run, by the name of what was measured, and `more` numbers.

        Trackers without a summary log them at `step`.
        """
        every = {f"{n}/{key}": getattr(x, key) for n, x in figures.items() for key in _SUMMARY}
        numbers = _finite(every | more)

        def store(name: str, tracker: Any) -> None:
            if name == "wandb":
                tracker.tracker.summary.update(numbers)
            else:
                tracker.log({f"summary/{key}": n for key, n in numbers.items()}, step=step)

        self._each(store)

    def texts(self, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        """Show prompts with the student's and the teacher's text, in trackers that show text."""

        def show(name: str, tracker: Any) -> None:
            if name == "wandb":
                wandb_run.log_samples(tracker.tracker, rows, step)
            elif name == "tensorboard":
                lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
                text = "\n".join(["| prompt | student | teacher |", "|---|---|---|", *lines])
                tracker.tracker.add_text("samples", text, global_step=step)

        self._each(show)

    def modulation(self, found: Modulation, step: int) -> None:
        """Log each target's share of multipliers at their bounds, and histograms if it can."""
        shares: dict[str, Any] = {}
        counted: dict[str, Sequence[int]] = {}
        for index, layer in found.layers.items():
            for target, look in layer.targets.items():
                where = f"modulation/layers.{index}.{target}"
                for key in ("saturated", "add_rms", "std"):
                    shares[f"{where}.{key}"] = getattr(look, key)
                if look.counts is not None:
                    counted[where] = look.counts

        def show(name: str, tracker: Any) -> None:
            if counted and name == "wandb":
                wandb_run.log_histograms(tracker.tracker, counted, found.edges, step)
            elif counted and name == "tensorboard":
                for where, counts in counted.items():
                    _add_histogram(tracker.tracker, where, counts, found.edges, step)

        self.log(shares, step)
        self._each(show)

    def alert(self, title: str, text: str) -> None:
        """Send an alert, in trackers that have them."""
        self._each_wandb(lambda run: run.alert(title=title, text=text, level="ERROR"))

    def files(self, record: Mapping[str, Any]) -> None:
        """Upload report, pictures and adapters, with `record` as metadata, if a tracker can."""
        self._each_wandb(lambda run: wandb_run.log_files(run, self.folder, _plain(record)))

    def close(self, status: int = 0) -> None:
        """Close all, once, with the run's exit status; a run that failed before `describe` leaves
        nothing."""

        def end(name: str, tracker: Any) -> None:
            if name == "wandb":
                tracker.tracker.finish(exit_code=status)
            elif name != "tensorboard" or self._described:
                tracker.finish()

        self._each(end)
        self._trackers = {}
        for name, count in self._failed.items():
            if count > 1:
                self.warn(f"{name} failed {count} times in all; what it was told then it lacks")
        self._failed.clear()
        if status and self._made and not self._described and _holds_trackers_alone(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _each_wandb(self, act: Callable[[Any], Any]) -> None:
        self._each(lambda name, tracker: act(tracker.tracker) if name == "wandb" else None)

    def _each(self, act: Callable[[str, Any], Any]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                with undisturbed():
                    act(name, tracker)
            except Exception as error:  # each tracker raises its own; none may end the run
                self._note(name, error)
            else:
                self._in_a_row[name] = 0

    def _note(self, name: str, error: Exception) -> None:
        self._failed[name] += 1
        self._in_a_row[name] += 1
        if self._failed[name] == 1:
            self.warn(
                f"{name} failed: {_reason(error)}; the run continues, and it may lack some of it"
            )
        if self._in_a_row[name] == LOST_AFTER:
            del self._trackers[name]
            self.warn(f"{name} failed {LOST_AFTER} times in a row and is told no more")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore torch's, Python's and numpy's random states afterwards."""
    drawn, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with kept_random_state():
            yield
    finally:
        random.setstate(drawn)
        numpy.random.set_state(of_numpy)


def _make(folder: Path) -> bool:
    """Make the folder if it is missing, and return whether it was; ConfigError if it cannot be."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return True
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise ConfigError(
            f"--output_dir {folder} cannot be written: {error.strerror}; choose another folder"
        ) from error
    return False


def _holds_trackers_alone(folder: Path) -> bool:
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= TRACKED


def _started(
    name: str, config: TrainConfig, places: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Open one tracker; ConfigError if it cannot be started."""
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigError(
            f"--report_to {name}: accelerate {version('accelerate')} opens no such tracker; pip"
            " install -U accelerate"
        )
    try:
        with undisturbed():
            PartialState()  # accelerate's loggers ask for it
            tracker = LOGGER_TYPE_TO_CLASS[name](*places, **options)
            if name == "tensorboard":
                from torch.utils import tensorboard  # noqa: F401 - fail now, not in `describe`
            else:
                tracker.start()
    except Exception as error:  # each tracker raises its own
        parts = {"project": config.project, "entity": config.wandb_entity}
        where = ", ".join(f"{word} {value}" for word, value in parts.items() if value)
        named = f"{name} ({where})" if where else name
        remedy = _REMEDIES.get(name, "mend that, ") + _LEAVE_OUT
        raise ConfigError(f"{named} cannot be started: {_reason(error)}; {remedy}") from error
    return tracker


def _opening(
    name: str, config: TrainConfig, folder: Path, resume_at: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the project (and folder) that accelerate's class takes, and the library's options."""
    if name == "wandb":
        return (wandb_run.project_of(config),), {}
    if name == "tensorboard":
        return (_SUBFOLDER, str(folder)), {} if resume_at is None else {"purge_step": resume_at + 1}
    project = config.project
    if not project and name == "comet_ml":
        project = os.environ.get("COMET_PROJECT_NAME")
    named = config.run_name or folder.name
    options: dict[str, dict[str, Any]] = {
        "mlflow": {"run_name": named},
        "trackio": {"name": named, "resume": "allow"},
        "swanlab": {"experiment_name": named, "logdir": str(folder / "swanlog")},
        "dvclive": {
            "dir": str(folder / "dvclive"),
            "resume": resume_at is not None,
            "save_dvc_exp": False,  # an observer makes no commits
        },
    }
    places = (project or wandb_run.PROJECT, *([str(folder)] if name == "aim" else []))
    return places, options.get(name, {})


def _add_histogram(
    writer: Any, name: str, counts: Sequence[int], edges: Sequence[float], step: int
) -> None:
    """Log counts between edges; sums are of the bins' middles."""
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    writer.add_histogram_raw(
        name,
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        sum_squares=sum(
            count * middle * middle for count, middle in zip(counts, middles, strict=True)
        ),
        bucket_limits=list(edges[1:]),
        bucket_counts=list(counts),
        global_step=step,
    )


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in _flat(value))
        else:
            yield name, value


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, int | float | str | bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def _reason(error: BaseException) -> str:
    """Return an error's text without its own end mark."""
    return first_line(error)[:200].rstrip(".;")
