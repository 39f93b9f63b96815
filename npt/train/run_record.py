"""The content of `run.json`, as far as it is known before a run."""

from __future__ import annotations

from typing import Any

from npt.adapters.attach import adapter_parameters, is_sharded, npt_layers
from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.base.quantization_error import product_errors
from npt.runs.run_folder import versions
from npt.train.run_data import RunData
from npt.train.run_setup import RunSetup


def run_record(setup: RunSetup, data: RunData, base: BaseIdentity) -> dict[str, Any]:
    """Return settings, model, precision, device and data of a run, for JSON.

    Args:
        setup, data: of the run.
        base: identity of the base.
    """
    model = setup.model
    return {
        "settings": setup.all_settings(),
        "layers": [index for index, _ in npt_layers(model)],
        "trainable_parameters": sum(p.numel() for p in adapter_parameters(model).values()),
        "seed": setup.config.seed,
        **base.as_record(),
        "other_base": None,
        "precision": audit_precision(model, policy_dtype(model)).as_dict(),
        "product_errors": None if is_sharded(model) else product_errors(model),
        "device": str(setup.device),
        "deterministic": setup.deterministic,
        "processes": setup.processes.size,
        "versions": versions(),
        "heldout": data.heldout,
        "sources": [{"name": source.label, "share": source.share} for source in data.sources],
    }
