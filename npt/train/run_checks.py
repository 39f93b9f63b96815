"""Combinations of settings, models and data that cannot be trained, refused before a run."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from npt.adapters.consolidate import consolidated
from npt.adapters.converted import (
    adapter_parameters,
    attached_config,
    is_attached,
    is_sharded,
    npt_layers,
)
from npt.adapters.fit import check_length
from npt.base.attention import attention_name
from npt.base.identity import base_hash
from npt.base.load import COMPUTE
from npt.base.precision import audit_precision, policy_dtype, quantization_of
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.data.source import OWN_HELDOUT
from npt.distill.hidden_losses import layer_weights
from npt.errors import ConfigError, DataError
from npt.runs.trackers import check_trackers
from npt.step.guarded_update import EXACT
from npt.step.train_step import check_unfrozen


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


def check_samples_shown(config: TrainConfig) -> None:
    """Refuse to show texts of a student whose base is shared among processes."""
    if config.sample_steps is not None:
        raise ConfigError(
            f"--sample_steps is {config.sample_steps}, but a sharded base writes no text; drop it,"
            " or --shard_base"
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
    if is_sharded(model):
        for name, _ in config.stage_shares:
            if name != "local":
                raise ConfigError(
                    f"--strategy {name} does not support a sharded base; use --strategy local"
                )
        check_samples_shown(config)
    check_trackers(config)
    check_length(data.max_length, model.config)
    layer_weights(config, len(npt_layers(model)))  # a list has one weight per layer
    samples = config.gradient_accumulation_steps * processes * config.batch_size
    if samples * data.max_length >= EXACT:
        raise ConfigError(
            f"a window may have {samples * data.max_length} tokens (--gradient_accumulation_steps x"
            f" --batch_size x --max_length x {processes} processes), and is counted exactly below"
            f" {EXACT} only; lower one of them"
        )
    return adapter


def teacher_record(model: PreTrainedModel, teacher: PreTrainedModel | None) -> dict[str, Any]:
    """Return the entries of `run.json` about a separate teacher, or that there is none; refuse one
    of other shapes than the student's, quantised, elsewhere, or with adapters.
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
    if teacher.device != model.device:
        raise ConfigError(
            f"the teacher is on {teacher.device}, the student's base on {model.device}; load both"
            " on one device"
        )
    dtype = teacher.model.layers[0].mlp.up_proj.weight.dtype
    precision = {stored: name for name, stored in COMPUTE.items()}.get(dtype)
    fault = None
    if quantization_of(teacher) is not None:
        fault = "is quantised as well"
    elif is_attached(teacher):
        fault = "has adapters of its own"
    elif precision is None:
        fault = f"is stored in {str(dtype).removeprefix('torch.')}"
    if fault is not None:
        raise ConfigError(f"the teacher {fault}; load it with npt.load_teacher")
    attention, identity = attention_name(teacher), base_hash(teacher)
    return {"teacher_precision": precision, "teacher_attention": attention, "teacher": identity}
