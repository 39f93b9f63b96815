"""Train in other trainers, and compare with the run that never saw the fault."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faults.bench import difference
from faults.row_cases import TENSOR, RowCase
from faults.row_trainers import TRAINERS
from faults.verdict import Line, verdict_of
from npt.guard import Refusal


@dataclass(frozen=True)
class Compared:
    """A comparison of three runs by one process.

    Attributes:
        fate: outcome of the unguarded run.
        complaints: differences of the guarded run.
        located: every refusal names what was planted.
        strangers: number of other refusals.
        marks: hashes of the state, which must agree between processes.
    """

    fate: str
    complaints: tuple[str, ...]
    located: bool
    strangers: int
    marks: tuple[str, ...] = ()


def judged(case: RowCase, trainer: str) -> Line:
    """Train three times in this process and compare."""
    started = time.perf_counter()
    return line_of(case, [compared(case, trainer)], time.perf_counter() - started)


def compared(case: RowCase, trainer: str) -> Compared:
    """Train without the fault, with it, and guarded with it."""
    train = TRAINERS[trainer]
    clean = train(case, False, False)
    fate = "not run"  # it would end one process while the other waits
    try:
        if case.kind != "data" or case.processes == 1:
            bare = difference(train(case, True, False).state, clean.state)
            fate = "equal" if bare is None else "changed"
    except Exception as error:
        if (
            case.processes > 1 and trainer != "grpo"
        ):  # in grpo all processes generate with NaN and end alike
            raise  # the other processes wait for this one
        fate = f"ended by {type(error).__name__}"
    complaints, located, strangers = [], False, 0
    marks: tuple[str, ...] = ()
    try:
        guarded = train(case, True, True)
    except Exception as error:
        if case.processes > 1:
            raise
        complaints.append(f"{type(error).__name__}: {error}")
    else:
        where = difference(guarded.state, clean.state)
        if where is not None:
            complaints.append(f"{where} differs from the run without the fault")
        located, strangers = _located(case, guarded.refusals)
        marks = tuple(digest(guarded.state[part]) for part in ("weights", "moments", "schedule"))
    return Compared(fate, tuple(complaints), located, strangers, marks)


def line_of(case: RowCase, found: Sequence[Compared], seconds: float) -> Line:
    """Judge a case by the comparisons of its processes."""
    complaints = list(dict.fromkeys(text for one in found for text in one.complaints))
    if any(one.marks != found[0].marks for one in found):
        complaints.append("the processes' states differ")
    fates = list(dict.fromkeys(one.fate for one in found))
    if case.bad and "equal" in fates:
        complaints.append("the fault does nothing to an unguarded run")
    located = all(one.located for one in found)
    strangers = max(one.strangers for one in found)
    verdict = verdict_of("survived", complaints, located, strangers)
    return Line(case, verdict, seconds, ", ".join(fates))


def digest(state: Any) -> str:
    """Return a hash that is equal for equal states."""
    if isinstance(state, dict):
        return "".join(f"{key}:{digest(value)};" for key, value in state.items())
    if isinstance(state, Tensor):
        data = state.detach().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
    return repr(state)


def _located(case: RowCase, refusals: Sequence[Refusal]) -> tuple[bool, int]:
    """Return whether every refusal names the planted fault, and the number of other refusals."""
    fits = [r for r in refusals if r.kind == case.kind and r.micro_batch in case.refused]
    one = case.fault is not None and case.fault.startswith("tensor-")
    named = all(TENSOR in (refusal.tensor or "") for refusal in fits) if one else True
    named &= all(r.process == (r.micro_batch or 0) % case.processes for r in fits)
    places = [refusal.micro_batch for refusal in fits]
    return named and places == case.refused, len(refusals) - len(fits)
