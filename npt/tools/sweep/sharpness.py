"""Sharpness: the largest eigenvalue of the Hessian of one layer's loss in its adapter's parameters.

Gradient descent at rate r is stable in a direction of curvature c as long as r c < 2; the largest
curvature says which rates can work at all (Cohen et al., "Gradient Descent on Neural Networks
Typically Occurs at the Edge of Stability", ICLR 2021). Adam rescales each parameter, so the figure
compares runs, and is no limit of Adam's rate. The Hessian is never formed: what is needed are its
products with vectors alone, which two backward passes give (Pearlmutter, "Fast Exact Multiplication
by the Hessian", 1994).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from npt.adapters.attach import adapters_disabled, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer, attention_output, student_stream
from npt.adapters.modulation import modulate, modulation_energy
from npt.adapters.stream import open_stream
from npt.base.linear import dense_weight
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.hidden_losses import hidden_loss

ROUNDING = 1e-6
"""Of the Hessian's size: a direction that is left of this length, fp32 has made."""


def largest_eigenvalue(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], iterations: int, seed: int = 0
) -> float:
    """The largest eigenvalue of the loss's Hessian in these parameters, from below.

    Of the space that so many power iterations walk through the largest Ritz value is taken
    (Lanczos), not their last vector: that comes near much sooner, and near the right end where the
    largest eigenvalue and the most negative one are of one size, as they are at the saddle that a
    product of A and M starts from.

    Args:
        loss: computes the scalar loss with graph.
        parameters: that it depends on, leaves that require gradients.
        iterations: products with the Hessian.
        seed: of the first vector.

    Returns:
        NaN where loss or curvature are not finite.
    """
    gradients = torch.autograd.grad(loss(), parameters, create_graph=True, allow_unused=True)
    used = [
        (g, p)
        for g, p in zip(gradients, parameters, strict=True)
        if g is not None and g.requires_grad
    ]
    if not used:
        return 0.0
    shapes, own = [p.shape for _, p in used], used[0][1]

    def product(vector: Tensor) -> Tensor:
        parts = [
            part.view(shape)
            for part, shape in zip(vector.split([s.numel() for s in shapes]), shapes, strict=True)
        ]
        found = torch.autograd.grad(
            [g for g, _ in used], [p for _, p in used], parts, retain_graph=True, allow_unused=True
        )
        return torch.cat(
            [
                (torch.zeros_like(v) if f is None else f).flatten()
                for v, f in zip(parts, found, strict=True)
            ]
        )

    count = sum(shape.numel() for shape in shapes)
    vector = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(own)
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(iterations, count)):
        size = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        if not math.isfinite(size):
            return math.nan
        if basis and size <= ROUNDING * max(map(abs, [*diagonal, *beside]), default=0.0):
            break  # the space is closed: nothing of the Hessian's largest part lies outside
        beside += [size] if basis else []
        basis.append(vector / size)
        vector = product(basis[-1])
        diagonal.append(float(torch.dot(basis[-1].double(), vector.double())))
        # rounding lets what was taken out come back; the second time takes out that
        for _ in range(2):
            for other in basis:
                vector = vector - torch.dot(other, vector) * other
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        matrix += torch.diag(torch.tensor(beside, dtype=torch.float64), 1) + torch.diag(
            torch.tensor(beside, dtype=torch.float64), -1
        )
    return (
        float(torch.linalg.eigvalsh(matrix)[-1]) if bool(torch.isfinite(matrix).all()) else math.nan
    )


def layer_sharpness(
    model: PreTrainedModel, batch: Batch, config: TrainConfig, iterations: int
) -> float:
    """Sharpness of the first converted layer's loss per valid token, the layer being fed the base's
    state and aiming at its output.

    Args:
        model: with adapters attached.
        batch: on the model's device.
        config: the loss.
        iterations: of the power iteration.
    """
    index, layer = npt_layers(model)[0]
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        hidden = stream.hidden
        for below in decoder_layers(model)[:index]:
            hidden = stream.clean(below(hidden, **stream.context_of(below)))
        h, a = (
            stream.rows(hidden),
            stream.rows(attention_output(layer, hidden, **stream.context_of(layer))),
        )
        behind = h + a
        t = behind + layer.mlp(layer.post_attention_layernorm(behind))
    return largest_eigenvalue(
        lambda: _loss(layer, h, a, t, config) / len(h),
        [p for p in layer.npt.parameters() if p.requires_grad],
        iterations,
    )


def _loss(layer: NPTLayer, h: Tensor, a: Tensor, t: Tensor, config: TrainConfig) -> Tensor:
    """The layer's summed loss, of plain operations that can be differentiated twice; the training's
    own products cannot all be.
    """
    adapter, mlp = layer.npt, layer.mlp
    own = adapter.config
    with torch.no_grad():
        stream = student_stream(layer, h, a)
        x = layer.post_attention_layernorm(stream)
        gate, up, weight = mlp.gate_proj(x), mlp.up_proj(x), dense_weight(mlp.down_proj)
    z = F.linear(a.to(adapter.A.dtype), adapter.A)
    terms = []

    def modulated(target: str, y: Tensor) -> Tensor:
        if target not in own.targets:
            return y
        mult = adapter.M[target] if own.multiplicative else None
        add = adapter.B[target] if own.additive else None
        out, m, s = modulate(y, z, mult, add, own.mult_bound, own.additive_scale, own.mult_form)
        terms.append((m, s))
        return out

    product = mlp.act_fn(modulated("gate", gate)) * modulated("up", up)
    o = stream + modulated("down", F.linear(product, weight.to(product.dtype)))
    loss = hidden_loss(config, o, t, h)[0]
    energy = modulation_energy(terms)
    return loss if energy is None else loss + config.regularization_lambda * energy.sum()
