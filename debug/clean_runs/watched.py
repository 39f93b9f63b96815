"""Record the results and callbacks of a run, plain or guarded, and compare two runs."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, set_seed

from npt.guard import protect

Build = Callable[[Path], Any]
"""Makes a Trainer that writes into a folder. Calls may differ in nothing else."""

OF_THE_CLOCK = ("_runtime", "_per_second", "step_time")
"""Endings of log entries that differ between any two runs."""
ADDED_FIGURE = "refused"
"""The entry that a guard adds to each log line (docs/guides/guard.md)."""


def train(trainer: Any) -> Any:
    """Train and return the metrics."""
    return trainer.train().metrics


@dataclass(frozen=True)
class Example:
    """A small training run.

    Attributes:
        run: uses the Trainer and returns the results.
    """

    id: str
    group: str
    build: Build
    run: Callable[[Any], Any] = train


class Watching(TrainerCallback):
    """Record each event with the Trainer's state."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def noted(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Record an event. The state's log is compared as a whole afterwards."""
        entry = {"event": event, **asdict(control)}
        entry |= {name: getattr(state, name) for name in ("global_step", "epoch", "total_flos")}
        entry["num_input_tokens_seen"] = state.num_input_tokens_seen
        entry |= {name: unclocked(given[name]) for name in ("logs", "metrics") if name in given}
        if event == "on_pre_optimizer_step":
            entry["grad"] = {
                name: None if parameter.grad is None else float(parameter.grad.norm())
                for name, parameter in given["model"].named_parameters()
            }
        self.events.append(entry)


def _noting(event: str) -> Callable[..., None]:
    def on_event(self: Watching, *arguments: Any, **given: Any) -> None:
        self.noted(event, *arguments, **given)

    return on_event


for _event in (name for name in dir(TrainerCallback) if name.startswith("on_")):
    setattr(Watching, _event, _noting(_event))


def run(example: Example, guarded: bool, folder: Path) -> dict[str, Any]:
    """Run an example in an empty folder; return everything to compare."""
    set_seed(0)
    trainer = example.build(folder)
    watching = Watching()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watching)
    if guarded:
        protect(trainer)
    returned = example.run(trainer)
    if guarded and trainer.guard.counts.refused:
        raise AssertionError(f"{example.id}: the guard refused {trainer.guard.outcome}")
    return {
        "weights": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random numbers": torch.get_rng_state(),
        "returned": unclocked(returned),
        "log": [unclocked(entry) for entry in trainer.state.log_history],
        "state": {**asdict(trainer.state), "log_history": None},
        "events": watching.events,
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
    }


def unclocked(figures: Any) -> Any:
    """Return figures without times and without the guard's entry."""
    if not isinstance(figures, dict):
        return figures
    return {
        name: value
        for name, value in figures.items()
        if not name.endswith(OF_THE_CLOCK) and (name != ADDED_FIGURE or value != 0)
    }


def compared(example: Example) -> list[str]:
    """Run an example plain and guarded; return the differences."""
    parent = Path(tempfile.mkdtemp())
    try:
        folder = parent / "run"  # one path for both, because states contain it
        plain = run(example, False, folder)
        shutil.rmtree(folder, ignore_errors=True)  # some examples write nothing
        return list(differences(plain, run(example, True, folder)))
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def differences(plain: Any, guarded: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each bitwise difference of two nested states."""
    if isinstance(plain, dict) and isinstance(guarded, dict):
        for key in [*plain, *(key for key in guarded if key not in plain)]:
            if key not in plain or key not in guarded:
                yield f"{where} {key}: only {'guarded' if key in guarded else 'plain'}"
            else:
                yield from differences(plain[key], guarded[key], f"{where} {key}".strip())
    elif isinstance(plain, list | tuple) and isinstance(guarded, list | tuple):
        if len(plain) != len(guarded):
            yield f"{where}: {len(guarded)} entries guarded, {len(plain)} plain"
        for index, pair in enumerate(zip(plain, guarded, strict=False)):
            yield from differences(*pair, f"{where}[{index}]")
    elif isinstance(plain, Tensor) and isinstance(guarded, Tensor):
        if not _same_bits(plain, guarded):
            yield f"{where}: bits differ"
    elif not _equal(plain, guarded):
        yield f"{where}: {guarded!r} guarded, {plain!r} plain"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    both_nan = isinstance(one, float) and isinstance(other, float)
    return one == other or (both_nan and math.isnan(one) and math.isnan(other))
