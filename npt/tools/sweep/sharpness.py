"""Sharpness: the largest eigenvalue of the Hessian of one layer's loss in its adapter's parameters.

Gradient descent at rate r is stable in a direction of curvature c as long as r c < 2; the largest
curvature says which rates can work at all (Cohen et al., "Gradient Descent on Neural Networks
Typically Occurs at the Edge of Stability", ICLR 2021). Adam rescales each parameter, so the figure
compares runs, and is no limit of Adam's rate. The Hessian is never formed: two backward passes give
its product with a vector (Pearlmutter, "Fast Exact Multiplication by the Hessian", 1994).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer, attention_output, student_stream
from npt.adapters.modulation import modulate, modulation_energy
from npt.adapters.stream import open_stream
from npt.base.linear import dense_weight, multiply, product_weight
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.hidden_losses import hidden_loss

ROUNDING = 1e-6
"""Of the Hessian's size: a direction that is left shorter than this is fp32's rounding."""


def largest_eigenvalue(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], iterations: int, seed: int = 0
) -> float:
    """Return the largest eigenvalue of the Hessian of a scalar loss in these parameters, from
    below; NaN if loss or curvature are not finite.

    It is the largest Ritz value of the space of so many power iterations (Lanczos), which comes
    near much sooner than their last vector, and near the right end if the largest and the most
    negative eigenvalue are of one size, as at the saddle that a product of A and M starts from.
    """
    gradients = torch.autograd.grad(loss(), parameters, create_graph=True, allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    used = [(g, p) for g, p in pairs if g is not None and g.requires_grad]
    if not used:
        return 0.0
    sloped, own = [g for g, _ in used], [p for _, p in used]
    sizes = [p.numel() for p in own]

    def product(vector: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(vector.split(sizes), own, strict=True)]
        found = torch.autograd.grad(
            sloped, own, parts, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([part.flatten() for part in found])

    vector = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).to(own[0])
    basis: list[Tensor] = []
    diagonal: list[float] = []
    off: list[float] = []
    for _ in range(min(iterations, sum(sizes))):
        size = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        if not math.isfinite(size):
            return math.nan
        if basis and size <= ROUNDING * max(map(abs, [*diagonal, *off])):
            break  # the space is closed: nothing of the Hessian's largest part lies outside
        off += [size] if basis else []
        basis.append(vector / size)
        vector = product(basis[-1])
        diagonal.append(float(torch.dot(basis[-1].double(), vector.double())))
        # rounding lets components that were removed come back; the second time removes those
        for _ in range(2):
            for other in basis:
                vector = vector - torch.dot(other, vector) * other
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if off:
        side = torch.diag(torch.tensor(off, dtype=torch.float64), 1)
        matrix = matrix + side + side.T
    return float(torch.linalg.eigvalsh(matrix)[-1]) if matrix.isfinite().all() else math.nan


def layer_sharpness(
    model: PreTrainedModel, batch: Batch, config: TrainConfig, iterations: int
) -> float:
    """Return the sharpness of the first converted layer's loss per valid token after so many
    products with the Hessian; the layer is fed the base's state and aims at its output.
    """
    index, layer = npt_layers(model)[0]
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        hidden = stream.hidden
        for below in decoder_layers(model)[:index]:
            hidden = stream.clean(below(hidden, **stream.context_of(below)))
        h = stream.rows(hidden)
        a = stream.rows(attention_output(layer, hidden, **stream.context_of(layer)))
        t = h + a + layer.mlp(layer.post_attention_layernorm(h + a))
    return largest_eigenvalue(
        lambda: _loss(layer, h, a, t, config) / len(h),
        [p for p in layer.npt.parameters() if p.requires_grad],
        iterations,
    )


def _loss(layer: NPTLayer, h: Tensor, a: Tensor, t: Tensor, config: TrainConfig) -> Tensor:
    """Return the layer's summed loss of operations that can be differentiated twice, unlike some of
    the training's own products.
    """
    adapter, mlp = layer.npt, layer.mlp
    own = adapter.config
    z = F.linear(a.to(adapter.A.dtype), adapter.A)
    stream = student_stream(layer, h, a, z)
    x = layer.post_attention_layernorm(stream)
    parts = mlp.gate_proj, mlp.up_proj
    gate, up = (multiply(part, product_weight(part, x.dtype), x) for part in parts)
    weight = dense_weight(mlp.down_proj)
    terms = []

    def modulated(target: str, y: Tensor) -> Tensor:
        if target not in own.targets:
            return y
        mult, add = adapter.weights_of(target)
        out, m, s = modulate(y, z, mult, add, own.mult_bound, own.additive_scale, own.mult_form)
        terms.append((m, s))
        return out

    product = mlp.act_fn(modulated("gate", gate)) * modulated("up", up)
    o = stream + modulated("down", F.linear(product, weight.to(product.dtype)))
    loss = hidden_loss(config, o, t, h)
    energy = modulation_energy(terms)
    return loss if energy is None else loss + config.regularization_lambda * energy.sum()
