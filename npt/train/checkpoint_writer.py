"""The checkpoints of a run, written by the main process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    ProcessError,
    TooManyRefusalsError,
)
from npt.evaluation.evaluate import Fidelity
from npt.random_state import random_state
from npt.runs.checkpoint import write_checkpoint
from npt.runs.resume import Resumed, plain_settings
from npt.runs.run_folder import BROKEN, SUPERSEDED, RunFolder
from npt.train.loop import Loop
from npt.train.run_data import RunData
from npt.train.run_setup import RunSetup
from npt.versions import versions


class CheckpointWriter:
    """Saves the checkpoints of a run, and its best adapters."""

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
        """Write a checkpoint of all processes' state.

        Args:
            loop: to be saved.
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
            said = f"the best adapters could not be kept at step {loop.steps}: {error}"
            self._save_failed(loop, error, f"best: {error}", said)

    def rescue(self, loop: Loop, error: BaseException, measure: Callable[[int], object]) -> None:
        """Save the steps before an error that ended the loop; a second signal does not wait.

        After too many refusals or a divergence the modulation is measured.
        """
        setup = self._setup
        if isinstance(error, KeyboardInterrupt) and setup.stop.number is not None:
            return
        reported = isinstance(error, TooManyRefusalsError | DivergedError)
        if not reported:
            self._report_error(loop, error, str(error))
        # The others are elsewhere: leave out whatever would wait for them.
        if not setup.processes.met_by_all(error):
            setup.processes.leave()
        try:
            loop.settle()  # a checkpoint bears the step of its weights
            if setup.processes.broken and loop.guard.window.applied_steps != loop.steps:
                return  # the weights are of a step whose result the others did not tell
            if loop.steps and loop.unsaved:
                self.save(loop, last=True)
            if reported:  # a multiplier at its bound may be why
                measure(loop.steps)
        except Exception as second:  # the first error is the one to be seen
            self._report_error(loop, second, f"not saved: {second}")

    def _random_states(self, loop: Loop) -> dict[int, dict[str, Tensor]]:
        """Return the random state of every process, after comparing their adapters and moments.

        It is this one's alone if the others are gone.
        """
        processes = self._setup.processes
        if processes.size == 1 or processes.broken:
            return {processes.index: random_state()}
        own = {
            "held": loop.guard.update.checksum(),
            "random": {name: state.tolist() for name, state in random_state().items()},
        }
        everyone = processes.gather_json(own)
        for process, other in enumerate(everyone):
            if other["held"] != everyone[0]["held"]:
                raise processes.everywhere(
                    ProcessError(
                        f"process {process} holds other adapters or moments than process 0 at step"
                        f" {loop.steps} (checksums {other['held']} and {everyone[0]['held']});"
                        " nothing was saved: look at the hardware of these processes, then"
                        " continue with --resume auto"
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
            "date": self._setup.date,
            "initial": self._initial.as_dict(),
            "base_hash": self._base.strict,
            "versions": versions(),
        }

        def write(path: Path) -> None:
            write_checkpoint(path, self._setup.model, loop.guard.window, record, self._base, states)

        folder, step = self._folder, loop.steps
        try:
            path = folder.save_checkpoint(step, write, self._setup.config.save_total_limit)
        except (OSError, SafetensorError, CheckpointError) as error:
            older = folder.checkpoints()
            good = f"the last good one is {older[-1]}" if older else "there is no other"
            said = None
            if older and not last:
                said = f"no checkpoint at step {step}: {error}; {good}, training continues"
            self._save_failed(loop, error, f"{error}; {good}", said)
            if said is not None:
                return False
            raise CheckpointError(
                f"no checkpoint could be written at step {step}: {error}; {good}; make room and"
                " continue with --resume"
            ) from error
        folder.event("save", step=step, folder=str(path.relative_to(folder.path)))
        return True

    def _save_failed(self, loop: Loop, error: Exception, message: str, said: str | None) -> None:
        kind = type(error).__name__
        self._folder.event("save_failed", step=loop.steps, error=kind, message=message[:500])
        if said is not None:
            self._setup.say(f"WARNING: {said}")

    def _report_error(self, loop: Loop, error: BaseException, message: str) -> None:
        kind = type(error).__name__
        self._folder.event("error", step=loop.steps, error=kind, message=message[:500])


def set_aside_unused(resumed: Resumed, folder: RunFolder, warn: Callable[[str], None]) -> None:
    """Set aside checkpoints that do not verify, and those after the one that is resumed.

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
            warn(f"the run continues from step {resumed.step}; {path.name} is set aside as {aside}")
