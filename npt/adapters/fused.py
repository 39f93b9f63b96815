"""The modulation by hand, forward and backward, in blocks of rows.

    p = silu(gate') * up',   y' = m * y + s (npt/adapters/layer.py) for y = gate, up, down

Automatic differentiation of the plain form keeps some fifteen tensors of the size of the MLP's
products, and walks through memory once for each. Here gate, up and z are kept and nothing else: m,
s and all that follows from them are made again in backward, in blocks of rows that are small enough
to stay in a processor's cache. The results are those of the plain form, to rounding; the sums over
tokens in the gradients of M and B are taken block by block.

Shapes: N tokens, F ffn, R rank, O width of a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCK = {"cpu": 1 << 19, "cuda": 1 << 23}
"""Elements of a block by type of device. On a CPU a handful of them fits the last cache, with rows
enough for low-rank products to be worth their call; on a GPU the time of a kernel is that of its
memory traffic."""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def unfused() -> Iterator[None]:
    """Compute converted layers operation by operation within the context, to look at each."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def is_unfused() -> bool:
    return _PLAIN.get()


@dataclass(frozen=True)
class Form:
    """Settings of the arithmetic.

    Attributes:
        mult_bound: beta.
        additive_scale: alpha.
        regularised: the energy is differentiated.
    """

    mult_bound: float
    additive_scale: float
    regularised: bool = False

    @property
    def slope(self) -> float:
        """2 beta."""
        return 2.0 * self.mult_bound


def blocks(like: Tensor, rank: int) -> list[slice]:
    """Return the rows of an [N, O] tensor in blocks, of a length by O, R and the device alone.

    A block has no fewer rows than R: low-rank products of fewer would spend their time on reading
    M and B.
    """
    length = max(1, rank, BLOCK.get(like.device.type, BLOCK["cuda"]) // max(1, like.shape[-1]))
    return [slice(start, start + length) for start in range(0, len(like), length)]


class LowRank:
    """M z and B z of some targets in blocks of rows, and the gradients of z, M and B.

    Args:
        z: [N, R].
        weights: M and B [O, R] of each target in turn, None if absent.
        form: of the arithmetic.
        grad_energy: [N], in backward.

    Attributes:
        grad_z, grad_weights: in backward, sums over the blocks so far.
    """

    def __init__(
        self,
        z: Tensor,
        weights: Sequence[Tensor | None],
        form: Form,
        grad_energy: Tensor | None = None,
    ):
        self.z, self.form, self.mults = z, form, weights[::2]
        self.adds = [None if add is None else form.additive_scale * add for add in weights[1::2]]
        self._memory: dict[int, list[Tensor]] = {}
        self._grad_energy = grad_energy if form.regularised else None
        if grad_energy is not None:
            self.grad_z = torch.zeros_like(z)
            self.grad_weights = [None if w is None else torch.zeros_like(w) for w in weights]
        if self._grad_energy is not None:
            self._add_grad_of_additive_energy(self._grad_energy)

    def of(
        self, target: int, rows: slice, product: Tensor, with_s: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return y, y + s (y itself without s), and u = M z, of these rows of a target's product.

        All blocks share the memory of the last two.
        """
        y, z = product[rows], self.z[rows]
        mult, add = self.mults[target], self.adds[target] if with_s else None
        if target not in self._memory:  # the first block is the largest
            self._memory[target] = [
                y if weight is None else torch.empty_like(y) for weight in (add, mult)
            ]
        room_s, room_u = (memory[: len(y)] for memory in self._memory[target])
        return (
            y,
            y if add is None else torch.addmm(y, z, add.t(), out=room_s),
            None if mult is None else torch.mm(z, mult.t(), out=room_u),
        )

    def additive_energy(self) -> Tensor:
        """Return the mean over channels of s^2, summed over targets: [N].

        |s|^2 = z'(alpha^2 B'B) z, so s is not needed.
        """
        energy = self.z.new_zeros(len(self.z))
        for add in self.adds:
            if add is not None:
                squares = ((self.z @ (add.t() @ add)) * self.z).sum(dim=-1)
                energy += squares.clamp_min_(0.0) / len(add)
        return energy

    def _add_grad_of_additive_energy(self, grad: Tensor) -> None:
        for add, total in zip(self.adds, self.grad_weights[1::2], strict=True):
            if add is not None and total is not None:
                weighted = (2.0 / len(add) * grad).unsqueeze(-1) * self.z
                self.grad_z.addmm_(weighted, add.t() @ add)
                total.addmm_(add, weighted.t() @ self.z, alpha=self.form.additive_scale)

    def energy_weight(self, rows: slice) -> Tensor | None:
        """Return the factor of each (m - 1) in the energy's gradient, before division by O."""
        return None if self._grad_energy is None else 2.0 * self._grad_energy[rows].unsqueeze(-1)

    def add(self, rows: slice, *grads: Tensor | None) -> None:
        """Add a block's gradients: for each target that of u, over -2 beta, and that of s."""
        codes, total, slope = self.z[rows], self.grad_z[rows], self.form.slope
        for target, (mult, add) in enumerate(zip(self.mults, self.adds, strict=True)):
            of_u, of_s = grads[2 * target : 2 * target + 2]
            into_mult, into_add = self.grad_weights[2 * target : 2 * target + 2]
            if mult is not None and into_mult is not None and of_u is not None:
                into_mult.addmm_(of_u.t(), codes, alpha=-slope)
                total.addmm_(of_u, mult, alpha=-slope)
            if add is not None and into_add is not None and of_s is not None:
                into_add.addmm_(of_s.t(), codes, alpha=self.form.additive_scale)
                total.addmm_(of_s, add)


class Modulated(torch.autograd.Function):
    """One product, modulated: `Modulated.apply(y, z, M, B, form)`.

    Takes y [N, O], z [N, R] of the same dtype, and the weights of the target; gives y' [N, O] and
    the energy [N] of m and s (`modulation_energy`), with a graph if `form.regularised`.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, z: Tensor, mult: Tensor | None, add: Tensor | None, form: Form
    ) -> tuple[Tensor, Tensor]:
        low = LowRank(z, (mult, add), form)
        out, energy = torch.empty_like(y), low.additive_energy()
        for rows in blocks(y, z.shape[-1]):
            out[rows] = _multiplied(*low.of(0, rows, y), form.slope, energy[rows])[0]
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
        low = LowRank(z, weights, form, grad_energy)
        grad_y = torch.empty_like(y) if ctx.needs_input_grad[0] else None
        for rows in blocks(y, z.shape[-1]):
            part, _, u = low.of(0, rows, y, with_s=False)
            into = None if grad_y is None else grad_y[rows]
            weight = low.energy_weight(rows)
            c = None if u is None else u.sigmoid_().sub_(0.5)
            low.add(rows, *_modulated_backward(grad[rows], part, c, form.slope, weight, into))
        return grad_y, low.grad_z, *low.grad_weights, None


def product_forward(gate: Tensor, up: Tensor, low: LowRank, out: Tensor) -> Tensor:
    """Write p = silu(gate') * up' [N, F] to `out`; return the energy [N] of both targets.

    Args:
        gate, up: [N, F], products of the frozen weights; kept for backward.
        low: of gate's M and B, then up's.
        out: [N, F].
    """
    energy = low.additive_energy()
    for rows in blocks(gate, low.z.shape[-1]):
        of_gate, of_up = low.of(0, rows, gate), low.of(1, rows, up)
        gate_out, _ = _multiplied(*of_gate, low.form.slope, energy[rows])
        up_out, _ = _multiplied(*of_up, low.form.slope, energy[rows])
        torch.mul(F.silu(gate_out, inplace=gate_out is not of_gate[0]), up_out, out=out[rows])
    return energy


def product_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    low: LowRank,
    grad_gate: Tensor | None = None,
    grad_up: Tensor | None = None,
) -> None:
    """Add to the gradients of `low` those of p's modulation; write gate's and up's if given."""
    slope = low.form.slope
    for rows in blocks(gate, low.z.shape[-1]):
        of_gate, of_up = low.of(0, rows, gate), low.of(1, rows, up)
        part, weight = grad[rows], low.energy_weight(rows)
        into_gate, into_up = (None if g is None else g[rows] for g in (grad_gate, grad_up))
        gate_out, gate_c = _multiplied(*of_gate, slope)
        up_out, up_c = _multiplied(*of_up, slope)
        grad_of_up = F.silu(gate_out).mul_(part)
        grad_of_gate = part * up_out if up_out is of_up[0] else up_out.mul_(part)
        grad_of_gate = torch.ops.aten.silu_backward(grad_of_gate, gate_out)
        low.add(
            rows,
            *_modulated_backward(grad_of_gate, of_gate[0], gate_c, slope, weight, into_gate),
            *_modulated_backward(grad_of_up, of_up[0], up_c, slope, weight, into_up),
        )


# --- elementwise, on a block. For a target they take y, y + s and u, and write over the last two;
# without s the second is y, which is left as it is. c = sigmoid(u) - 1/2, so m = 1 + 2 beta c:
# exactly 1 at u = 0, and off by no more than the rounding of m itself. On a CPU sigmoid is several
# times as fast as tanh(u / 2), which is 2 c.


def _multiplied(
    y: Tensor, moved: Tensor, u: Tensor | None, slope: float, energy: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return m y + s, and c; add the mean over channels of (m - 1)^2 to the energy."""
    if u is None:
        return moved, None
    c = u.sigmoid_().sub_(0.5)
    if energy is not None:
        energy += torch.linalg.vector_norm(c, dim=-1).square_().mul_(slope * slope / c.shape[-1])
    if moved is y:
        return torch.addcmul(y, c, y, value=slope), c
    return moved.addcmul_(c, y, value=slope), c


def _modulated_backward(
    grad: Tensor,
    y: Tensor,
    c: Tensor | None,
    slope: float,
    weight: Tensor | None,
    grad_y: Tensor | None,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of u, over -2 beta, and of s from that of m y + s; write that of y to
    `grad_y`.
    """
    if c is None:
        if grad_y is not None:
            grad_y.copy_(grad)
        return None, grad
    if grad_y is not None:
        torch.addcmul(grad, c, grad, value=slope, out=grad_y)
    # sigmoid (1 - sigmoid) = 1/4 - c^2
    if weight is None:
        return c.square_().sub_(0.25).mul_(grad).mul_(y), grad
    of_m = torch.addcmul(weight / y.shape[-1] * (slope * c), grad, y)
    return of_m.mul_(c.square_().sub_(0.25)), grad
