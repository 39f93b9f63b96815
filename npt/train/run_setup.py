"""The parts of a run, checked before it: model, settings, processes, the checkpoint it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, at_random_start, set_adapters
from npt.adapters.consolidate import consolidated
from npt.adapters.converted import adapter_parameters, attached_config, is_attached, is_sharded
from npt.adapters.fit import check_length
from npt.base.attention import attention_name, repeats_exactly
from npt.base.identity import BaseIdentity, base_hash
from npt.base.load import COMPUTE
from npt.base.precision import audit_precision, declared_dtype, policy_dtype, quantization_of
from npt.calibration.calibrate import check_calibration
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.console import make_console, say, silent_console
from npt.data.chat import date_of, fix_date, has_template
from npt.data.source import OWN_HELDOUT
from npt.distill.splitting import MicroBatchSplitter
from npt.distill.step import check_unfrozen
from npt.distill.strategies import STRATEGIES, Strategy
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, DataError
from npt.guard.update import EXACT
from npt.runs.checkpoint import read_checkpoint
from npt.runs.resume import Resumed, changed_settings, find_resumed, plain_settings
from npt.runs.run_folder import check_free, default_folder
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers, check_trackers
from npt.versions import versions

MAY_DIFFER = ("model_name", "dataset_name", "replay_dataset")
"""Settings in which the processes of a run may differ: paths on their machines."""


class RunSetup:
    """Model, settings and processes of a run, checked; arguments as of the Trainer.

    Attributes:
        adapter_config: with the ranks that a resumed run's start was given.
        resumed: where the run continues, None for a new one; `checkpoint` is its own.
        goes_on: the run continues in the folder of an earlier one.
        first_step: the steps that the resumed run has made.
        changed: settings that the resumed run had otherwise, with both values.
        folder_path: of the run, which is not made yet.
        window_size: micro-batches of a window, over all processes.
        deterministic: every step gives the same bits again, backward of attention included.
        date: that the chat template writes; None without one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        teacher: PreTrainedModel | None,
        config: TrainConfig,
        data_config: DataConfig,
        processes: ProcessGroup,
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
        trackers: Trackers | None = None,
    ):
        self.model, self.tokenizer, self.teacher = model, tokenizer, teacher
        self.config, self.data_config, self.processes = config, data_config, processes
        self.console = (console or make_console()) if processes.main else silent_console()
        self.stop = StopOnSignal()
        self.splitter = MicroBatchSplitter(config.batch_size)
        self.strategy: Strategy = STRATEGIES[config.strategy]
        if teacher is not None:
            self.strategy = partial(self.strategy, teacher=teacher)
        self.device = next(model.parameters()).device
        self.window_size = config.gradient_accumulation_steps * processes.size
        self.deterministic = config.strategy != "end_to_end" or repeats_exactly(model)
        self._settings = settings or {}
        self.adapter_config = check_model(model, config, data_config, processes.size)
        self._teacher_record = teacher_record(model, teacher)
        # before an exchange that only some settings bring: it would be paired with another one
        processes.agree(self._shared_settings())
        self.resumed = None if config.resume is None else self._find_resumed(config.resume)
        self.checkpoint = None if self.resumed is None else self.resumed.checkpoint
        self.goes_on = self.resumed is not None and self.resumed.goes_on
        self.first_step = 0 if self.resumed is None else self.resumed.step
        if self.checkpoint is None and at_random_start(model):
            check_calibration(self.adapter_config)
        self.folder_path = Path(processes.first(lambda: str(self._choose_folder(trackers))))
        self.changed: Mapping[str, tuple[Any, Any]] = {}
        date = None
        if self.checkpoint is not None:
            saved = self.checkpoint.record["settings"]
            date = self.checkpoint.record.get("date")
            if self.adapter_config.spends_ranks and saved.get("ranks") is not None:
                # the checkpoint has their numbers
                ranked = replace(self.adapter_config, ranks=tuple(saved["ranks"]))
                self.changed = changed_settings(saved, self.all_settings() | asdict(ranked))
                zeros = {name: torch.zeros(s) for name, s in adapter_shapes(model, ranked).items()}
                set_adapters(model, ranked, zeros)
                self.adapter_config = ranked
            else:
                self.changed = changed_settings(saved, self.all_settings())
        # a chat template writes the date of the run's start, on every process and after a resume
        self.date: str | None = None
        if has_template(tokenizer):
            fix_date(tokenizer, processes.first(lambda: date or date_of(tokenizer)))
            self.date = date_of(tokenizer)

    def say(self, line: str) -> None:
        say(self.console, line)

    def all_settings(self) -> dict[str, Any]:
        """Return every setting, as `run.json` keeps them."""
        settings = dict(self._settings)
        for part in (self.adapter_config, self.data_config, self.config):
            settings |= asdict(part)
        if quantization_of(self.model) is not None:
            names = {dtype: name for name, dtype in COMPUTE.items()}
            settings["compute_dtype"] = names.get(declared_dtype(self.model), "other")
        attention = {"attn_implementation": attention_name(self.model)}
        return {**settings, **self._teacher_record, **attention, "processes": self.processes.size}

    def agree(self, base: BaseIdentity, facts: Mapping[str, Any]) -> None:
        """Refuse processes that would not do the same; `facts` are further values to compare."""
        if self.processes.size == 1:
            return
        tensors = adapter_parameters(self.model).values()
        adapters = sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in tensors)).hexdigest()
        self.processes.agree(
            {
                **self._shared_settings(),
                "a base of hash": base.strict,
                "adapters of hash": adapters,
                **facts,
                "a checkpoint of step": None if self.checkpoint is None else self.checkpoint.step,
                "a device of kind": self.device.type,
                **{f"version of {name}": version for name, version in versions().items()},
            }
        )

    def _shared_settings(self) -> dict[str, Any]:
        """Return what every process of a run must have alike, known before its data."""
        plain = plain_settings(self.all_settings())
        settings = {f"--{name}": value for name, value in plain.items() if name not in MAY_DIFFER}
        return {**settings, "a chat template": has_template(self.tokenizer)}

    def _find_resumed(self, resume: str) -> Resumed:
        """Find the run to resume. The main process looks; the others read what it found."""
        resumed: Resumed | None = None

        def find() -> tuple[str, str | None, bool]:
            nonlocal resumed
            resumed = find_resumed(resume, self.config.output_dir)
            checkpoint = resumed.checkpoint
            path = None if checkpoint is None else str(checkpoint.folder)
            return str(resumed.folder), path, resumed.goes_on

        folder, path, goes_on = self.processes.first(find)
        if resumed is not None:
            return resumed
        return Resumed(Path(folder), None if path is None else read_checkpoint(Path(path)), goes_on)

    def _choose_folder(self, trackers: Trackers | None) -> Path:
        """Return the run's folder: a new one, or the one that is continued."""
        if self.resumed is not None:
            return self.resumed.folder
        if trackers is not None and trackers.active:
            return trackers.folder
        folder = Path(self.config.output_dir) if self.config.output_dir else default_folder()
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


def check_replay(data: DataConfig, given: bool = False) -> None:
    """Refuse a ratio without a data set to replay, named by `data` or given as records."""
    if data.replay_ratio is not None and data.replay_dataset is None and not given:
        raise ConfigError(
            f"--replay_ratio is {data.replay_ratio} without --replay_dataset; name the data set"
        )


def check_model(
    model: PreTrainedModel, config: TrainConfig, data: DataConfig, processes: int
) -> NPTConfig:
    """Refuse a model that cannot be trained with these settings; return its adapters' form.

    PrecisionError if a module would compute otherwise than the policy says, as in a 4-bit model
    that npt.load_base did not load.
    """
    adapter = attached_config(model)
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
    check_trackers(config)
    check_length(data.max_length, model.config)
    samples = config.gradient_accumulation_steps * processes * config.batch_size
    if samples * data.max_length >= EXACT:
        raise ConfigError(
            f"a window may have {samples * data.max_length} tokens (--gradient_accumulation_steps x"
            f" --batch_size x --max_length x {processes} processes), and is counted exactly below"
            f" {EXACT} only; lower one of them"
        )
    return adapter


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
    precision = {stored: name for name, stored in COMPUTE.items()}.get(dtype)
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
