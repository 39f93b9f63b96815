"""Flags and YAML entries: from the settings' fields, under their own and other names."""

import os
from dataclasses import fields
from pathlib import Path

import pytest

from npt.cli.main import main, make_parser
from npt.config import GROUPS, BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.errors import ConfigError
from npt.flags import add_settings, build, read_yaml, with_safe_mode
from npt.parser import ALIASES, REPLACED, OneLineParser, canonical
from npt.train.resolve import _with_config

CLASSES = (BaseConfig, NPTConfig, DataConfig, TrainConfig)
FLAGS = [flag_of(f) for cls in CLASSES for f in fields(cls)]

# the command line that others rely on; a flag may gain company, never vanish
PROMISED = """
    model_name adapter_rank layers targets modulation residual init additive_scale mult_bound
    use_quantization quant_type use_fp16 matmul_precision share_embeddings strategy loss
    dataset_name dataset_config dataset_split text_column prompt_column completion_column streaming
    num_samples max_length packing replay_dataset replay_ratio batch_size
    gradient_accumulation_steps learning_rate weight_decay regularization_lambda num_epochs
    max_steps warmup_steps scheduler_type max_grad_norm max_consecutive_bad seed output_dir
    log_steps eval_steps save_steps save_total_limit resume use_wandb use_tensorboard run_name
    smoke_test trace_steps
"""


def parse(*arguments: str) -> dict[str, object]:
    parser = OneLineParser(prog="npt pretrain", allow_abbrev=False)
    add_settings(parser, *CLASSES)
    return vars(parser.parse_args(arguments))


def test_every_promised_flag_exists() -> None:
    assert set(PROMISED.split()) <= set(FLAGS)


def test_flags_that_are_not_given_leave_the_defaults() -> None:
    assert parse() == {}
    assert build(TrainConfig, {}) == TrainConfig()


def test_given_flags_arrive_with_their_types() -> None:
    given = parse(
        *("--adapter_rank", "8", "--learning_rate", "3e-4", "--targets", "gate,up"),
        *("--use_quantization", "--eval_steps", "7", "--output_dir", "my-runs", "--run_name=a-b=d"),
    )
    assert build(NPTConfig, given) == NPTConfig(rank=8, targets=("gate", "up"))
    assert build(BaseConfig, given).use_quantization is True
    assert build(TrainConfig, given) == TrainConfig(
        learning_rate=3e-4, eval_steps=7, output_dir="my-runs", run_name="a-b=d"
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("--smoke_test", {"smoke_test": True}),
        ("--no_smoke_test", {"smoke_test": False}),
        ("--smoke_test false", {"smoke_test": False}),
        ("--smoke_test yes", {"smoke_test": True}),
        ("--learning-rate 3e-4", {"learning_rate": 3e-4}),
        ("--learning-rate=3e-4", {"learning_rate": 3e-4}),
        ("--per_device_train_batch_size 8", {"batch_size": 8}),
        ("--per-device-train-batch-size=8", {"batch_size": 8}),
        ("--num_train_epochs 2", {"num_epochs": 2}),
        ("--logging_steps 5", {"log_steps": 5}),
        ("--lr_scheduler_type linear", {"scheduler_type": "linear"}),
        ("--load_in_4bit", {"use_quantization": True}),
        ("--load_in_4bit False", {"use_quantization": False}),
        ("--no-load-in-4bit", {"use_quantization": False}),
        ("--model_name_or_path a-b", {"model_name": "a-b"}),
        ("--resume_from_checkpoint auto", {"resume": "auto"}),
    ],
)
def test_dashes_negations_and_the_names_of_transformers_scripts_are_taken(
    written: str, expected: dict[str, object]
) -> None:
    assert parse(*written.split()) == expected


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("--batch_size x", "--batch_size: invalid int value: 'x'"),
        ("--smoke_test perhaps", "--smoke_test: 'perhaps' is neither true nor false"),
        ("--quant_type int8", "--quant_type: invalid choice: 'int8'"),
        ("--learing_rate 1", "there is no flag --learing_rate: did you mean --learning_rate?"),
        ("--save-step 1", "there is no flag --save-step: did you mean --save_steps?"),
        ("--per_device_train_batch 1", "did you mean --per_device_train_batch_size?"),
        ("--zzz", "there is no flag --zzz (see npt pretrain --help)"),
        ("--mixed_precision fp16", "no flag --mixed_precision: use --use_fp16"),
        ("--optimizer-type=adamw", "no flag --optimizer-type: the optimizer is always AdamW"),
        ("--padding_side left", "rows are padded on the right"),
        ("stray", "'stray' does not belong to any flag"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    written: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*written.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("npt pretrain: error: ") and words in line
    assert line.endswith("(see npt pretrain --help)")


def test_no_other_name_hides_a_flag() -> None:
    assert not set(ALIASES) & set(FLAGS) and set(ALIASES.values()) <= set(FLAGS)
    assert not set(REPLACED) & {*FLAGS, *ALIASES}
    assert all(canonical(name, FLAGS) == name for name in FLAGS)


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_has_every_flag_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    shown = helped(capsys, "pretrain", "--help")
    assert all(f"--{name} " in shown for name in FLAGS)
    assert all(title in shown for title in GROUPS.values())


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_yaml_gives_what_flags_would(tmp_path: Path) -> None:
    text = (
        "lr: 5e-5\nper-device-train-batch-size: 2\ntargets: [gate, down]\nlayers: [3, 5]\n"
        "smoke_test: no\nadapter_rank: 4\nrun_name: 7\nmax_steps: null\nhidden_weight: 2\n"
        "seed: 3.0\n"
    )
    given = read_yaml(write(tmp_path, text), CLASSES)
    assert build(TrainConfig, given) == TrainConfig(
        learning_rate=5e-5, batch_size=2, smoke_test=False, run_name="7", hidden_weight=2.0, seed=3
    )
    assert build(NPTConfig, given) == NPTConfig(rank=4, targets=("gate", "down"), layers="3,5")
    assert read_yaml(write(tmp_path, ""), CLASSES) == {}
    with pytest.raises(ConfigError, match="--targets is 'None'; choose from stream, gate, up, do"):
        build(NPTConfig, read_yaml(write(tmp_path, "targets: [stream, null]"), CLASSES))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_sise: 4\n", "there is no setting 'batch_sise': did you mean batch_size"),
        ("fp16: true\n", "there is no setting 'fp16': use --use_fp16"),
        ("batch_size: four\n", "batch_size is 'four'; expected int"),
        ("batch_size: 2.5\n", "batch_size is 2.5; expected int"),
        ("batch_size: '5.0'\n", "batch_size is '5.0'; expected int"),
        ("batch_size: .inf\n", "batch_size is inf; expected int"),
        ("batch_size: true\n", "batch_size is True; expected int"),
        ("learning_rate: [1]\n", "learning_rate is [1]; expected float"),
        ("smoke_test: perhaps\n", "smoke_test is 'perhaps'; expected bool"),
        ("dataset_name: {a: 1}\n", "expected str"),
        ("layers: [[1], 2]\n", "expected str"),
        ("- 1\n- 2\n", "holds a list"),
        ("a: [1\nb: 2\n", "is not valid YAML: line 2"),
        ("max_steps: 1\nmax_steps: 2\n", "line 2, column 1: max_steps is given twice"),
        ("batch_size: 1\nper_device_train_batch_size: 2\n", "batch_size is given twice, once as"),
        ("lr: 1\nlearning_rate: 2\n", "lr is given twice, once as learning_rate: remove one"),
        ("max_steps: 2001-99-99\n", "max_steps is '2001-99-99'; expected int"),
        ("max_steps: !!int abc\n", "line 1, column 12: !!int is a tag: write the value without it"),
        ("max_steps: !!timestamp abc\n", "!!timestamp is a tag"),
        ("smoke_test: !!bool abc\n", "!!bool is a tag"),
        ("layers: !!set {3, 5}\n", "!!set is a tag"),
        ("? [a, b]\n: 1\n", "line 1, column 3: a key is a list or a mapping: write a name"),
        ("run_name: &a [x]\nlayers: [*a, *a]\n", "line 2, column 10: *a is an alias"),
        ("resume: false\n", "resume is False; expected str: leave the line out, or put text in"),
        ("layers: [no, 3]\n", "layers is [False, 3]; expected str"),
        ("seed: 0x10\n", "seed is '0x10'; expected int"),
        ("run_name: \x00\n", "is not valid YAML: unacceptable character #x0000"),
        (f"max_steps: {'9' * 6000}\n", "9...; expected int"),
        (f"layers: {'[' * 2000}{']' * 2000}\n", "is not valid YAML: maximum recursion depth"),
    ],
)
def test_a_wrong_yaml_file_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_yaml(write(tmp_path, text), CLASSES)
    assert words in str(refused.value) and "run.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_yaml_reads_text_and_numbers_as_a_flag_does(tmp_path: Path) -> None:
    """YAML 1.1 reads 3:5 as 185, 010 as 8 and `12:30` as 750."""
    text = "layers: 3:5\nseed: 010\nrun_name: 2001-01-01\noutput_dir: 12:30\n"
    expected = {"layers": "3:5", "seed": 10, "run_name": "2001-01-01", "output_dir": "12:30"}
    assert read_yaml(write(tmp_path, text), CLASSES) == expected


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_yaml_with_a_byte_order_mark_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run_name: é\n", encoding=encoding)
    assert read_yaml(str(path), CLASSES) == {"run_name": "é"}


def test_a_pipe_or_a_file_of_weights_is_no_yaml(tmp_path: Path) -> None:
    """A pipe without a writer would be waited for, and weights be read as a whole."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(10 << 30)
    for name, words in (("pipe", "not a regular file"), ("large", "more than the limit of")):
        with pytest.raises(ConfigError, match=f"{name} cannot be read: .*{words}"):
            read_yaml(str(tmp_path / name), CLASSES)


def test_a_missing_yaml_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a file nor a preset: name"):
        read_yaml(str(tmp_path / "none.yaml"), CLASSES)


@pytest.mark.parametrize(
    "given", ["--no_safe_mode", "--no-safe-mode", "--safe_mode --no_safe_mode"]
)
def test_no_safe_mode_overrides_the_safe_mode_of_a_file(given: str) -> None:
    def modulation(line: str) -> object:
        flags = vars(make_parser().parse_args(["pretrain", "--config", "seed", *line.split()]))
        return with_safe_mode(_with_config(flags)).get("modulation")

    assert modulation("") == "additive"
    assert modulation(given) is None
    assert modulation(f"{given} --modulation both") == "both"
