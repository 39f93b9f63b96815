"""Settings: their values are checked one by one, then together, and each refusal names its flag."""

import dataclasses
import math
import re
from collections import Counter

import pytest

from npt.config import (
    GROUPS,
    MODULATIONS,
    BaseConfig,
    DataConfig,
    NPTConfig,
    TrainConfig,
    flag_of,
    parse_steps,
)
from npt.errors import ConfigError, NotSupportedError

ALL = (NPTConfig, BaseConfig, DataConfig, TrainConfig)
NAN, INF = math.nan, math.inf
WHOLE = {"strategy": "end_to_end"}
LOGITS = {**WHOLE, "logit_kl_weight": 1.0}

COUNTS = """
    batch_size gradient_accumulation_steps num_epochs max_steps max_consecutive_bad log_steps
    eval_steps eval_samples save_steps save_total_limit calibration_tokens
"""

# class, setting, values that are refused, and what is said of them
BAD_VALUES = [
    (NPTConfig, "rank", (0, -3), "it must be at least 1"),
    (NPTConfig, "ranks", ((), (4, 0), (4, 1.5)), "give each converted layer a whole number of at"),
    (NPTConfig, "ranks", ("4,,5",), "write whole numbers like 8,16,32"),
    (NPTConfig, "targets", ((), " , "), "name each of stream, gate, up, down at most once"),
    (NPTConfig, "targets", ("up,up",), "name each of stream, gate, up, down at most once"),
    (NPTConfig, "targets", ("side", "gate,side"), "choose from stream, gate, up, down"),
    (NPTConfig, "modulation", ("none",), "choose from both, additive, multiplicative"),
    (NPTConfig, "residual", ("drop",), "choose from modulate, keep"),
    (NPTConfig, "init", ("zero",), "choose from random, calibrated"),
    (NPTConfig, "mult_form", ("tanh",), "choose from sigmoid, half_sigmoid, one_plus_tanh"),
    (NPTConfig, "mult_bound", (0.0, 1.0, -0.5, NAN, INF), "it must be above 0 and at most 0.999"),
    (NPTConfig, "additive_scale", (0.0, -0.1, NAN), "it must be above 0"),
    (BaseConfig, "quant_type", ("int4",), "choose from nf4, fp4"),
    (BaseConfig, "matmul_precision", ("low",), "choose from auto, highest, high"),
    (BaseConfig, "attn_implementation", ("flash",), "choose from sdpa, eager"),
    (DataConfig, "max_length", (1, 0, -5), "it must be at least 2"),
    (DataConfig, "num_samples", (0, -1), "it must be at least 1"),
    (DataConfig, "replay_ratio", (0.0, 1.0, NAN, INF), "it must be above 0 and below 1"),
    (TrainConfig, "strategy", ("global",), "choose from local, propagated, end_to_end"),
    (TrainConfig, "loss", ("mae",), "choose from nmse, nmse_update, direction"),
    (TrainConfig, "logit_loss", ("tv",), "choose from kl, reverse_kl, cross_entropy"),
    (TrainConfig, "scheduler_type", ("step",), "choose from cosine, linear, constant"),
    (TrainConfig, "warmup_steps", (-1,), "it must be at least 0"),
    (TrainConfig, "seed", (-1,), "it must be at least 0"),
    *((TrainConfig, name, (0, -1), "it must be at least 1") for name in COUNTS.split()),
    *(
        (TrainConfig, name, (-1.0, NAN), "it must be at least 0.0")
        for name in ("weight_decay", "regularization_lambda", "logit_kl_weight", "hidden_weight")
    ),
    *(
        (TrainConfig, name, (0.0, -1.0, NAN), "it must be above 0")
        for name in ("learning_rate", "max_grad_norm")
    ),
    (
        TrainConfig,
        "trace_steps",
        ("", "0", "0-3", "3-1", "1,,2", "1-", "-2", "1.5", "all", "1;2", "/0", "1/2"),
        "write steps as a list 1,2,3, a range 1-5, /100 for every hundredth",
    ),
]

# as a YAML file or a caller may hand them in
WRONG_TYPES = [
    (NPTConfig, "rank", (1.5, NAN, "16", None, True), "expected int"),
    (NPTConfig, "layers", (None,), "expected str"),
    (NPTConfig, "targets", (None, 3), "expected tuple"),
    (NPTConfig, "modulation", (None,), "expected str"),
    (NPTConfig, "mult_bound", ("0.5", None, False), "expected float"),
    (BaseConfig, "quant_type", (None, 4), "expected str"),
    (DataConfig, "max_length", (2.5, None), "expected int"),
    (TrainConfig, "eval_steps", ("4",), "expected int or unset"),
    (TrainConfig, "learning_rate", (None, "5e-5"), "expected float"),
    (NPTConfig, "additive_scale", (1e39,), "it must be a number of at most 3e+38"),
]


@pytest.mark.parametrize(
    ("cls", "name", "value", "words"),
    [
        (cls, name, value, words)
        for cls, name, values, words in BAD_VALUES + WRONG_TYPES
        for value in values
    ],
)
def test_a_bad_value_is_refused_with_flag_value_and_what_would_do(cls, name, value, words):
    with pytest.raises(ConfigError) as refusal:
        cls(**{name: value})
    (flag,) = (flag_of(f) for f in dataclasses.fields(cls) if f.name == name)
    assert str(refusal.value).startswith(f"--{flag} is ") and words in str(refusal.value)
    assert not isinstance(refusal.value, NotSupportedError)


TOGETHER = [
    (NPTConfig, {"mult_form": "unbounded", "modulation": "additive"}, "--modulation both"),
    (NPTConfig, {"mult_form": "one_plus_tanh", "mult_bound": 0.3}, "--mult_form sigmoid"),
    (NPTConfig, {"residual": "keep", "mult_form": "half_sigmoid"}, "half_sigmoid start at 0.75"),
    (BaseConfig, {"quant_type": "fp4"}, "has no effect without --use_quantization"),
    (BaseConfig, {"teacher_precision": "bf16"}, "has no effect without --use_quantization"),
    (BaseConfig, {"compute_dtype": "bf16"}, "has no effect without --use_quantization"),
    (DataConfig, {"completion_column": "a"}, "a has no effect without --prompt_column"),
    (DataConfig, {"prompt_column": "a", "completion_column": "a"}, "are both 'a'"),
    (TrainConfig, {"logit_loss": "reverse_kl"}, "without --logit_kl_weight above 0"),
    (TrainConfig, {"logit_kl_weight": 0.5}, "without --strategy end_to_end"),
    (TrainConfig, {"hidden_weight": 0, "strategy": "propagated"}, "--logit_kl_weight are both 0"),
    (TrainConfig, {"hidden_weight": 0, **WHOLE}, "--logit_kl_weight are both 0"),
    (TrainConfig, {"loss": "direction", "hidden_weight": 0, **LOGITS}, "--hidden_weight above 0"),
    (TrainConfig, {"gradient_checkpointing": True}, "without --strategy end_to_end"),
]


@pytest.mark.parametrize(("cls", "settings", "words"), TOGETHER, ids=str)
def test_settings_that_do_not_go_together_are_refused(cls, settings, words):
    with pytest.raises(ConfigError) as refusal:
        cls(**settings)
    message = str(refusal.value)
    assert words in message and any(f"--{name}" in message for name in settings)
    assert isinstance(refusal.value, ValueError) and refusal.value.exit_status == 2


@pytest.mark.parametrize("cls", ALL)
def test_defaults_work_and_settings_cannot_be_changed_or_misspelt(cls):
    made = cls()
    assert made == cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, "other")
    with pytest.raises(TypeError):
        cls(no_such_setting=1)


def test_every_setting_is_one_flag_with_a_help_in_a_group_of_at_most_a_dozen():
    fields = [f for cls in ALL for f in dataclasses.fields(cls)]
    flags, groups = Counter(map(flag_of, fields)), Counter(f.metadata["group"] for f in fields)
    assert max(flags.values()) == 1 and len(flags) <= 69 and all(f.metadata["help"] for f in fields)
    assert set(groups) == set(GROUPS) and max(groups.values()) <= 12
    for f in fields:
        default = f.default if isinstance(f.default, tuple) else (f.default,)
        assert not f.metadata["choices"] or {*default} - {None} <= {*f.metadata["choices"]}, f.name


@pytest.mark.parametrize(
    ("cls", "name", "written", "value"),
    [
        (NPTConfig, "targets", "gate, down", ("gate", "down")),
        (NPTConfig, "targets", ["up"], ("up",)),
        (NPTConfig, "targets", "gate", ("gate",)),
        (NPTConfig, "ranks", "8,16", (8, 16)),
        (NPTConfig, "ranks", [8, 16], (8, 16)),
        (NPTConfig, "layers", [3, 5, 7], "3,5,7"),
        (NPTConfig, "layers", range(2), "0,1"),
        (NPTConfig, "layers", "8-15", "8-15"),
        (NPTConfig, "layers", 3, "3"),
        (TrainConfig, "trace_steps", 3, "3"),
        (TrainConfig, "trace_steps", (1, 2, 8), "1,2,8"),
    ],
)
def test_lists_may_be_written_in_either_way(cls, name, written, value):
    assert getattr(cls(**{name: written}), name) == value


def test_steps_are_read_as_lists_and_ranges_that_take_no_memory():
    for text, steps in {
        "1,2,3": [1, 2, 3],
        "1-5,8": [1, 2, 3, 4, 5, 8],
        " 7 - 9 ,2": [7, 8, 9, 2],
        "3-3": [3],
        "01": [1],
    }.items():
        assert [step for chosen in parse_steps(text) for step in chosen] == steps
    steps, often = parse_steps("1-1000000000000,/100")
    assert 10**12 in steps and 10**12 + 1 not in steps
    assert 10**6 in often and 10**6 + 1 not in often and 0 not in often


def test_each_modulation_has_the_terms_of_its_name_and_the_original_form_can_be_written():
    for modulation in MODULATIONS:
        config = NPTConfig(modulation=modulation)
        assert config.multiplicative == (modulation in ("both", "multiplicative"))
        assert config.additive == (modulation in ("both", "additive"))
    config = NPTConfig(rank=16, targets=("gate",), modulation="additive")
    assert (config.targets, config.additive_scale, config.mult_bound) == (("gate",), 0.1, 0.5)


def test_quantisation_is_a_switch_and_a_code():
    assert BaseConfig().quantization is None
    assert BaseConfig(use_quantization=True).quantization == "nf4"
    assert BaseConfig(use_quantization=True, quant_type="fp4").quantization == "fp4"


def test_settings_at_their_bounds_are_accepted():
    NPTConfig(rank=1, mult_bound=1e-6, additive_scale=1e-9)
    DataConfig(max_length=2, num_samples=1)
    TrainConfig(warmup_steps=0, seed=0, weight_decay=0.0, batch_size=1, max_steps=10_000_000)
    TrainConfig(**LOGITS, logit_loss="reverse_kl", hidden_weight=0)


@pytest.mark.parametrize("cls", ALL)
def test_numbers_that_nothing_can_hold_are_refused_by_flag(cls):
    """A counter, a tensor's size or a number in fp32; found by torch or Python, it is a
    traceback. The rates of all steps are kept, so there are ten million at most."""
    for field in dataclasses.fields(cls):
        kinds = str(field.type)
        for kind, huge in (("int", 10**20), ("int", 2**31), ("float", 1e308), ("float", INF)):
            if kind in kinds and "tuple" not in kinds:
                message = (
                    re.escape(f"--{flag_of(field)} is {huge}; it must be ") + ".*(at most|below)"
                )
                with pytest.raises(ConfigError, match=message):
                    cls(**{field.name: huge})
