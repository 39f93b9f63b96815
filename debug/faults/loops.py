"""Plain loops, as they are commonly written, over the same micro-batches and faults as the
guarded step.

Each makes one step of a window whose gradients lie in `.grad`, summed over its micro-batches and
divided by its tokens. That is all they differ in; without a fault they compute what the guarded
step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from faults.bench import Fault, Place, Setting, Student, difference, no_fault
from npt.tracer.watchdogs import moments_fault, named_moments, tensor_fault

if TYPE_CHECKING:
    from faults.patterns import Case

OUTCOMES: dict[str, str] = {
    "survives": "equal, bit for bit, to the same loop without the bad micro-batch",
    "poisoned": "a weight or a moment is not finite",
    "aborts": "the run ended by itself, its state finite",
    "poisoned, aborts": "the run ended by itself, too late",
    "stepped on zeros": (
        "finite, but a step was taken with every gradient zero, which moments and weight decay make"
        " a move"
    ),
    "trained on it": "finite, and moved by the fault",
}

Step = Callable[[Student, Tensor], None]


def clip_only(student: Student, loss: Tensor) -> None:
    """Clip, step, trust."""
    torch.nn.utils.clip_grad_norm_(student.parameters.values(), student.config.max_grad_norm)
    student.optimizer.step()


def multiply_by_zero(student: Student, loss: Tensor) -> None:
    """'Skip' a bad step by multiplying its gradients with a flag of 0; no host branch, and 0 * NaN
    is NaN.
    """
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in student.parameters.values() if p.grad is not None]
    )
    flag = (torch.isfinite(loss) & torch.isfinite(norm)).to(torch.float32)
    for p in student.parameters.values():
        assert p.grad is not None
        p.grad.mul_(flag)
    clip_only(student, loss)


def abort_on_nan_loss(student: Student, loss: Tensor) -> None:
    """Look at the loss, and end the run when it is not finite."""
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {float(loss)}")
    clip_only(student, loss)


LOOPS: dict[str, Step] = {
    "clip only": clip_only,
    "multiply by zero": multiply_by_zero,
    "abort on NaN loss": abort_on_nan_loss,
}


def train(
    setting: Setting, step: Step, faults: dict[Place, Fault], absent: Iterable[Place] = ()
) -> tuple[Student, bool, bool]:
    """Train a fresh student with a plain loop.

    Returns:
        The student, whether the loop gave up, and whether a step was taken with every gradient
        zero.
    """
    student = Student(setting)
    missing = frozenset(absent)
    zeros: list[bool] = []
    student.optimizer.register_step_pre_hook(
        lambda *_: zeros.append(
            not any(bool(p.grad.any()) for p in student.parameters.values() if p.grad is not None)
        )
    )
    for window in range(setting.windows):
        student.optimizer.zero_grad()
        total, tokens = torch.zeros(()), 0
        for micro in range(setting.size):
            if (window, micro) not in missing:
                with faults.get((window, micro), no_fault)(
                    student, setting.batch((window, micro))
                ) as (batch, fill):
                    sums = fill() if fill is not None else student.fill(batch)
                total, tokens = total + sums.loss, tokens + sums.tokens
        for p in student.parameters.values():
            assert p.grad is not None
            p.grad.div_(tokens)
        try:
            step(student, total / tokens)
        except FloatingPointError:
            return student, True, any(zeros)
    return student, False, any(zeros)


def became(case: Case, step: Step) -> str:
    """Return the fate of a plain loop that meets the case's fault: one of `OUTCOMES`."""
    assert case.fault is not None
    student, aborted, zeros = train(case.setting, step, dict.fromkeys(case.places, case.fault))
    poisoned = (
        tensor_fault(student.parameters) is not None
        or moments_fault(named_moments(student.parameters, student.optimizer)) is not None
    )
    if poisoned or aborted:
        return ", ".join([*(["poisoned"] if poisoned else []), *(["aborts"] if aborted else [])])
    twin = train(case.setting, step, {}, absent=case.places)[0]
    if difference(student.state(), twin.state()) is None:
        return "survives"
    return "stepped on zeros" if zeros else "trained on it"


def compare(case: Case) -> dict[str, str]:
    """The case in every plain loop."""
    return {name: became(case, step) for name, step in LOOPS.items()}
