import dataclasses
import math
import re

import pytest

from npt import config as config_module
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of, parse_steps
from npt.errors import ConfigError, NotSupportedError, NPTError

ALL = (NPTConfig, BaseConfig, DataConfig, TrainConfig)
NAN, INF = math.nan, math.inf

# The flags that the recommended command and the documentation use.
DOCUMENTED = set(
    """
    model_name adapter_rank layers targets modulation residual init additive_scale mult_bound
    use_quantization quant_type use_fp16 compute_dtype matmul_precision share_embeddings
    strategy loss dataset_name dataset_config dataset_split text_column prompt_column
    completion_column streaming num_samples max_length packing replay_dataset
    replay_ratio hidden_weight batch_size gradient_accumulation_steps learning_rate
    weight_decay regularization_lambda num_epochs max_steps warmup_steps scheduler_type
    max_grad_norm max_consecutive_bad seed output_dir log_steps eval_steps save_steps
    save_total_limit resume use_wandb use_tensorboard run_name smoke_test trace_steps
    trace_every
    """.split()  # noqa: SIM905 - read as the documentation writes them
)

LOGITS = {"strategy": "end_to_end", "logit_kl_weight": 1.0}

BAD_VALUES = [
    (NPTConfig, {"rank": 0}, "--adapter_rank is 0; it must be at least 1"),
    (NPTConfig, {"rank": -3}, "--adapter_rank is -3"),
    (NPTConfig, {"ranks": ()}, "--ranks is ()"),
    (
        NPTConfig,
        {"ranks": (4, 0)},
        "--ranks is (4, 0); give each converted layer a whole number of at least 1",
    ),
    (NPTConfig, {"ranks": (4, 1.5)}, "--ranks is (4, 1.5)"),
    (NPTConfig, {"ranks": "4,,5"}, "--ranks is '4,,5'; write whole numbers like 8,16,32"),
    (TrainConfig, {"calibration_tokens": 0}, "--calibration_tokens is 0"),
    (
        NPTConfig,
        {"targets": "gate,side"},
        "--targets is 'side'; choose from stream, gate, up, down",
    ),
    (
        NPTConfig,
        {"targets": ()},
        "--targets is (); name each of stream, gate, up, down at most once, and one at least",
    ),
    (NPTConfig, {"targets": " , "}, "--targets is ()"),
    (NPTConfig, {"targets": "up,up"}, "--targets is ('up', 'up')"),
    (
        NPTConfig,
        {"modulation": "none"},
        "--modulation is 'none'; choose from both, additive, multiplicative",
    ),
    (NPTConfig, {"residual": "drop"}, "--residual is 'drop'; choose from modulate, keep"),
    (NPTConfig, {"init": "zero"}, "--init is 'zero'; choose from random, calibrated"),
    *[
        (
            NPTConfig,
            {"mult_bound": v},
            f"--mult_bound is {v}; it must lie above 0 and be at most 0.999",
        )
        for v in (0.0, 1.0, -0.5, 1.5, NAN, INF)
    ],
    *[
        (NPTConfig, {"additive_scale": v}, f"--additive_scale is {v}; it must be a positive number")
        for v in (0.0, -0.1, NAN, INF)
    ],
    (
        NPTConfig,
        {"mult_form": "tanh"},
        "--mult_form is 'tanh'; choose from sigmoid, half_sigmoid, one_plus_tanh, unbounded",
    ),
    (
        NPTConfig,
        {"mult_form": "unbounded", "modulation": "additive"},
        "--mult_form unbounded means nothing without --modulation both",
    ),
    (
        NPTConfig,
        {"mult_form": "one_plus_tanh", "mult_bound": 0.3},
        "--mult_bound 0.3 means nothing without --mult_form sigmoid",
    ),
    (
        NPTConfig,
        {"residual": "keep", "mult_form": "half_sigmoid"},
        "--residual keep starts equal to its base",
    ),
    (BaseConfig, {"quant_type": "int4"}, "--quant_type is 'int4'; choose from nf4, fp4"),
    (
        BaseConfig,
        {"matmul_precision": "low"},
        "--matmul_precision is 'low'; choose from auto, highest, high",
    ),
    *[
        (
            DataConfig,
            {"max_length": v},
            f"--max_length is {v}; it must be a finite number of at least 2",
        )
        for v in (1, 0, -5)
    ],
    *[
        (
            DataConfig,
            {"num_samples": v},
            f"--num_samples is {v}; it must be a finite number of at least 1",
        )
        for v in (0, -1)
    ],
    (
        DataConfig,
        {"completion_column": "a"},
        "--completion_column is 'a' without --prompt_column; name both",
    ),
    (
        DataConfig,
        {"prompt_column": "a", "completion_column": "a"},
        "--prompt_column and --completion_column are both 'a'; they are two",
    ),
    *[
        (
            DataConfig,
            {"replay_dataset": "x", "replay_ratio": v},
            f"--replay_ratio is {v}; it is a share, between 0 and 1",
        )
        for v in (0.0, 1.0, -0.2, 1.5, NAN, INF)
    ],
    (
        TrainConfig,
        {"strategy": "global"},
        "--strategy is 'global'; choose from local, propagated, end_to_end",
    ),
    (
        TrainConfig,
        {"loss": "mae"},
        "--loss is 'mae'; choose from nmse, nmse_update, direction, mse, smooth_l1, cosine",
    ),
    (
        TrainConfig,
        {"logit_loss": "tv"},
        "--logit_loss is 'tv'; choose from kl, reverse_kl, jsd, cross_entropy",
    ),
    *[
        (
            TrainConfig,
            {**LOGITS, "logit_temperature": v},
            f"--logit_temperature is {v}; it must lie between 0.001 and 1000.0",
        )
        for v in (0.0, -1.0, 1e-4, 1e4, NAN, INF)
    ],
    (
        TrainConfig,
        {"logit_loss": "jsd"},
        "--logit_loss jsd means nothing without a --logit_kl_weight above 0",
    ),
    (
        TrainConfig,
        {"logit_temperature": 2.0},
        "--logit_temperature 2.0 means nothing without a --logit_kl_weight above 0",
    ),
    (
        TrainConfig,
        {**LOGITS, "logit_loss": "cross_entropy", "logit_temperature": 2.0},
        "--logit_temperature 2.0 means nothing without",
    ),
    (
        TrainConfig,
        {"scheduler_type": "step"},
        "--scheduler_type is 'step'; choose from cosine, linear, constant",
    ),
    *[
        (
            TrainConfig,
            {name: low - 1},
            f"--{name} is {low - 1}; it must be a finite number of at least {low}",
        )
        for name, low in {
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
            "num_epochs": 1,
            "max_steps": 1,
            "warmup_steps": 0,
            "max_consecutive_bad": 1,
            "seed": 0,
            "log_steps": 1,
            "eval_steps": 1,
            "eval_samples": 1,
            "save_steps": 1,
            "save_total_limit": 1,
            "trace_every": 1,
        }.items()
    ],
    *[
        (
            TrainConfig,
            {name: value},
            f"--{name} is {value}; it must be a finite number of at least 0.0",
        )
        for name in ("weight_decay", "regularization_lambda", "logit_kl_weight")
        for value in (-1.0, NAN, INF)
    ],
    *[
        (TrainConfig, {name: value}, f"--{name} is {value}; it must be a positive number")
        for name in ("learning_rate", "max_grad_norm")
        for value in (0.0, -1.0, NAN, INF)
    ],
    *[
        (
            TrainConfig,
            {"trace_steps": v},
            (
                f"--trace_steps is {v!r}; write steps from 1 on as a list 1,2,3, a range 1-5 or a"
                " mix 1-5,8"
            ),
        )
        for v in ("", "0", "0-3", "3-1", "1,,2", "1-", "-2", "1.5", "all", "1;2")
    ],
    (
        TrainConfig,
        {"hidden_weight": 0.0},
        (
            "--hidden_weight is 0, but --strategy local trains on hidden states alone; raise it,"
            " or use"
        ),
    ),
    (
        TrainConfig,
        {"hidden_weight": 0, "strategy": "propagated"},
        "--hidden_weight is 0, but --strategy propagated trains on hidden",
    ),
    (
        TrainConfig,
        {"hidden_weight": 0, "strategy": "end_to_end"},
        "--hidden_weight and --logit_kl_weight are both 0, which leaves nothing",
    ),
    (
        TrainConfig,
        {"hidden_weight": 0, "loss": "mse", **LOGITS},
        "--loss mse means nothing without a --hidden_weight above 0",
    ),
    *[
        (TrainConfig, {"hidden_weight": v}, f"--hidden_weight is {v}; it must be a finite number")
        for v in (-1.0, NAN, INF)
    ],
    (
        TrainConfig,
        {"logit_kl_weight": 0.5},
        "--logit_kl_weight is 0.5 with --strategy local, which computes no logits",
    ),
    (
        BaseConfig,
        {"teacher_precision": "bf16"},
        "--teacher_precision is bf16, but the base is not quantised",
    ),
]

# As a YAML file or a caller may hand them in.
WRONG_TYPES = [
    (NPTConfig, {"rank": 1.5}, "--adapter_rank is 1.5"),
    (NPTConfig, {"rank": NAN}, "--adapter_rank is nan"),
    (NPTConfig, {"rank": "16"}, "--adapter_rank is 16"),
    (NPTConfig, {"rank": None}, "--adapter_rank is None"),
    (NPTConfig, {"layers": None}, "--layers is None"),
    (NPTConfig, {"targets": None}, "--targets is None"),
    (NPTConfig, {"modulation": None}, "--modulation is None"),
    (NPTConfig, {"residual": None}, "--residual is None"),
    (NPTConfig, {"mult_bound": "0.5"}, "--mult_bound is 0.5"),
    (NPTConfig, {"additive_scale": None}, "--additive_scale is None"),
    (BaseConfig, {"quant_type": None}, "--quant_type is None"),
    (DataConfig, {"max_length": 2.5}, "--max_length is 2.5"),
    (DataConfig, {"max_length": None}, "--max_length is None"),
    (TrainConfig, {"batch_size": 2.5}, "--batch_size is 2.5"),
    (TrainConfig, {"batch_size": None}, "--batch_size is None"),
    (TrainConfig, {"batch_size": "4"}, "--batch_size is 4"),
    (TrainConfig, {"seed": 1.5}, "--seed is 1.5"),
    (TrainConfig, {"strategy": None}, "--strategy is None"),
    (TrainConfig, {"learning_rate": None}, "--learning_rate is None"),
    (TrainConfig, {"learning_rate": "5e-5"}, "--learning_rate is 5e-5"),
]


def cases(table):
    ids = [
        f"{config.__name__}-{','.join(f'{key}={value!r}' for key, value in settings.items())}"
        for config, settings, _ in table
    ]
    return pytest.mark.parametrize(("config", "settings", "message"), table, ids=ids)


@cases(BAD_VALUES)
def test_a_bad_value_is_refused_with_flag_value_and_what_would_do(config, settings, message):
    with pytest.raises(ConfigError) as refusal:
        config(**settings)
    assert str(refusal.value).startswith(message)
    assert not isinstance(refusal.value, NotSupportedError)


@cases(WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused_like_any_other(config, settings, message):
    with pytest.raises(ConfigError) as refusal:
        config(**settings)
    assert str(refusal.value).replace("'", "").startswith(message)


def test_a_refusal_is_a_value_error_and_exit_status_2():
    with pytest.raises(ValueError, match="--adapter_rank") as refusal:
        NPTConfig(rank=0)
    assert isinstance(refusal.value, NPTError)
    assert refusal.value.exit_status == 2


@pytest.mark.parametrize("config", ALL)
def test_defaults_work_and_settings_cannot_be_changed_or_misspelt(config):
    made = config()
    assert made == config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, "other")
    with pytest.raises(TypeError):
        config(no_such_setting=1)


def test_every_documented_flag_exists_exactly_once_and_has_a_help():
    fields = [f for config in ALL for f in dataclasses.fields(config)]
    flags = [flag_of(f) for f in fields]
    assert len(set(flags)) == len(flags)
    assert set(flags) >= DOCUMENTED
    assert all(f.metadata["help"] for f in fields)


@pytest.mark.parametrize("config", ALL)
def test_every_default_is_among_its_choices(config):
    for f in dataclasses.fields(config):
        if f.metadata["choices"]:
            default = f.default if isinstance(f.default, tuple) else (f.default,)
            assert set(default) - {None} <= set(f.metadata["choices"]), f.name  # None is unset


@pytest.mark.parametrize(
    ("settings", "attribute", "value"),
    [
        ({"targets": "gate, down"}, "targets", ("gate", "down")),
        ({"targets": ["up"]}, "targets", ("up",)),
        ({"targets": "gate"}, "targets", ("gate",)),
        ({"layers": [3, 5, 7]}, "layers", "3,5,7"),
        ({"layers": range(2)}, "layers", "0,1"),
        ({"layers": "8-15"}, "layers", "8-15"),
        ({"layers": 3}, "layers", "3"),
    ],
)
def test_lists_of_targets_and_layers_may_be_written_in_either_way(settings, attribute, value):
    assert getattr(NPTConfig(**settings), attribute) == value


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1,2,3", [1, 2, 3]),
        ("1-5,8", [1, 2, 3, 4, 5, 8]),
        (" 7 - 9 ,2", [7, 8, 9, 2]),
        ("4", [4]),
        ("3-3", [3]),
        ("01", [1]),
    ],
)
def test_steps_are_read_as_lists_and_ranges(text, steps):
    assert [step for chosen in parse_steps(text) for step in chosen] == steps


def test_a_range_of_steps_takes_no_memory():
    (steps,) = parse_steps("1-1000000000000")
    assert 10**12 in steps and 10**12 + 1 not in steps


@pytest.mark.parametrize(
    ("given", "held"), [(3, "3"), ([1, 2, 8], "1,2,8"), ((4,), "4"), ("1-3", "1-3")]
)
def test_steps_to_trace_may_be_written_as_numbers_too(given, held):
    assert TrainConfig(trace_steps=given).trace_steps == held


@pytest.mark.parametrize("modulation", config_module.MODULATIONS)
def test_each_modulation_has_the_terms_of_its_name(modulation):
    config = NPTConfig(modulation=modulation)
    assert config.multiplicative == (modulation in ("both", "multiplicative"))
    assert config.additive == (modulation in ("both", "additive"))


def test_the_original_form_can_be_written():
    config = NPTConfig(rank=16, targets=("gate",), modulation="additive")
    assert (config.targets, config.additive_scale, config.mult_bound) == (("gate",), 0.1, 0.5)
    assert not config.multiplicative


def test_quantisation_is_a_switch_and_a_code():
    assert BaseConfig().quantization is None
    with pytest.raises(
        ConfigError, match="--quant_type fp4 means nothing without --use_quantization"
    ):
        BaseConfig(quant_type="fp4")
    assert BaseConfig(use_quantization=True).quantization == "nf4"
    assert BaseConfig(use_quantization=True, quant_type="fp4").quantization == "fp4"


def test_settings_at_their_bounds_are_accepted():
    NPTConfig(rank=1, mult_bound=1e-6, additive_scale=1e-9)
    DataConfig(max_length=2, num_samples=1)
    TrainConfig(
        warmup_steps=0,
        seed=0,
        weight_decay=0.0,
        batch_size=1,
        log_steps=1,
        save_total_limit=1,
        max_steps=None,
    )
    TrainConfig(strategy="end_to_end", logit_kl_weight=0.5)
    TrainConfig(**LOGITS, logit_loss="jsd", logit_temperature=1e-3)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GiB", 10 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("800MB", 800_000_000),
        ("64KiB", 65536),
        ("2TB", 2 * 10**12),
        ("12B", 12),
        (123456, 123456),
        ("0.5KiB", 512),
    ],
)
def test_sizes_of_memory_are_read_in_both_kinds_of_units(text, size) -> None:
    assert TrainConfig(max_memory=text).max_memory_bytes == size


@pytest.mark.parametrize(
    "text", ["", "10G", "GiB", "-1GiB", "0", "0.0001KB", "1e9", "nan", "10GiB8", 0, True, "1" * 30]
)
def test_what_is_no_size_is_refused_with_an_example(text) -> None:
    with pytest.raises(ConfigError, match="--max_memory"):
        TrainConfig(max_memory=text)


@pytest.mark.parametrize("config", ALL)
def test_numbers_that_nothing_can_hold_are_refused_by_flag(config) -> None:
    """A counter, a tensor's size or a number in fp32; found by torch or Python, it is a
    traceback."""
    refused = 0
    for field in dataclasses.fields(config):
        kinds = str(field.type)
        for kind, huge in (("int", 10**20), ("int", 2**31), ("float", 1e308)):
            if kind in kinds and "tuple" not in kinds:
                message = re.escape(f"--{flag_of(field)} is {huge}; it ")
                with pytest.raises(ConfigError, match=message):
                    config(**{field.name: huge})
                refused += 1
    assert refused or config is BaseConfig


def test_a_run_is_not_longer_than_its_rates_can_be_kept() -> None:
    for name in ("max_steps", "warmup_steps"):
        assert getattr(TrainConfig(**{name: 10_000_000}), name) == 10_000_000
        with pytest.raises(ConfigError, match=f"--{name} is 10000001; .* at most 10000000"):
            TrainConfig(**{name: 10_000_001})
