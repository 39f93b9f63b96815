"""Checks of the arithmetic: the modulation, the loss, clipping, and what the base computes in.

Shapes: N tokens, D hidden, O width of a modulated product, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from faults.bench import Base, Student
from faults.check import (
    CannotLook,
    Wrong,
    adapters_of,
    check,
    device_of,
    ensure,
    logits_of,
    random,
    rounding,
    setting_of,
    student_of,
)
from faults.transient_faults import scaled
from npt.adapters.attach import detach
from npt.adapters.converted import adapters_disabled
from npt.adapters.layer import STD_A, STD_B, NPTAdapter
from npt.base.linear import dense_weight, quantized_linears
from npt.base.precision import audit_precision
from npt.config import STREAM
from npt.distill import local
from npt.errors import PrecisionError

# --- the modulation

EXTREME_CODES = (0.0, 1e-38, 1e-3, 1.0, 9.0, 17.0, 1e4, 1e19, 1e38)
"""Up to where a code times a weight overflows, with 9 and 17 where fp32's tanh is about to round to
1.
"""


@check(
    "the modulation never reaches 0",
    "1 + tanh(u) reached 0 and switched channels off, with their gradients",
)
def bounded(base: Base) -> str:
    student = student_of(base, modulation="both")
    beta = base.adapter.mult_bound
    codes = torch.tensor(sorted({sign * c for c in EXTREME_CODES for sign in (-1.0, 1.0)}))
    low, high = math.inf, -math.inf
    adapter = adapters_of(student)[0]
    z = torch.zeros(len(codes), adapter.config.rank, device=adapter.A.device)
    z[:, 0] = codes.to(z.device)
    for target, weight in adapter.M.items():
        for size in (1.0, 1e3):  # 1e3 makes the largest code overflow to infinity
            with torch.no_grad():
                weight[:, 0] = size
            m = _multipliers(adapter, target, z)
            if not bool(torch.isfinite(m).all()):
                largest = float(codes.abs().max())
                raise Wrong(f"m of {target} is not finite for a code of size {largest:g}")
            low, high = min(low, float(m.min())), max(high, float(m.max()))
    # One rounding of fp32 at the ends.
    good = low > 0 and low >= 1 - beta - 1e-6 and high <= 1 + beta + 1e-6
    return ensure(
        good,
        f"m in [{low:.6g}, {high:.6g}] for codes from -1e38 to 1e38; beta {beta:g} allows"
        f" [{1 - beta:g}, {1 + beta:g}]",
    )


@check(
    "the modulation is exactly 1 at the start",
    "0.5 sigmoid(u) + 0.5 is 0.75 at u = 0, so every layer started damped",
)
def neutral(base: Base) -> str:
    student = student_of(base, modulation="both")
    seen = wrong = 0
    value = 1.0
    for adapter in adapters_of(student):
        z = random(2, 8, adapter.config.rank, device=adapter.A.device)
        z = z * torch.logspace(-30, 30, 8, device=z.device)[:, None]
        for target in adapter.M:
            m = _multipliers(adapter, target, z)
            seen += m.numel()
            off = m != 1.0
            if bool(off.any()):
                wrong, value = wrong + int(off.sum()), float(m[off][0])
    if wrong:
        raise Wrong(
            f"{wrong:,} of {seen:,} multipliers are not 1 before the first step, the first of"
            f" them {value:.6g}"
        )
    return f"{seen:,} multipliers, each exactly 1, for codes of size 1e-30 to 1e30"


@torch.no_grad()
def _multipliers(adapter: NPTAdapter, target: str, z: Tensor) -> Tensor:
    ones = torch.ones(len(z), len(adapter.M[target]), device=z.device)
    _, m, _ = adapter.apply_to(target, ones, z)
    assert m is not None
    return m


@check("the start is small, as configured", "large random starts made the first losses overflow")
def start(base: Base) -> str:
    student = student_of(base, modulation="both")
    config = base.adapter
    adapters = adapters_of(student)
    if any(bool(weight.any()) for adapter in adapters for weight in adapter.M.values()):
        raise Wrong("M is not 0 at the start")
    said = []
    good = True
    std_b = 0.0 if config.residual == "keep" else STD_B
    # next to the stream the products start unchanged
    drawn = [STREAM] if STREAM in config.targets else list(config.targets)
    others = [b for x in adapters for target, b in x.B.items() if target not in drawn]
    if any(bool(weight.any()) for weight in others):
        raise Wrong("B of the products is not 0 at the start, next to that of the stream")
    groups = {
        "A": (STD_A, [adapter.A for adapter in adapters]),
        "B": (std_b, [adapter.B[target] for adapter in adapters for target in drawn]),
    }
    for name, (std, tensors) in groups.items():
        values = torch.cat([t.detach().flatten() for t in tensors]).to(torch.float64)
        found, n = float(values.square().mean().sqrt()), values.numel()
        # Six standard errors of a standard deviation, sigma / sqrt(2 n): a sound start falls
        # outside once in 5e8.
        close = abs(found - std) <= 6 * std / math.sqrt(2 * n)
        good = good and close and float(values.abs().max()) <= 8 * std
        said.append(f"{name} {found:.3g} for {std:g} over {n:,}")
    return ensure(good, f"standard deviation of {', of '.join(said)}; M all 0")


@check(
    "the additive term is scaled by alpha",
    "an unscaled additive term drowned the product it was added to",
)
def scaled_additive(base: Base) -> str:
    worst = 0.0
    doubled = True
    alpha = base.adapter.additive_scale
    student = student_of(base, modulation="additive")
    terms = _additive_terms(student)
    for adapter, target, z, y, out, s in terms:
        weight = adapter.B[target].detach().to(torch.float64)
        expected = alpha * (z.double() @ weight.T)
        size = alpha * (z.double().abs() @ weight.abs().T)
        worst = max(worst, float(((s.double() - expected).abs() / size.clamp_min(1e-300)).max()))
        if not torch.equal(out, y + s):
            raise Wrong(f"what is added to {target} is not s")
    other = replace(base, adapter=replace(base.adapter, additive_scale=2 * alpha))
    twice = student_of(other, modulation="additive")
    for (_, _, _, _, _, s), (_, _, _, _, _, t) in zip(terms, _additive_terms(twice), strict=True):
        doubled = doubled and torch.equal(2 * s, t)
    # The error of a sum of R products, each rounded once, and one rounding for alpha.
    good = worst <= (base.adapter.rank + 2) * rounding() and doubled
    return ensure(
        good,
        f"s = {alpha:g} (B z) within {worst:.1e}; twice the alpha gives"
        f" {'exactly' if doubled else 'NOT'} twice the s",
    )


def _additive_terms(
    student: Student,
) -> list[tuple[NPTAdapter, str, Tensor, Tensor, Tensor, Tensor]]:
    """Return (adapter, target, z, y, y', s) of the first converted layer."""
    generator = torch.Generator().manual_seed(3)
    adapter = adapters_of(student)[0]
    found = []
    for target, weight in adapter.B.items():
        z = torch.randn(8, adapter.config.rank, generator=generator).to(weight.device)
        y = torch.randn(8, len(weight), generator=generator).to(weight.device)
        with torch.no_grad():
            out, _, s = adapter.apply_to(target, y, z)
        assert s is not None
        found.append((adapter, target, z, y, out, s))
    return found


# --- the loss


@check(
    "the NMSE is normalised token by token",
    "one loud token drowned all others, and a silent one divided by 0",
)
def normalised(base: Base) -> str:
    device, width = device_of(base), base.model.config.hidden_size
    direction = nn.functional.normalize(random(4, width), dim=0).to(device)
    loud = torch.logspace(-3, 12, 16, device=device)
    silent = torch.tensor([0.0, 1e-38, 1e-30, 1e-20, 1e-12], device=device)
    teacher = torch.cat([loud, silent])[:, None] * direction
    student = (1.1 * teacher).requires_grad_(True)
    nmse = local.nmse_per_token(student, teacher)
    (gradient,) = torch.autograd.grad(nmse.sum(), student)
    alone = torch.cat(
        [local.nmse_per_token(s[None], t[None]) for s, t in zip(student, teacher, strict=True)]
    )
    nmse, alone = nmse.detach(), alone.detach()
    if nmse.shape != (len(teacher),):
        raise Wrong(f"{list(nmse.shape)} values for {len(teacher)} tokens")
    if not bool(torch.isfinite(nmse).all()):
        raise Wrong(
            f"the NMSE is {float(nmse[~torch.isfinite(nmse)][0])} for a teacher's state of size"
            f" {_size_of(teacher, nmse):g}"
        )
    if not bool(torch.isfinite(gradient).all()):
        raise Wrong("the gradient is not finite for a teacher's state near 0")
    spread = float((nmse[: len(loud)] / 0.01 - 1).abs().max())
    largest = float(nmse[len(loud) :].max())
    # 1.1 t - t is rounded in fp32 at about 1e-7 of t, a millionth of the difference; squared and
    # summed.
    good = spread < 1e-4 and 0 <= largest <= 0.0101
    if not torch.allclose(alone, nmse, rtol=1e-5, atol=0):
        raise Wrong(
            f"a token of NMSE {float(alone[0]):.4g} alone has {float(nmse[0]):.4g} among others"
        )
    return ensure(
        good,
        f"10% off gives 0.01 within {0.01 * spread:.0e} for states of size 1e-3 to 1e12, at"
        f" most {largest:.2g} for 1e-12 to 0",
    )


def _size_of(teacher: Tensor, nmse: Tensor) -> float:
    return float(teacher.norm(dim=-1)[~torch.isfinite(nmse)][0])


@check(
    "clipping bounds the norm that is applied",
    "clipping after a NaN, or not at all, let single batches throw the weights",
)
def clipped(base: Base) -> str:
    limit = base.config.max_grad_norm
    raw, _ = _applied_norm(base, 1.0)
    if not raw > 0:
        raise CannotLook("the first gradient is 0")
    said = []
    good = True
    for factor in (1e4 * limit / raw, 1e-2 * limit / raw):
        before, applied = _applied_norm(base, factor)
        expected = min(before, limit)
        # One division and one product per element in fp32, and the 1e-6 that clipping adds to the
        # norm.
        good = good and applied <= limit * (1 + 1e-5) and abs(applied - expected) <= 1e-3 * expected
        said.append(f"{before:.3g} became {applied:.3g}")
    return ensure(good, f"gradient norm {', '.join(said)}; max_grad_norm {limit:g}")


def _applied_norm(base: Base, factor: float) -> tuple[float, float]:
    """Return the window's norm before clipping, and that of the gradients the optimizer
    is given.
    """
    made = student_of(base, windows=1, size=1)
    norms: list[float] = []

    def look(*_: object) -> None:
        grads = [p.grad for p in made.parameters.values() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))

    made.optimizer.register_step_pre_hook(look)
    made.window(0, {(0, 0): scaled(factor)})
    (result,) = made.outcome().results
    if result.grad_norm is None or len(norms) != 1:
        raise CannotLook(f"the window was refused: {result.refusals}")
    return result.grad_norm, norms[0]


# --- precision and the base

LARGE = 1e6
"""Activations that fp16 has no numbers for."""


@check(
    "everything computes in fp32",
    "activations beyond 65504 overflowed inside 4-bit products that ran in fp16",
)
def in_fp32(base: Base) -> str:
    try:
        audit_precision(student_of(base).model)
    except PrecisionError as error:
        raise Wrong(f"the audit: {error}") from error
    detach(base.model)
    worst, seen = 0.0, 0
    generator = torch.Generator().manual_seed(5)
    for name, module in base.model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        x = (LARGE * torch.randn(4, module.in_features, generator=generator)).to(
            next(module.parameters()).device
        )
        with torch.no_grad():
            y = module(x)
            rows = dense_weight(module)[:64].double()
            expected = x.double() @ rows.T
        if y.dtype != torch.float32 or not bool(torch.isfinite(y).all()):
            raise Wrong(
                f"{name} gives {y.dtype} with {int((~torch.isfinite(y)).sum())} non-finite"
                " values for inputs of 1e6"
            )
        bias = 0.0 if module.bias is None else module.bias[:64].double()
        worst = max(worst, float((y[:, :64].double() - expected - bias).norm() / expected.norm()))
        seen += 1
    # Sums of D products: fp32 comes to about 1e-7, a product in bf16 to 2e-3, in fp16 to 3e-4
    # without overflow.
    limit = 1e-5 if torch.get_float32_matmul_precision() == "highest" else 1e-3
    packed = len(quantized_linears(base.model))
    said = (
        f"{seen} products ({packed} in 4 bit) of inputs of 1e6 finite, within {worst:.0e} of fp64"
    )
    return ensure(
        worst < limit, said if worst < limit else f"{said}, which fp32 would be within {limit:g} of"
    )


@check(
    "teacher and student are one base",
    "a second copy of embeddings and base took the memory, and drifted from the first",
)
def shared(base: Base) -> str:
    batch, model = setting_of(base).batch((0, 0)), base.model
    before, size, teacher = _addresses(model), _bytes(model), logits_of(base, batch)
    student = student_of(base)
    student.window(0)
    student.outcome()
    added = sum(p.numel() * p.element_size() for p in student.parameters.values())
    with adapters_disabled(model):
        during, equal = _addresses(model), torch.equal(logits_of(base, batch), teacher)
    moved = [name for name, address in before.items() if during.get(name) != address]
    extra = _bytes(model) - size - added
    if moved:
        raise Wrong(
            f"{len(moved)} tensors of the base lie elsewhere under the student, {moved[0]} first"
        )
    if extra:
        raise Wrong(f"{extra:,} bytes more than the base and the adapters' {added:,}")
    detail = (
        f"{len(before)} tensors of the base at their addresses, {added:,} bytes of adapters"
        f" besides {size:,}"
    )
    changed = "; the teacher's logits CHANGED in a step of the student"
    return ensure(equal, detail + (", teacher bit-equal after a step" if equal else changed))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in _tensors(model) if ".npt." not in name}


def _bytes(model: nn.Module) -> int:
    """Return the size of all distinct storages of the model's tensors."""
    storages = (tensor.untyped_storage() for _, tensor in _tensors(model))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
