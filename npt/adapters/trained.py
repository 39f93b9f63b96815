"""What a converted layer gives while it is trained: its output, the teacher's where both start from
the same h, and the energy.

The frozen products and the modulation are computed by hand here, forward and backward, so that no
more is computed and kept than has to be: gate and up see inputs that no adapter has touched, and
need no backward; a packed weight is dequantised once for teacher and student, and down_proj's once
for forward and backward; the layers of a pass use one piece of memory after the other. Where a
layer computes in another precision than the policy's (npt/base/precision.py), with another
activation than SiLU, with a LoRA around a weight, or with hooks that may change a value on the way,
the plain form of `npt.adapters.layer` is used, which calls every module as it stands and also is
the yardstick of the tests.

Whoever observes a layer, or has hooks that only look (npt/base/hooks.py), sees the plain form's
stages, made aside from copies of the adapter's weights. What the layer gives, and every gradient
that counts, has the same bits as without him.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from npt.adapters.adapter import NPTAdapter
from npt.adapters.fused import (
    Form,
    Modulated,
    is_unfused,
    modulated_product,
    product_backward,
    product_forward,
)
from npt.adapters.layer import NPTLayer, Terms, stages_to_product, student_output, student_stream
from npt.adapters.modulation import modulation_energy
from npt.base.hooks import is_hooked, may_change
from npt.base.linear import (
    is_plain_linear,
    multiply,
    multiply_backward,
    product_weight,
    quantized_linears,
)
from npt.base.precision import effective_dtype


class Workspace:
    """Memory that is used by one layer after the other. A layer's backward has to come before the
    next layer's forward.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.uses = 0

    def rows(self, count: int, width: int, like: Tensor) -> Tensor:
        """[count, width], uninitialised; what was handed out before is void."""
        self.uses += 1
        key = like.device, like.dtype
        if key not in self._kept or self._kept[key].numel() < count * width:
            self._kept.pop(key, None)  # before the larger one is made
            self._kept[key] = torch.empty(count * width, device=like.device, dtype=like.dtype)
        return self._kept[key][: count * width].view(count, width)


@dataclass(frozen=True)
class Work:
    """How layers are computed in training.

    regularised: the energy is differentiated. compiled: elementwise work by `torch.compile`. space:
    shared by layers whose backward comes before the next one's forward; None where graphs live
    longer.
    """

    regularised: bool = True
    compiled: bool = False
    space: Workspace | None = field(default=None, repr=False)


def stacked_outputs(
    layer: NPTLayer, hidden: Tensor, attention: Tensor, work: Work = Work()
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Teacher's and student's output of one converted layer from the same h and a.

    Args:
        layer: a converted layer; only frozen weights and `layer.npt` are used.
        hidden: h, [N, D], without graph.
        attention: a, [N, D], without graph.
        work: see there.

    Returns:
        t [N, D] without graph, o [N, D], and the energy of the modulation [N], None where nothing
        is modulated.
    """
    adapter = layer.npt
    if not is_fusable(layer, hidden):
        return _plain_stacked_outputs(layer, hidden, attention, work)
    with torch.no_grad():
        teacher_stream = hidden + attention
        stream = student_stream(layer, hidden, attention)
        shared = adapter.config.residual == "keep"  # the MLP reads the same in both
        n = len(hidden)
        x = layer.post_attention_layernorm(
            teacher_stream if shared else torch.cat([stream, teacher_stream])
        )
    z = adapter.code(attention)
    if not shared:
        # so that both gate and up find the rows of the two side by side, in the order that each
        # needs
        x = torch.cat([x, x[:n]])
    frozen = _Frozen(layer, n, "shared" if shared else "apart", work.space)
    output, energy, teacher_down = _student_rows(
        layer, hidden, attention, stream, x, z, frozen, work
    )
    teacher = teacher_stream + teacher_down
    adapter.show(t=teacher)
    return teacher, output, energy


def trained_output(
    layer: NPTLayer, hidden: Tensor, attention: Tensor, work: Work = Work()
) -> tuple[Tensor, Tensor | None]:
    """The student's output of one converted layer, as `student_output` computes it, with the energy
    [N] in place of the terms.

    Args:
        layer: a converted layer.
        hidden: h, [N, D], with a graph or without.
        attention: a, [N, D], likewise.
        work: see there.
    """
    adapter = layer.npt
    if adapter.mode == "floor" or not is_fusable(layer, hidden):
        output, found = student_output(layer, hidden, attention)
        return output, _energy(found, work)
    stream = student_stream(layer, hidden, attention)
    x = layer.post_attention_layernorm(stream)
    z = adapter.code(attention)
    if not x.requires_grad:
        frozen = _Frozen(layer, len(hidden), "alone", work.space)
        return _student_rows(layer, hidden, attention, stream, x, z, frozen, work)[:2]
    gate, up = layer.mlp.gate_proj(x), layer.mlp.up_proj(x)
    product, energy = modulated_product(
        gate, up, z, adapter.weights_of("gate"), adapter.weights_of("up"), _form(adapter, work)
    )
    terms: Terms = []
    if adapter.observer is not None:
        shown, terms = _aside(
            layer,
            gate.detach().requires_grad_(),
            up.detach().requires_grad_(),
            z,
            h=hidden,
            a=attention,
            stream=stream,
        )
        product = _Twin.apply(product, shown)
        adapter.show(product=product)
    down = layer.mlp.down_proj(product)
    changed = down
    if "down" in adapter.config.targets:
        weights_of_down = adapter.weights_of("down")
        changed, of_down = Modulated.apply(down, z, *weights_of_down, _form(adapter, work))
        energy = energy + of_down
    if adapter.observer is None:
        return stream + changed, energy
    return _observed(layer, stream, changed, down.detach(), z, energy, terms, work)


def is_fusable(layer: NPTLayer, hidden: Tensor) -> bool:
    """Whether this layer's MLP can be computed by hand from h [N, D]: in fp32, or in fp32 but for
    4-bit products in bf16, with SiLU, of plain linear layers, where nobody may change what is
    computed on the way."""
    mlp, dtype = layer.mlp, torch.float32
    parts = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return (
        not is_unfused()
        and layer.npt.config.mult_form == "sigmoid"
        and hidden.dtype == layer.npt.A.dtype == dtype
        and not torch.is_autocast_enabled(hidden.device.type)
        and type(mlp.act_fn) in (nn.SiLU, SiLUActivation)
        # a hook on it is called where stages are shown
        and (layer.npt.observer is not None or not is_hooked(mlp.act_fn))
        and all(_is_by_hand(part) for part in parts)
        and not any(may_change(module) for module in (mlp, mlp.act_fn, *parts))
        and {"gate", "up", "down"}.issuperset(layer.npt.config.targets)
    )


def _is_by_hand(part: nn.Module) -> bool:
    """Whether `multiply` computes as the module does."""
    if not is_plain_linear(part):
        return False
    return effective_dtype(part) in (
        ("float32", "bfloat16") if quantized_linears(part) else ("float32",)
    )


def _form(adapter: NPTAdapter, work: Work) -> Form:
    return Form(
        adapter.config.mult_bound, adapter.config.additive_scale, work.regularised, work.compiled
    )


def _energy(terms: Terms, work: Work) -> Tensor | None:
    with torch.set_grad_enabled(torch.is_grad_enabled() and work.regularised):
        return modulation_energy(terms)


def _plain_stacked_outputs(
    layer: NPTLayer, hidden: Tensor, attention: Tensor, work: Work
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`stacked_outputs`, each of the two by the modules as they stand."""
    with torch.no_grad():
        stream = hidden + attention
        teacher = stream + layer.mlp(layer.post_attention_layernorm(stream))
    output, found = student_output(layer, hidden, attention)
    layer.npt.show(t=teacher)
    return teacher, output, _energy(found, work)


@dataclass
class _Frozen:
    """The frozen side of a layer's MLP.

    students: rows N of the student. teacher: whose rows stand behind them, with x of their own
    (`apart`), with the student's x (`shared`), or not at all (`alone`). look: is given copies of
    gate and up [N, F] in front of down_proj. weight: of down_proj, dense, kept where somebody
    looks. space: None where graphs live longer; what backward reads is then saved in the graph
    alone, so that a checkpoint can drop it.
    """

    layer: NPTLayer
    students: int
    teacher: str
    space: Workspace | None
    look: Callable[[Tensor, Tensor], None] | None = None
    weight: Tensor | None = None


class _MLP(torch.autograd.Function):
    """x through gate, up, modulation, SiLU and down, with the teacher's rows beside the student's,
    and back to z and the adapter's weights.

    x is the student's rows, or these, the teacher's and these once more: gate takes the first two
    of the three, up the last two. Then of four pieces of memory [N, F] the outer two are the
    student's gate and up, which are kept for backward, and the inner two the teacher's, which
    become what down reads of the two, and the first of them in backward the gradient of what it
    read of the student.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, *others: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        *weights, x, frozen, form = others
        n, mlp, space = frozen.students, frozen.layer.mlp, frozen.space
        pieces = 3 if frozen.teacher == "alone" else 4
        width = mlp.gate_proj.out_features
        memory = (
            x.new_empty(pieces * n, width) if space is None else space.rows(pieces * n, width, x)
        )
        gate, product, *behind, up = _parts(memory, n, pieces)
        if frozen.teacher == "apart":
            _multiply_into(mlp.gate_proj, x[: 2 * n], memory[: 2 * n])
            _multiply_into(mlp.up_proj, x[n:], memory[2 * n :])
            behind[0].mul_(F.silu(product, inplace=True))
        else:
            _multiply_into(mlp.gate_proj, x, gate)
            _multiply_into(mlp.up_proj, x, up)
            if frozen.teacher == "shared":
                F.silu(behind[0].copy_(gate), inplace=True).mul_(up)
        energy = product_forward(gate, up, z, weights, form, product)
        if frozen.look is not None:
            with torch.enable_grad():
                frozen.look(gate.clone(), up.clone())
        weight = product_weight(mlp.down_proj, x.dtype)
        read = memory[n : (pieces - 1) * n]
        down = (
            mlp.down_proj(read)
            if is_hooked(mlp.down_proj)
            else multiply(mlp.down_proj, weight, read)
        )
        frozen.weight = weight if frozen.look is not None else None
        ctx.frozen, ctx.form, ctx.pieces = frozen, form, pieces
        ctx.use, ctx.weight = (None, None) if space is None else (space.uses, weight)
        ctx.save_for_backward(memory, weight if space is None else None, z, *weights)
        student, teacher = down.split([n, len(read) - n])
        ctx.mark_non_differentiable(*([teacher] if form.regularised else [teacher, energy]))
        return student, teacher, energy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, _: Tensor, grad_energy: Tensor
    ) -> tuple[Tensor | None, ...]:
        space, down_proj = ctx.frozen.space, ctx.frozen.layer.mlp.down_proj
        assert space is None or space.uses == ctx.use, (
            "another layer has used this layer's memory before its backward"
        )
        memory, saved, z, *weights = ctx.saved_tensors
        gate, product, *_others, up = _parts(memory, len(z), ctx.pieces)
        multiply_backward(down_proj, ctx.weight if saved is None else saved, grad, out=product)
        ctx.weight = None  # a graph may outlive its backward
        sums = product_backward(product, grad_energy, gate, up, z, weights, ctx.form)
        return sums.z, *sums.weights, None, None, None


def _parts(memory: Tensor, rows: int, pieces: int) -> Sequence[Tensor]:
    return memory.split(rows) if rows else [memory] * pieces


def _multiply_into(module: Any, x: Tensor, out: Tensor) -> None:
    if is_hooked(module):
        out.copy_(module(x))
    else:
        multiply(module, product_weight(module, x.dtype), x, out)


def _student_rows(
    layer: NPTLayer,
    hidden: Tensor,
    attention: Tensor,
    stream: Tensor,
    x: Tensor,
    z: Tensor,
    frozen: _Frozen,
    work: Work,
) -> tuple[Tensor, Tensor, Tensor]:
    """o [N, D] with the energy [N], and down_proj's product of the teacher's rows."""
    adapter = layer.npt
    weights = (*adapter.weights_of("gate"), *adapter.weights_of("up"))
    shown: list[tuple[Tensor, Terms]] = []

    def look(gate: Tensor, up: Tensor) -> None:
        shown.append(_aside(layer, gate, up, z, h=hidden, a=attention, stream=stream))
        adapter.show(product=shown[0][0])

    frozen.look = None if adapter.observer is None else look
    # Where down alone is modulated, a backward through the MLP would bring z nothing but zeros.
    code = z if any(weight is not None for weight in weights) else z.detach()
    down, teacher_down, energy = _MLP.apply(code, *weights, x, frozen, _form(adapter, work))
    seen, terms = down, Terms()
    if shown:
        ((product, terms),) = shown
        seen = _Seen.apply(product, down, layer.mlp.down_proj, frozen.weight)
    changed = down
    if "down" in adapter.config.targets:
        weights_of_down = adapter.weights_of("down")
        changed, of_down = Modulated.apply(down, z, *weights_of_down, _form(adapter, work))
        energy = energy + of_down
    if adapter.observer is None:
        return stream + changed, energy, teacher_down
    return *_observed(layer, stream, changed, seen, z, energy, terms, work), teacher_down


def _observed(
    layer: NPTLayer,
    stream: Tensor,
    changed: Tensor,
    seen: Tensor,
    z: Tensor,
    energy: Tensor,
    terms: Terms,
    work: Work,
) -> tuple[Tensor, Tensor]:
    """Show the stages after down_proj; return o and the energy, tied to them.

    Args:
        layer: that is observed.
        stream: what the MLP's output is added to.
        changed, energy: as training has them.
        seen, terms: down_proj's product, and gate's and up's terms, made for the observer.
        z: the code.
        work: see there.
    """
    adapter = layer.npt
    shown, m, s = adapter.apply_to("down", seen, z.detach(), aside=True)
    changed = _Twin.apply(changed, shown)
    energy = _Twin.apply(energy, _energy([*terms, (m, s)], work))
    output = stream + changed
    adapter.show(m_down=m, s_down=s, mlp=changed, o=output)
    return output, energy


def _aside(
    layer: NPTLayer, gate: Tensor, up: Tensor, z: Tensor, **before: Tensor
) -> tuple[Tensor, Terms]:
    """The stages up to the product, shown, from copies of the adapter's weights and without a way
    back to z.
    """
    apart = z.detach()
    return stages_to_product(
        layer,
        lambda target, y: layer.npt.apply_to(target, y, apart, aside=True),
        gate,
        up,
        **before,
        z=z,
    )


class _Twin(torch.autograd.Function):
    """A tensor, whose gradient also goes to another one that was computed for somebody
    who looks.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shown: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class _Seen(torch.autograd.Function):
    """down_proj's product, computed already, as a function of the product that it reads."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, down: Tensor, module: nn.Module, weight: Tensor
    ) -> Tensor:
        ctx.module, ctx.weight = module, weight
        return down.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return multiply_backward(ctx.module, ctx.weight, grad), None, None, None
