"""Weights of layers and of tokens in the hidden-state loss. Both have mean 1, so that they move
emphasis and not the loss's scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from npt.config import TrainConfig
from npt.distill.divergence import nmse_per_token
from npt.errors import ConfigError


def layer_weights(config: TrainConfig, count: int) -> list[float]:
    """Weight of each converted layer's loss, in order of depth, with mean 1.

    `uniform` is 1 for all, `linear` grows as 1, 2, 3, ...; a list is taken as it is. Under `local`
    a layer's gradients are its own and Adam divides them by their size, so there a weight acts
    through the clipping of the global norm alone.

    Args:
        config: `layer_weights`.
        count: of converted layers.

    Raises:
        ConfigError: a list of another length.
    """
    given = config.layer_weight_list
    if given is None:
        given = (
            tuple(float(k) for k in range(1, count + 1))
            if config.layer_weights == "linear"
            else (1.0,) * count
        )
    if len(given) != count:
        raise ConfigError(
            f"--layer_weights has {len(given)} weights ({config.layer_weights}), but {count} layers"
            " are converted"
        )
    given = tuple(weight / max(given) for weight in given)  # a sum of large weights would overflow
    return [weight * count / math.fsum(given) for weight in given]


def disagreement_weights(student: Tensor, teacher: Tensor, lengths: Tensor) -> Tensor:
    """More weight for tokens on which the student disagrees with the teacher: w = (1 + d / mean d)
    / 2.

    d is the token's NMSE, at most 1 (what a student that says nothing has), and its mean is taken
    over the token's own document. So a document's weights have mean 1, none is below 1/2, and they
    depend on nothing outside the document: not on padding, on the order or the split of a batch,
    nor on what else is in the window. A constant for autograd: no gradient flows through it.

    Args:
        student: o, [N, D].
        teacher: t, [N, D].
        lengths: [C] int64, tokens of each document, in the rows' order.

    Returns:
        [N].
    """
    with torch.no_grad():
        disagreement = nmse_per_token(student, teacher).clamp(max=1.0)
        # Not checked (unsafe): that would wait for the device. Lengths come from the host and are
        # of these very rows.
        sums = torch.segment_reduce(disagreement, "sum", lengths=lengths, unsafe=True)
        mean = (sums / lengths).repeat_interleave(lengths, output_size=len(disagreement))
        return 0.5 + 0.5 * torch.where(mean == 0, 1.0, disagreement / mean)
