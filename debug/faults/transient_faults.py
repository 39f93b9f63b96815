"""Faults of a single micro-batch: in its data, activations, loss or gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from faults.bench import Fault, Fill, Student, module_of, no_fault
from npt.adapters.converted import adapters_disabled, decoder_layers
from npt.batch import IGNORE_INDEX, Batch, batch_from_tensors
from npt.distill.local import BatchSums

Index = tuple[int, ...]
TENSOR = "model.layers.1.npt.B.up"
"""The adapter tensor that single-tensor faults change."""


def hooked(register: Callable[[Student, Batch], Any]) -> Fault:
    """Return a fault made by a hook. `register` sets the hook and returns its handle."""

    @contextmanager
    def fault(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        handle = register(student, batch)
        try:
            yield batch, None
        finally:
            handle.remove()

    return fault


def filled(fill: Callable[[Student, Batch], BatchSums]) -> Fault:
    """Return a fault whose gradients and sums come from `fill`."""

    @contextmanager
    def fault(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        yield batch, lambda: fill(student, batch)

    return fault


def together(*faults: Fault) -> Fault:
    """Combine faults in one micro-batch, with the batch and fill of the first."""

    @contextmanager
    def fault(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        with ExitStack() as stack:
            results = [stack.enter_context(one(student, batch)) for one in faults]
            yield results[0]

    return fault


# --- data


def changed_batch(change: Callable[[Batch], Batch]) -> Fault:
    """Change the micro-batch."""

    @contextmanager
    def fault(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        yield change(batch), None

    return fault


def id_at(row: int, position: int, value: int) -> Fault:
    return changed_batch(
        lambda batch: replace(batch, input_ids=spoilt(batch.input_ids, (row, position), value))
    )


def label_at(row: int, position: int, value: int) -> Fault:
    return changed_batch(
        lambda batch: replace(batch, labels=spoilt(batch.labels, (row, position), value))
    )


def without_labels(batch: Batch) -> Batch:
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX))


def mask_out(*rows: int) -> Fault:
    """Set the attention mask of these rows to zeros."""

    def change(batch: Batch) -> Batch:
        mask = batch.attention_mask.clone()
        mask[list(rows)] = 0
        return batch_from_tensors(batch.input_ids, mask, batch.sample_ids)

    return changed_batch(change)


def empty(rows: bool) -> Fault:
    """Return a batch without rows, or with rows without tokens."""

    def change(batch: Batch) -> Batch:
        ids = batch.input_ids[:0] if rows else batch.input_ids[:, :0]
        return batch_from_tensors(ids, torch.ones_like(ids), () if rows else batch.sample_ids)

    return changed_batch(change)


def short_mask(batch: Batch) -> Batch:
    """Return the batch with an attention mask that is one token short."""
    return replace(batch, attention_mask=batch.attention_mask[:, :-1])


# --- activations


def output_of(module: str, change: Callable[[Tensor, Batch], Tensor]) -> Fault:
    """Change the output of `module` at every call in the micro-batch."""
    return hooked(
        lambda student, batch: module_of(student, module).register_forward_hook(
            lambda _module, _inputs, output: change(output, batch)
        )
    )


def output_spoilt(module: str, index: Index, value: float, clamp: float = math.inf) -> Fault:
    """Set one element of the output, counted from the front of each axis, then clamp."""

    def change(output: Tensor, _batch: Batch) -> Tensor:
        output = spoilt(output, index, value)
        return output if clamp == math.inf else output.clamp(-clamp, clamp)

    return output_of(module, change)


def padding_spoilt(module: str, value: float) -> Fault:
    """Set every padded position of a [B, T, D] output."""
    return output_of(
        module,
        lambda output, batch: torch.where(batch.attention_mask.unsqueeze(-1).bool(), output, value),
    )


def input_of(module: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Change the first input of `module`."""
    return hooked(
        lambda student, _batch: module_of(student, module).register_forward_pre_hook(
            lambda _module, inputs: (change(inputs[0]), *inputs[1:])
        )
    )


def attribute(module: str, name: str, value: Any) -> Fault:
    """Set an attribute of `module` for the micro-batch."""

    @contextmanager
    def fault(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        with mock.patch.object(module_of(student, module), name, value):
            yield batch, None

    return fault


def in_fp16(module: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Compute a 4-bit layer in fp16 on a changed input; its output is fp32."""
    return together(attribute(module, "compute_dtype", torch.float16), input_of(module, change))


def head_fault(
    calls: Container[int], teacher: bool, row: int, column: int, seen: list[Tensor] | None = None
) -> Fault:
    """Set a logit of lm_head to NaN at these calls (from 0) with the teacher's or the student's
    state; only the student's carries a graph.

    If the head is trained (`trained_head`), the student's second call is the recomputation in
    backward.

    Args:
        seen: receives the changed logits.
    """

    def register(student: Student, _batch: Batch) -> Any:
        counted = -1

        def hook(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            nonlocal counted
            if inputs[0].requires_grad == teacher:
                return None
            counted += 1
            if counted not in calls:
                return None
            output = spoilt(output, (row, column), math.nan)
            if seen is not None:
                seen.append(output.detach())
            return output

        return student.model.lm_head.register_forward_hook(hook)

    return hooked(register)


def trained_head(other: Fault) -> Fault:
    """Run another fault while lm_head is trained too, so that backward recomputes its logits."""

    @contextmanager
    def fault(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        weight = student.model.lm_head.weight.requires_grad_(True)
        try:
            with other(student, batch) as result:
                yield result
        finally:
            weight.requires_grad_(False).grad = None

    return fault


# --- attention

LOWEST = torch.finfo(torch.float32).min
MASK_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda mask: mask,
    "-inf": lambda mask: torch.where(mask, 0.0, -math.inf),
    "finfo.min": lambda mask: torch.where(mask, 0.0, LOWEST),
}
"""A boolean mask (True: may attend) in the forms that attention accepts."""


def attention_masks(change: Callable[[Tensor], Tensor], layer: int | None = None) -> Fault:
    """Change the attention mask of one layer, or of all."""

    def hook(
        _module: Any, inputs: tuple[Any, ...], arguments: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs, {**arguments, "attention_mask": change(arguments["attention_mask"])}

    def register(student: Student, _batch: Batch) -> Any:
        layers: Any = decoder_layers(student.model)
        handles = ExitStack()
        for one in layers if layer is None else layers[layer : layer + 1]:
            handle = one.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
            handles.callback(handle.remove)
        return SimpleNamespace(remove=handles.close)

    return hooked(register)


def mask_row(layer: int, row: int, query: int, form: str) -> Fault:
    """Leave a valid token of one layer nothing to attend to, with the mask in one of the forms."""

    def change(mask: Tensor) -> Tensor:
        mask = mask.clone()
        if form != "bool" and mask.dtype == torch.bool:
            mask = MASK_FORMS["finfo.min"](mask)
        mask[row, :, query] = {"bool": False, "-inf": -math.inf, "finfo.min": LOWEST}[form]
        return mask

    return attention_masks(change, layer)


def eager(fault: Fault = no_fault) -> Fault:
    """Run another fault under eager attention."""

    @contextmanager
    def both(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        config = student.model.config
        before, config._attn_implementation = config._attn_implementation, "eager"
        try:
            with fault(student, batch) as result:
                yield result
        finally:
            config._attn_implementation = before

    return both


# --- losses and gradients


def gradient_spoilt(index: Index, value: float, name: str = TENSOR) -> Fault:
    """Set one element of a gradient after a clean backward; the loss stays finite."""

    def fill(student: Student, batch: Batch) -> BatchSums:
        sums = student.fill(batch)
        _gradient(student, name)[index] = value
        return sums

    return filled(fill)


def gradient_hooked(change: Callable[[Tensor], Tensor], name: str = TENSOR) -> Fault:
    """Change one tensor's gradient in backward itself; the loss stays finite."""
    return hooked(lambda student, _batch: student.parameters[name].register_hook(change))


def scaled(factor: float) -> Fault:
    """Multiply loss and gradients of the micro-batch by `factor`: finite, and far too large."""

    def fill(student: Student, batch: Batch) -> BatchSums:
        before = {
            name: p.grad if p.grad is None else p.grad.clone()
            for name, p in student.parameters.items()
        }
        sums = student.fill(batch)
        for name, old in before.items():
            grad = _gradient(student, name)
            grad.mul_(factor) if old is None else grad.sub_(old).mul_(factor).add_(old)
        return sums._replace(loss=sums.loss * factor)

    return filled(fill)


Extra = Callable[[Student, Batch], Tensor]


def extra_loss(term: Extra, tokens: int | None = None, alone: bool = False) -> Fault:
    """Add a loss term with its gradients.

    Args:
        term: a scalar with a graph.
        tokens: the count to return (default: the batch's).
        alone: the term replaces the strategy's loss.
    """

    def fill(student: Student, batch: Batch) -> BatchSums:
        sums = student.fill(batch)
        if alone:
            for name in student.parameters:
                _gradient(student, name).zero_()
        loss = term(student, batch)
        loss.backward()
        total = loss.detach() if alone else sums.loss + loss.detach()
        return sums._replace(loss=total, tokens=sums.tokens if tokens is None else tokens)

    return filled(fill)


def reverse_kl(student: Student, batch: Batch, temperature: float = 0.05) -> Tensor:
    """Return the sum of q (log q - log p) at a low temperature, with zeros masked by `where`, a
    common mistake.

    At 0.05 most q underflow to 0. `where` keeps 0 log 0 out of the loss but not out of the
    gradient, which is 0 * Inf.
    """
    logits = _logits(student, batch)
    with torch.no_grad(), adapters_disabled(student.model):
        teacher = _logits(student, batch)
    q = torch.softmax(logits / temperature, dim=-1)
    log_p = torch.log_softmax(teacher / temperature, dim=-1)
    log_q = q.log()  # planted: reverse-kl
    return torch.where(q > 0, q * (log_q - log_p), 0.0).sum()


def cross_entropy_of_nothing(reduction: str) -> Extra:
    """Return a cross-entropy with every label ignored: NaN as a mean, 0 as a sum, and gradients of
    0 either way.
    """

    def loss(student: Student, batch: Batch) -> Tensor:
        logits = _logits(student, batch)[:, :-1].flatten(0, 1)
        labels = without_labels(batch).labels[:, 1:].flatten()
        options: dict[str, Any] = {"ignore_index": IGNORE_INDEX, "reduction": reduction}
        return F.cross_entropy(logits, labels, **options)  # planted: no-labels

    return loss


def masked_by_multiplication(student: Student, batch: Batch) -> Tensor:
    """Return an error that is Inf at padding and masked by multiplication: Inf * 0 is NaN."""
    mask = batch.attention_mask
    code: Any = student.parameters["model.layers.1.npt.A"]
    errors = (code.sum() * torch.ones(mask.shape)).masked_fill(mask == 0, math.inf)
    return (errors * mask).sum()


class Interrupted(Exception):
    """Raised inside a micro-batch."""


@contextmanager
def interruption(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
    """Raise after the micro-batch's backward; the caller catches the error and continues."""

    def fill() -> BatchSums:
        student.fill(batch)
        raise Interrupted

    with suppress(Interrupted):
        yield batch, fill


def spoilt(tensor: Tensor, index: Index, value: float) -> Tensor:
    """Return a copy with one element changed; leading axes that `index` leaves out are 0."""
    changed = tensor.clone()
    changed[(0,) * (tensor.ndim - len(index)) + index] = value
    return changed


def _gradient(student: Student, name: str) -> Tensor:
    gradient = student.parameters[name].grad
    assert gradient is not None
    return gradient


def _logits(student: Student, batch: Batch) -> Tensor:
    return student.model(batch.input_ids, attention_mask=batch.attention_mask).logits
