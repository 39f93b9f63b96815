"""Trackers: Weights & Biases, TensorBoard and the others that accelerate opens. They are shown what
happens and can change nothing.

accelerate's classes are used one by one and without its `Accelerator`, which would see to devices,
precision and processes as well.
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
"""Calls that fail in a row before a tracker is not asked any more: each may have waited for a
network.
"""

_SUBFOLDER = "npt"
"""Of the run folder, where TensorBoard's files are."""

_SUMMARY = ("perplexity", "perplexity_ratio", "kl", "top1", "acceptance")
"""Figures that a run as a whole is known by."""

_REMEDIES = {
    "wandb": (
        "log in first (wandb login), set WANDB_MODE=offline, or leave it out (--report_to none)"
    ),
    "comet_ml": "log in first (comet login, COMET_API_KEY), or leave it out (--report_to none)",
    "clearml": "set it up first (clearml-init), or leave it out (--report_to none)",
    "mlflow": "check MLFLOW_TRACKING_URI, or leave it out (--report_to none)",
    "swanlab": "log in first (swanlab login), or leave it out (--report_to none)",
}


def check_trackers(config: TrainConfig) -> list[str]:
    """Return the names of the trackers that the configuration asks for.

    Raises:
        ConfigError: one of them is not installed.
    """
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
    flags = {
        name: f"--use_{name}"
        for name, wanted in (("wandb", config.use_wandb), ("tensorboard", config.use_tensorboard))
        if wanted
    }
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
    """Start a run's trackers on process 0, which alone has any; what keeps them from starting ends
    every process.

    Args:
        processes: the processes of the run.
        config: which trackers.
        folder: the run's; that of process 0 counts.
        resume_at: as of `Trackers`.

    Raises:
        ConfigError: one cannot be started. The folder is as it was.
        ProcessError: on the other processes.
    """
    started: list[Trackers] = []
    run = wandb_run.known_run(folder) if resume_at is not None else None
    processes.first(lambda: started.append(Trackers(config, folder, run=run, resume_at=resume_at)))
    return started[0] if started else Trackers(TrainConfig(), folder)


class Trackers:
    """The trackers of one run, from before its base is loaded to behind its last file. A context,
    which closes them.

    One that fails under way is warned of once and counted; the run, its random numbers included,
    goes on as without it.

    Args:
        config: which ones, and how they name the run.
        folder: the run's, which is made if it is missing.
        run: what Weights & Biases is to know the run by; one that it knows is gone on with.
        group: runs that Weights & Biases shows together.
        resume_at: the step that the run in this folder goes on from. TensorBoard forgets what it
            has of later ones; Weights & Biases keeps the figures that it had first, which differ
            from those to come only where settings were changed.

    Raises:
        ConfigError: one of them cannot be started; nothing is left behind.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        run: str | None = None,
        group: str | None = None,
        resume_at: int | None = None,
    ):
        self.folder = folder
        self.warn: Callable[[str], None] = lambda message: None
        """Told of what fails."""
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
                self._trackers[name] = _started(name, config, folder, run, group, resume_at)
        except BaseException:
            self.close(1)
            raise

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(0 if error is None else getattr(error, "exit_status", 1))

    @property
    def active(self) -> bool:
        """Whether there is any."""
        return bool(self._trackers)

    @property
    def run_id(self) -> str | None:
        """What Weights & Biases knows the run by."""
        found = getattr(getattr(self._trackers.get("wandb"), "tracker", None), "id", None)
        return found if isinstance(found, str) else None

    def describe(self, values: Mapping[str, Any]) -> None:
        """Settings and whatever else a run is known by before its first step, nested or not.

        TensorBoard begins here: until the run does, it forgets nothing of an earlier one.
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
        """Numbers at `step`; None and non-finite values are left out, which every tracker
        can draw.
        """
        numbers = _finite(values)
        self._each(lambda _, tracker: tracker.log(numbers, step=step))

    def summarize(self, figures: Mapping[str, Figures], step: int, **more: float) -> None:
        """Figures of the run as a whole, by what they are of; where a tracker has no place for such
        they are numbers at `step`.

        Args:
            figures: by the name of what was measured.
            step: of the run now.
            more: further numbers.
        """
        numbers = _finite(
            {
                f"{name}/{key}": getattr(found, key)
                for name, found in figures.items()
                for key in _SUMMARY
            }
            | more
        )

        def store(name: str, tracker: Any) -> None:
            if name == "wandb":
                tracker.tracker.summary.update(numbers)
            else:
                tracker.log(
                    {f"summary/{key}": number for key, number in numbers.items()}, step=step
                )

        self._each(store)

    def texts(self, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        """Prompts with what student and teacher write, where a tracker shows text."""
        columns = ("step", "prompt", "student", "teacher")

        def show(name: str, tracker: Any) -> None:
            if name == "wandb":
                wandb_run.log_table(
                    tracker.tracker, "samples", columns, [(step, *row) for row in rows], step
                )
            elif name == "tensorboard":
                lines = [
                    "| prompt | student | teacher |",
                    "|---|---|---|",
                    *(f"| {' | '.join(map(_cell, row))} |" for row in rows),
                ]
                tracker.tracker.add_text("samples", "\n".join(lines), global_step=step)

        self._each(show)

    def modulation(self, found: Modulation, step: int) -> None:
        """Of every layer's targets the share of multipliers at their bounds, and where a tracker
        draws such a histogram of all.
        """
        shares: dict[str, Any] = {}
        counted: dict[str, tuple[list[int], list[float]]] = {}
        edges = found.edges
        for index, layer in found.layers.items():
            for target, look in layer.targets.items():
                where = f"modulation/layers.{index}.{target}"
                shares |= {
                    f"{where}.saturated": look.saturated,
                    f"{where}.add_rms": look.add_rms,
                    f"{where}.std": look.std,
                }
                if look.counts is not None:
                    counted[where] = look.counts, edges

        def show(name: str, tracker: Any) -> None:
            if counted and name == "wandb":
                wandb_run.log_histograms(tracker.tracker, counted, step)
            elif counted and name == "tensorboard":
                for where, (counts, limits) in counted.items():
                    _add_histogram(tracker.tracker, where, counts, limits, step)

        self.log(shares, step)
        self._each(show)

    def alert(self, title: str, text: str) -> None:
        """Tell whoever follows the run, where a tracker can."""
        self._each(
            lambda name, tracker: (
                tracker.tracker.alert(title=title, text=text, level="ERROR")
                if name == "wandb"
                else None
            )
        )

    def files(self, record: Mapping[str, Any]) -> None:
        """What the run folder holds at its end, where a tracker keeps files: report, pictures,
        adapters with `record` as metadata.
        """
        plain = _plain(record)
        self._each(
            lambda name, tracker: (
                wandb_run.log_files(tracker.tracker, self.folder, plain)
                if name == "wandb"
                else None
            )
        )

    def close(self, status: int = 0) -> None:
        """End them all; doing so twice is doing it once.

        Args:
            status: what the run ends with. Of one that failed before it was described nothing is
                left.
        """

        def end(name: str, tracker: Any) -> None:
            if name == "wandb":
                tracker.tracker.finish(exit_code=status)
            elif name != "tensorboard" or self._described:
                tracker.finish()

        self._each(end)
        self._trackers = {}
        for name, count in self._failed.items():
            if count > 1:
                self.warn(f"{name} failed {count} times in all; what it was told then it has not")
        self._failed.clear()
        if status and self._made and not self._described and _holds_trackers_alone(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _each(self, act: Callable[[str, Any], Any]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                with undisturbed():
                    act(name, tracker)
            # each tracker has classes of its own, and an observer must not end the run that it
            # looks at
            except Exception as error:
                self._note(name, error)
            else:
                self._in_a_row[name] = 0

    def _note(self, name: str, error: Exception) -> None:
        self._failed[name] += 1
        self._in_a_row[name] += 1
        if self._failed[name] == 1:
            self.warn(
                f"{name} failed: {_reason(error)}; the run goes on, and it may lack some of it"
            )
        if self._in_a_row[name] == LOST_AFTER:
            del self._trackers[name]
            self.warn(f"{name} failed {LOST_AFTER} times in a row and is told no more")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn within the context, torch's, Python's and numpy's random states are as
    before afterwards.
    """
    drawn, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with kept_random_state():
            yield
    finally:
        random.setstate(drawn)
        numpy.random.set_state(of_numpy)


def _make(folder: Path) -> bool:
    """Whether the folder had to be made.

    Raises:
        ConfigError: it cannot be, or nothing can be written into it.
    """
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
    name: str,
    config: TrainConfig,
    folder: Path,
    run: str | None,
    group: str | None,
    resume_at: int | None,
) -> Any:
    """One tracker.

    Raises:
        ConfigError: it cannot be started.
    """
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
            tracker = LOGGER_TYPE_TO_CLASS[name](
                *_arguments(name, config, folder),
                **_options(name, config, folder, run, group, resume_at),
            )
            if name == "tensorboard":
                from torch.utils import tensorboard  # noqa: F401 - that it can be
            else:
                tracker.start()
    except Exception as error:  # each tracker has classes of its own
        where = [
            f"{word} {value}"
            for word, value in (("project", config.project), ("entity", config.wandb_entity))
            if value
        ]
        named = f"{name} ({', '.join(where)})" if where else name
        remedy = _REMEDIES.get(name, "mend that, or leave it out (--report_to none)")
        raise ConfigError(f"{named} cannot be started: {_reason(error)}; {remedy}") from error
    return tracker


def _arguments(name: str, config: TrainConfig, folder: Path) -> tuple[Any, ...]:
    """Arguments of accelerate's class: a project, and a folder where it asks for one."""
    if name == "wandb":
        return (wandb_run.project_of(config),)
    if name == "tensorboard":
        return _SUBFOLDER, str(folder)
    project = (
        config.project
        or (os.environ.get("COMET_PROJECT_NAME") if name == "comet_ml" else None)
        or wandb_run.PROJECT
    )
    return (project, str(folder)) if name == "aim" else (project,)


def _options(
    name: str,
    config: TrainConfig,
    folder: Path,
    run: str | None,
    group: str | None,
    resume_at: int | None,
) -> dict[str, Any]:
    """Arguments that accelerate's class hands on to the library: names, and places within the run
    folder.
    """
    named = config.run_name or folder.name
    if name == "wandb":
        return wandb_run.options_of(config, folder, run, group)
    if name == "tensorboard":
        return {} if resume_at is None else {"purge_step": resume_at + 1}
    if name == "mlflow":
        return {"run_name": named}
    if name == "trackio":
        return {"name": named, "resume": "allow"}
    if name == "swanlab":
        return {"experiment_name": named, "logdir": str(folder / "swanlog")}
    if name == "dvclive":
        # no commits of its own
        return {
            "dir": str(folder / "dvclive"),
            "resume": resume_at is not None,
            "save_dvc_exp": False,
        }
    return {}


def _add_histogram(
    writer: Any, name: str, counts: Sequence[int], edges: Sequence[float], step: int
) -> None:
    """Counts between edges, as TensorBoard takes them; a number's place within its bin is lost, so
    sums are of the middles.
    """
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
    """As JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, int | float | str | bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def _reason(error: BaseException) -> str:
    """What an error says, without an end that would stand before our own."""
    return first_line(error)[:200].rstrip(".;")
