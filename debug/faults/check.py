"""Checks, and students on the user's own base, with the user's own settings.

A check provokes one earlier cause of NaN and looks where it would show. It goes through the names
that training goes through, so its findings hold for a run, and it does not change the base. A
check that raises, or that cannot look, has failed: it has not found that all is in order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from faults.bench import FIRST_ID, Base, Run, Setting, Student, difference
from npt.adapters.attach import detach
from npt.adapters.converted import npt_layers
from npt.adapters.layer import NPTAdapter
from npt.data.batch import Batch, Sample
from npt.distill.local import MicroBatch


@dataclass(frozen=True)
class Check:
    """One earlier cause, looked for. earlier: what went wrong. detail: the figures, or what is
    wrong still.
    """

    name: str
    earlier: str
    passed: bool
    detail: str


class CannotLook(Exception):
    """This model or these settings leave nothing to look at, and why."""


class Wrong(Exception):
    """A check found what it looks for, and what it is."""


def ensure(good: bool, detail: str) -> str:
    """Return the figures of a check, or raise `Wrong` with them."""
    if not good:
        raise Wrong(detail)
    return detail


Look = Callable[[Base], str]


def check(name: str, earlier: str) -> Callable[[Look], Callable[[Base], Check]]:
    """Make a check of a function that returns its figures if all is in order, and else raises."""

    def made(look: Look) -> Callable[[Base], Check]:
        @functools.wraps(look)
        def checked(base: Base) -> Check:
            try:
                return Check(name, earlier, True, look(base))
            except Wrong as reason:
                detail = str(reason)
            except CannotLook as reason:
                detail = f"cannot be checked: {reason}"
            except Exception as error:
                first = str(error).splitlines()[0] if str(error) else ""
                detail = f"cannot be checked: {type(error).__name__}: {first}"
            finally:
                detach(base.model)
            return Check(name, earlier, False, detail)

        return checked

    return made


def device_of(base: Base) -> torch.device:
    return next(base.model.parameters()).device


def logits_of(base: Base, batch: Batch) -> Tensor:
    batch = batch.to(device_of(base))
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.no_grad():
        return base.model(**inputs, use_cache=False).logits


def random(seed: int, *shape: int, device: torch.device | str = "cpu") -> Tensor:
    """Return normal noise, made on the host."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], wrong: str) -> None:
    """Raise `Wrong` if a tensor differs in a bit; `wrong` says {} for its name."""
    different = difference(one, other)
    if different is not None:
        raise Wrong(wrong.format(different))


def setting_of(base: Base, **changes: Any) -> Setting:
    """Return the bench's setting on this base: its token ids, and flags read as in a run on its
    device.
    """
    late = device_of(base).type == "cuda"
    usual = {"late": late, "vocabulary": base.model.config.vocab_size, "windows": 2, "size": 2}
    return Setting(**{**usual, **changes})


def student_of(base: Base, modulation: str | None = None, **changes: Any) -> Run:
    """Return a fresh student with the user's adapters, or with these adapters in another form of
    modulation.
    """
    adapter = base.adapter if modulation is None else replace(base.adapter, modulation=modulation)
    return Run(setting_of(base, **changes), replace(base, adapter=adapter))


def samples_of(base: Base, lengths: Sequence[int] = (16, 11, 5, 14)) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    vocabulary = base.model.config.vocab_size
    return [
        Sample(
            f"s{i}", tuple(torch.randint(FIRST_ID, vocabulary, (n,), generator=generator).tolist())
        )
        for i, n in enumerate(lengths)
    ]


def adapters_of(student: Student) -> list[NPTAdapter]:
    return [layer.npt for _, layer in npt_layers(student.model)]


def rounding() -> float:
    """Return the relative rounding error of one fp32 product in this process: TF32 keeps 10 bits of
    the factors.
    """
    return 2.0**-23 if torch.get_float32_matmul_precision() == "highest" else 2.0**-10


def filled(student: Student, batch: Batch) -> tuple[MicroBatch, dict[str, Tensor]]:
    """Return the sums of one micro-batch and a copy of its gradients."""
    for p in student.parameters.values():
        p.grad = None
    sums = student.fill(batch)
    return sums, {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in student.parameters.items()
    }


@contextmanager
def planted(tensor: Tensor, index: tuple[int, ...], value: float = math.nan) -> Iterator[None]:
    """Set one element to `value` within the context, and restore it afterwards."""
    data = tensor.data
    before = data[index].clone()
    data[index] = value
    try:
        yield
    finally:
        data[index] = before
