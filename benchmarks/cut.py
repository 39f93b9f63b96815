"""The rival that takes five lines: attention cut to R directions, and nothing else.

In the converted layers the attention output a becomes a' = P A a, added to the stream, and the
layer computes on as it is. A are the R directions that the first walk of a calibration ranks by
what they are worth to the teacher's predictions, P = C A'(A C A')^-1 the least squares that give a
back from them. Nothing else is fitted, nothing is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from npt.adapters.converted import decoder_layers
from npt.base.quantization_error import fp32_products
from npt.calibration.cut import Cut
from npt.calibration.sensitivity import measure
from npt.data.batch import Sample, batches

Projections = Mapping[int, tuple[Tensor, Tensor]]
"""By layer A [R, D] and P [D, R], fp32."""


def projections(
    model: Any, samples: Sequence[Sample], rank: int, *, batch_size: int, seed: int
) -> Projections:
    """Return A and P of every converted layer of a model with adapters attached, which it leaves as
    it is.
    """
    with fp32_products("highest"):
        found = measure(model, batches(samples, batch_size), seed, lambda batch: None)
        cut = {}
        for index, sums in found.items():
            code = Cut.of(sums.covariance, sums.to_attention).code[:rank].to(torch.float64)
            across = sums.covariance @ code.T
            back = torch.linalg.solve(code @ across, across, left=False)
            cut[index] = code.to(torch.float32), back.to(torch.float32)
    return cut


@contextmanager
def attention_cut(model: Any, found: Projections) -> Iterator[None]:
    """Let the layers of a base without adapters have P A a for a."""

    def cut(index: int) -> Any:
        code, back = found[index]

        def hook(_module: Any, _inputs: Any, output: Any) -> Any:
            a, *rest = output
            with fp32_products("highest"):
                return ((a.float() @ code.T) @ back.T).to(a.dtype), *rest

        return hook

    layers: list[Any] = list(decoder_layers(model))
    handles = [layers[index].self_attn.register_forward_hook(cut(index)) for index in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
