"""Tables of studies that never ran, with outcomes that are known."""

from __future__ import annotations

import functools
from typing import Any

from npt.tools.sweep.spec import Design, design_of
from npt.tools.sweep.table import MEASURES, rows_of

RATES = [1e-4, 1e-3, 1e-2, 1e-1]


def result(**given: Any) -> dict[str, Any]:
    """The outcome of a run."""
    usual = {
        "outcome": "stable", "kl": 0.1, "kl_start": 1.1, "kl_se": 0.01, "perplexity_ratio": 1.1,
        "top1": 0.8, "acceptance": 0.85, "floor_kl": 1.2, "loss_first": 0.1, "loss_last": 0.05,
        "loss_max": 0.1, "steps": 40, "refused": 0,
        "refused_kinds": None, "runs": 1, "parameters": 1000, "tokens": 10240,
        "seconds_training": 2.0, "seconds": 3.0, "heldout": True, "trial": 0, "worker": "host:1:ab",
        "started": "2026-01-01T00:00:00", "ended": "2026-01-01T00:00:03",
    }  # fmt: skip
    assert set(usual) | set(given) <= set(MEASURES)
    return usual | given


@functools.cache
def design() -> Design:
    """Two forms at four rates with two seeds, two formats, and a limit."""
    return design_of(
        {
            "name": "made <study>",
            "settings": {"max_steps": 40},
            "parts": {
                "forms": {
                    "note": "what <this> is for",
                    "seeds": [0, 1],
                    "grid": {"mult_form": ["sigmoid", "one_plus_tanh"], "learning_rate": RATES},
                },
                "sizes": {
                    "grid": {"adapter_rank": [4, 8, 32], "learning_rate": [1e-4, 1e-3, 1e-2]}
                },
                "formats": {
                    "arms": {"fp32": {}, "bf16": {"compute_dtype": "bf16"}},
                    "settings": {"use_quantization": True},
                },
                "limits": {
                    "arms": {"plain": {}},
                    "bisect": {"low": 1e-4, "high": 1.0, "rounds": 4},
                },
            },
        },
        "made.yaml",
    )


def table() -> list[dict[str, Any]]:
    """Every trial's row: one_plus_tanh fails from 0.01 on, sigmoid at 0.1; a larger rank has a
    smaller KL.
    """
    found = {}
    for trial in design().trials:
        s = trial.settings
        rate, form = s.training.learning_rate, s.adapter.mult_form
        kl = 1.0 / (s.adapter.rank * rate**0.25) * (1.01 if s.training.seed else 1.0)
        row = result(
            kl=kl, parameters=1000 * s.adapter.rank, seconds_training=2.0 + s.adapter.rank / 10
        )
        if trial.origins[0].part == "limits":
            row |= {"limit_low": 0.03, "limit_high": 0.1, "runs": 6}
        elif form == "one_plus_tanh" and rate >= 0.01:
            row |= {"outcome": "diverged", "reason": "loss", "kl": 9.0}
        elif rate == 0.1:
            row |= {"outcome": "worse", "reason": "the loss has grown", "kl": 2.0}
        found[trial.key] = row
    return rows_of(design(), found)
