"""NPT: distil Neuro-Plastic adapters into quantised language models, with training steps that no
NaN can poison.

The public names are imported when they are first used, so that `npt --help` and a wrong flag do not
wait for torch.
"""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from npt.version import __version__

# Without the optional package `kernels`, whose CPU code is not used here, bitsandbytes warns at its
# import on some CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# bitsandbytes before 0.50 checks sizes by a function that torch has deprecated, in every call.
warnings.filterwarnings("ignore", message="_check_is_size will be removed", category=FutureWarning)

if TYPE_CHECKING:
    from npt.adapters.attach import AttachReport, adapter_mode, adapters_disabled, attach, detach
    from npt.adapters.consolidate import (
        consolidate,
        consolidated,
        consolidation_disabled,
        unconsolidate,
        update_from,
    )
    from npt.adapters.consolidated_files import load_consolidated, save_consolidated
    from npt.adapters.export import export
    from npt.adapters.io import load_adapter, save_adapter
    from npt.adapters.peft_shim import register_peft
    from npt.adapters.pretrained import from_pretrained
    from npt.adapters.push import push_to_hub
    from npt.adapters.token_modulation import modulation_of
    from npt.adapters.transplant import transplant, transplanted
    from npt.calibration.calibrate import calibrate
    from npt.calibration.report import Calibration
    from npt.config import DataConfig, NPTConfig, TrainConfig
    from npt.distill.sharded import shard_base
    from npt.distill.trainer import Trainer, TrainResult
    from npt.errors import NPTError
    from npt.fidelity.evaluate import Fidelity, evaluate
    from npt.generation.view import student_view, teacher_view
    from npt.health.trace import trace
    from npt.health.verdict import Verdict
    from npt.quant.identity import BaseIdentity, base_hash, base_identity
    from npt.quant.load import load_base, load_teacher

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
    "BaseIdentity": "npt.quant.identity",
    "base_hash": "npt.quant.identity",
    "base_identity": "npt.quant.identity",
    "calibrate": "npt.calibration.calibrate",
    "consolidate": "npt.adapters.consolidate",
    "consolidated": "npt.adapters.consolidate",
    "consolidation_disabled": "npt.adapters.consolidate",
    "detach": "npt.adapters.attach",
    "evaluate": "npt.fidelity.evaluate",
    "export": "npt.adapters.export",
    "from_pretrained": "npt.adapters.pretrained",
    "load_adapter": "npt.adapters.io",
    "load_base": "npt.quant.load",
    "load_consolidated": "npt.adapters.consolidated_files",
    "load_teacher": "npt.quant.load",
    "modulation_of": "npt.adapters.token_modulation",
    "push_to_hub": "npt.adapters.push",
    "register_peft": "npt.adapters.peft_shim",
    "save_adapter": "npt.adapters.io",
    "save_consolidated": "npt.adapters.consolidated_files",
    "shard_base": "npt.distill.sharded",
    "student_view": "npt.generation.view",
    "teacher_view": "npt.generation.view",
    "trace": "npt.health.trace",
    "transplant": "npt.adapters.transplant",
    "transplanted": "npt.adapters.transplant",
    "unconsolidate": "npt.adapters.consolidate",
    "update_from": "npt.adapters.consolidate",
}

__all__ = [
    "AttachReport",
    "BaseIdentity",
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
    "base_identity",
    "calibrate",
    "consolidate",
    "consolidated",
    "consolidation_disabled",
    "detach",
    "evaluate",
    "export",
    "from_pretrained",
    "load_adapter",
    "load_base",
    "load_consolidated",
    "load_teacher",
    "modulation_of",
    "push_to_hub",
    "register_peft",
    "save_adapter",
    "save_consolidated",
    "shard_base",
    "student_view",
    "teacher_view",
    "trace",
    "transplant",
    "transplanted",
    "unconsolidate",
    "update_from",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'npt' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
