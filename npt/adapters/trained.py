"""The output of a converted layer in training: the student's, the teacher's, and the energy.

The formula is that of npt/adapters/layer.py, fused: frozen products and modulation are computed by
hand, forward and backward, so that no more is computed and kept than necessary. gate and up need no
backward unless what they read has one, by h or by the target `stream`; a packed weight is
dequantised once for teacher and student, and down_proj's once for forward and backward where the
one follows the other; the layers of a pass use one piece of memory after the other.

A layer in another precision than the policy's (npt/base/precision.py), with another activation than
SiLU, a LoRA around a weight, or hooks that may change a value takes the plain form, which calls
every module as it is and is the tests' yardstick.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from npt.adapters.fused import (
    Form,
    LowRank,
    Modulated,
    is_unfused,
    product_backward,
    product_forward,
)
from npt.adapters.layer import (
    NPTLayer,
    modulated_product,
    modulation_energy,
    student_output,
    student_stream,
)
from npt.base.hooks import has_forward_hooks, may_change
from npt.base.linear import (
    effective_dtype,
    is_plain_linear,
    multiply,
    multiply_backward,
    product_weight,
)
from npt.config import STREAM


class Workspace:
    """Memory that layers use one after the other: each must end its backward before the next."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.uses = 0

    def rows(self, count: int, width: int, like: Tensor) -> Tensor:
        """Return [count, width], uninitialised; what was handed out before is void."""
        self.uses += 1
        key = like.device, like.dtype
        if key not in self._kept or self._kept[key].numel() < count * width:
            self._kept.pop(key, None)  # before the larger one is made
            self._kept[key] = torch.empty(count * width, device=like.device, dtype=like.dtype)
        return self._kept[key][: count * width].view(count, width)


def stacked_outputs(
    layer: NPTLayer,
    hidden: Tensor,
    attention: Tensor,
    regularised: bool = True,
    space: Workspace | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return teacher's and student's output of one converted layer from the same h and a.

    Args:
        layer: a converted layer.
        hidden: h, [N, D], without graph.
        attention: a, [N, D], without graph.
        regularised: the energy is differentiated.
        space: shared by layers whose backward comes before the next one's forward; None if graphs
            live longer.

    Returns:
        t [N, D] without graph, o [N, D], and the energy of the modulation [N], None if nothing is
        modulated.
    """
    taught = hidden + attention
    if is_fusable(layer, hidden):
        output, energy, of_teacher = _fused(layer, hidden, attention, regularised, space, taught)
        target = taught + of_teacher
    else:
        with torch.no_grad():
            target = taught + layer.mlp(layer.post_attention_layernorm(taught))
        output, energy = _plain(layer, hidden, attention, regularised)
    layer.npt.show(t=target)
    return target, output, energy


def trained_output(
    layer: NPTLayer,
    hidden: Tensor,
    attention: Tensor,
    regularised: bool = True,
    space: Workspace | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the student's output of one converted layer and the energy of its modulation.

    Args as of `stacked_outputs`, but h and a may have a graph.
    """
    if layer.npt.mode == "floor" or not is_fusable(layer, hidden):
        return _plain(layer, hidden, attention, regularised)
    return _fused(layer, hidden, attention, regularised, space)[:2]


def is_fusable(layer: NPTLayer, hidden: Tensor) -> bool:
    """Return whether a layer's MLP can be computed by hand from h [N, D].

    It must compute in fp32 (4-bit products in fp32 or bf16), with SiLU, in plain linear layers, and
    nobody may change a value on the way.
    """
    mlp = layer.mlp
    parts = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return (
        not is_unfused()
        and layer.npt.config.mult_form == "sigmoid"
        and hidden.dtype == layer.npt.A.dtype == torch.float32
        and not torch.is_autocast_enabled(hidden.device.type)
        and type(mlp.act_fn) in (nn.SiLU, SiLUActivation)
        # a hook on it is called when stages are shown
        and (layer.npt.observer is not None or not has_forward_hooks(mlp.act_fn))
        and all(map(is_plain_linear, parts))
        and all(
            effective_dtype(part) == "float32"
            or (isinstance(part, bnb.nn.Linear4bit) and effective_dtype(part) == "bfloat16")
            for part in parts
        )
        and not any(may_change(module) for module in (mlp, mlp.act_fn, *parts))
        and {STREAM, "gate", "up", "down"}.issuperset(layer.npt.config.targets)
    )


def _plain(
    layer: NPTLayer, hidden: Tensor, attention: Tensor, regularised: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the same as `trained_output`, by the modules as they are."""
    output, terms = student_output(layer, hidden, attention)
    with torch.set_grad_enabled(torch.is_grad_enabled() and regularised):
        return output, modulation_energy(terms)


def _fused(
    layer: NPTLayer,
    hidden: Tensor,
    attention: Tensor,
    regularised: bool,
    space: Workspace | None,
    taught: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return o [N, D], the energy [N] of all products, None if none is modulated, and the teacher's
    MLP [N, D] from its stream, if that is given.
    """
    adapter = layer.npt
    form = Form(adapter.config.mult_bound, adapter.config.additive_scale, regularised)
    z = adapter.code(attention)
    stream = student_stream(layer, hidden, attention, z)
    read, x = _mlp_input(layer, stream, taught)
    weights = (*adapter.weights_of("gate"), *adapter.weights_of("up"))
    # If neither is modulated, a backward through the MLP would bring z nothing but zeros.
    code = z if any(w is not None for w in weights) else z.detach()
    shown = None if adapter.observer is None else _Shown(layer, read, z)
    others = layer.mlp, x, taught is not None, form, space, shown
    down, of_teacher, energy = _MLP.apply(code, *weights, read, *others)
    changed = down
    if adapter.config.targets == (STREAM,):
        energy = None
    if "down" in adapter.config.targets:
        changed, of_down = Modulated.apply(down, z, *adapter.weights_of("down"), form)
        energy = energy + of_down
    if shown is not None:
        changed, energy = shown.tie(changed, energy, regularised)
    output = stream + changed
    adapter.show(o=output)
    return output, energy, of_teacher


def _mlp_input(layer: NPTLayer, stream: Tensor, taught: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the student's x [N, D] with its graph, and the rows that `_MLP` multiplies."""
    if taught is None:
        read = layer.post_attention_layernorm(stream)
        return read, read.detach()
    both = layer.post_attention_layernorm(torch.cat([stream, taught]))
    # gate and up each find the rows of both next to each other
    x = torch.cat([both, both[: len(stream)]])
    return (both if both.requires_grad else x)[: len(stream)], x.detach()


class _Shown:
    """The plain form's stages of an observed layer's MLP, computed once more from copies. What the
    layer gives, and every gradient that counts, has the bits that it has without an observer.
    """

    def __init__(self, layer: NPTLayer, read: Tensor, z: Tensor):
        self._layer, self._read, self._z = layer, read, z.detach()

    def show_product(self) -> None:
        """Show the stages up to down_proj's input."""
        mlp, x = self._layer.mlp, self._read.detach().requires_grad_(self._read.requires_grad)
        with torch.enable_grad():
            gate, up = _product(mlp.gate_proj, x), _product(mlp.up_proj, x)
            self._inputs, self._terms = modulated_product(
                self._layer, gate, up, self._z, aside=True
            )
        self._layer.npt.show(product=self._inputs)

    def tie(
        self, changed: Tensor, energy: Tensor | None, regularised: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Show the stages after down_proj; return down' [N, D] and the energy [N] as training has
        them, with gradients that go through what was shown, too.
        """
        adapter, down_proj = self._layer.npt, self._layer.mlp.down_proj
        down, m, s = adapter.apply_to(
            "down", _product(down_proj, self._inputs), self._z, aside=True
        )
        changed = _Twin.apply(changed, down)
        if energy is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and regularised):
                energy = _Twin.apply(energy, modulation_energy([*self._terms, (m, s)]))
        adapter.show(m_down=m, s_down=s, mlp=changed)
        return changed, energy


def _product(module: nn.Module, x: Tensor) -> Tensor:
    return multiply(module, product_weight(module, x.dtype), x)


class _Twin(torch.autograd.Function):
    """A tensor whose gradient also goes to a copy of it that was computed for an observer."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shown: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class _MLP(torch.autograd.Function):
    """x through gate, up, modulation, SiLU and down, the teacher's rows next to the student's.

    The rows x are the student's, or these, the teacher's and these once more: gate takes the first
    two of the three, up the last two. Of four pieces of memory [N, F] the outer two are the
    student's gate and up, which backward reads; the inner two are the teacher's gate and up, which
    become down's inputs of student and teacher. In backward the first of these becomes the gradient
    of the student's; without a workspace, where the graph may live long, it gets memory of its own.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        *weights, _, mlp, x, with_teacher, form, space, shown = others
        n, pieces, width = len(z), 4 if with_teacher else 3, mlp.gate_proj.out_features
        if space is None and pieces == 3:
            gate, product, up = (x.new_empty(n, width) for _ in range(3))
            taught, inputs = [], product
        else:
            size = pieces * n, width
            memory = x.new_empty(size) if space is None else space.rows(*size, x)
            gate, product, *taught, up = memory.split(n) if n else [memory] * pieces
            inputs = memory[n : (pieces - 1) * n]
        products = (mlp.gate_proj, x, gate), (mlp.up_proj, x, up)
        if with_teacher:
            of_gate, of_up = memory[: 2 * n], memory[2 * n :]
            products = (mlp.gate_proj, x[: 2 * n], of_gate), (mlp.up_proj, x[n:], of_up)
        for module, rows, out in products:
            if has_forward_hooks(module):
                out.copy_(module(rows))
            else:
                multiply(module, product_weight(module, x.dtype), rows, out)
        if with_teacher:
            taught[0].mul_(F.silu(product, inplace=True))
        energy = product_forward(gate, up, LowRank(z, weights, form), product)
        if shown is not None:
            shown.show_product()
        weight = product_weight(mlp.down_proj, x.dtype)
        hooked = has_forward_hooks(mlp.down_proj)
        down = mlp.down_proj(inputs) if hooked else multiply(mlp.down_proj, weight, inputs)
        ctx.mlp, ctx.space, ctx.form = mlp, space, form
        ctx.use, ctx.weight = (None, None) if space is None else (space.uses, weight)
        # Where every layer's graph lives until the end, dense weights would fill the memory.
        ctx.goes_on = ctx.needs_input_grad[5]  # to x, by what is read
        saved = None if space is not None or ctx.goes_on else weight
        ctx.save_for_backward(gate, up, None if space is None else product, saved, z, *weights)
        student, teacher = down.split([n, len(inputs) - n])
        ctx.mark_non_differentiable(*([teacher] if form.regularised else [teacher, energy]))
        return student, teacher, energy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, _: Tensor, grad_energy: Tensor
    ) -> tuple[Tensor | None, ...]:
        space, mlp = ctx.space, ctx.mlp
        assert space is None or space.uses == ctx.use, (
            "another layer has used this layer's memory before its backward"
        )
        gate, up, product, saved, z, *weights = ctx.saved_tensors
        weight = ctx.weight if saved is None else saved
        if weight is None:
            weight = product_weight(mlp.down_proj, gate.dtype)
        of_product = multiply_backward(mlp.down_proj, weight, grad, out=product)
        ctx.weight = weight = None  # not held through what follows
        low = LowRank(z, weights, ctx.form, grad_energy)
        grad_x = None
        if not ctx.goes_on:
            product_backward(of_product, gate, up, low)
        else:
            of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
            product_backward(of_product, gate, up, low, of_gate, of_up)
            del of_product
            parts = (mlp.gate_proj, of_gate), (mlp.up_proj, of_up)
            of_x = (multiply_backward(m, product_weight(m, g.dtype), g) for m, g in parts)
            grad_x = next(of_x).add_(next(of_x))
        return low.grad_z, *low.grad_weights, grad_x, *[None] * 6
