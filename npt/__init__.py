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
    from npt.adapters.files.adapter_files import load_adapter, save_adapter
    from npt.adapters.files.consolidated_files import load_consolidated, save_consolidated
    from npt.adapters.files.export import export
    from npt.adapters.files.peft_shim import register_peft
    from npt.adapters.files.pretrained import from_pretrained
    from npt.adapters.files.push import push_to_hub
    from npt.adapters.token_modulation import modulation_of
    from npt.base.identity import BaseIdentity, base_hash, base_identity
    from npt.base.load import load_base, load_teacher
    from npt.calibration.calibrate import calibrate
    from npt.calibration.report import Calibration
    from npt.config import DataConfig, NPTConfig, TrainConfig
    from npt.diagnostics.tracer.trace import trace
    from npt.diagnostics.tracer.verdict import Verdict
    from npt.distributed.sharded_base import shard_base
    from npt.errors import NPTError
    from npt.evaluation.evaluate import Fidelity, evaluate
    from npt.evaluation.view import student_view, teacher_view
    from npt.tools.editing.transplant import transplant, transplanted
    from npt.train.trainer import Trainer, TrainResult

_HOME = {
    "AttachReport": "npt.adapters.attach",
    "Calibration": "npt.calibration.report",
    "DataConfig": "npt.config",
    "Fidelity": "npt.evaluation.evaluate",
    "NPTConfig": "npt.config",
    "NPTError": "npt.errors",
    "TrainConfig": "npt.config",
    "TrainResult": "npt.train.trainer",
    "Trainer": "npt.train.trainer",
    "Verdict": "npt.diagnostics.tracer.verdict",
    "adapter_mode": "npt.adapters.attach",
    "adapters_disabled": "npt.adapters.attach",
    "attach": "npt.adapters.attach",
    "BaseIdentity": "npt.base.identity",
    "base_hash": "npt.base.identity",
    "base_identity": "npt.base.identity",
    "calibrate": "npt.calibration.calibrate",
    "consolidate": "npt.adapters.consolidate",
    "consolidated": "npt.adapters.consolidate",
    "consolidation_disabled": "npt.adapters.consolidate",
    "detach": "npt.adapters.attach",
    "evaluate": "npt.evaluation.evaluate",
    "export": "npt.adapters.files.export",
    "from_pretrained": "npt.adapters.files.pretrained",
    "load_adapter": "npt.adapters.files.adapter_files",
    "load_base": "npt.base.load",
    "load_consolidated": "npt.adapters.files.consolidated_files",
    "load_teacher": "npt.base.load",
    "modulation_of": "npt.adapters.token_modulation",
    "push_to_hub": "npt.adapters.files.push",
    "register_peft": "npt.adapters.files.peft_shim",
    "save_adapter": "npt.adapters.files.adapter_files",
    "save_consolidated": "npt.adapters.files.consolidated_files",
    "shard_base": "npt.distributed.sharded_base",
    "student_view": "npt.evaluation.view",
    "teacher_view": "npt.evaluation.view",
    "trace": "npt.diagnostics.tracer.trace",
    "transplant": "npt.tools.editing.transplant",
    "transplanted": "npt.tools.editing.transplant",
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
