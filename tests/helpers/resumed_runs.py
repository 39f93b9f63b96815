"""Runs that are interrupted and resumed, and what must be equal to the run that was
not.
"""

import io
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import status_of
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import npt
from faults.runs import NoTokenizer
from npt.batch import Batch
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.distill.local import BatchSums
from npt.train.trainer import Trainer, TrainResult

RARE = 99
"""A token whose embedding overflows in the base of `poisoned_folder`: its micro-batches are refused
for their loss.
"""

Act = Callable[[int, Batch], None]
"""Is called before every micro-batch, with its number in the process and itself."""


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records of four to eight ordinary tokens."""
    return [
        {
            "id": f"{seed}-{i}",
            "input_ids": [3 + (11 * i + 7 * j + 5 * seed) % 90 for j in range(4 + (i + seed) % 5)],
        }
        for i in range(count)
    ]


def with_faults(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record in nine has a token outside the vocabulary, another one in nine a token that makes
    the loss overflow.
    """
    for i in range(4, len(records), 9):
        records[i]["input_ids"][1] = 999
    for i in range(7, len(records), 9):
        records[i]["input_ids"][2] = RARE
    return records


class Stream:
    """Readable again and again, of unknown length."""

    def __init__(self, content: list[dict[str, Any]]):
        self.content = content

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.content)


@dataclass
class Runs:
    """Makes runs of one kind in folders below `place`, all on one model, whose adapters are
    attached anew for each.

    Attributes:
        data: makes a fresh dataset.
        settings: of training.
        data_settings: of the data.
        report: write one at their end.
    """

    model: nn.Module
    place: Path
    data: Callable[[], Iterable[Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    data_settings: dict[str, Any] = field(default_factory=dict)
    replay: Callable[[], Iterable[Any]] | None = None
    adapter: dict[str, Any] = field(default_factory=lambda: {"rank": 2, "layers": "1,3"})
    eval_data: Iterable[Any] | None = None
    said: io.StringIO = field(default_factory=io.StringIO)
    report: bool = False

    def trainer(self, folder: str | None, act: Act | None = None, **changed: Any) -> Trainer:
        """A trainer, with `act` done before every micro-batch."""
        npt.detach(self.model)
        form = NPTConfig(**{**self.adapter, **changed.pop("adapter", {})})
        npt.attach(self.model, form, seed=changed.get("seed", 0))
        data, teacher = changed.pop("data", self.data)(), changed.pop("teacher", None)
        data_settings = {"max_length": 12, **self.data_settings, **changed.pop("data_settings", {})}
        if self.replay is not None:
            file = self.place / "replay.jsonl"
            file.write_text("".join(json.dumps(record) + "\n" for record in self.replay()))
            data_settings["replay_dataset"] = str(file)
        out = None if folder is None else str(self.place / folder)
        usual = {"batch_size": 1, "log_steps": 1, "learning_rate": 1e-2, "smoke_test": False}
        usual |= {"max_consecutive_bad": 50, "output_dir": out}
        settings = {**usual, **self.settings, **changed}
        trainer = Trainer(
            self.model,
            NoTokenizer(),
            data,
            TrainConfig(**settings),
            data_config=DataConfig(**data_settings),
            eval_data=records(1, seed=7) if self.eval_data is None else self.eval_data,
            console=Console(file=self.said, width=300),
            teacher=teacher,
        )
        return acting(trainer if self.report else without_report(trainer), act)

    def run(self, folder: str | None, act: Act | None = None, **changed: Any) -> TrainResult:
        """The run to its end."""
        return self.trainer(folder, act, **changed).train()

    def killed(self, folder: str, act: Act, **changed: Any) -> int:
        """The run in a process of its own; its exit status, negative for a signal that ended it."""
        return status_of(lambda: self.run(folder, act, **changed).exit_status)

    def outcome(self, folder: str) -> "Outcome":
        return outcome(self.place / folder)


def without_report(trainer: Trainer) -> Trainer:
    """The trainer, whose run writes no report at its end, nor what only that is made of."""
    trainer.report = False
    return trainer


def acting(trainer: Trainer, act: Act | None) -> Trainer:
    if act is None:
        return trainer
    strategy, calls = trainer.strategy, iter(range(10**6))

    def strategy_behind_it(model: Any, batch: Batch, config: TrainConfig) -> BatchSums:
        act(next(calls), batch)
        return strategy(model, batch, config)

    trainer.strategy = strategy_behind_it
    return trainer


def at(call: int, number: int = signal.SIGTERM) -> Act:
    """Send this process a signal before one micro-batch."""
    return lambda count, batch: os.kill(os.getpid(), number) if count == call else None


@dataclass
class Outcome:
    """Return all that a run came to, apart from clock and place."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    metrics: list[dict[str, Any]]
    fidelity: dict[str, Any] | None
    best: dict[str, torch.Tensor]

    def assert_equal_but_passes(self, other: "Outcome") -> None:
        """Bit for bit, but for what is remembered of how many samples were too many at once, and
        for figures, which are rounded by it.
        """
        apart = ("samples_at_once", "initial")
        mine, theirs = (
            replace(o, fidelity=None, state={k: v for k, v in o.state.items() if k not in apart})
            for o in (self, other)
        )
        mine.assert_equal(theirs)

    def assert_equal(self, other: "Outcome") -> None:
        """Bit for bit."""
        assert self.tensors.keys() == other.tensors.keys()
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name
        assert self.state == other.state
        assert self.metrics == other.metrics
        assert self.fidelity == other.fidelity
        assert self.best.keys() == other.best.keys()
        for name, tensor in self.best.items():
            assert torch.equal(tensor, other.best[name]), f"best: {name}"


def outcome(folder: Path) -> Outcome:
    """Of the run in a folder: its newest checkpoint, metrics, figures and best adapters."""
    whole = [p for p in (folder / "checkpoints").glob("step-*") if p.suffix == ""]
    checkpoint = max(whole)
    state = strict(checkpoint / "state.json")
    for clocked in ("settings", "versions"):
        state.pop(clocked)
    best = folder / "best" / "adapter" / "adapter_model.safetensors"
    return Outcome(
        tensors={
            **load_file(checkpoint / "state.safetensors"),
            **load_file(checkpoint / "adapter" / "adapter_model.safetensors"),
        },
        state=state,
        metrics=[
            {k: v for k, v in line.items() if k != "tokens_per_second"}
            for line in lines(folder, "metrics")
        ],
        fidelity=strict(folder / "fidelity.json") if (folder / "fidelity.json").is_file() else None,
        best=load_file(best) if best.is_file() else {},
    )


def strict(path: Path) -> Any:
    """JSON as its standard has it: NaN and Infinity are refused."""
    return json.loads(
        path.read_text(encoding="utf-8"),
        parse_constant=lambda word: pytest.fail(f"{word} in {path}"),
    )


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(folder, "events") if event["event"] == kind]


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def entry(*path: Any) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """`entry("a", "b")(value)` sets said["a"]["b"]."""

    def to(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(said: dict[str, Any]) -> None:
            for key in path[:-1]:
                said = said[key]
            said[path[-1]] = value

        return change

    return to
