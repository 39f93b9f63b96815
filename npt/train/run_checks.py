"""Combinations of settings, models and data that cannot be trained, refused before a run."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from npt.adapters.consolidate import consolidated
from npt.adapters.converted import adapter_parameters, attached_config, is_attached, is_sharded
from npt.adapters.fit import check_length
from npt.base.attention import attention_name
from npt.base.identity import base_hash
from npt.base.load import COMPUTE
from npt.base.precision import audit_precision, policy_dtype, quantization_of
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.data.source import OWN_HELDOUT
from npt.distill.step import check_unfrozen
from npt.errors import ConfigError, DataError
from npt.guard.update import EXACT
from npt.runs.trackers import check_trackers


def check_trainable(config: NPTConfig, data: DataConfig | None, own_teacher: bool = False) -> None:
    """Refuse combinations that cannot be trained, before a base is loaded.

    Args:
        config: of the adapters.
        data: to train on, if the settings name them.
        own_teacher: the teacher is another model than the student's base.

    Raises:
        ConfigError: the adapters keep the attention residual and the base is the teacher.
        DataError: a built-in text's held-out documents, on which every run is evaluated.
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


def check_model(model: PreTrainedModel, config: TrainConfig, data: DataConfig) -> NPTConfig:
    """Refuse a model that cannot be trained with these settings; return its adapters' form.

    Raises:
        ConfigError: nothing attached, frozen or consolidated adapters, a sharded base with what it
            does not support, or settings that do not fit the model.
        PrecisionError: a module would compute otherwise than the policy says, as in a 4-bit model
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
    return adapter


def check_window(config: TrainConfig, data: DataConfig, processes: int) -> None:
    """Refuse windows of `EXACT` tokens or more, which cannot be counted exactly."""
    samples = config.gradient_accumulation_steps * processes * config.batch_size
    tokens = samples * data.max_length
    if tokens >= EXACT:
        raise ConfigError(
            f"a window may have {tokens} tokens (--gradient_accumulation_steps x --batch_size x"
            f" --max_length x {processes} processes), and is counted exactly below {EXACT} only;"
            " lower one of them"
        )


def teacher_record(model: PreTrainedModel, teacher: PreTrainedModel | None) -> dict[str, Any]:
    """Return the entries of `run.json` about a separate teacher, or that there is none.

    Raises:
        ConfigError: it has other shapes than the student, is quantised, is elsewhere, or has
            adapters.
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
    if quantization_of(teacher) is not None:
        raise ConfigError("the teacher is quantised as well; load it with npt.load_teacher")
    if teacher.device != model.device:
        raise ConfigError(
            f"the teacher is on {teacher.device}, the student's base on {model.device}; load both"
            " on one device"
        )
    if is_attached(teacher):
        raise ConfigError("the teacher has adapters of its own; load it with npt.load_teacher")
    dtype = teacher.model.layers[0].mlp.up_proj.weight.dtype
    stored = next((name for name, known in COMPUTE.items() if known == dtype), None)
    if stored is None:
        raise ConfigError(
            f"the teacher is stored in {str(dtype).removeprefix('torch.')}; load it with"
            " npt.load_teacher"
        )
    attention, identity = attention_name(teacher), base_hash(teacher)
    return {"teacher_precision": stored, "teacher_attention": attention, "teacher": identity}
