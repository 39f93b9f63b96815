"""The checkpoints of a run, written by the main process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.errors import CheckpointError, ConfigError, ProcessError, TooManyRefusalsError
from npt.evaluation.evaluate import Fidelity
from npt.random_state import random_state
from npt.runs.checkpoint import write_checkpoint
from npt.runs.resume import Resumed, plain_settings
from npt.runs.run_folder import BROKEN, SUPERSEDED, RunFolder, versions
from npt.train.loop import Loop
from npt.train.run_data import RunData
from npt.train.run_setup import RunSetup


class CheckpointWriter:
    """Saves what a run can be resumed from, and its best adapters.

    Args:
        setup, data: of the run.
        base: identity of the base.
        initial: fidelity at the start.
        folder: of the run.
    """

    def __init__(
        self,
        setup: RunSetup,
        data: RunData,
        base: BaseIdentity,
        initial: Fidelity,
        folder: RunFolder,
    ):
        self._setup, self._data, self._base = setup, data, base
        self._initial, self._folder = initial, folder

    def save(self, loop: Loop, last: bool = False) -> bool:
        """Write a checkpoint of what all processes have.

        Args:
            loop: what is saved.
            last: the run is over, so nothing would be written later.

        Returns:
            False if it could not be written, an older one exists, and the run continues.

        Raises:
            CheckpointError: it could not be written, and it is the last or the only one.
            ProcessError: another process is lost, or holds other adapters or moments.
        """
        model, processes, splitter = self._setup.model, self._setup.processes, self._setup.splitter
        audit_precision(model, policy_dtype(model))
        states = self._random_states(loop)
        if processes.broken:
            return processes.main and self._write(loop, states, [splitter.shrunk_to], last)
        shrunk_to = processes.gather_json(splitter.shrunk_to)
        return processes.first(lambda: self._write(loop, states, shrunk_to, last))

    def save_best(self, loop: Loop, fidelity: Fidelity) -> None:
        """Keep the adapters as the best so far; if that fails, say so."""
        figures = {"step": loop.steps, **fidelity.as_dict()}
        try:
            self._folder.save_best(self._setup.model, self._base, figures)
        except (OSError, SafetensorError) as error:
            self._save_failed(loop, error, f"best: {error}")
            self._setup.say(
                f"WARNING: the best adapters could not be kept at step {loop.steps}: {error}"
            )

    def rescue(self, loop: Loop, error: BaseException, measure: Callable[[int], None]) -> None:
        """Save the steps before an error that ended the loop; a second signal does not wait.

        Args:
            loop: that ended.
            error: which ended it.
            measure: measures the modulation at a step, after too many refusals.
        """
        setup, folder = self._setup, self._folder
        if isinstance(error, KeyboardInterrupt) and setup.stop.number is not None:
            return
        if not isinstance(error, TooManyRefusalsError):  # the loop has reported that one itself
            kind, message = type(error).__name__, str(error)[:500]
            folder.event("error", step=loop.steps, error=kind, message=message)
        # The others are elsewhere: leave out whatever would wait for them.
        if not setup.processes.met_by_all(error):
            setup.processes.leave(error)
        try:
            loop.settle()  # a checkpoint bears the step of its weights
            if setup.processes.broken and loop.step.window.applied_steps != loop.steps:
                return  # the weights are of a step whose result the others did not tell
            if loop.steps and loop.unsaved:
                self.save(loop, last=True)
            if isinstance(error, TooManyRefusalsError):  # a multiplier at its bound may be why
                measure(loop.steps)
        except Exception as second:  # the first error is the one to be seen
            kind, message = type(second).__name__, f"not saved: {second}"[:500]
            folder.event("error", step=loop.steps, error=kind, message=message)

    def _random_states(self, loop: Loop) -> dict[int, dict[str, Tensor]]:
        """Return the random state of every process, after comparing what they hold.

        It is this one's alone if the others are gone.
        """
        processes = self._setup.processes
        if processes.size == 1 or processes.broken:
            return {processes.index: random_state()}
        own = {
            "held": loop.step.update.checksum(),
            "random": {name: state.tolist() for name, state in random_state().items()},
        }
        everyone = processes.gather_json(own)
        for process, other in enumerate(everyone):
            if other["held"] != everyone[0]["held"]:
                raise processes.everywhere(
                    ProcessError(
                        f"process {process} holds other adapters or moments than process 0 at step"
                        f" {loop.steps} (checksums {other['held']} and {everyone[0]['held']});"
                        " nothing was saved: look at the hardware of these processes, then go on"
                        " with --resume auto"
                    )
                )
        return {
            process: {
                name: torch.tensor(state, dtype=torch.uint8)
                for name, state in other["random"].items()
            }
            for process, other in enumerate(everyone)
        }

    def _write(
        self,
        loop: Loop,
        states: dict[int, dict[str, Tensor]],
        shrunk_to: list[int | None],
        last: bool,
    ) -> bool:
        record = {
            **loop.state(),
            "samples_at_once": shrunk_to,
            "counted_from": self._data.counted_from,
            "settings": plain_settings(self._setup.all_settings()),
            "data": self._data.identity,
            "initial": self._initial.as_dict(),
            "base_hash": self._base.strict,
            "versions": versions(),
        }

        def write(path: Path) -> None:
            write_checkpoint(path, self._setup.model, loop.step.window, record, self._base, states)

        folder = self._folder
        try:
            path = folder.save_checkpoint(loop.steps, write, self._setup.config.save_total_limit)
        except (OSError, SafetensorError, CheckpointError) as error:
            standing = folder.checkpoints()
            good = f"the last good one is {standing[-1]}" if standing else "there is no other"
            self._save_failed(loop, error, f"{error}; {good}")
            if last or not standing:
                raise CheckpointError(
                    f"no checkpoint could be written at step {loop.steps}: {error}; {good}; make"
                    " room and go on with --resume"
                ) from error
            self._setup.say(
                f"WARNING: no checkpoint at step {loop.steps}: {error}; {good}, training goes on"
            )
            return False
        folder.event("save", step=loop.steps, folder=str(path.relative_to(folder.path)))
        return True

    def _save_failed(self, loop: Loop, error: Exception, message: str) -> None:
        kind = type(error).__name__
        self._folder.event("save_failed", step=loop.steps, error=kind, message=message[:500])


def set_aside_unused(resumed: Resumed, folder: RunFolder, warn: Callable[[str], None]) -> None:
    """Set aside checkpoints that do not verify, and those after the one that is resumed.

    Args:
    resumed: what was found.
    folder: of the run.
    warn: prints a warning and keeps it.

    Raises:
        ConfigError: there are others than when the checkpoint was chosen.
    """
    if not resumed.goes_on:
        for problem in resumed.broken.values():
            warn(problem)
        return
    if tuple(path.name for path in folder.checkpoints()) != resumed.seen:
        raise ConfigError(
            f"another process has written to {folder.path} since its checkpoints were read;"
            " start again"
        )
    for path, problem in resumed.broken.items():
        warn(f"{problem}; set aside as {folder.set_aside(path, BROKEN).name}")
    for path in folder.checkpoints():
        step = int(path.name.removeprefix("step-"))
        if resumed.checkpoint is not None and step > resumed.step:
            aside = folder.set_aside(path, SUPERSEDED).name
            warn(f"the run goes on from step {resumed.step}; {path.name} is set aside as {aside}")
