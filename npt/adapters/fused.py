"""The modulation with what lies between gate, up and down in one piece, whose backward computes again what it needs.

    p = silu(gate') * up',   y' = m * y + s of `npt.adapters.modulation` for y = gate, up, down

Automatic differentiation of the plain form keeps some fifteen tensors of the size of the MLP's products, and walks through memory once for
each. Here gate, up and z are kept and nothing else: m, s and all that follows from them are made anew in backward, in blocks of rows
that are small enough to stay in a processor's cache. So [N, F] is never written but for p and, where somebody wants them, the gradients
of gate and up.

It computes what the plain form computes, to rounding; the sum over tokens in the gradients of M and B is taken block by block. The
plain form remains for everything else: other precisions than fp32 (fp64 for tests), autocast, other activations.

Shapes: N tokens, F ffn, R rank, O width of a product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Elements of a block by type of device: on a CPU a handful of them fits into a core's cache; on a GPU they are large enough for the time
of a kernel to be that of its memory traffic."""

Weights = tuple[Tensor | None, Tensor | None]
"""M and B of a target, [O, R] each; None where the form has no such term, or the target is not modulated."""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def unfused() -> Iterator[None]:
    """Within the context converted layers are computed operation by operation, for whoever looks at single ones."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def is_unfused() -> bool:
    """Whether operations are to be left single."""
    return _PLAIN.get()


@dataclass(frozen=True)
class Form:
    """What the arithmetic depends on beside its tensors.

    mult_bound, additive_scale: beta and alpha. regularised: the energy is differentiated. compiled: elementwise work by `torch.compile`.
    """

    mult_bound: float
    additive_scale: float
    regularised: bool = False
    compiled: bool = False


def modulated(y: Tensor, z: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor]:
    """One product, modulated.

    Args:
        y: [N, O].
        z: [N, R], of the same dtype.
        weights: of its target.
        form: see there.

    Returns:
        y' [N, O], and the energy [N] of m and s (`modulation_energy`), which has a graph where `form.regularised`.
    """
    return _Modulated.apply(y, z, *weights, form)


def modulated_product(gate: Tensor, up: Tensor, z: Tensor, gate_weights: Weights, up_weights: Weights, form: Form) -> tuple[Tensor, Tensor]:
    """p = silu(gate') * up'.

    Args:
        gate, up: [N, F].
        z: [N, R], of the same dtype.
        gate_weights, up_weights: of the two targets.
        form: see there.

    Returns:
        p [N, F], and the energy [N] of both targets' m and s, which has a graph where `form.regularised`.
    """
    return _Product.apply(gate, up, z, *gate_weights, *up_weights, form)


class _Modulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, mult: Tensor | None, add: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
        out, energy = torch.empty_like(y), y.new_zeros(len(y))
        for rows in blocks(y, z.shape[-1]):
            _modulate(form)(y[rows], *_low_rank(z[rows], (mult, add)), form.mult_bound, form.additive_scale, out[rows], energy[rows])
        ctx.form = form
        ctx.save_for_backward(y, z, mult, add)
        if not form.regularised:
            ctx.mark_non_differentiable(energy)
        return out, energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        y, z, *weights = ctx.saved_tensors
        form: Form = ctx.form
        sums = _Sums(z, (tuple(weights),), form)
        grad_y = torch.empty_like(y) if ctx.needs_input_grad[0] else None
        for rows in blocks(y, z.shape[-1]):
            low = _low_rank(z[rows], weights)
            energy = grad_energy[rows] if form.regularised else None
            out = None if grad_y is None else grad_y[rows]
            sums.add(rows, _modulate_backward(form)(grad[rows], y[rows], *low, form.mult_bound, form.additive_scale, energy, out))
        return grad_y, sums.z, *sums.weights, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, z: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        *weights, form = others
        product, energy = torch.empty_like(gate), gate.new_zeros(len(gate))
        product_forward(gate, up, z, weights, form, product, energy)
        ctx.form = form
        ctx.save_for_backward(gate, up, z, *weights)
        if not form.regularised:
            ctx.mark_non_differentiable(energy)
        return product, energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, z, *weights = ctx.saved_tensors
        grads = [torch.empty_like(y) if wanted else None for y, wanted in zip((gate, up), ctx.needs_input_grad[:2], strict=True)]
        sums = product_backward(grad, grad_energy, gate, up, z, weights, ctx.form, *grads)
        return *grads, sums.z, *sums.weights, None


def product_forward(gate: Tensor, up: Tensor, z: Tensor, weights: Any, form: Form, product: Tensor, energy: Tensor) -> None:
    """Write `modulated_product`'s two results into `product` and `energy`. weights: M and B of gate, M and B of up."""
    for rows in blocks(gate, z.shape[-1]):
        low = _low_rank(z[rows], weights)
        _product(form)(gate[rows], up[rows], *low, form.mult_bound, form.additive_scale, product[rows], energy[rows])


def product_backward(
    grad: Tensor,
    grad_energy: Tensor,
    gate: Tensor,
    up: Tensor,
    z: Tensor,
    weights: Any,
    form: Form,
    grad_gate: Tensor | None = None,
    grad_up: Tensor | None = None,
) -> _Sums:
    """Gradients of z, M and B from that of the product; those of gate and up are written where there is a place for them."""
    sums = _Sums(z, (tuple(weights[:2]), tuple(weights[2:])), form)
    for rows in blocks(gate, z.shape[-1]):
        low = _low_rank(z[rows], weights)
        energy = grad_energy[rows] if form.regularised else None
        places = [None if place is None else place[rows] for place in (grad_gate, grad_up)]
        found = _product_backward(form)(grad[rows], gate[rows], up[rows], *low, form.mult_bound, form.additive_scale, energy, *places)
        sums.add(rows, found)
    return sums


def blocks(like: Tensor, rank: int) -> list[slice]:
    """Rows of an [N, O] tensor in blocks, whose length depends on O, R and the device alone. A block has no fewer rows than R: with
    fewer, the low-rank products would spend their time on reading M and B."""
    length = max(1, rank, BLOCK.get(like.device.type, BLOCK["cuda"]) // max(1, like.shape[-1]))
    return [slice(start, start + length) for start in range(0, len(like), length)]


class _Sums:
    """Gradients of z and of the weights of some targets, collected block by block.

    z: [N, R]. weights: M and B of each target in turn, None where there is none.
    """

    def __init__(self, z: Tensor, targets: tuple[Weights, ...], form: Form):
        self.z = torch.zeros_like(z)
        self.weights = [None if weight is None else torch.zeros_like(weight) for target in targets for weight in target]
        self._codes, self._given, self._scales = z, [w for target in targets for w in target], (1.0, form.additive_scale) * len(targets)

    def add(self, rows: slice, grads: tuple[Tensor | None, ...]) -> None:
        """Those of u = M z and s = B z of a block, each [rows, O]; s is not multiplied by alpha yet."""
        for grad, weight, total, scale in zip(grads, self._given, self.weights, self._scales, strict=True):
            if weight is not None:
                assert grad is not None and total is not None
                total.addmm_(grad.t(), self._codes[rows], alpha=scale)
                self.z[rows].addmm_(grad, weight, alpha=scale)


def _low_rank(z: Tensor, weights: Any) -> list[Tensor | None]:
    return [None if weight is None else F.linear(z, weight) for weight in weights]


# --- elementwise, on a block: plain functions of tensors, which may be compiled. They write over u and s, which are made for them.


def _modulate_block(
    y: Tensor, u: Tensor | None, s: Tensor | None, mult_bound: float, additive_scale: float, out: Tensor, energy: Tensor
) -> None:
    out.copy_(_modulated_block(y, u, s, mult_bound, additive_scale, energy))


def _product_block(
    gate: Tensor,
    up: Tensor,
    gate_u: Tensor | None,
    gate_s: Tensor | None,
    up_u: Tensor | None,
    up_s: Tensor | None,
    mult_bound: float,
    additive_scale: float,
    out: Tensor,
    energy: Tensor,
) -> None:
    gate = _modulated_block(gate, gate_u, gate_s, mult_bound, additive_scale, energy)
    up = _modulated_block(up, up_u, up_s, mult_bound, additive_scale, energy)
    torch.mul(F.silu(gate), up, out=out)


def _modulated_block(y: Tensor, u: Tensor | None, s: Tensor | None, mult_bound: float, additive_scale: float, energy: Tensor) -> Tensor:
    """m y + s, its energy added to `energy`; y itself where there is neither u nor s."""
    if s is not None:
        s = s.mul_(additive_scale)
        energy += _mean_square(s)
    if u is not None:
        u = _centred(u).mul_(2.0 * mult_bound)
        energy += _mean_square(u)
        y = u.add_(1.0).mul_(y)
    return y if s is None else s.add_(y)


def _centred(u: Tensor) -> Tensor:
    """c = sigmoid(u) - 1/2, with which m = 1 + 2 beta c: exactly 1 at u = 0, and off by no more than the rounding of m itself. On a CPU
    several times as fast as tanh(u / 2), which is 2 c."""
    return u.sigmoid_().sub_(0.5)


def _mean_square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1).square() / x.shape[-1]


def _modulate_backward_block(
    grad: Tensor,
    y: Tensor,
    u: Tensor | None,
    s: Tensor | None,
    mult_bound: float,
    additive_scale: float,
    grad_energy: Tensor | None,
    grad_y: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of u and s; that of y is written to `grad_y`."""
    c = None if u is None else _centred(u)
    if s is not None:
        s = s.mul_(additive_scale)
    return _modulated_backward(grad, y, c, s, mult_bound, grad_energy, grad_y)


def _product_backward_block(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_u: Tensor | None,
    gate_s: Tensor | None,
    up_u: Tensor | None,
    up_s: Tensor | None,
    mult_bound: float,
    additive_scale: float,
    grad_energy: Tensor | None,
    grad_gate: Tensor | None,
    grad_up: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of both u and s; those of gate and up are written to `grad_gate` and `grad_up`."""
    gate_c, gate_s, gate_out = _again(gate, gate_u, gate_s, mult_bound, additive_scale)
    up_c, up_s, up_out = _again(up, up_u, up_s, mult_bound, additive_scale)
    sigmoid = torch.sigmoid(gate_out)
    activation = gate_out * sigmoid
    of_up = grad * activation
    # silu' = sigmoid + silu (1 - sigmoid)
    of_gate = torch.addcmul(sigmoid, activation, 1.0 - sigmoid).mul_(grad).mul_(up_out)
    return (
        *_modulated_backward(of_gate, gate, gate_c, gate_s, mult_bound, grad_energy, grad_gate),
        *_modulated_backward(of_up, up, up_c, up_s, mult_bound, grad_energy, grad_up),
    )


def _again(
    y: Tensor, u: Tensor | None, s: Tensor | None, mult_bound: float, additive_scale: float
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """c = sigmoid(u) - 1/2, alpha s, and m y + s."""
    c = None
    if u is not None:
        c = _centred(u)
        y = (c * (2.0 * mult_bound)).add_(1.0).mul_(y)
    if s is not None:
        s = s.mul_(additive_scale)
        y = y + s
    return c, s, y


def _modulated_backward(
    grad: Tensor, y: Tensor, c: Tensor | None, s: Tensor | None, mult_bound: float, grad_energy: Tensor | None, grad_y: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """From the gradient of m y + s, with m = 1 + 2 beta c and c = sigmoid(u) - 1/2: those of u and alpha s, and where asked that of y."""
    slope = 2.0 * mult_bound
    weight = None if grad_energy is None else (2.0 / y.shape[-1] * grad_energy).unsqueeze(-1)
    if grad_y is not None:
        grad_y.copy_(grad if c is None else (c * slope).add_(1.0).mul_(grad))
    of_u = None
    if c is not None:
        of_m = grad * y
        if weight is not None:
            of_m = of_m + weight * (slope * c)
        of_u = of_m.mul_(c.square().neg_().add_(0.25)).mul_(slope)  # sigmoid (1 - sigmoid) = 1/4 - c^2
    of_s = None
    if s is not None:
        of_s = grad if weight is None else grad + weight * s
    return of_u, of_s


# --- the same, compiled where that is asked for


class _Body:
    """An elementwise function, as it is or compiled. Where it cannot be compiled that is said once, and it is used as it is."""

    def __init__(self, plain: Callable[..., Any]):
        self._plain = plain
        self._compiled: Callable[..., Any] | None = None
        self._proven = self._failed = False

    def __call__(self, form: Form) -> Callable[..., Any]:
        return self._fast if form.compiled and not self._failed else self._plain

    def _fast(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(self._plain, dynamic=True)
        if self._proven:
            return self._compiled(*arguments)
        try:
            found = self._compiled(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler may lack; nothing has been computed yet
            self._failed = True
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            name = self._plain.__name__.strip("_")
            warnings.warn(f"--compile: {name} could not be compiled and is computed as it is ({reason})", stacklevel=2)
            return self._plain(*arguments)
        self._proven = True
        return found


_modulate, _modulate_backward = _Body(_modulate_block), _Body(_modulate_backward_block)
_product, _product_backward = _Body(_product_block), _Body(_product_backward_block)
