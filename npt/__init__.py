"""NPT: distil Neuro-Plastic adapters into quantised language models, with training steps that no NaN can poison.

The public names are imported when they are first used, so that `npt --help` and a wrong flag do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from npt.version import __version__

if TYPE_CHECKING:
    from npt.adapters.attach import AttachReport, adapter_mode, adapters_disabled, attach, detach
    from npt.adapters.io import load_adapter, save_adapter
    from npt.calibration.calibrate import calibrate
    from npt.calibration.report import Calibration
    from npt.config import DataConfig, NPTConfig, TrainConfig
    from npt.distill.trainer import Trainer, TrainResult
    from npt.errors import NPTError
    from npt.fidelity.evaluate import Fidelity, evaluate
    from npt.health.trace import trace
    from npt.health.verdict import Verdict
    from npt.quant.load import base_hash, load_base

_HOME = {
    "AttachReport": "npt.adapters.attach",
    "Calibration": "npt.calibration.report",
    "DataConfig": "npt.config",
    "Fidelity": "npt.fidelity.evaluate",
    "NPTConfig": "npt.config",
    "NPTError": "npt.errors",
    "TrainConfig": "npt.config",
    "TrainResult": "npt.distill.trainer",
    "Trainer": "npt.distill.trainer",
    "Verdict": "npt.health.verdict",
    "adapter_mode": "npt.adapters.attach",
    "adapters_disabled": "npt.adapters.attach",
    "attach": "npt.adapters.attach",
    "base_hash": "npt.quant.load",
    "calibrate": "npt.calibration.calibrate",
    "detach": "npt.adapters.attach",
    "evaluate": "npt.fidelity.evaluate",
    "load_adapter": "npt.adapters.io",
    "load_base": "npt.quant.load",
    "save_adapter": "npt.adapters.io",
    "trace": "npt.health.trace",
}

__all__ = [
    "AttachReport",
    "Calibration",
    "DataConfig",
    "Fidelity",
    "NPTConfig",
    "NPTError",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "Verdict",
    "__version__",
    "adapter_mode",
    "adapters_disabled",
    "attach",
    "base_hash",
    "calibrate",
    "detach",
    "evaluate",
    "load_adapter",
    "load_base",
    "save_adapter",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'npt' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
