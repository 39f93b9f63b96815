"""The parts of a run, checked before it: model, settings, processes, what it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, at_random_start, set_adapters
from npt.adapters.converted import adapter_parameters, attached_config, is_attached, is_sharded
from npt.adapters.fit import check_length
from npt.base.attention import attention_name, repeats_exactly
from npt.base.identity import BaseIdentity, base_hash
from npt.base.precision import audit_precision, declared_dtype, policy_dtype, quantization_of
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.console import say
from npt.data.source import OWN_HELDOUT
from npt.distill.step import MicroBatchSplitter, check_unfrozen
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, DataError
from npt.guard.update import EXACT
from npt.runs.checkpoint import Checkpoint, read_checkpoint
from npt.runs.resume import Resumed, changed_settings, find_resumed, plain_settings
from npt.runs.run_folder import check_free, default_folder
from npt.runs.signals import StopOnSignal
from npt.versions import versions

MAY_DIFFER = ("model_name", "dataset_name", "replay_dataset")
"""Settings in which the processes of a run may differ: paths on their machines."""


@dataclass(frozen=True)
class RunSetup:
    """Model, settings and processes of a run, checked.

    Attributes:
        splitter: of micro-batches into parts that fit into memory.
        settings: further ones, for `run.json`.
        folder: of the run, which is not made yet.
        resumed: where the run continues, None for a new one.
        changed: settings that the resumed run had otherwise, with both values.
        date: that the chat template writes; None without one.
        stop: set by a signal.
    """

    model: PreTrainedModel
    tokenizer: Any
    teacher: PreTrainedModel | None
    config: TrainConfig
    data_config: DataConfig
    processes: ProcessGroup
    console: Console
    splitter: MicroBatchSplitter
    settings: Mapping[str, Any]
    folder: Path = Path()
    resumed: Resumed | None = None
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    date: str | None = None
    stop: StopOnSignal = field(default_factory=StopOnSignal)

    @property
    def adapter_config(self) -> NPTConfig:
        """The adapters' form, with the ranks that a start was given."""
        return attached_config(self.model)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The one that the run continues from."""
        return None if self.resumed is None else self.resumed.checkpoint

    @property
    def resume_at(self) -> int | None:
        """The step at which the run continues in its own folder; None in a new one."""
        return self.resumed.step if self.resumed is not None and self.resumed.goes_on else None

    @property
    def first_step(self) -> int:
        """The steps that the resumed run has made."""
        return 0 if self.resumed is None else self.resumed.step

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def window_size(self) -> int:
        """Micro-batches of a window, over all processes."""
        return self.config.gradient_accumulation_steps * self.processes.size

    @property
    def deterministic(self) -> bool:
        """True if every step gives the same bits again, the backward of attention included."""
        return self.config.strategy != "end_to_end" or repeats_exactly(self.model)

    def say(self, line: str) -> None:
        say(self.console, line)

    def all_settings(self) -> dict[str, Any]:
        """Return every setting, as `run.json` keeps them."""
        settings = dict(self.settings)
        for part in (self.adapter_config, self.data_config, self.config):
            settings |= asdict(part)
        if quantization_of(self.model) is not None:
            settings["compute_dtype"] = _name_of(declared_dtype(self.model)) or "other"
        attention = {"attn_implementation": attention_name(self.model)}
        return {**settings, **attention, "processes": self.processes.size}

    def shared_settings(self) -> dict[str, Any]:
        """Return what every process of a run must have alike, known before its data."""
        from npt.data.chat import has_template

        plain = plain_settings(self.all_settings())
        settings = {f"--{name}": value for name, value in plain.items() if name not in MAY_DIFFER}
        return {**settings, "a chat template": has_template(self.tokenizer)}

    def agree(self, base: BaseIdentity, facts: Mapping[str, Any]) -> None:
        """Refuse processes that would not do the same; `facts` are further values to compare."""
        if self.processes.size == 1:
            return
        tensors = adapter_parameters(self.model).values()
        adapters = sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in tensors)).hexdigest()
        self.processes.agree(
            {
                **self.shared_settings(),
                "a base of hash": base.strict,
                "adapters of hash": adapters,
                **facts,
                "a checkpoint of step": None if self.checkpoint is None else self.checkpoint.step,
                "a device of kind": self.device.type,
                **{f"version of {name}": version for name, version in versions().items()},
            }
        )


def checked(setup: RunSetup) -> RunSetup:
    """Check model, settings and processes, and find what is resumed.

    The adapters get the ranks of the checkpoint.
    """
    from npt.data.chat import date_of, fix_date, has_template

    model, config, processes = setup.model, setup.config, setup.processes
    check_model(model, config, setup.data_config, processes.size)
    setup = replace(setup, settings={**setup.settings, **teacher_record(model, setup.teacher)})
    # before an exchange that only some settings bring: it would be paired with another one
    processes.agree(setup.shared_settings())
    resumed = None if config.resume is None else _find_resumed(config, processes)
    setup = replace(setup, resumed=resumed)
    checkpoint, changed, date = setup.checkpoint, {}, None
    if checkpoint is None and setup.adapter_config.init == "calibrated" and at_random_start(model):
        from npt.calibration.calibrate import check_calibration

        check_calibration(setup.adapter_config)
    folder = resumed.folder if resumed is not None else None
    folder = Path(processes.first(lambda: str(folder or _new_folder(config))))
    if checkpoint is not None:
        recorded, form = checkpoint.record["settings"], setup.adapter_config
        date = checkpoint.record.get("date")
        if form.spends_ranks and recorded.get("ranks") is not None:
            form = replace(form, ranks=tuple(recorded["ranks"]))  # the checkpoint has their numbers
        changed = changed_settings(recorded, setup.all_settings() | asdict(form))
        if form != setup.adapter_config:
            shapes = adapter_shapes(model, form).items()
            set_adapters(model, form, {name: torch.zeros(shape) for name, shape in shapes})
    # a chat template writes the date of the run's start, on every process and after a resume
    if has_template(setup.tokenizer):
        fix_date(setup.tokenizer, processes.first(lambda: date or date_of(setup.tokenizer)))
        date = date_of(setup.tokenizer)
    return replace(setup, folder=folder, changed=changed, date=date)


def _find_resumed(config: TrainConfig, processes: ProcessGroup) -> Resumed:
    """Find the run to resume. The main process looks; the others read what it found."""
    resumed: Resumed | None = None

    def find() -> tuple[str, str | None, bool]:
        nonlocal resumed
        resumed = find_resumed(str(config.resume), config.output_dir)
        checkpoint = resumed.checkpoint
        path = None if checkpoint is None else str(checkpoint.folder)
        return str(resumed.folder), path, resumed.goes_on

    folder, path, goes_on = processes.first(find)
    if resumed is not None:
        return resumed
    return Resumed(Path(folder), None if path is None else read_checkpoint(Path(path)), goes_on)


def _new_folder(config: TrainConfig) -> Path:
    folder = Path(config.output_dir) if config.output_dir else default_folder()
    check_free(folder)
    return folder


def check_trainable(config: NPTConfig, data: DataConfig | None, own_teacher: bool = False) -> None:
    """Refuse combinations that cannot be trained, before a base is loaded.

    Args:
        config: of the adapters.
        data: to train on, if the settings name them.
        own_teacher: the teacher is another model than the student's base.
    """
    if config.residual == "keep" and not own_teacher:
        raise ConfigError(
            "--residual keep starts equal to its base, so there is nothing to learn from it; give a"
            " 4-bit base an unquantised teacher with --teacher_precision bf16, or use --residual"
            " modulate"
        )
    if data is not None and data.dataset_name in OWN_HELDOUT and data.dataset_split != "train":
        raise DataError(
            f"--dataset_split {data.dataset_split} of the built-in text is what runs are evaluated"
            " on; train on 'train'"
        )


def check_replay(data: DataConfig, has_records: bool = False) -> None:
    """Refuse a ratio without a data set to replay, named by `data` or given as records."""
    if data.replay_ratio is not None and data.replay_dataset is None and not has_records:
        raise ConfigError(
            f"--replay_ratio is {data.replay_ratio} without --replay_dataset; name the data set"
        )


def check_model(
    model: PreTrainedModel, config: TrainConfig, data: DataConfig, processes: int
) -> None:
    """Refuse a model that cannot be trained with these settings.

    PrecisionError if a module would compute otherwise than the policy says, as in a 4-bit model
    that npt.load_base did not load.
    """
    from npt.adapters.consolidate import consolidated

    attached_config(model)
    audit_precision(model, policy_dtype(model))
    check_unfrozen(adapter_parameters(model))
    if consolidated(model):
        raise ConfigError(
            "a run does not record the updates that were consolidated into its base; call"
            " npt.unconsolidate first"
        )
    if is_sharded(model) and config.strategy != "local":
        raise ConfigError(
            f"--strategy {config.strategy} does not support a sharded base; use --strategy local"
        )
    if config.use_wandb or config.use_tensorboard:
        from npt.runs.trackers import check_trackers

        check_trackers(config)
    check_length(data.max_length, model.config)
    samples = config.gradient_accumulation_steps * processes * config.batch_size
    if samples * data.max_length >= EXACT:
        raise ConfigError(
            f"a window may have {samples * data.max_length} tokens (--gradient_accumulation_steps x"
            f" --batch_size x --max_length x {processes} processes), and is counted exactly below"
            f" {EXACT} only; lower one of them"
        )


def teacher_record(model: PreTrainedModel, teacher: PreTrainedModel | None) -> dict[str, Any]:
    """Return the entries of `run.json` about a separate teacher; refuse one that is quantised, has
    adapters or has other shapes than the student.
    """
    if teacher is None:
        return {"teacher_precision": None, "teacher_attention": None, "teacher": None}
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        one, other = getattr(teacher.config, name), getattr(model.config, name)
        if one != other:
            raise ConfigError(
                f"the teacher has {name} {one}, the student's base {other}; load both from the same"
                " model"
            )
    dtype = teacher.model.layers[0].mlp.up_proj.weight.dtype
    precision = _name_of(dtype)
    faults = {
        "is quantised as well": quantization_of(teacher) is not None,
        "has adapters of its own": is_attached(teacher),
        f"is stored in {str(dtype).removeprefix('torch.')}": precision is None,
    }
    for fault, present in faults.items():
        if present:
            raise ConfigError(f"the teacher {fault}; load it with npt.load_teacher")
    attention, identity = attention_name(teacher), base_hash(teacher)
    return {"teacher_precision": precision, "teacher_attention": attention, "teacher": identity}


def _name_of(dtype: torch.dtype) -> str | None:
    """Return what a setting calls a dtype that is computed in."""
    from npt.base.load import COMPUTE

    return next((name for name, computed in COMPUTE.items() if computed == dtype), None)
