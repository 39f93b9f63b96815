"""Faults, each planted in one micro-batch and gone after it: in its data, its activations, its loss
or its gradients.

A plant knows nothing of who trains, so the same fault meets the transaction and the plain loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from faults.bench import Fill, Plant, Student, module_of
from npt.adapters.attach import adapters_disabled, decoder_layers
from npt.data.batch import IGNORE_INDEX, Batch, batch_from_tensors
from npt.distill.strategies import MicroBatch

TENSOR = "model.layers.1.npt.B.up"
"""The adapter tensor that faults of single tensors are planted in."""


# --- data
# ------------------------------------------------------------------------------------------------------------


def batch_fault(change: Callable[[Batch], Batch]) -> Plant:
    """The micro-batch as `change` leaves it."""

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        yield change(batch), None

    return plant


def id_at(row: int, position: int, value: int) -> Callable[[Batch], Batch]:
    return lambda batch: replace(batch, input_ids=_set(batch.input_ids, (row, position), value))


def label_at(row: int, position: int, value: int) -> Callable[[Batch], Batch]:
    return lambda batch: replace(batch, labels=_set(batch.labels, (row, position), value))


def no_labels(batch: Batch) -> Batch:
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX))


def mask_out(*rows: int) -> Callable[[Batch], Batch]:
    """The attention mask all zeros in these rows."""

    def change(batch: Batch) -> Batch:
        mask = batch.attention_mask.clone()
        mask[list(rows)] = 0
        return batch_from_tensors(batch.input_ids, mask, batch.sample_ids)

    return change


def without(rows: bool) -> Callable[[Batch], Batch]:
    """No rows at all, or rows of no tokens."""

    def change(batch: Batch) -> Batch:
        ids = batch.input_ids[:0] if rows else batch.input_ids[:, :0]
        return batch_from_tensors(ids, torch.ones_like(ids), () if rows else batch.sample_ids)

    return change


def short_mask(batch: Batch) -> Batch:
    """An attention mask of one token too few."""
    return replace(batch, attention_mask=batch.attention_mask[:, :-1])


# --- activations
# -----------------------------------------------------------------------------------------------------


def output_fault(module: str, change: Callable[[Tensor, Batch], Tensor]) -> Plant:
    """`module` gives what `change` makes of its output, at every call in the micro-batch."""

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        with ExitStack() as stack:
            hook = module_of(student, module).register_forward_hook(
                lambda _module, _inputs, output: change(output, batch)
            )
            stack.callback(hook.remove)
            yield batch, None

    return plant


def spoil(index: tuple[int, ...], value: float) -> Callable[[Tensor, Batch], Tensor]:
    """One element of the output, counted from the front of each axis."""
    return lambda output, _batch: _set(output, index, value)


def spoil_and_clamp(
    index: tuple[int, ...], value: float, limit: float
) -> Callable[[Tensor, Batch], Tensor]:
    return lambda output, _batch: _set(output, index, value).clamp(-limit, limit)


def spoil_padding(value: float) -> Callable[[Tensor, Batch], Tensor]:
    """Every padded position of a [B, T, D] output."""
    return lambda output, batch: torch.where(
        batch.attention_mask.unsqueeze(-1).bool(), output, value
    )


def head_fault(
    calls: Container[int], teacher: bool, row: int, column: int, seen: list[Tensor] | None = None
) -> Plant:
    """NaN among the logits of lm_head, at these of its calls (from 0) with the teacher's or the
    student's state.

    Of a head that is trained (`trained_head`) the student's second call is the recomputation in
    backward. The two states are told apart by whether they carry a graph.

    Args:
        seen: receives the poisoned logits.
    """

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        counted = -1

        def hook(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            nonlocal counted
            if inputs[0].requires_grad == teacher:
                return None
            counted += 1
            if counted not in calls:
                return None
            output = _set(output, (row, column), math.nan)
            if seen is not None:
                seen.append(output.detach())
            return output

        handle = student.model.lm_head.register_forward_hook(hook)
        try:
            yield batch, None
        finally:
            handle.remove()

    return plant


def trained_head(other: Plant) -> Plant:
    """lm_head is trained as well, so that its logits are computed again in backward, beside another
    plant.
    """

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        weight = student.model.lm_head.weight.requires_grad_(True)
        try:
            with other(student, batch) as result:
                yield result
        finally:
            weight.requires_grad_(False).grad = None

    return plant


def half_precision_overflow(module: str, factor: float) -> Plant:
    """A 4-bit layer that computes in fp16, on activations `factor` times too large: what comes out
    is fp32, and not finite.
    """

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        layer: Any = module_of(student, module)
        before = layer.compute_dtype
        layer.compute_dtype = torch.float16
        handle = layer.register_forward_pre_hook(
            lambda _module, inputs: (inputs[0] * factor, *inputs[1:])
        )
        try:
            yield batch, None
        finally:
            handle.remove()
            layer.compute_dtype = before

    return plant


MaskForm = Callable[[Tensor], Tensor]
"""A boolean mask (True: may attend) in another form that attention takes."""

MASK_FORMS: dict[str, MaskForm] = {
    "bool": lambda mask: mask,
    "-inf": lambda mask: torch.where(mask, 0.0, -math.inf),
    "finfo.min": lambda mask: torch.where(mask, 0.0, torch.finfo(torch.float32).min),
}


def mask_form(form: str) -> Plant:
    """Every layer is given its attention mask in this form."""

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        def hook(
            _module: Any, inputs: tuple[Any, ...], arguments: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            assert arguments["attention_mask"].dtype == torch.bool
            return inputs, {
                **arguments,
                "attention_mask": MASK_FORMS[form](arguments["attention_mask"]),
            }

        with ExitStack() as stack:
            for layer in decoder_layers(student.model):
                attention: Any = layer.self_attn
                stack.callback(attention.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield batch, None

    return plant


# --- losses and gradients
# --------------------------------------------------------------------------------------------


def gradient_fault(index: tuple[int, ...], value: float, name: str = TENSOR) -> Plant:
    """One element of one gradient, set behind a backward that went well: the loss is finite."""

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        def fill() -> MicroBatch:
            sums = student.fill(batch)
            gradient = student.parameters[name].grad
            assert gradient is not None
            gradient[index] = value
            return sums

        yield batch, fill

    return plant


def scaled(factor: float) -> Plant:
    """Loss and gradients of the micro-batch times `factor`: finite, and far off."""

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        def fill() -> MicroBatch:
            before = {
                name: None if p.grad is None else p.grad.clone()
                for name, p in student.parameters.items()
            }
            sums = student.fill(batch)
            for name, p in student.parameters.items():
                assert p.grad is not None
                old = before[name]
                p.grad.mul_(factor) if old is None else p.grad.sub_(old).mul_(factor).add_(old)
            return replace(sums, loss=sums.loss * factor)

        yield batch, fill

    return plant


def backward_fault(index: tuple[int, ...], value: float, name: str = TENSOR) -> Plant:
    """A backward that itself computes a bad gradient for one tensor, behind a loss that is finite."""

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        handle = student.parameters[name].register_hook(
            lambda gradient: _set(gradient, index, value)
        )
        try:
            yield batch, None
        finally:
            handle.remove()

    return plant


Extra = Callable[[Student, Batch], Tensor]


def extra_loss(term: Extra, tokens: int | None = None, alone: bool = False) -> Plant:
    """A further loss term of the caller's own beside the strategy's, with its gradients.

    Args:
        term: a scalar with a graph.
        tokens: the count to return; default the batch's.
        alone: the term takes the place of the strategy's loss.
    """

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        def fill() -> MicroBatch:
            sums = student.fill(batch)
            if alone:
                for p in student.parameters.values():
                    assert p.grad is not None
                    p.grad.zero_()
            loss = term(student, batch)
            loss.backward()
            total = loss.detach() if alone else sums.loss + loss.detach()
            return replace(sums, loss=total, tokens=sums.tokens if tokens is None else tokens)

        yield batch, fill

    return plant


def reverse_kl(student: Student, batch: Batch, temperature: float = 0.05) -> Tensor:
    """Sum of q (log q - log p) at a low temperature, its zeros left out by `where`, as one would
    write it.

    At 0.05 most q underflow to 0. `where` keeps 0 log 0 out of the loss and not out of the
    gradient, which is 0 * Inf.
    """
    logits = student.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    with torch.no_grad(), adapters_disabled(student.model):
        teacher = student.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    q = torch.softmax(logits / temperature, dim=-1)
    log_p = torch.log_softmax(teacher / temperature, dim=-1)
    return torch.where(q > 0, q * (q.log() - log_p), 0.0).sum()


def cross_entropy_of_nothing(reduction: str) -> Extra:
    """Cross-entropy with every label ignored: NaN as a mean, 0 as a sum, and gradients of 0 either
    way.
    """

    def term(student: Student, batch: Batch) -> Tensor:
        logits = student.model(batch.input_ids, attention_mask=batch.attention_mask).logits
        labels = no_labels(batch).labels
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            ignore_index=IGNORE_INDEX,
            reduction=reduction,
        )

    return term


def masked_by_multiplication(student: Student, batch: Batch) -> Tensor:
    """An Inf at a padded position, 'masked' by a mask of 0: Inf * 0 is NaN."""
    code: Any = student.parameters["model.layers.1.npt.A"]
    errors = (code.sum() * torch.ones(batch.attention_mask.shape)).masked_fill(
        batch.attention_mask == 0, math.inf
    )
    return (errors * batch.attention_mask).sum()


class Interrupted(Exception):
    """Raised in the middle of a micro-batch."""


@contextmanager
def interruption(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
    """The micro-batch raises behind its backward, with its gradients already there; the caller goes
    on.
    """

    def fill() -> MicroBatch:
        student.fill(batch)
        raise Interrupted

    with suppress(Interrupted):
        yield batch, fill


def _set(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    """A copy with one element changed; `index` may leave out the leading axes, which are then 0."""
    changed = tensor.clone()
    changed[(0,) * (tensor.ndim - len(index)) + index] = value
    return changed
