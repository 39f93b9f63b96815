"""The checkpoints of a run, written by the main process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.errors import CheckpointError, ConfigError, ProcessError
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

        ProcessError if another process is lost, or holds other adapters or moments.

        Args:
            loop: to be saved.
            last: the run is over, so nothing would be written later.

        Returns:
            False if it could not be written, an older one exists, and the run continues; else that
            is a CheckpointError.
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
            self._failed("save_failed", loop, error, f"best: {error}")
            self._setup.say(
                f"WARNING: the best adapters could not be kept at step {loop.steps}: {error}"
            )

    def _random_states(self, loop: Loop) -> dict[int, dict[str, Tensor]]:
        """Return the random state of every process, after comparing their adapters and moments; of
        this one alone if the others are gone.
        """
        processes = self._setup.processes
        if processes.size == 1 or processes.broken:
            return {processes.index: random_state()}
        drawn = {name: state.tolist() for name, state in random_state().items()}
        everyone = processes.gather_json({"held": loop.guard.update.checksum(), "random": drawn})
        first = everyone[0]["held"]
        states = {}
        for process, theirs in enumerate(everyone):
            if theirs["held"] != first:
                raise processes.everywhere(
                    ProcessError(
                        f"process {process} holds other adapters or moments than process 0 at step"
                        f" {loop.steps} (checksums {theirs['held']} and {first}); nothing was"
                        " saved: look at the hardware of these processes, then continue with"
                        " --resume auto"
                    )
                )
            states[process] = {
                name: torch.tensor(state, dtype=torch.uint8)
                for name, state in theirs["random"].items()
            }
        return states

    def _write(
        self,
        loop: Loop,
        states: dict[int, dict[str, Tensor]],
        shrunk_to: list[int | None],
        last: bool,
    ) -> bool:
        setup, folder, step = self._setup, self._folder, loop.steps
        record = {
            **loop.state(),
            "samples_at_once": shrunk_to,
            "counted_from": self._data.counted_from,
            "settings": plain_settings(setup.all_settings()),
            "data": self._data.identity,
            "date": setup.date,
            "initial": self._initial.as_dict(),
            "base_hash": self._base.strict,
            "versions": versions(),
        }

        def write(path: Path) -> None:
            write_checkpoint(path, setup.model, loop.guard.window, record, self._base, states)

        try:
            path = folder.save_checkpoint(step, write, setup.config.save_total_limit)
        except (OSError, SafetensorError, CheckpointError) as error:
            older = folder.checkpoints()
            good = f"the last good one is {older[-1]}" if older else "there is no other"
            self._failed("save_failed", loop, error, f"{error}; {good}")
            if older and not last:
                message = f"no checkpoint at step {step}: {error}; {good}, training continues"
                setup.say(f"WARNING: {message}")
                return False
            raise CheckpointError(
                f"no checkpoint could be written at step {step}: {error}; {good}; make room and"
                " continue with --resume"
            ) from error
        folder.event("save", step=step, folder=str(path.relative_to(folder.path)))
        return True

    def _failed(self, event: str, loop: Loop, error: BaseException, message: str) -> None:
        kind = type(error).__name__
        self._folder.event(event, step=loop.steps, error=kind, message=message[:500])


def set_aside_unused(resumed: Resumed, folder: RunFolder, warn: Callable[[str], None]) -> None:
    """Set aside checkpoints that do not verify, and those after the one that is resumed.

    ConfigError if there are others than when the checkpoint was chosen.
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
