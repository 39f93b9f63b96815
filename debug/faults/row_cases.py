"""Cases for other trainers under `npt.guard`, such as a plain loop and transformers' Trainer.

Each case trains a PEFT LoRA on an NF4 base three times: guarded with the fault, unguarded without
the micro-batch, and unguarded with the fault. The first two must be equal bit for bit; the third
must differ.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

TENSOR = "layers.1."
"""Part of the name of the tensor that single-tensor faults change."""


@dataclass(frozen=True)
class RowCase:
    """A fault and the rows that have it.

    Attributes:
        kind: kind of the refusals.
        bad: rows in the last window of an epoch, the only window in which a Trainer accepts fewer
            micro-batches.
        rows: rows of an epoch, dealt out to the processes in turn.
        window: micro-batches of a step on each process.
        steps: windows that the guarded run receives.
        spoilt_step: step of the optimizer, from 0, that writes NaN into a `weight` or `moment`.
        processes: number of processes.
        together: a refusal on one process drops the micro-batch on all.
    """

    id: str
    name: str
    kind: str
    fault: str | None = None
    bad: tuple[int, ...] = (5,)
    rows: int = 8
    window: int = 4
    steps: int = 3
    checkpointing: bool = False
    spike_sigmas: float | None = None
    spoilt_step: tuple[int, str] | None = None
    processes: int = 1
    together: bool = False

    @property
    def size(self) -> int:
        """Return the micro-batches of a window over all processes."""
        return self.window * self.processes

    @property
    def bad_places(self) -> list[list[int]]:
        """Return the bad micro-batches of each window of a run."""
        windows = [range(i, i + self.size) for i in range(0, self.rows, self.size)]
        bad = [[row % self.size for row in rows if row in self.bad] for rows in windows]
        return [bad[step % len(bad)] for step in range(self.steps)]

    @property
    def lost(self) -> int:
        """Return the number of windows that are refused as a whole."""
        return sum(self.dropped(places) == {*range(self.size)} for places in self.bad_places)

    def dropped(self, bad: Collection[int]) -> set[int]:
        """Return the micro-batches of a window that are dropped if these are bad."""
        if not self.together:
            return {*bad}
        rounds = {place // self.processes for place in bad}
        return {place for place in range(self.size) if place // self.processes in rounds}

    @property
    def idle(self) -> bool:
        """Return whether one process loses a whole window of which another keeps a part."""
        for places in self.bad_places:
            bad = [sum(p % self.processes == i for p in places) for i in range(self.processes)]
            if self.window in bad and min(bad) < self.window:
                return True
        return False

    @property
    def refused(self) -> list[int | None]:
        """Return the micro-batches that must be refused; None is a whole window."""
        if self.kind in ("update", "spike"):
            return [None] * self.lost
        return [place for places in self.bad_places for place in places]

    @property
    def truth(self) -> str:
        """Return the expected outcome in words."""
        if not self.bad:
            return "no refusal; equal to the run without the guard, bit for bit"
        count = len(self.refused)
        return f"{count} refused as {self.kind}; equal to the run without them, bit for bit"


CASES = [
    RowCase("row-id-large", "token id equal to the vocabulary size", "data", "id-large"),
    RowCase("row-id-negative", "negative token id", "data", "id-negative"),
    RowCase("row-label", "label outside the vocabulary", "data", "label"),
    RowCase("row-loss-nan", "NaN in an activation", "loss", "loss-nan"),
    RowCase("row-loss-inf", "Inf in an activation", "loss", "loss-inf"),
    RowCase("row-gradient-nan", "finite loss, NaN in backward", "gradient", "gradient-nan"),
    RowCase("row-gradient-inf", "finite loss, -Inf in backward", "gradient", "gradient-inf"),
    RowCase("row-tensor-nan", "NaN in one tensor's gradient", "gradient", "tensor-nan"),
    RowCase("row-tensor-inf", "Inf in one tensor's gradient", "gradient", "tensor-inf"),
    RowCase("row-tensor-1e20", "finite 1e20 in one tensor's gradient", "gradient", "tensor-1e20"),
    RowCase("row-tensor-1e30", "finite 1e30 in one element", "gradient", "tensor-1e30"),
    RowCase("row-recomputation", "NaN in the recomputation only", "gradient", "recomputation",
            checkpointing=True),
    RowCase("row-checkpointed", "NaN in one tensor's gradient, with checkpointing", "gradient",
            "tensor-nan", checkpointing=True),
    RowCase("row-raises-forward", "FloatingPointError in forward", "error", "raises-forward"),
    RowCase("row-raises-backward", "FloatingPointError in backward", "error", "raises-backward"),
    RowCase("row-first", "first of four micro-batches", "gradient", "tensor-nan", bad=(4,)),
    RowCase("row-last", "last of four micro-batches", "loss", "loss-nan", bad=(7,)),
    RowCase("row-two", "two of four micro-batches", "gradient", "gradient-nan", bad=(4, 6)),
    RowCase("row-three", "three of four micro-batches", "loss", "loss-nan", bad=(5, 6, 7)),
    RowCase("row-every-window", "one in every window", "gradient", "tensor-nan",
            bad=(1,), rows=4),
    RowCase("row-whole-window", "every micro-batch of a window", "gradient", "gradient-inf",
            bad=(4, 5, 6, 7)),
    RowCase("row-step-one", "only micro-batch of the first step", "loss", "loss-nan",
            bad=(0,), rows=6, window=1, steps=6),
    RowCase("row-alone", "only micro-batch of a step", "gradient", "tensor-nan",
            window=1, steps=8),
    RowCase("step-weight", "NaN in a weight after a step", "update",
            window=1, steps=8, spoilt_step=(5, "weight")),
    RowCase("step-moment", "NaN in a moment after a step", "update",
            window=1, steps=8, spoilt_step=(5, "moment")),
    RowCase("step-first", "NaN in a weight after the first step", "update", bad=(0,),
            window=1, steps=8, spoilt_step=(0, "weight")),
    RowCase("spike", "finite gradient 1e6 times too large", "spike", "huge", bad=(25,), rows=28,
            window=1, steps=28, spike_sigmas=8.0),
]  # fmt: skip


def pair(
    id: str, name: str, kind: str, fault: str | None, bad: tuple[int, ...], **rest: Any
) -> RowCase:
    """Return a case of two processes that share every window; process 1 has the odd rows."""
    return RowCase(id, name, kind, fault, bad, **{"rows": 16, "processes": 2, **rest})


PAIR_CASES = [
    pair("pair-loss-nan", "NaN in an activation, on one process", "loss", "loss-nan", (11,)),
    pair("pair-gradient-nan", "NaN in backward, on one process", "gradient", "gradient-nan", (13,)),
    pair("pair-tensor-nan", "NaN in one tensor's gradient, on one process", "gradient",
         "tensor-nan", (9,)),
    pair("pair-tensor-1e30", "finite 1e30 in one element, on one process", "gradient",
         "tensor-1e30", (15,)),
    pair("pair-recomputation", "NaN in the recomputation, on one process", "gradient",
         "recomputation", (11,), checkpointing=True),
    pair("pair-three", "three of four micro-batches, on one process", "loss", "loss-nan",
         (9, 11, 13)),
    pair("pair-all", "every micro-batch of a window, on one process", "gradient", "gradient-inf",
         (9, 11, 13, 15)),
    pair("pair-first", "every micro-batch of the first window, on one process", "loss", "loss-nan",
         (1, 3, 5, 7)),
    pair("pair-each", "one micro-batch, on each process", "gradient", "tensor-inf", (8, 13)),
    pair("pair-every-window", "one in every window, on one process", "gradient", "tensor-nan",
         (3,), rows=8),
    pair("pair-both", "every micro-batch of a window, on both processes", "gradient",
         "gradient-inf", tuple(range(8, 16))),
    pair("pair-step", "NaN in a weight after a step, on both processes", "update", None, (10, 11),
         window=1, steps=8, spoilt_step=(5, "weight")),
]  # fmt: skip

FSDP_CASES = [
    *PAIR_CASES,
    pair("pair-id", "token id too large, on one process", "data", "id-large", (11,)),
    pair("pair-label", "label outside the vocabulary, on one process", "data", "label", (8,)),
    pair("pair-loss-inf", "Inf in an activation, on one process", "loss", "loss-inf", (10,)),
    pair("pair-tensor-1e20", "finite 1e20 in one tensor's gradient", "gradient", "tensor-1e20",
         (13,)),
    pair("pair-moment", "NaN in a moment after a step", "update", None, (10, 11),
         window=1, steps=8, spoilt_step=(5, "moment")),
    pair("pair-spike", "finite gradient 1e6 times too large, on both processes", "spike", "huge",
         (50, 51), rows=56, window=1, steps=28, spike_sigmas=8.0),
    pair("pair-clean", "no fault, 50 steps", "", None, (), steps=50),
]  # fmt: skip


def cases_of(trainer: str) -> list[RowCase]:
    """Return the cases that a trainer can run.

    Generations have no labels, and their ids come from the tokenizer. A stock Trainer hangs if one
    process has an empty window, so `hf` leaves out the cases in which that happens.
    """
    if trainer.startswith("fsdp"):  # a process that raises in forward would hang the other
        return [replace(case, together=trainer == "fsdp_sharded") for case in FSDP_CASES]
    pairs = PAIR_CASES if trainer in ("accelerate", "hf", "grpo") else []
    cases = CASES + [case for case in pairs if trainer != "hf" or not case.idle]
    return [case for case in cases if trainer != "grpo" or case.kind != "data"]
