"""Checks of the arithmetic: the modulation, the loss, clipping, precision and the shared base."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from faults.transient_faults import scaled
from fixes.check import (
    Subject,
    Wrong,
    adapters_of,
    device_of,
    ensure,
    noise,
    padded_batch,
    proves,
    student_of,
    with_form,
)
from npt.adapters.converted import adapters_disabled
from npt.adapters.layer import STD_A, STD_B, NPTAdapter
from npt.base.linear import dense_weight
from npt.base.precision import audit_precision, policy_dtype
from npt.config import STREAM
from npt.distill import hidden_losses
from npt.errors import PrecisionError
from npt.packed import quantized_linears

CODES = (0.0, 1e-38, 1e-3, 1.0, 9.0, 17.0, 1e4, 1e19, 1e38)
"""Sizes of codes, up to where a product overflows; from 9 on tanh rounds to 1 in fp32."""


@torch.no_grad()
def multipliers(adapter: NPTAdapter, target: str, z: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(len(z), len(adapter.M[target]), device=z.device)
    m = adapter.apply_to(target, ones, z)[1]
    assert m is not None
    return m


@proves("multipliers stay within 1 - beta and 1 + beta, never 0")
def bounded(subject: Subject) -> str:
    adapter = adapters_of(student_of(with_form(subject, modulation="both")))[0]
    codes = torch.tensor([sign * code for code in CODES for sign in (-1.0, 1.0)])
    z = torch.zeros(len(codes), adapter.A.shape[0], device=adapter.A.device)
    z[:, 0] = codes
    found = []
    for target, weight in adapter.M.items():
        for size in (1.0, 1e3):  # 1e3 makes the largest code overflow
            with torch.no_grad():
                weight[:, 0] = size
            found.append(multipliers(adapter, target, z).flatten())
    m, beta = torch.cat(found), subject.adapter.mult_bound
    low, high = float(m.min()), float(m.max())
    within = low > 0 and low >= 1 - beta - 1e-6 and high <= 1 + beta + 1e-6  # rounded once
    return ensure(
        within and bool(m.isfinite().all()),
        f"{low:g} to {high:g} for codes from -1e38 to 1e38; beta {beta:g}",
    )


@proves("multipliers are exactly 1 at the start")
def neutral(subject: Subject) -> str:
    seen = 0
    for adapter in adapters_of(student_of(with_form(subject, modulation="both"))):
        z = noise(2, 8, adapter.A.shape[0], device=adapter.A.device)
        z = z * torch.logspace(-30, 30, 8, device=z.device)[:, None]
        for target in adapter.M:
            m = multipliers(adapter, target, z)
            if bool((m != 1).any()):
                raise Wrong(f"{float(m[m != 1][0]):g} in {target} before the first step")
            seen += m.numel()
    return f"{seen:,} of {seen:,}, for codes of size 1e-30 to 1e30"


@proves("A and B start small, M at 0")
def small_start(subject: Subject) -> str:
    said = []
    for targets in (subject.adapter.targets, ("gate", "up", "down")):
        adapters = adapters_of(student_of(with_form(subject, modulation="both", targets=targets)))
        if any(bool(weight.any()) for adapter in adapters for weight in adapter.M.values()):
            raise Wrong("M is not 0")
        drawn = [STREAM] if STREAM in targets else [*targets]
        others = [b for x in adapters for target, b in x.B.items() if target not in drawn]
        if any(bool(weight.any()) for weight in others):
            raise Wrong("B of the products is not 0 next to that of the stream")
        kept = subject.adapter.residual == "keep"
        groups = {
            "A": (STD_A, [adapter.A for adapter in adapters]),
            "B": (0.0 if kept else STD_B, [x.B[target] for x in adapters for target in drawn]),
        }
        for name, (std, tensors) in groups.items():
            values = torch.cat([tensor.detach().flatten() for tensor in tensors]).double()
            found, n = float(values.square().mean().sqrt()), values.numel()
            # six standard errors: a sound start is outside once in 5e8
            good = abs(found - std) <= 6 * std / math.sqrt(2 * n)
            said.append(ensure(good, f"{name} {found:.3g} for {std:g} over {n:,}"))
    return f"standard deviation of {', '.join(said[:2])}"


@proves("the additive term is scaled by alpha")
def scaled_additive(subject: Subject) -> str:
    alpha, worst = subject.adapter.additive_scale, 0.0
    shifts: list[Any] = []
    for factor in (1, 2):
        form = with_form(subject, modulation="additive", additive_scale=factor * alpha)
        adapter = adapters_of(student_of(form))[0]
        z = noise(3, 8, adapter.A.shape[0], device=adapter.A.device)
        shifts.append([])
        for target in adapter.B:
            with torch.no_grad():
                adapter.B[target].copy_(noise(4, *adapter.B[target].shape, device=z.device))
                zero = torch.zeros(len(z), len(adapter.B[target]), device=z.device)
                out, _, s = adapter.apply_to(target, zero, z)
            expected = factor * alpha * (z.double() @ adapter.B[target].detach().double().T)
            error = (out.double() - expected).norm() / expected.norm()
            worst = max(worst, float(error))
            shifts[-1].append(s)
    doubled = all(torch.equal(2 * one, two) for one, two in zip(*shifts, strict=True))
    return ensure(
        doubled and worst < 1e-2,  # TF32
        f"alpha {alpha:g}: within {worst:.1e} of alpha B z; twice the alpha gives"
        f" {'exactly' if doubled else 'NOT'} twice the term",
    )


@proves("the NMSE is normalised per token")
def normalised(subject: Subject) -> str:
    device = device_of(subject)
    direction = nn.functional.normalize(noise(4, 64, device=device), dim=0)
    loud = torch.logspace(-3, 12, 16, device=device)
    silent = torch.tensor([0.0, 1e-38, 1e-30, 1e-20, 1e-12], device=device)
    teacher = torch.cat([loud, silent])[:, None] * direction
    student = (1.1 * teacher).requires_grad_()
    nmse = hidden_losses.HIDDEN_LOSSES["nmse"](student, teacher, None)
    (gradient,) = torch.autograd.grad(nmse.sum(), student)
    nmse = nmse.detach()
    spread = float((nmse[: len(loud)] / 0.01 - 1).abs().max())
    finite = bool(nmse.isfinite().all() and gradient.isfinite().all())
    # 1.1 t - t is rounded at about 1e-7 of t, squared and summed
    return ensure(
        finite and spread < 1e-4 and float(nmse.max()) < 0.0101,
        f"10% off gives 0.01 within {spread:.0e} for states of size 1e-3 to 1e12;"
        f" {'finite' if finite else 'NOT finite'} down to 0",
    )


@proves("gradients are clipped after the norm is checked")
def clipped(subject: Subject) -> str:
    limit = subject.config.max_grad_norm
    raw, _ = applied_norm(subject, 1.0)
    said = []
    for factor in (1e4 * limit / raw, 1e-2 * limit / raw):
        before, applied = applied_norm(subject, factor)
        good = applied <= limit * (1 + 1e-5)
        good = good and abs(applied - min(before, limit)) <= 1e-3 * limit
        said.append(ensure(good, f"norm {before:.3g} became {applied:.3g}"))
    overflowing, window = math.inf, student_of(subject, windows=1, size=1)
    window.window(0, {(0, 0): scaled(overflowing)})
    refused = [refusal.kind for _, refusal in window.outcome().refusals]
    return ensure(
        len(refused) == 1, f"{', '.join(said)}; limit {limit:g}; a norm of Inf is refused"
    )


def applied_norm(subject: Subject, factor: float) -> tuple[float, float]:
    """Return a window's norm before clipping, and that of the gradients of its step."""
    student = student_of(subject, windows=1, size=1)
    norms: list[float] = []

    def look(*_: object) -> None:
        gradients = [p.grad for p in student.parameters.values() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    student.optimizer.register_step_pre_hook(look)
    student.window(0, {(0, 0): scaled(factor)})
    (result,) = student.outcome().results
    if result.grad_norm is None or not norms:
        raise Wrong(f"no step was made: {result.refused}")
    return result.grad_norm, norms[0]


@proves("4-bit products are computed in fp32")
def in_fp32(subject: Subject) -> str:
    model = subject.model
    try:
        audit_precision(model, policy_dtype(model))
    except PrecisionError as error:
        raise Wrong(str(error)) from error
    products = quantized_linears(model)
    if not products:
        return f"nothing is quantised; the audit finds {policy_dtype(model)} everywhere"
    worst = 0.0
    for name, module in products:
        x = 1e6 * noise(5, 4, module.in_features, device=module.weight.device)  # fp16 has no 1e6
        with torch.no_grad():
            y = module(x)
            bias = 0.0 if module.bias is None else module.bias[:64].double()
            expected = x.double() @ dense_weight(module)[:64].double().T + bias
        if not bool(y.isfinite().all()):
            raise Wrong(f"{name} gives {int((~y.isfinite()).sum())} bad values for inputs of 1e6")
        worst = max(worst, float((y[:, :64].double() - expected).norm() / expected.norm()))
    limit = 1e-5 if torch.get_float32_matmul_precision() == "highest" else 1e-3
    said = f"{len(products)} products of inputs of 1e6 within {worst:.0e} of fp64"
    return ensure(worst < limit, said)


@proves("teacher and student share one base")
def shared(subject: Subject) -> str:
    model, batch = subject.model, padded_batch(subject).to(device_of(subject))
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.no_grad():
        before = model(**inputs, use_cache=False).logits
    size, addresses = memory(model), places(model)
    student = student_of(subject)
    student.window(0)
    student.outcome()
    added = sum(p.numel() * p.element_size() for p in student.parameters.values())
    with adapters_disabled(model), torch.no_grad():
        after = model(**inputs, use_cache=False).logits
    extra = memory(model) - size - added
    moved = [name for name, address in places(model).items() if addresses.get(name) != address]
    if moved:
        raise Wrong(f"{len(moved)} tensors of the base lie elsewhere, {moved[0]} first")
    equal = torch.equal(before, after)
    return ensure(
        equal and extra == 0,
        f"{extra:,} bytes besides {size:,} of the base and {added:,} of adapters; the teacher's"
        f" logits {'bit-equal' if equal else 'CHANGED'} after a step",
    )


def places(model: nn.Module) -> dict[str, int]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named if ".npt." not in name}


def memory(model: nn.Module) -> int:
    """Return the bytes of all distinct storages of the model's tensors."""
    storages = [t.untyped_storage() for t in [*model.parameters(), *model.buffers()]]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
