"""NPT: distil Neuro-Plastic adapters into quantised language models, with training steps that no NaN can poison."""

from npt.adapters.attach import AttachReport, adapter_mode, adapters_disabled, attach, detach
from npt.adapters.io import load_adapter, save_adapter
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.distill.trainer import Trainer, TrainResult
from npt.errors import NPTError
from npt.fidelity.evaluate import Fidelity, evaluate
from npt.quant.load import base_hash, load_base
from npt.version import __version__

__all__ = [
    "AttachReport",
    "DataConfig",
    "Fidelity",
    "NPTConfig",
    "NPTError",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "__version__",
    "adapter_mode",
    "adapters_disabled",
    "attach",
    "base_hash",
    "detach",
    "evaluate",
    "load_adapter",
    "load_base",
    "save_adapter",
]
