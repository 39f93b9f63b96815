from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.errors import ConfigError
from npt.flags import OneLineParser, add_settings, build, read_yaml

CLASSES = (BaseConfig, NPTConfig, DataConfig, TrainConfig)

# The command line that others rely on; a flag may gain company, never vanish.
PROMISED = [
    "model_name",
    "adapter_rank",
    "layers",
    "targets",
    "modulation",
    "residual",
    "init",
    "additive_scale",
    "mult_bound",
    "use_quantization",
    "quant_type",
    "use_fp16",
    "matmul_precision",
    "share_embeddings",
    "strategy",
    "loss",
    "dataset_name",
    "dataset_config",
    "dataset_split",
    "text_column",
    "prompt_column",
    "completion_column",
    "streaming",
    "num_samples",
    "max_length",
    "packing",
    "replay_dataset",
    "replay_ratio",
    "batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "weight_decay",
    "regularization_lambda",
    "num_epochs",
    "max_steps",
    "warmup_steps",
    "scheduler_type",
    "max_grad_norm",
    "max_consecutive_bad",
    "seed",
    "output_dir",
    "log_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "resume",
    "use_wandb",
    "use_tensorboard",
    "run_name",
    "smoke_test",
    "trace_steps",
    "trace_every",
]


def parse(*arguments: str) -> dict[str, object]:
    parser = OneLineParser(prog="npt", allow_abbrev=False)
    add_settings(parser, *CLASSES)
    return vars(parser.parse_args(arguments))


def test_every_promised_flag_exists_once() -> None:
    names = [flag_of(f) for cls in CLASSES for f in fields(cls)]
    assert len(names) == len(set(names))
    assert set(PROMISED) <= set(names)


def test_flags_that_are_not_given_leave_the_defaults() -> None:
    assert parse() == {}
    assert build(TrainConfig, {}) == TrainConfig()


def test_given_flags_arrive_with_their_types() -> None:
    given = parse(
        "--adapter_rank",
        "8",
        "--learning_rate",
        "3e-4",
        "--targets",
        "gate,up",
        "--use_quantization",
        "--eval_steps",
        "7",
    )
    assert build(NPTConfig, given).rank == 8
    assert build(NPTConfig, given).targets == ("gate", "up")
    assert build(BaseConfig, given).use_quantization is True
    assert build(TrainConfig, given).learning_rate == 3e-4
    assert build(TrainConfig, given).eval_steps == 7


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("--smoke_test",), True),
        (("--no_smoke_test",), False),
        (("--smoke_test", "false"), False),
        (("--smoke_test", "yes"), True),
    ],
)
def test_a_boolean_flag_takes_a_value_and_has_a_negation(
    arguments: tuple[str, ...], value: bool
) -> None:
    assert parse(*arguments) == {"smoke_test": value}


@pytest.mark.parametrize(
    "arguments",
    [("--batch_size", "x"), ("--smoke_test", "perhaps"), ("--quant_type", "int8"), ("--rank", "4")],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*arguments)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert arguments[0] in lines[0] and "--help" in lines[0]


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_yaml_gives_what_flags_would(tmp_path: Path) -> None:
    text = (
        "learning_rate: 5e-5\nbatch_size: 2\ntargets: [gate, down]\nsmoke_test: no\nadapter_rank:"
        " 4\nrun_name: 7\nmax_steps: null\n"
    )
    given = read_yaml(write(tmp_path, text), CLASSES)
    assert build(TrainConfig, given) == TrainConfig(
        learning_rate=5e-5, batch_size=2, smoke_test=False, run_name="7"
    )
    assert build(NPTConfig, given) == NPTConfig(rank=4, targets=("gate", "down"))


def test_an_empty_yaml_file_changes_nothing(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, ""), CLASSES) == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("batch_sise: 4\n", "did you mean batch_size"),
        ("batch_size: four\n", "batch_size is 'four', expected int"),
        ("batch_size: 2.5\n", "batch_size is 2.5, expected int"),
        ("batch_size: true\n", "batch_size is True, expected int"),
        ("learning_rate: [1]\n", "learning_rate is [1], expected float"),
        ("smoke_test: perhaps\n", "smoke_test is 'perhaps', expected bool"),
        ("dataset_name: {a: 1}\n", "expected str"),
        ("- 1\n- 2\n", "holds a list"),
        ("a: [1\nb: 2\n", "not valid YAML: line 2"),
        ("max_steps: 1\nmax_steps: 2\n", "line 2, column 1: max_steps is given twice"),
        ("max_steps: 2001-99-99\n", "holds a value that cannot be read: month must be"),
        ("max_steps: !!int abc\n", "holds a value that cannot be read: invalid literal"),
        (f"max_steps: {'9' * 6000}\n", "holds a value that cannot be read: Exceeds the limit"),
        (f"layers: {'[' * 2000}{']' * 2000}\n", "cannot be read: nested too deeply"),
        ("run_name: &a [x]\nlayers: [*a, *a]\n", "line 2, column 10: *a is an alias"),
    ],
)
def test_a_wrong_yaml_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_yaml(write(tmp_path, text), CLASSES)
    assert named in str(refused.value)
    assert "run.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_yaml_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a file nor one of the presets"):
        read_yaml(str(tmp_path / "none.yaml"), CLASSES)
