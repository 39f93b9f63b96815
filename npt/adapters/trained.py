"""The forward of a converted layer in training: the student's output, the teacher's, the energy.

This is the formula of npt/adapters/layer.py, fused. Forward and backward of the frozen products and
their modulation,

    p = silu(gate') * up',   y' = m * y + s   for y = gate, up, down

are written by hand. Automatic differentiation of the plain form keeps about fifteen tensors as
large as the MLP's products, with a pass over memory for each. The fused form keeps gate, up and
down. Backward recomputes the rest in blocks of rows that fit a processor's cache. gate and up need
a backward only if their input x does, because of h or of the target `stream`. A 4-bit weight is
dequantised once for teacher and student. Results equal the plain form's up to rounding.

The plain form, which calls every module, runs for layers outside the precision policy
(npt/base/precision.py) and for those with another activation than SiLU, a LoRA around a weight, or
hooks that may change a value. Tests compare the two.

Shapes: N tokens, D hidden, F ffn, R rank, O width of a product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from npt.adapters.converted import attribute_set
from npt.adapters.layer import (
    MULTIPLIERS,
    NPTAdapter,
    NPTLayer,
    modulation_energy,
    student_mlp,
    student_output,
    student_stream,
)
from npt.adapters.products import Gradients, Modulation, Product
from npt.base.linear import (
    effective_dtype,
    is_plain_linear,
    multiply,
    multiply_backward,
    product_weight,
)
from npt.config import STREAM, NPTConfig
from npt.config.adapter import SATURATED
from npt.errors import first_line
from npt.extras import installed
from npt.hooks import has_forward_hooks, is_unfused, may_change

BLOCK = {"cpu": 1 << 19, "cuda": 1 << 23}
"""Elements of a block, by type of device. On a CPU a few blocks fit the last-level cache, with
enough rows for efficient low-rank products. On a GPU memory traffic decides."""

_PRODUCTS = ("gate", "up", "down")


def trained_output(
    layer: NPTLayer, hidden: Tensor, attention: Tensor, *, teach: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the student's output of one converted layer, its energy, and the teacher's output.

    Args:
        layer: a converted layer.
        hidden: h, [N, D].
        attention: a, [N, D].
        teach: also compute the teacher's output. Then h and a must have no graph, and backward must
            run before the next layer's forward.

    Returns:
        o [N, D]; the energy of the modulation [N]; and t [N, D] without a graph, or None.
    """
    adapter = layer.npt
    taught = hidden + attention if teach else None
    if adapter.mode == "floor" or not is_fusable(layer, hidden):
        output, energy, of_teacher = _plain_output(layer, hidden, attention, taught)
    else:
        stream, z = student_stream(layer, hidden, attention)
        assert z is not None
        read, x = _mlp_input(layer, stream, taught)
        weights = [weight for target in _PRODUCTS for weight in adapter.weights_of(target)]
        down, of_teacher, energy = _MLP.apply(
            z, read, layer.mlp, x, teach, adapter.config, *weights
        )
        # the fused form has no stages to show
        if adapter.observer is not None or any(map(has_forward_hooks, _parts(layer.mlp))):
            down, energy = _shown(layer, read, z, down, energy)
        output = stream + down
        adapter.show(o=output)
    if taught is not None:
        with torch.no_grad():
            taught = taught + of_teacher
        adapter.show(t=taught)
    return output, energy, taught


def is_fusable(layer: NPTLayer, hidden: Tensor) -> bool:
    """Return whether the fused form supports a layer's MLP for h [N, D] (see the module)."""
    form = layer.npt.config
    supported = (
        not is_unfused(),
        hidden.dtype == layer.npt.A.dtype == torch.float32,
        form.mult_form == "sigmoid",
        {STREAM, *_PRODUCTS}.issuperset(form.targets),
    )
    # in this order: some devices have no autocast to ask about
    if not all(supported) or torch.is_autocast_enabled(hidden.device.type):
        return False
    # not asked once and for all: hooks, modules and dtypes may change between two passes
    parts = _parts(layer.mlp)
    _, activation, *linears = parts
    is_silu = type(activation) in (nn.SiLU, SiLUActivation)
    if not is_silu or any(map(may_change, parts)):
        return False
    return all(map(_is_supported, linears))


def _is_supported(linear: nn.Module) -> bool:
    """Return whether a module is a plain linear layer that computes in fp32, or dequantises 4-bit
    weights to bf16.
    """
    if not is_plain_linear(linear):
        return False
    dtype = effective_dtype(linear)
    return dtype == "float32" or (dtype == "bfloat16" and isinstance(linear, bnb.nn.Linear4bit))


def _parts(mlp: Any) -> tuple[nn.Module, ...]:
    return mlp, mlp.act_fn, mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _plain_output(
    layer: NPTLayer, hidden: Tensor, attention: Tensor, taught: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [N, D] and the energy [N], operation by operation, and what the MLP adds to the
    teacher's state `taught` [N, D]; empty if there is none.
    """
    of_teacher = hidden.new_empty(0)
    if taught is not None:
        with torch.no_grad():
            of_teacher = layer.mlp(layer.post_attention_layernorm(taught))
    output, terms = student_output(layer, hidden, attention)
    energy = modulation_energy(terms)
    if energy is None:
        energy = torch.zeros(len(hidden), dtype=layer.npt.A.dtype, device=hidden.device)
    return output, energy, of_teacher


def _mlp_input(layer: NPTLayer, stream: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the student's x [N, D] with its graph, and the input rows of `_MLP`."""
    norm = layer.post_attention_layernorm
    if taught is None:
        read = norm(stream)
        return read, read.detach()
    n = len(stream)
    both = norm(torch.cat([stream, taught]))
    own = both[:n]
    # gate needs its rows adjacent, and so does up
    x = torch.cat([both, own])
    if not both.requires_grad:
        own = x[:n]  # not a view of `both`, which can then be freed
    return own, x.detach()


def _shown(
    layer: NPTLayer, read: Tensor, z: Tensor, down: Tensor, energy: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the MLP again in the plain form, from copies, for the layer's hooks and observer.

    Returns down' [N, D] and the energy [N] unchanged; their gradients also flow through the copies.
    """
    x = read.detach().requires_grad_(read.requires_grad)
    with torch.enable_grad():
        plain, terms = student_mlp(layer, x, z.detach(), aside=True)
        shown = modulation_energy(terms)
        energy = energy if shown is None else _Twin.apply(energy, shown)
        return _Twin.apply(down, plain), energy


class _Twin(torch.autograd.Function):
    """Return a tensor whose gradient also goes to a copy computed for an observer."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shown: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class _MLP(torch.autograd.Function):
    """The modulated MLP of the student and, if `teach`, the MLP of its teacher.

    `apply(z, read, mlp, x, teach, config, *weights)` returns down' [N, D], the teacher's output and
    the energy [N]. z is [N, R], `read` the student's x [N, D] with its graph, and weights are M and
    B of gate, up and down. x holds N rows of the student and, with a teacher, N rows of the teacher
    and then the student's rows again.

    With a teacher, gate multiplies the first 2 N rows and up the last 2 N, into four buffers
    [N, F]. The outer two hold the student's gate and up, which backward reads. The inner two hold
    the teacher's gate and up, then p of student and teacher. Backward reuses the student's p for
    its gradient.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, mlp, x, teach, config, *weights = others
        n = len(z)
        width = mlp.gate_proj.out_features
        taught = None
        if teach:
            memory = x.new_empty(4, n, width)
            of_gate = memory[:2]
            inputs = memory[1:3]
            of_up = memory[2:]
            taught = inputs[1]
        else:
            of_gate, inputs, of_up = (x.new_empty(1, n, width) for _ in range(3))
        gate = of_gate[0]
        product = inputs[0]
        up = of_up[-1]
        _multiply_all(mlp.gate_proj, x[: n * len(of_gate)], of_gate)
        _multiply_all(mlp.up_proj, x[len(x) - n * len(of_up) :], of_up)
        backend = _backend(z)
        of_both = [Product(gate, *weights[:2]), Product(up, *weights[2:4])]
        energy = backend(z, config, of_both).forward(product, taught)
        # p of student and teacher in one product; without a teacher, the second part is empty
        weight = product_weight(mlp.down_proj, x.dtype)
        both = multiply(mlp.down_proj, weight, inputs.flatten(0, 1))
        down, teacher = both.split([n, len(both) - n])
        own = None
        if "down" in config.targets:
            own = down
            down = torch.empty_like(own)
            of_down = Product(own, *weights[4:])
            energy = energy + backend(z, config, [of_down]).forward(down)
        ctx.mlp = mlp
        ctx.config = config
        ctx.backend = backend
        if teach:
            # can be freed early in backward, but would defeat gradient checkpointing
            ctx.freed = own, weight, product
            ctx.save_for_backward(gate, up, z, *weights)
        else:
            ctx.freed = None
            # if the gradient goes on, all layers' graphs coexist: dense weights would fill memory
            kept = None if ctx.needs_input_grad[1] else weight
            ctx.save_for_backward(gate, up, z, *weights, own, kept, None)
        ctx.set_materialize_grads(False)  # an energy that no loss reads has no gradient
        ctx.mark_non_differentiable(teacher)
        return down, teacher, energy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Any, _: None, grad_energy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        mlp = ctx.mlp
        gate, up, z, *others = ctx.saved_tensors
        own, weight, product = ctx.freed or others[6:]
        ctx.freed = None
        if grad is None:
            grad = z.new_zeros(len(z), mlp.down_proj.out_features)
        goes_on = ctx.needs_input_grad[1]  # to x
        grad_z = None
        grad_x = None
        grads: list[Tensor | None] = [None] * 6
        # without M and B of gate and up, nobody needs the gradient of p
        deeper = goes_on or not {"gate", "up"}.isdisjoint(ctx.config.targets)
        if own is not None:
            of_down = ctx.backend(z, ctx.config, [Product(own, *others[4:6])])
            of_y = torch.empty_like(own) if deeper else None
            grad_z, grads[4:] = of_down.backward(grad, grad_energy, [of_y])
            grad = of_y
            del own, of_down
        if deeper:
            if weight is None:
                weight = product_weight(mlp.down_proj, gate.dtype)
            # into the memory of p, which is not read again
            of_product = multiply_backward(mlp.down_proj, weight, grad, out=product)
            del weight  # free it before the next products
            of_both = [Product(gate, *others[:2]), Product(up, *others[2:4])]
            of_mlp = ctx.backend(z, ctx.config, of_both)
            into = [torch.empty_like(y) if goes_on else None for y in (gate, up)]
            of_z, grads[:4] = of_mlp.backward(of_product, grad_energy, into)
            grad_z = of_z if grad_z is None else of_z + grad_z
            del of_product
            if goes_on:
                of_gate, of_up = into
                grad_x = _input_gradient(mlp.gate_proj, of_gate)
                grad_x.add_(_input_gradient(mlp.up_proj, of_up))
        return grad_z, grad_x, None, None, None, None, *grads


def _multiply_all(module: Any, x: Tensor, out: Tensor) -> None:
    """Write a product to consecutive [N, F] buffers; no dense weight remains."""
    multiply(module, product_weight(module, x.dtype), x, out.flatten(0, 1))


def _input_gradient(module: Any, grad: Any) -> Tensor:
    """Return the gradient at the input of a product; no dense weight remains."""
    return multiply_backward(module, product_weight(module, grad.dtype), grad)


def _backend(z: Tensor) -> type[Modulation]:
    """Return Triton's for a CUDA tensor if it works, and torch's for others, fake ones included."""
    if z.is_cuda and type(z) is Tensor:
        return _backend_on(z.get_device())
    return TorchModulation


@cache
def _backend_on(device: int) -> type[Modulation]:
    if not installed("triton"):
        return TorchModulation
    try:
        from npt.adapters import kernels

        kernels.try_out(device)
    except Exception as error:  # from an import, a compiler, a linker or a driver
        warnings.warn(
            f"Triton cannot build kernels for cuda:{device}: {first_line(error)}. Training runs"
            " slower without them: install a C compiler and Python's headers",
            stacklevel=2,
        )
        return TorchModulation
    return kernels.TritonModulation


@dataclass
class TorchModulation(Modulation):
    """Modulates with torch's operations, in blocks of rows."""

    def __post_init__(self) -> None:
        self._parts = [_ProductInBlocks(self.z, self.config, *each) for each in self.products]

    def forward(self, out: Tensor, taught: Tensor | None = None) -> Tensor:
        if taught is not None:
            taught.mul_(F.silu(out, inplace=True))
        energy = self.z.new_zeros(len(self.z))
        for part in self._parts:
            part.add_energy_of_shift(energy)
        for rows in self._blocks(out):
            moved = [part.forward(rows, energy) for part in self._parts]
            if len(moved) == 1:
                out[rows] = moved[0]
            else:
                gate, up = moved
                torch.mul(F.silu(gate), up, out=out[rows])
        return energy

    def backward(
        self, grad: Tensor, grad_energy: Tensor | None, into: Sequence[Tensor | None]
    ) -> Gradients:
        grad_z = torch.zeros_like(self.z)
        for part, of_y in zip(self._parts, into, strict=True):
            part.begin_backward(grad_z, grad_energy, of_y)
        for rows in self._blocks(grad):
            cs = [part.c(rows) for part in self._parts]
            of_parts = [grad[rows]]
            if len(cs) > 1:
                of_parts = self._through_silu(rows, of_parts[0], cs)
            for part, of_part, c in zip(self._parts, of_parts, cs, strict=True):
                part.backward(rows, of_part, c)
        return grad_z, [of_weight for part in self._parts for of_weight in part.grads]

    def _through_silu(self, rows: slice, grad: Tensor, cs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients of a block's gate' and up' [n, F] from that of silu(gate') * up'."""
        gate, up = (part.modulated(rows, c) for part, c in zip(self._parts, cs, strict=True))
        of_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return [of_gate, F.silu(gate).mul_(grad)]

    def _blocks(self, like: Tensor) -> Iterator[slice]:
        """Yield the rows of an [N, O] tensor in blocks. O, R and the device set their length.

        A block has at least R rows: with fewer, reading M and B would take most of the time.
        """
        fitting = BLOCK.get(like.device.type, BLOCK["cuda"]) // max(1, like.shape[-1])
        length = max(1, self.z.shape[-1], fitting)
        for start in range(0, len(like), length):
            yield slice(start, start + length)


class _ProductInBlocks:
    """One product's m y + s in blocks of rows, and the gradients of z, M and B.

    With c = sigmoid(M z) - 1/2, m = 1 + 2 beta c. This m is exactly 1 at M z = 0, and its error
    stays within the rounding of m. On a CPU sigmoid is several times as fast as tanh(M z / 2).

    Attributes:
        add: alpha B.
        grads: of M and B, in backward the sums over the blocks so far.
    """

    def __init__(
        self, z: Tensor, config: NPTConfig, y: Tensor, mult: Tensor | None, add: Tensor | None
    ):
        self.z = z
        self.y = y
        self.mult: Any = mult
        self.grads: list[Any] = []
        self.alpha = config.additive_scale
        self.slope = 2.0 * config.mult_bound
        self.add = None if add is None else self.alpha * add

    def c(self, rows: slice) -> Tensor | None:
        """Return c of these rows [n, O], None without M."""
        if self.mult is None:
            return None
        return torch.mm(self.z[rows], self.mult.t()).sigmoid_().sub_(0.5)

    def modulated(self, rows: slice, c: Tensor | None) -> Tensor:
        """Return m y + s of these rows [n, O]; a view of y without modulation."""
        y = self.y[rows]
        if self.add is None:
            return y if c is None else torch.addcmul(y, c, y, value=self.slope)
        moved = torch.addmm(y, self.z[rows], self.add.t())
        return moved if c is None else moved.addcmul_(c, y, value=self.slope)

    def forward(self, rows: slice, energy: Tensor) -> Tensor:
        """Return `modulated`; add the mean over channels of (m - 1)^2 to the energy [N]."""
        c = self.c(rows)
        if c is not None:
            norm = torch.linalg.vector_norm(c, dim=-1)
            weight = self.slope * self.slope / c.shape[-1]
            energy[rows] += norm.square_().mul_(weight)
        return self.modulated(rows, c)

    def add_energy_of_shift(self, energy: Tensor) -> None:
        """Add the mean over channels of s^2 to the energy [N]."""
        if self.add is not None:
            energy += _squared_norms(self.z, self.add.t() @ self.add) / len(self.add)

    def begin_backward(
        self, grad_z: Tensor, grad_energy: Tensor | None, grad_y: Tensor | None
    ) -> None:
        """Start the sums of gradients with those of the additive energy."""
        self.grad_z = grad_z
        self.grad_energy = grad_energy
        self.grad_y = grad_y
        weights = (self.mult, self.add)
        self.grads = [None if weight is None else torch.zeros_like(weight) for weight in weights]
        if self.add is not None and grad_energy is not None:
            weight = 2.0 / len(self.add) * grad_energy
            weighted = weight.unsqueeze(-1) * self.z
            grad_z.addmm_(weighted, self.add.t() @ self.add)
            self.grads[1].addmm_(self.add, weighted.t() @ self.z, alpha=self.alpha)

    def backward(self, rows: slice, grad: Tensor, c: Tensor | None) -> None:
        """Backpropagate m y + s for a block: add to the gradients of z, M and B, and write that of
        y, if wanted. It overwrites c.
        """
        codes = self.z[rows]
        grad_z = self.grad_z[rows]
        into_mult, into_add = self.grads
        if self.grad_y is not None:
            into_y = self.grad_y[rows].copy_(grad)
            if c is not None:
                into_y.addcmul_(c, grad, value=self.slope)
        if c is not None:
            of_u = self._gradient_of_u(rows, grad, c)
            into_mult.addmm_(of_u.t(), codes, alpha=-self.slope)
            grad_z.addmm_(of_u, self.mult, alpha=-self.slope)
        if self.add is not None:
            into_add.addmm_(grad.t(), codes, alpha=self.alpha)
            grad_z.addmm_(grad, self.add)  # which holds alpha already

    def _gradient_of_u(self, rows: slice, grad: Tensor, c: Tensor) -> Tensor:
        """Return the gradient of u = M z, divided by -2 beta, in a block; overwrite c.

        sigmoid (1 - sigmoid) = 1/4 - c^2.
        """
        y = self.y[rows]
        if self.grad_energy is None:
            return c.square_().sub_(0.25).mul_(grad).mul_(y)
        weight = 2.0 * self.grad_energy[rows].unsqueeze(-1) / y.shape[-1]
        of_u = torch.addcmul(weight * (self.slope * c), grad, y)
        return of_u.mul_(c.square_().sub_(0.25))


def _squared_norms(z: Tensor, gram: Tensor) -> Tensor:
    """Return |s|^2 [N] from z [N, R] and alpha^2 B'B. The wide s itself is not computed."""
    squares = ((z @ gram) * z).sum(dim=-1)
    # rounding may leave a negative sum
    return squares.clamp_min_(0.0)


MODULATION = ("multiplier_change", "at_bounds", "code_norm", "shift_norm", "active")
"""Figures of a layer's modulation, means over tokens: |m - 1| and the share of multipliers at a
bound, over all products; the norm of z; the norm of the shifts of all targets together, that of the
stream in units of r if there is a token part; the number of z's entries that are not 0."""


class ModulationMeter:
    """Measures the modulation of training passes from the codes that they compute anyway.

    It stands where a code could be replaced, measures what a replacement that is there already
    makes of it, and returns that. So it changes no bit, keeps nothing for backward, and leaves its
    sums on the device. A layer that backward computes again is measured again, which changes no
    mean.
    """

    def __init__(self, adapters: Sequence[NPTAdapter]):
        self._spreads = {adapter: adapter.config.multiplier_spread for adapter in adapters}
        self._sums: dict[NPTAdapter, Tensor] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Add up the figures of a pass over a micro-batch or a part of it. An error drops all."""
        recodes = [(each, partial(self._measure, each, each.recode)) for each in self._spreads]
        try:
            with attribute_set("recode", recodes):
                yield
        except BaseException:
            self._sums = {}
            raise

    def take(self) -> Tensor:
        """Return and forget the sums: for each layer the number of tokens, then `MODULATION` summed
        over them [layers * 6]. They are 0 for a layer that the passes left out.
        """
        sums = self._sums
        self._sums = {}
        device = next(iter(self._spreads)).A.device
        none = torch.zeros(1 + len(MODULATION), device=device)
        return torch.cat([sums.get(adapter, none) for adapter in self._spreads])

    def _measure(
        self, adapter: NPTAdapter, recode: Callable[[Tensor], Tensor] | None, z: Tensor
    ) -> Tensor:
        if recode is not None:
            z = recode(z)
        sums = _strength(adapter, z.detach().flatten(0, -2), *self._spreads[adapter])
        if adapter in self._sums:
            sums = self._sums[adapter] + sums
        self._sums[adapter] = sums
        return z


@torch.no_grad()
def _strength(adapter: NPTAdapter, z: Tensor, middle: float, half: float) -> Tensor:
    """Return the number of tokens and the sums of `MODULATION` over them, from z [N, R]: [6].

    middle, half: the middle of the multipliers' range, and half its width.
    """
    form = adapter.config
    sums = z.new_zeros(1 + len(MODULATION))
    multiplier = MULTIPLIERS[form.mult_form]
    channels = sum(len(mult) for mult in adapter.M.values())
    block = BLOCK.get(z.device.type, BLOCK["cuda"])
    limit = SATURATED * half
    for mult in adapter.M.values():
        length = max(1, block // len(mult))
        for codes in z.split(length):
            m = multiplier(F.linear(codes, mult), form.mult_bound)
            # without names, which would keep a block while the next is computed
            sums[1] += (m - 1.0).abs_().sum() / channels
            # in fp32: a sum of bools is four times as slow on a CPU
            sums[2] += m.sub_(middle).abs_().gt_(limit).sum() / channels
    sums[0].fill_(len(z))
    norms = torch.linalg.vector_norm(z, dim=-1)
    sums[3] = norms.sum()
    sums[5] = torch.count_nonzero(z)
    gram = z.new_zeros(z.shape[-1], z.shape[-1])
    for target, add in adapter.B.items():
        if target == STREAM and adapter.scale is not None:
            add = add / adapter.scale  # in units of the token's size r
        gram.addmm_(add.t(), add, alpha=form.additive_scale**2)
    sums[4] = _squared_norms(z, gram).sqrt_().sum()
    return sums
