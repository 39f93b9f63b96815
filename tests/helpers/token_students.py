"""A student on the random Llama whose modulation is large enough to see, and tokens for it."""

from students import moved

import npt

IDS = [5, 60, 17, 44, 90]


def student(load_model, quantization="nf4", **settings):
    model = load_model(quantization)
    npt.attach(
        model, npt.NPTConfig(**{"layers": "1-2", "rank": 8, "additive_scale": 0.4, **settings})
    )
    return moved(model, 0.3, seed=0)
