"""The parts of a run, checked before it starts: model, settings, processes, origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, set_adapters
from npt.adapters.converted import adapter_parameters, attached_config, is_attached, is_sharded
from npt.adapters.files.adapter_files import adapter_hash
from npt.adapters.fit import check_length
from npt.base.attention import attention_name, repeats_exactly, set_deterministic
from npt.base.identity import base_hash
from npt.base.precision import audit_precision, declared_dtype, policy_dtype, quantization_of
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.console import say
from npt.data.source import OWN_HELDOUT
from npt.distill.step import MicroBatchSplitter, check_unfrozen
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, DataError, StoppedError
from npt.guard.update import EXACT
from npt.runs.resume import RunOrigin, changed_settings, find_origin, plain_settings
from npt.runs.signals import StopOnSignal
from npt.versions import versions

MAY_DIFFER = ("model_name", "dataset_name", "replay_dataset")
"""Settings that may differ between the processes of a run: paths on their machines."""


@dataclass(frozen=True)
class RunSetup:
    """Model, settings and processes of a run.

    Attributes:
        settings: all settings, as they read back from JSON.
        changed: settings that differ from those of the resumed run, as (old, new).
        date: date that the chat template writes; None without a template.
    """

    model: PreTrainedModel
    tokenizer: Any
    teacher: PreTrainedModel | None
    config: TrainConfig
    data_config: DataConfig
    processes: ProcessGroup
    console: Console
    origin: RunOrigin
    splitter: MicroBatchSplitter
    settings: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    date: str | None = None
    stop: StopOnSignal = field(default_factory=StopOnSignal)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def window_size(self) -> int:
        """Micro-batches of a window, over all processes."""
        return self.config.gradient_accumulation_steps * self.processes.size

    @property
    def deterministic(self) -> bool:
        """True if repeating a step gives the same bits, including the backward of attention."""
        return self.config.strategy != "end_to_end" or repeats_exactly(self.model)

    def check_stop(self) -> None:
        """Raise StoppedError if a signal came; on a sharded base all processes raise together."""
        number = self.signal() if is_sharded(self.model) else self.stop.number
        if number is not None:
            raise StoppedError(number)

    def signal(self) -> int | None:
        """Return the number of a signal that any process received. Every process must call this."""
        own = self.stop.number
        everyone = (own, *self.processes.gather(own))
        return next((number for number in everyone if number is not None), None)

    def say(self, line: str) -> None:
        say(self.console, line)

    def say_lack(self, act: str, samples: int, now: int, message: str) -> None:
        lack = f"{act}: out of memory with {samples} samples at once ({message})"
        self.say(f"{lack}; retrying with {now}")

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError if adapters, devices, versions or `facts` differ between processes."""
        if self.processes.size == 1:
            return
        checkpoint = self.origin.checkpoint
        self.processes.agree(
            {
                **facts,
                "adapters of hash": adapter_hash(self.model),
                "a checkpoint of step": None if checkpoint is None else checkpoint.step,
                "a device of kind": self.device.type,
                **{f"version of {name}": version for name, version in versions().items()},
            }
        )


def make_setup(
    model: PreTrainedModel,
    tokenizer: Any,
    teacher: PreTrainedModel | None,
    config: TrainConfig,
    data_config: DataConfig,
    processes: ProcessGroup,
    console: Console,
    further: Mapping[str, Any],
) -> RunSetup:
    """Check the parts of a run and find where it begins. A resumed run takes the adapters' ranks
    and the chat template's date from its checkpoint.
    """
    from npt.data.chat import date_of, fix_date, has_template

    check_model(model, config, data_config, processes.size)
    settings = {**further, **teacher_record(model, teacher), "processes": processes.size}
    for part in (attached_config(model), data_config, config):
        settings |= asdict(part)
    if quantization_of(model) is not None:
        settings["compute_dtype"] = _name_of(declared_dtype(model)) or "other"
    settings["attn_implementation"] = attention_name(model)
    settings = plain_settings(settings)
    # compare settings first, since some add exchanges between processes
    alike = {f"--{name}": value for name, value in settings.items() if name not in MAY_DIFFER}
    processes.agree({**alike, "a chat template": has_template(tokenizer)})
    origin = find_origin(config.resume, config.output_dir, processes)
    changed: dict[str, tuple[Any, Any]] = {}
    form = attached_config(model)
    date = None
    if origin.checkpoint is not None:
        recorded = origin.checkpoint.record["settings"]
        date = origin.checkpoint.record.get("date")
        # ranks that the closed-form start chose are settings of the resumed run
        if form.spends_ranks and recorded.get("ranks") is not None:
            form = replace(form, ranks=tuple(recorded["ranks"]))
        settings |= plain_settings(asdict(form))
        changed = changed_settings(recorded, settings)
        if form != attached_config(model):
            shapes = adapter_shapes(model, form)
            # zeros, since the checkpoint's tensors replace them
            zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
            set_adapters(model, form, zeros)
    # the chat template writes the date of the run's start, on every process and after a resume
    if has_template(tokenizer):
        fix_date(tokenizer, processes.first(lambda: date or date_of(tokenizer)))
        date = date_of(tokenizer)
    set_deterministic(model, config.deterministic)
    return RunSetup(
        model=model,
        tokenizer=tokenizer,
        teacher=teacher,
        config=config,
        data_config=data_config,
        processes=processes,
        console=console,
        origin=origin,
        splitter=MicroBatchSplitter(config.batch_size),
        settings=settings,
        changed=changed,
        date=date,
    )


def check_trainable(config: NPTConfig, data: DataConfig | None, own_teacher: bool) -> None:
    """Refuse settings that cannot be trained, before a base is loaded."""
    if config.residual == "keep" and not own_teacher:
        raise ConfigError(
            "--residual keep starts equal to its base and has nothing to learn from it; add"
            " --teacher_precision bf16 to learn from the unquantised model, or use --residual"
            " modulate"
        )
    if data is not None and data.dataset_name in OWN_HELDOUT and data.dataset_split != "train":
        raise DataError(
            f"--dataset_split {data.dataset_split} of the built-in text is reserved for evaluation;"
            " use --dataset_split train"
        )


def check_model(
    model: PreTrainedModel, config: TrainConfig, data: DataConfig, processes: int
) -> None:
    """Refuse a model that cannot be trained with these settings, or (PrecisionError) that would not
    compute in the expected precision because `npt.load_base` did not load it.
    """
    from npt.adapters.consolidate import consolidated

    attached_config(model)
    data.check_objective(config)
    audit_precision(model, policy_dtype(model))
    check_unfrozen(adapter_parameters(model))
    if consolidated(model):
        raise ConfigError(
            "the base contains consolidated updates, which a run does not record; call"
            " npt.unconsolidate first"
        )
    check_length(data.max_length, model.config)
    samples = config.gradient_accumulation_steps * processes * config.batch_size
    tokens = samples * data.max_length
    if tokens >= EXACT:
        raise ConfigError(
            f"a window may have {tokens} tokens (--gradient_accumulation_steps x"
            f" --batch_size x --max_length x {processes} processes), but only counts below {EXACT}"
            " are exact; lower one of them"
        )


def teacher_record(model: PreTrainedModel, teacher: PreTrainedModel | None) -> dict[str, Any]:
    """Return the teacher's entries of `run.json`; refuse a teacher that does not fit the model."""
    if teacher is None:
        return {"teacher_precision": None, "teacher_attention": None, "teacher": None}
    # states are compared layer by layer, logits entry by entry
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        one = getattr(teacher.config, name)
        other = getattr(model.config, name)
        if one != other:
            raise ConfigError(
                f"the teacher has {name} {one}, the student's base {other}; load both from the same"
                " model"
            )
    dtype = teacher.model.layers[0].mlp.up_proj.weight.dtype
    precision = _name_of(dtype)
    faults = {
        "is quantised": quantization_of(teacher) is not None,
        "has adapters attached": is_attached(teacher),
        f"is stored in {str(dtype).removeprefix('torch.')}": precision is None,
    }
    for fault, present in faults.items():
        if present:
            raise ConfigError(f"the teacher {fault}; load it with npt.load_teacher")
    return {
        "teacher_precision": precision,
        "teacher_attention": attention_name(teacher),
        "teacher": base_hash(teacher),
    }


def _name_of(dtype: torch.dtype) -> str | None:
    from npt.base.load import COMPUTE

    return next((name for name, computed in COMPUTE.items() if computed == dtype), None)
