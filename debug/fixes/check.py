"""A check proves that one fix holds on the user's base, by provoking what it fixes.

It goes through the names that training goes through and leaves the base as it was. A check that
raises, or that cannot look, has failed: it has not found that all is in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from faults.bench import FIRST_ID, Base, Run, Setting, Student
from npt.adapters.attach import detach
from npt.adapters.converted import npt_layers
from npt.adapters.layer import NPTAdapter
from npt.batch import Batch, Sample, collate
from npt.config import TARGETS
from npt.distill.local import BatchSums


@dataclass(frozen=True)
class Subject(Base):
    """The user's base, with the adapter and the settings to train it with."""

    tokenizer: Any = None


@dataclass(frozen=True)
class Check:
    """The result of a check. figure: what was measured, or what is wrong."""

    proved: str
    passed: bool
    figure: str

    def __str__(self) -> str:
        return f"{'ok' if self.passed else 'FAILED':<8}{self.proved}  ({self.figure})"


class Wrong(Exception):
    """A check found that its fix does not hold."""


def ensure(good: bool, figure: str) -> str:
    """Return the figure, or raise `Wrong` with it."""
    if not good:
        raise Wrong(figure)
    return figure


Look = Callable[[Subject], str]
CHECKS: dict[str, Callable[[Subject], Check]] = {}
"""Checks by the name of their function."""


def proves(claim: str) -> Callable[[Look], Look]:
    """Register a function as a check. It returns its figure, or raises what is wrong."""

    def register(look: Look) -> Look:
        @functools.wraps(look)
        def checked(subject: Subject) -> Check:
            try:
                return Check(claim, True, look(subject))
            except Wrong as wrong:
                return Check(claim, False, str(wrong))
            except Exception as error:
                first = next(iter(str(error).splitlines()), "")
                return Check(claim, False, f"cannot be checked: {type(error).__name__}: {first}")
            finally:
                detach(subject.model)

        CHECKS[look.__name__] = checked
        return look

    return register


def verify(subject: Subject, names: Sequence[str] | None = None) -> Iterator[Check]:
    """Run the checks (default: all); random state and training modes are as before afterwards."""
    model = subject.model
    training = [module for module in model.modules() if module.training]
    device = device_of(subject)
    try:
        model.eval()
        for name in CHECKS if names is None else names:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(0)
                yield CHECKS[name](subject)
    finally:
        for module in training:
            module.training = True


def summary(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the checks for JSON."""
    passed = sum(check.passed for check in checks)
    return {"checks": [asdict(check) for check in checks], "passed": passed, "total": len(checks)}


def device_of(subject: Base) -> torch.device:
    return next(subject.model.parameters()).device


def setting_of(subject: Base, **changes: Any) -> Setting:
    vocabulary = subject.model.config.vocab_size
    usual = {"late": device_of(subject).type == "cuda", "vocabulary": vocabulary}
    return Setting(**{**usual, "windows": 2, "size": 2, **changes})


def student_of(subject: Base, *, training: Any = None, **changes: Any) -> Run:
    """Return a new student. training: changes of its settings; changes: those of the bench's."""
    config = replace(subject.config, **(training or {}))
    return Run(setting_of(subject, **changes), replace(subject, config=config))


def with_form(subject: Subject, **form: Any) -> Subject:
    """Return the subject with all targets, and an adapter changed in these settings."""
    adapter = replace(subject.adapter, **{"targets": tuple(TARGETS), **form})
    return replace(subject, adapter=adapter)


def adapters_of(student: Student) -> list[NPTAdapter]:
    return [layer.npt for _, layer in npt_layers(student.model)]


def samples_of(subject: Base, *lengths: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    vocabulary = subject.model.config.vocab_size
    samples = []
    for number, length in enumerate(lengths or (16, 11, 5, 14)):
        ids = torch.randint(FIRST_ID, vocabulary, (length,), generator=generator)
        samples.append(Sample(f"s{number}", tuple(ids.tolist())))
    return samples


def padded_batch(subject: Base, side: str = "right", length: int = 20) -> Batch:
    return collate(samples_of(subject), side=side, length=length)


def gradients_of(student: Student, batch: Batch) -> tuple[BatchSums, dict[str, Tensor]]:
    """Return the sums of one micro-batch and a copy of its gradients."""
    for parameter in student.parameters.values():
        parameter.grad = None
    sums = student.fill(batch)
    gradients = {}
    for name, parameter in student.parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients[name] = gradient.clone()
    return sums, gradients


def noise(seed: int, *shape: int, device: torch.device) -> Tensor:
    """Return normal noise, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@contextmanager
def planted(tensor: Tensor, index: tuple[int, ...], value: float) -> Iterator[None]:
    """Set one element within the context."""
    data = tensor.data
    before = data[index].clone()
    data[index] = value
    try:
        yield
    finally:
        data[index] = before


ROUNDING = 1e-4
"""Relative difference of losses between micro-batches of other shapes, which are summed in another
order. TF32 keeps 10 bits of the factors."""
