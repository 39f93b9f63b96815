"""Cross-entropy and KL by position: does a long context survive the conversion?

A position is the index of the token that predicts the next one, so at position p a model sees p + 1
tokens. Positions are summed up in octaves (0-1, 2-3, 4-7, ...), with the standard error over rows.
Of an octave at most `PER_OCTAVE` positions, evenly spread, go through the head: neighbours say much
the same, and a head of 50,000 tokens costs as much as the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode
from npt.adapters.layer import Mode
from npt.base.linear import cast_once
from npt.data.batch import Sample, collate
from npt.evaluation.metrics import COLUMNS, check_ids, compare_tokens, final_states, mean_and_error

PER_OCTAVE = 64
"""Positions of an octave that are measured in a row, at most."""

_AT_ONCE = 128
"""Positions at a time that go through the head: some ten tensors of [128, V] in fp32."""

_MODES: tuple[Mode, ...] = ("teacher", "student")


@dataclass(frozen=True)
class Octave:
    """Means over the positions `first` to `last` of all rows, nats per token; `_se` is the standard
    error over rows. tokens: that were measured. excess: the student's cross-entropy over the
    teacher's, its error from paired differences.
    """

    first: int
    last: int
    tokens: int
    teacher: float
    teacher_se: float
    student: float
    student_se: float
    excess: float
    excess_se: float
    kl: float
    kl_se: float


@dataclass(frozen=True)
class Positions:
    """rows: of `context_length` tokens at most. whole: those that are one document from its start;
    the others are several, one after the other.
    """

    context_length: int
    rows: int
    whole: int
    octaves: tuple[Octave, ...]


def rows_of(documents: Sequence[Sample], length: int, count: int) -> tuple[list[Sample], int]:
    """Return at most `count` rows of `length` tokens, and how many are one document: documents that
    fill one come first, the rest is joined, each token seeing all before it. If there is too little
    for one row, it is as long as there is.
    """
    whole = [Sample(d.id, d.input_ids[:length]) for d in documents if len(d.input_ids) >= length]
    rows, whole_rows = whole[:count], min(len(whole), count)
    names: list[str] = []
    joined: list[int] = []
    for document in documents:
        if len(rows) == count:
            break
        if len(document.input_ids) >= length:
            continue
        names.append(document.id)
        joined += document.input_ids
        if len(joined) >= length:
            rows.append(Sample("+".join(names), tuple(joined[:length])))
            names, joined = [], []
    if not rows and len(joined) > 1:
        rows = [Sample("+".join(names), tuple(joined))]
    return rows, whole_rows


def chosen_positions(tokens: int) -> list[int]:
    """Return the positions that are measured in a row of so many tokens."""
    found: list[int] = []
    first, last = 0, 1
    while first < tokens - 1:
        end = min(last, tokens - 2)
        count = min(PER_OCTAVE, end - first + 1)
        found += [first + i * (end - first + 1) // count for i in range(count)]
        first, last = last + 1, 2 * last + 1
    return found


@torch.no_grad()
def measure_positions(
    model: PreTrainedModel, rows: Sequence[Sample], between: Callable[[], None] | None = None
) -> tuple[Octave, ...]:
    """Compare teacher and student on rows, one at a time, `between` being called before each."""
    longest = max(len(row.input_ids) for row in rows)
    octaves = (longest - 2).bit_length() if longest > 2 else 1
    sums = torch.zeros(len(rows), max(1, octaves), len(COLUMNS), dtype=torch.float64)
    with cast_once(model.lm_head):
        for number, row in enumerate(rows):
            if between is not None:
                between()
            positions = chosen_positions(len(row.input_ids))
            figures = _figures(model, row, positions)
            octave = torch.tensor([max(1, p).bit_length() - 1 for p in positions])
            sums[number].index_add_(0, octave, figures)
    return tuple(_octave(i, sums[:, i], longest) for i in range(sums.shape[1]))


def _figures(model: PreTrainedModel, row: Sample, positions: Sequence[int]) -> Tensor:
    """Return the quantities of COLUMNS at positions of a row, [P, len(COLUMNS)] in fp64."""
    batch = collate([row], pad_id=0)
    check_ids(batch, model, "held-out documents")
    batch = batch.to(next(model.parameters()).device)
    at = torch.tensor(positions, device=batch.input_ids.device)
    hidden = {}
    for mode in _MODES:
        with adapter_mode(model, mode):
            states = final_states(model, batch)
            hidden[mode] = states[at.to(states.device)]
    targets = batch.input_ids[0, 1:][at].to(hidden["teacher"].device)
    size = model.config.vocab_size
    parts = [
        compare_tokens(student, teacher, wanted, model.lm_head, size)
        for student, teacher, wanted in zip(
            hidden["student"].split(_AT_ONCE),
            hidden["teacher"].split(_AT_ONCE),
            targets.split(_AT_ONCE),
            strict=True,
        )
    ]
    return torch.cat(parts).to("cpu", torch.float64)


def _octave(index: int, sums: Tensor, longest: int) -> Octave:
    """Return the figures of [rows, len(COLUMNS)] sums."""
    sums = sums[sums[:, -1] > 0]
    column = {name: sums[:, i] for i, name in enumerate(COLUMNS)}
    counts = column["tokens"]
    teacher, teacher_se = mean_and_error(column["teacher_nll"], counts)
    student, student_se = mean_and_error(column["nll"], counts)
    excess, excess_se = mean_and_error(column["nll"] - column["teacher_nll"], counts)
    kl, kl_se = mean_and_error(column["kl"], counts)
    return Octave(
        first=0 if index == 0 else 2**index,
        last=min(2 ** (index + 1) - 1, longest - 2),
        tokens=int(counts.sum()),
        teacher=teacher,
        teacher_se=teacher_se,
        student=student,
        student_se=student_se,
        excess=excess,
        excess_se=excess_se,
        kl=kl,
        kl_se=kl_se,
    )
