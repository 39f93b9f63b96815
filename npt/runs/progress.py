"""How far a run has come. The loop advances it, and the record of a checkpoint holds its fields."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from npt.data.samples import Position
from npt.guard.outcome import Outcome


@dataclass
class RunProgress:
    """Counts of a run so far, and its position in the data.

    Attributes:
        step: applied optimizer steps.
        tokens: valid tokens of these steps, over all processes.
        micro_batches: micro-batches tried, refused ones included.
        in_a_row: refusals in a row at the last save.
        diagnoses: refusals that were traced.
        refused_by_kind: refused micro-batches and windows.
        refused_by_epoch: the same by epoch, from 0.
        last_evaluation: step of the last evaluation between two steps.
        best_kl: lowest value so far of the figure that judges the student.
        position: position after the last window counted.
    """

    step: int = 0
    tokens: int = 0
    micro_batches: int = 0
    in_a_row: int = 0
    diagnoses: int = 0
    refused_by_kind: Counter[str] = field(default_factory=Counter)
    refused_by_epoch: Counter[int] = field(default_factory=Counter)
    last_evaluation: int | None = None
    best_kl: float = math.inf
    position: Position = field(default_factory=Position)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RunProgress:
        """Return the progress that `as_record` wrote to a JSON file."""
        progress = cls(**{each.name: record[each.name] for each in fields(cls)})
        progress.refused_by_kind = Counter(record["refused_by_kind"])
        by_epoch = record["refused_by_epoch"].items()
        progress.refused_by_epoch = Counter({int(epoch): number for epoch, number in by_epoch})
        progress.position = Position.from_dict(record["position"])
        if progress.best_kl is None:  # JSON holds no infinity
            progress.best_kl = math.inf
        return progress

    def as_record(self) -> dict[str, Any]:
        return {**vars(self), "position": self.position.as_dict()}

    def count(self, outcome: Outcome, position: Position) -> None:
        """Count a window, after which training is at `position`."""
        self.position = position
        self.micro_batches += outcome.micro_batches
        self.refused_by_kind.update(refusal.kind for refusal in outcome.refused)
        self.refused_by_epoch.update([position.place.epoch] * len(outcome.refused))
        if outcome.applied:
            self.step += 1
            self.tokens += outcome.tokens

    @property
    def refused(self) -> int:
        return self.refused_by_kind.total()

    @property
    def refusals(self) -> dict[str, Any]:
        """The refusals of the run, for the event at its end."""
        return {
            "refused": self.refused,
            "refused_by_kind": self.refused_by_kind,
            "refused_by_epoch": self.refused_by_epoch,
        }

    @property
    def refusal_counts(self) -> dict[str, int]:
        """The refusals so far, for `metrics.jsonl`."""
        epoch = self.position.place.epoch
        kinds = sorted(self.refused_by_kind.items())
        return {
            "refused_total": self.refused,
            **{f"refused.{kind}": number for kind, number in kinds},
            "epoch": epoch,
            "refused_in_epoch": self.refused_by_epoch[epoch],
        }
