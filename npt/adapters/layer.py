"""The NPT decoder layer: a token's attention output modulates that token's MLP.

From the attention output a (width D), a low-rank code z = A a (width R) is computed. Each modulated
product y of the MLP becomes

    y' = m * y + s,   m = 1 + beta * (2 sigmoid(M z) - 1),   s = alpha * (B z)

With a token part, the code carries only what the context adds, and only its large numbers. With
x1 = RMSNorm1(h), which attention reads, and r = rms(h),

    l = b + L x1             what the token itself says of its attention output; L has rank Q
    u = c * A (a - l) / r    in nats: an error e of u costs |e|^2 / 2, to second order
    z = u where |u| >= tau, else 0
    h' = h + l + r alpha B_stream (z / c)

tau is one number for all layers and tokens. c [R] lets A and B be stored at the same size, so that
one learning rate fits both. Without context (mode `floor`) z is 0.

m lies within (1 - beta, 1 + beta), so with beta < 1 it never reaches 0, where a channel and its
gradient would vanish. It is exactly 1 at M z = 0. On purpose there is no dropout, no bias and no
normalisation of a or z.

`student_output` computes the formula operation by operation, for generation and evaluation.
Training runs it fused (npt/adapters/trained.py); tests compare the two.

A converted layer keeps its modules, parameter names and hooks. Only its class changes, to a
subclass of the original, and it gains the child `npt`. A wrapper would not work: transformers finds
decoder layers by `isinstance` to collect `output_hidden_states`.

Shapes: B batch, T time, D hidden, F ffn, R rank, Q rank of the token part, O width of the modulated
product (F or D); `...` is any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from npt.adapters.recompute import is_recomputing
from npt.base.families import FAMILIES
from npt.config import STREAM, TARGETS, NPTConfig
from npt.hooks import call_around

T = TypeVar("T")

Mode = Literal["student", "teacher", "floor"]
"""A layer computes the NPT form, the base, or the NPT form without context: with the token part
alone, if there is one, and without modulation."""

Terms = Sequence[tuple[Tensor | None, Tensor | None]]
"""(m, s) of each target, [..., O] each; None if the adapter's form lacks the term."""

Observer = Callable[[dict[str, Tensor | None]], None]
"""Receives stages of a layer's forward by name (None if absent, or if it is `stream` and equals
`h`) and must not change them."""

STD_A = 0.02
"""Standard deviation of A at a random start. M starts at 0, so every multiplier is 1."""

STD_B = 0.001
"""Standard deviation of B at a random start."""

START_TAU = 0.01
"""tau at a random start, where most numbers are above it. Training raises it."""

SMALLEST_SIZE = 1e-3
"""Least r, for a token whose state is about 0, as after an embedding that was never trained."""

COUNT_GRADIENT = 1e-6
"""Gradient of log tau for a number too few or too many. It is far below those of the weights, with
which it is clipped, and AdamW's steps do not depend on it."""


def multiplier(u: Tensor, mult_bound: float) -> Tensor:
    """Return m = 1 + beta * (2 sigmoid(u) - 1), same shape as `u`.

    It uses tanh(u / 2), which equals 2 sigmoid(u) - 1 without cancellation near u = 0, where
    training starts.
    """
    return 1.0 + mult_bound * torch.tanh(0.5 * u)


MULTIPLIERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": multiplier,
    "half_sigmoid": lambda u, _: 0.5 * torch.sigmoid(u) + 0.5,  # 0.75 at the start, never above 1
    "one_plus_tanh": lambda u, _: 1.0 + torch.tanh(u),  # reaches 0, where the gradient vanishes
    "unbounded": lambda u, _: 1.0 + u,
}
"""Forms of m by name, from u = M z and beta. All but `sigmoid` serve studies of their effect."""


def modulate(
    y: Tensor, z: Tensor, mult: Tensor | None, add: Tensor | None, form: NPTConfig
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Modulate one product: y' = m * y + s.

    Args:
        y: [..., O], product of the frozen weight, of any float dtype.
        z: [..., R], code, in the adapter's dtype (fp32).
        mult: M, [O, R], or None for no multiplicative term.
        add: B, [O, R], or None for no additive term.
        form: beta, alpha and the form of m.

    Returns:
        y' in y's dtype, then m and s in z's dtype, each None if absent.
    """
    out = y.to(z.dtype)
    m = None
    if mult is not None:
        multiplier = MULTIPLIERS[form.mult_form]
        m = multiplier(F.linear(z, mult), form.mult_bound)
        out = m * out
    s = None
    if add is not None:
        s = form.additive_scale * F.linear(z, add)
        out = out + s
    return out.to(y.dtype), m, s


def modulation_energy(terms: Terms) -> Tensor | None:
    """Return the energy [...] to be regularised, one number per token; None without modulation.

    It sums mean((m - 1)^2) + mean(s^2) over targets; the means are over channels.
    """
    parts = [(m - 1.0).square().mean(dim=-1) for m, _ in terms if m is not None]
    parts += [s.square().mean(dim=-1) for _, s in terms if s is not None]
    return torch.stack(parts).sum(dim=0) if parts else None


class NPTAdapter(nn.Module):
    """The trainable A, B and M of one layer. They stay fp32 when the model is cast.

    Args:
        config: form and size.
        hidden_size: D.
        ffn_size: F.
        generator: CPU generator that draws the random start.

    Attributes:
        A: [R, D].
        B: [O, R] by target; the stream has one in every form.
        M: [O, R] by target; the stream has none.
        b: [D], bias of the token part.
        L_in, L_out: [Q, D] and [D, Q], with L = L_out L_in.
        scale: [R], c; it is not trained. None without a token part.
        log_tau: [1], logarithm of tau, shared by all layers of a model.
        mode: what the layer computes.
        observer: called, if set, with the stages of each pass, from `h` to `o`.
        recode: called, if set, to replace the tokens' codes (npt/tools/editing/transplant.py).
    """

    def __init__(
        self,
        config: NPTConfig,
        hidden_size: int,
        ffn_size: int,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.config = config
        self.mode: Mode = "student"
        self.observer: Observer | None = None
        self.recode: Callable[[Tensor], Tensor] | None = None
        rank = config.rank
        sizes = {"ffn": ffn_size, "hidden": hidden_size}
        widths = {target: sizes[TARGETS[target].width] for target in config.targets}

        def normal(rows: int, columns: int, std: float) -> nn.Parameter:
            if std == 0:
                return nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32))
            values = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
            return nn.Parameter(std * values)

        def std_b(target: str) -> float:
            if config.residual == "keep":
                return 0.0  # it must start equal to the base
            if STREAM in config.targets and target != STREAM:
                return 0.0  # attention already arrives through the stream
            return STD_B

        # a seed fixes the start: the draws have this order, and those with std 0 draw nothing
        self.A = normal(rank, hidden_size, STD_A)
        self.B = nn.ParameterDict({t: normal(widths[t], rank, std_b(t)) for t in config.shifted})
        self.M = nn.ParameterDict({t: normal(widths[t], rank, 0.0) for t in config.multiplied})
        self.scale: Tensor | None
        self.register_buffer("scale", None)
        if config.token_part:
            self.scale = torch.ones(rank, dtype=torch.float32)
            none = torch.zeros(hidden_size, dtype=torch.float32)
            self.b = nn.Parameter(none)
        if config.token_rank:
            # one factor is 0, so that L is; of two, none would get a gradient
            self.L_in = normal(config.token_rank, hidden_size, STD_A)
            self.L_out = normal(hidden_size, config.token_rank, 0.0)
        if config.active:
            start = torch.tensor([math.log(START_TAU)], dtype=torch.float32)
            self.log_tau = nn.Parameter(start)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NPTAdapter:
        """Move with the model but ignore casts, which are meant for the base."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)

    def show(self, **stages: Tensor | None) -> None:
        """Pass stages to the observer, except when backward recomputes them."""
        if self.observer is not None and not is_recomputing():
            self.observer(stages)

    def code(self, attention: Tensor) -> Tensor:
        """Return z [..., R] from a, or from (a - l) / r, [..., D], in fp32 even under autocast."""
        with torch.autocast(attention.device.type, enabled=False):
            z = F.linear(attention.to(self.A.dtype), self.A)
            if self.scale is not None:
                z = self.scale * z
            if self.config.active:
                self.show(u=z)
                z = _Threshold.apply(z, self.log_tau, self.config.active)
        return z

    def size_of(self, state: Tensor) -> Tensor:
        """Return r = rms(h) of an fp32 state, [..., D] -> [..., 1]."""
        return state.square().mean(dim=-1, keepdim=True).clamp_min(SMALLEST_SIZE**2).sqrt()

    def token_part(self, x1: Tensor) -> Tensor:
        """Return l = b + L x1, [..., D] -> [..., D], in fp32 even under autocast."""
        with torch.autocast(x1.device.type, enabled=False):
            if not self.config.token_rank:
                return self.b.expand(x1.shape)
            inner = F.linear(x1.to(self.b.dtype), self.L_in)
            return F.linear(inner, self.L_out, self.b)

    def weights_of(self, target: str) -> tuple[Tensor | None, Tensor | None]:
        """Return M and B of a target, each None if the form lacks it."""
        return self.M.get(target), self.B.get(target)

    def apply_to(
        self, target: str, y: Tensor, z: Tensor | None, *, aside: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Modulate one target. Without a code, or if the form omits the target, return y unchanged.

        Args:
            target: stream, gate, up or down.
            y: [..., O].
            z: [..., R], the codes of the same tokens.
            aside: use detached copies of M and B, so that no gradient reaches the adapter.

        Returns:
            y' like y, then m and s [..., O] in fp32, each None if the form lacks it.
        """
        if z is None or target not in self.config.targets:
            return y, None, None
        mult, add = self.weights_of(target)
        if aside:
            mult, add = (w if w is None else w.detach().requires_grad_() for w in (mult, add))
        with torch.autocast(y.device.type, enabled=False):
            return modulate(y, z, mult, add, self.config)


class _Threshold(torch.autograd.Function):
    """z = u where |u| >= tau, else 0; NaN stays NaN.

    Gradients pass through the numbers that are kept. That of log tau is no derivative: it points to
    the tau at which `active` numbers of a token are kept on average over tokens and layers. So tau
    follows the mean count, and refusals, checkpoints and several processes treat it as a weight.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, log_tau: Tensor, active: int) -> Tensor:
        kept = ~(u.abs() < log_tau.exp())
        ctx.save_for_backward(kept)
        ctx.active = active
        return torch.where(kept, u, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (kept,) = ctx.saved_tensors
        tokens = kept.numel() // kept.shape[-1]
        lacking = ctx.active * tokens - torch.count_nonzero(kept)
        of_log_tau = (COUNT_GRADIENT * lacking).to(grad.dtype)
        return torch.where(kept, grad, 0.0), of_log_tau[None], None


NPT_FORMS: dict[type[nn.Module], type[NPTLayer]] = {}
"""The NPT class of each decoder layer class."""


class NPTLayer(nn.Module):
    """Mix-in, placed before the decoder layer's class, that replaces its forward."""

    npt: NPTAdapter
    # modules of the decoder layer, under the names that all supported families share
    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init_subclass__(cls, **named: Any) -> None:
        """Register the subclass as the NPT class of its decoder layer class."""
        super().__init_subclass__(**named)
        if cls.__bases__[0] is NPTLayer:  # not so for the subclasses that FSDP makes
            NPT_FORMS[cls.__bases__[1]] = cls

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        """Return o [B, T, D] from h [B, T, D] in the adapter's mode; `teacher` is the base's code.

        `context` holds the other arguments that the decoder passes to its layers.
        """
        if self.npt.mode == "teacher":
            return super().forward(hidden_states, **context)
        attention = attention_output(self, hidden_states, **context)
        return student_output(self, hidden_states, attention)[0]


for _base in [family.layer for family in FAMILIES.values()]:
    # pickle finds a class by its name in the module
    _name = f"NPT{_base.__name__}"
    globals()[_name] = type(_name, (NPTLayer, _base), {})


def attention_output(layer: Any, hidden: Tensor, **context: Any) -> Tensor:
    """Return a = Attention(RMSNorm1(h)), after o_proj: [B, T, D]."""
    return layer.self_attn(hidden_states=layer.input_layernorm(hidden), **context)[0]


def student_stream(
    layer: NPTLayer, hidden: Tensor, attention: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the stream that the student's MLP reads and adds to, [..., D], and the code z.

    It is h, with a kept residual h + a, with a token part h + l. The target `stream` adds its
    shift. Mode `floor` has no code.
    """
    adapter = layer.npt
    adapter.show(h=hidden, a=attention)
    floor = adapter.mode == "floor"
    z = None
    if adapter.scale is None:
        if not floor:
            z = adapter.code(attention)
            if adapter.recode is not None:
                z = adapter.recode(z)
        read = z
        kept = hidden
        if adapter.config.residual == "keep":
            kept = hidden + attention
    else:
        # without its hooks, which have seen it in attention
        x1 = layer.input_layernorm.forward(hidden)
        own = adapter.token_part(x1)
        adapter.show(l=own)
        state = hidden.to(own.dtype)
        read = None
        if not floor:
            size = adapter.size_of(state)
            z = adapter.code((attention - own) / size)
            if adapter.recode is not None:
                z = adapter.recode(z)
            # back from nats to the units of the stream
            read = size * (z / adapter.scale)
        kept = state + own
    stream, _, shift = adapter.apply_to(STREAM, kept, read)
    stream = stream.to(hidden.dtype)
    shown = None if stream is hidden else stream
    adapter.show(z=z, s_stream=shift, stream=shown)
    return stream, z


def student_output(layer: NPTLayer, hidden: Tensor, attention: Tensor) -> tuple[Tensor, Terms]:
    """Return o from h and a, [..., D] each, operation by operation, and the terms of its products.

    Hooks of the MLP and of its parts are called; hooks of the layer are not. Mode `floor` modulates
    nothing and has no terms.
    """
    adapter = layer.npt
    stream, z = student_stream(layer, hidden, attention)
    down, terms = student_mlp(layer, layer.post_attention_layernorm(stream), z)
    output = stream + down
    adapter.show(o=output)
    return output, terms


def student_mlp(
    layer: NPTLayer, x: Tensor, code: Tensor | None, *, aside: bool = False
) -> tuple[Tensor, Terms]:
    """Return down' [..., D] from x [..., D], and the terms of its three products.

    code: z, or None to modulate nothing. aside: see `NPTAdapter.apply_to`.
    """
    adapter = layer.npt
    mlp = layer.mlp
    terms: list[tuple[Tensor | None, Tensor | None]] = []

    def modulated(target: str, y: Tensor, stage: str) -> Tensor:
        y, m, s = adapter.apply_to(target, y, code, aside=aside)
        terms.append((m, s))
        adapter.show(**{f"m_{target}": m, f"s_{target}": s, stage: y})
        return y

    def modulated_mlp(x: Tensor) -> Tensor:
        gate = modulated("gate", mlp.gate_proj(x), "gate")
        up = modulated("up", mlp.up_proj(x), "up")
        activation = mlp.act_fn(gate)
        product = activation * up
        adapter.show(activation=activation, product=product)
        return modulated("down", mlp.down_proj(product), "mlp")

    name = f"layer {layer.self_attn.layer_idx}'s mlp"
    down = call_around(mlp, name, modulated_mlp, x)
    return down, [] if code is None else terms
