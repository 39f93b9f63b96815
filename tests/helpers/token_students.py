"""A student on the random Llama whose modulation is large enough to see, and tokens for it."""

from __future__ import annotations

import torch

import npt
from npt.adapters.converted import adapter_parameters

IDS = [5, 60, 17, 44, 90]


def student(load_model, quantization="nf4", **settings):
    model = load_model(quantization)
    npt.attach(
        model, npt.NPTConfig(**{"layers": "1-2", "rank": 8, "additive_scale": 0.4, **settings})
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model
