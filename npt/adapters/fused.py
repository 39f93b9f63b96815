"""The modulation with what lies between gate, up and down in one piece, whose backward computes
again what it needs.

    p = silu(gate') * up',   y' = m * y + s of `npt.adapters.modulation` for y = gate, up, down

Automatic differentiation of the plain form keeps some fifteen tensors of the size of the MLP's
products, and walks through memory once for each. Here gate, up and z are kept and nothing else: m,
s and all that follows from them are made anew in backward, in blocks of rows that are small enough
to stay in a processor's cache. So [N, F] is never written but for p and, where somebody wants them,
the gradients of gate and up.

It computes what the plain form computes, to rounding; the sum over tokens in the gradients of M and
B is taken block by block. The plain form remains for everything else: other precisions than fp32
(fp64 for tests), autocast, other activations.

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

BLOCK = {"cpu": 1 << 19, "cuda": 1 << 23}
"""Elements of a block by type of device: on a CPU a handful of them stays in the last cache, and
they have rows enough for low-rank products to be worth their call; on a GPU they are large enough
for the time of a kernel to be that of its memory traffic."""

Weights = tuple[Tensor | None, Tensor | None]
"""M and B of a target, [O, R] each; None where the form has no such term, or the target is not
modulated.
"""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def unfused() -> Iterator[None]:
    """Within the context converted layers are computed operation by operation, for whoever looks at
    single ones.
    """
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


_FEW_BLOCKS: ContextVar[bool] = ContextVar("few_blocks", default=False)


@contextmanager
def few_blocks() -> Iterator[None]:
    """Take only the first two blocks of rows and the last within the context, to count the memory
    of tensors without numbers: of hundreds, all between take the same.
    """
    token = _FEW_BLOCKS.set(True)
    try:
        yield
    finally:
        _FEW_BLOCKS.reset(token)


def is_unfused() -> bool:
    """Whether operations are to be left single."""
    return _PLAIN.get()


@dataclass(frozen=True)
class Form:
    """What the arithmetic depends on beside its tensors.

    mult_bound, additive_scale: beta and alpha. regularised: the energy is differentiated. compiled:
    elementwise work by `torch.compile`.
    """

    mult_bound: float
    additive_scale: float
    regularised: bool = False
    compiled: bool = False

    @property
    def slope(self) -> float:
        """2 beta."""
        return 2.0 * self.mult_bound


def modulated_product(
    gate: Tensor, up: Tensor, z: Tensor, gate_weights: Weights, up_weights: Weights, form: Form
) -> tuple[Tensor, Tensor]:
    """p = silu(gate') * up'.

    Args:
        gate, up: [N, F].
        z: [N, R], of the same dtype.
        gate_weights, up_weights: of the two targets.
        form: see there.

    Returns:
        p [N, F], and the energy [N] of both targets' m and s, which has a graph where
        `form.regularised`.
    """
    return _Product.apply(gate, up, z, *gate_weights, *up_weights, form)


class Modulated(torch.autograd.Function):
    """One product, modulated: `Modulated.apply(y, z, M, B, form)`.

    Takes y [N, O], z [N, R] of the same dtype, the weights of the target and their form; gives y'
    [N, O] and the energy [N] of m and s (`modulation_energy`), with a graph if `form.regularised`.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, z: Tensor, mult: Tensor | None, add: Tensor | None, form: Form
    ) -> tuple[Tensor, Tensor]:
        low = _LowRank(z, ((mult, add),), form)
        out, energy = torch.empty_like(y), low.additive_energy()
        for rows in blocks(y, z.shape[-1]):
            _modulate(form)(*low.of(rows, y), form.slope, out[rows], energy[rows])
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
        low = _LowRank(z, (tuple(weights),), form)
        sums = _Sums(low, grad_energy)
        grad_y = torch.empty_like(y) if ctx.needs_input_grad[0] else None
        for rows in blocks(y, z.shape[-1]):
            u = low.exponent(rows, y)
            sums.add(
                rows,
                _modulate_backward(form)(
                    grad[rows], y[rows], u, form.slope, sums.weight(rows), _part(grad_y, rows)
                ),
            )
        return grad_y, sums.z, *sums.weights, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, z: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor]:
        *weights, form = others
        product = torch.empty_like(gate)
        energy = product_forward(gate, up, z, weights, form, product)
        ctx.form = form
        ctx.save_for_backward(gate, up, z, *weights)
        if not form.regularised:
            ctx.mark_non_differentiable(energy)
        return product, energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, z, *weights = ctx.saved_tensors
        grads = [
            torch.empty_like(y) if wanted else None
            for y, wanted in zip((gate, up), ctx.needs_input_grad[:2], strict=True)
        ]
        sums = product_backward(grad, grad_energy, gate, up, z, weights, ctx.form, *grads)
        return *grads, sums.z, *sums.weights, None


def product_forward(
    gate: Tensor, up: Tensor, z: Tensor, weights: Any, form: Form, product: Tensor
) -> Tensor:
    """Write `modulated_product`'s first result into `product`, and give the second. weights: M and
    B of gate, M and B of up.
    """
    low = _LowRank(z, (tuple(weights[:2]), tuple(weights[2:])), form)
    energy = low.additive_energy()
    for rows in blocks(gate, z.shape[-1]):
        _product(form)(*low.of(rows, gate, up), form.slope, product[rows], energy[rows])
    return energy


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
    """Gradients of z, M and B from that of the product; those of gate and up are written where
    there is a place for them.
    """
    low = _LowRank(z, (tuple(weights[:2]), tuple(weights[2:])), form)
    sums = _Sums(low, grad_energy)
    for rows in blocks(gate, z.shape[-1]):
        places = [_part(place, rows) for place in (grad_gate, grad_up)]
        sums.add(
            rows,
            _product_backward(form)(
                grad[rows], *low.of(rows, gate, up), form.slope, sums.weight(rows), *places
            ),
        )
    return sums


def blocks(like: Tensor, rank: int) -> list[slice]:
    """Rows of an [N, O] tensor in blocks, whose length depends on O, R and the device alone. A
    block has no fewer rows than R: with fewer, the low-rank products would spend their time on
    reading M and B."""
    length = max(1, rank, BLOCK.get(like.device.type, BLOCK["cuda"]) // max(1, like.shape[-1]))
    found = [slice(start, start + length) for start in range(0, len(like), length)]
    return [*found[:2], found[-1]] if _FEW_BLOCKS.get() and len(found) > 3 else found


def _part(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


class _LowRank:
    """The low-rank side of some targets, block by block, in memory that all blocks share."""

    def __init__(self, z: Tensor, targets: tuple[Weights, ...], form: Form):
        self.z, self.targets, self.form = z, targets, form
        self.scaled = [None if add is None else form.additive_scale * add for _, add in targets]
        self._memory: dict[int, list[Tensor]] = {}

    def of(self, rows: slice, *products: Tensor) -> list[Tensor | None]:
        """Return for each target in turn y of these rows, y + s (y itself without s), and u = M z.

        All blocks share the memory of the results.
        """
        found: list[Tensor | None] = []
        for target, y in enumerate(products):
            part, (mult, _), add = y[rows], self.targets[target], self.scaled[target]
            if target not in self._memory:  # the first block is the largest
                wanted = (add is not None, mult is not None)
                self._memory[target] = [torch.empty_like(part) if w else part for w in wanted]
            into = [memory[: len(part)] for memory in self._memory[target]]
            z, moved, u = self.z[rows], part, None
            if add is not None:
                moved = torch.addmm(part, z, add.t(), out=into[0])
            if mult is not None:
                u = torch.mm(z, mult.t(), out=into[1])
            found += [part, moved, u]
        return found

    def exponent(self, rows: slice, like: Tensor) -> Tensor | None:
        """Return u = M z of these rows of the only target, None if there is no M."""
        mult, part = self.targets[0][0], like[rows]
        if mult is None:
            return None
        if 0 not in self._memory:
            self._memory[0] = [torch.empty_like(part)]
        return torch.mm(self.z[rows], mult.t(), out=self._memory[0][0][: len(part)])

    def additive_energy(self) -> Tensor:
        """Mean over channels of s^2, [N], summed over the targets: |s|^2 = z'(alpha^2 B'B) z needs
        no s.
        """
        energy = self.z.new_zeros(len(self.z))
        for add in self.scaled:
            if add is not None:
                energy += ((self.z @ (add.t() @ add)) * self.z).sum(dim=-1).clamp_min_(0.0) / len(
                    add
                )
        return energy


class _Sums:
    """Gradients of z and of the weights of some targets, collected block by block.

    z: [N, R]. weights: M and B of each target in turn, None where there is none.
    """

    def __init__(self, low: _LowRank, grad_energy: Tensor):
        self._low = low
        self.z = torch.zeros_like(low.z)
        self.weights = [
            None if weight is None else torch.zeros_like(weight)
            for target in low.targets
            for weight in target
        ]
        self._energy = grad_energy if low.form.regularised else None
        if self._energy is not None:
            self._add_energy(self._energy)

    def weight(self, rows: slice) -> Tensor | None:
        """What the energy's gradient is multiplied with in the gradient of each (m - 1), [rows, 1]
        and not yet divided by O.
        """
        return None if self._energy is None else 2.0 * self._energy[rows].unsqueeze(-1)

    def add(self, rows: slice, grads: tuple[Tensor | None, ...]) -> None:
        """Those of a block, for each target that of u = M z, divided by -2 beta, and that of s."""
        low, codes, total = self._low, self._low.z[rows], self.z[rows]
        for index, (mult, _) in enumerate(low.targets):
            of_u, of_s = grads[2 * index : 2 * index + 2]
            into_mult, into_add = self.weights[2 * index : 2 * index + 2]
            scaled = low.scaled[index]
            if mult is not None and into_mult is not None and of_u is not None:
                into_mult.addmm_(of_u.t(), codes, alpha=-low.form.slope)
                total.addmm_(of_u, mult, alpha=-low.form.slope)
            if scaled is not None and into_add is not None and of_s is not None:
                into_add.addmm_(of_s.t(), codes, alpha=low.form.additive_scale)
                total.addmm_(of_s, scaled)

    def _add_energy(self, grad: Tensor) -> None:
        """The gradient of `additive_energy`."""
        low = self._low
        for scaled, total in zip(low.scaled, self.weights[1::2], strict=True):
            if scaled is not None and total is not None:
                weighted = (2.0 / len(scaled) * grad).unsqueeze(-1) * low.z
                self.z.addmm_(weighted, scaled.t() @ scaled)
                total.addmm_(scaled, weighted.t() @ low.z, alpha=low.form.additive_scale)


# --- elementwise, on a block: plain functions of tensors, which may be compiled. For a target they
# are given y, y + s and u, and write over the last two, which are made for them; where there is no
# s, the second is y itself, and is left as it is.


def _modulate_block(
    y: Tensor, moved: Tensor, u: Tensor | None, slope: float, out: Tensor, energy: Tensor
) -> None:
    out.copy_(_modulated_block(y, moved, u, slope, energy))


def _product_block(
    gate: Tensor,
    gate_moved: Tensor,
    gate_u: Tensor | None,
    up: Tensor,
    up_moved: Tensor,
    up_u: Tensor | None,
    slope: float,
    out: Tensor,
    energy: Tensor,
) -> None:
    gate_out = _modulated_block(gate, gate_moved, gate_u, slope, energy)
    up_out = _modulated_block(up, up_moved, up_u, slope, energy)
    torch.mul(F.silu(gate_out, inplace=gate_out is not gate), up_out, out=out)


def _modulated_block(
    y: Tensor, moved: Tensor, u: Tensor | None, slope: float, energy: Tensor
) -> Tensor:
    """m y + s, with the energy of m added to `energy`."""
    if u is None:
        return moved
    c = _centred(u)
    energy += torch.linalg.vector_norm(c, dim=-1).square_().mul_(slope * slope / c.shape[-1])
    return _with_mult(y, moved, c, slope)


def _centred(u: Tensor) -> Tensor:
    """c = sigmoid(u) - 1/2, with which m = 1 + 2 beta c: exactly 1 at u = 0, and off by no more
    than the rounding of m itself. On a CPU several times as fast as tanh(u / 2), which is 2 c."""
    return u.sigmoid_().sub_(0.5)


def _with_mult(y: Tensor, moved: Tensor, c: Tensor, slope: float) -> Tensor:
    """(1 + 2 beta c) y + s."""
    return torch.addcmul(y, c, y, value=slope) if moved is y else moved.addcmul_(c, y, value=slope)


def _modulate_backward_block(
    grad: Tensor,
    y: Tensor,
    u: Tensor | None,
    slope: float,
    weight: Tensor | None,
    grad_y: Tensor | None,
) -> tuple[Tensor | None, Tensor]:
    """Gradients of u, divided by -2 beta, and of s; that of y is written to `grad_y`."""
    return _modulated_backward(grad, y, None if u is None else _centred(u), slope, weight, grad_y)


def _product_backward_block(
    grad: Tensor,
    gate: Tensor,
    gate_moved: Tensor,
    gate_u: Tensor | None,
    up: Tensor,
    up_moved: Tensor,
    up_u: Tensor | None,
    slope: float,
    weight: Tensor | None,
    grad_gate: Tensor | None,
    grad_up: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The same of both targets."""
    gate_c, up_c = (None if u is None else _centred(u) for u in (gate_u, up_u))
    gate_out = gate_moved if gate_c is None else _with_mult(gate, gate_moved, gate_c, slope)
    up_out = up_moved if up_c is None else _with_mult(up, up_moved, up_c, slope)
    of_up = F.silu(gate_out).mul_(grad)
    of_gate = torch.ops.aten.silu_backward(
        grad * up_out if up_out is up else up_out.mul_(grad), gate_out
    )
    return (
        *_modulated_backward(of_gate, gate, gate_c, slope, weight, grad_gate),
        *_modulated_backward(of_up, up, up_c, slope, weight, grad_up),
    )


def _modulated_backward(
    grad: Tensor,
    y: Tensor,
    c: Tensor | None,
    slope: float,
    weight: Tensor | None,
    grad_y: Tensor | None,
) -> tuple[Tensor | None, Tensor]:
    """From the gradient of m y + s, with m = 1 + 2 beta c and c = sigmoid(u) - 1/2: those of u,
    divided by -2 beta, and of s, and where asked that of y."""
    if grad_y is not None:
        if c is None:
            grad_y.copy_(grad)
        else:
            torch.addcmul(grad, c, grad, value=slope, out=grad_y)
    if c is None:
        return None, grad
    # sigmoid (1 - sigmoid) = 1/4 - c^2
    if weight is None:
        return c.square_().sub_(0.25).mul_(grad).mul_(y), grad
    of_m = torch.addcmul(weight / y.shape[-1] * (slope * c), grad, y)
    return of_m.mul_(c.square_().sub_(0.25)), grad


# --- the same, compiled where that is asked for


class _Body:
    """An elementwise function, as it is or compiled. Where it cannot be compiled that is said once,
    and it is used as it is.

    It is compiled as a whole, so that whatever the compiler lacks, for these arguments or for
    others later, shows before anything is computed. What fails while it runs is an error like any
    other: some of its arguments may have been written over by then.
    """

    def __init__(self, plain: Callable[..., Any]):
        self._plain = plain
        self._compiled: Callable[..., Any] | None = None
        self._failed = False

    def __call__(self, form: Form) -> Callable[..., Any]:
        return self._fast if form.compiled and not self._failed else self._plain

    def _fast(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(self._plain, dynamic=True, fullgraph=True)
        try:
            return self._compiled(*arguments)
        except Exception as error:
            if not _is_of_the_compiler(error):
                raise
            self._failed = True
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            name = self._plain.__name__.strip("_")
            warnings.warn(
                f"--compile: {name} could not be compiled and is computed as it is ({reason})",
                stacklevel=2,
            )
            return self._plain(*arguments)


def _is_of_the_compiler(error: Exception) -> bool:
    """Whether nothing has been computed: there is no compiler, it failed, or it was asked for too
    many forms of one function.
    """
    # here, since it takes a second to load
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)


_modulate, _modulate_backward = _Body(_modulate_block), _Body(_modulate_backward_block)
_product, _product_backward = _Body(_product_block), _Body(_product_backward_block)
