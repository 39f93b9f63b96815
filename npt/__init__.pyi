"""The public names of npt, each with its home: the only list of them."""

from npt.adapters.attach import AttachReport as AttachReport
from npt.adapters.attach import attach as attach
from npt.adapters.attach import detach as detach
from npt.adapters.consolidate import consolidated as consolidated
from npt.adapters.consolidate import unconsolidate as unconsolidate
from npt.adapters.converted import adapter_mode as adapter_mode
from npt.adapters.converted import adapters_disabled as adapters_disabled
from npt.adapters.files.adapter_files import from_pretrained as from_pretrained
from npt.adapters.files.adapter_files import load_adapter as load_adapter
from npt.adapters.files.adapter_files import save_adapter as save_adapter
from npt.adapters.files.export import export as export
from npt.adapters.files.push import push_to_hub as push_to_hub
from npt.adapters.sharded_base import shard_base as shard_base
from npt.adapters.token_modulation import modulation_of as modulation_of
from npt.base.gguf.convert import Conversion as Conversion
from npt.base.gguf.convert import import_base as import_base
from npt.base.identity import BaseIdentity as BaseIdentity
from npt.base.identity import base_hash as base_hash
from npt.base.identity import base_identity as base_identity
from npt.base.load import load_base as load_base
from npt.base.load import load_teacher as load_teacher
from npt.calibration.calibrate import calibrate as calibrate
from npt.calibration.report import Calibration as Calibration
from npt.config import DataConfig as DataConfig
from npt.config import NPTConfig as NPTConfig
from npt.config import TrainConfig as TrainConfig
from npt.errors import NPTError as NPTError
from npt.errors import TooManyRefusalsError as TooManyRefusalsError
from npt.evaluation.evaluate import Fidelity as Fidelity
from npt.evaluation.evaluate import evaluate as evaluate
from npt.evaluation.modulation_map import ModulationMap as ModulationMap
from npt.evaluation.modulation_map import modulation_map as modulation_map
from npt.evaluation.view import student_view as student_view
from npt.evaluation.view import teacher_view as teacher_view
from npt.tools.editing.context_code import ContextCode as ContextCode
from npt.tools.editing.context_code import context_code as context_code
from npt.tools.editing.transplant import transplant as transplant
from npt.tools.editing.transplant import transplanted as transplanted
from npt.tools.editing.write import consolidate as consolidate
from npt.tracer.trace import trace as trace
from npt.tracer.verdict import Verdict as Verdict
from npt.train.trainer import Trainer as Trainer
from npt.train.trainer import TrainResult as TrainResult

__version__: str
