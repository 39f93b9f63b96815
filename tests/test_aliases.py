"""Other names of flags, near misses, and what help shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from npt.cli.main import main
from npt.config import GROUPS, BaseConfig, DataConfig, NPTConfig, TrainConfig, flag_of
from npt.errors import ConfigError
from npt.flags import ALIASES, RETIRED, OneLineParser, add_settings, canonical, read_yaml

CLASSES = (BaseConfig, NPTConfig, DataConfig, TrainConfig)
FLAGS = [flag_of(f) for cls in CLASSES for f in fields(cls)]


def parse(*arguments: str) -> dict[str, object]:
    parser = OneLineParser(prog="npt pretrain", allow_abbrev=False)
    add_settings(parser, *CLASSES)
    return vars(parser.parse_args(arguments))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["--learning-rate", "3e-4"], {"learning_rate": 3e-4}),
        (["--learning-rate=3e-4"], {"learning_rate": 3e-4}),
        (["--per_device_train_batch_size", "8"], {"batch_size": 8}),
        (["--per-device-train-batch-size=8"], {"batch_size": 8}),
        (["--num_train_epochs", "2"], {"num_epochs": 2}),
        (["--logging_steps", "5"], {"log_steps": 5}),
        (["--lr_scheduler_type", "linear"], {"scheduler_type": "linear"}),
        (["--load_in_4bit"], {"use_quantization": True}),
        (["--load_in_4bit", "False"], {"use_quantization": False}),
        (["--no-load-in-4bit"], {"use_quantization": False}),
        (["--model_name_or_path", "a-b"], {"model_name": "a-b"}),
        (["--resume_from_checkpoint", "auto"], {"resume": "auto"}),
    ],
    ids=" ".join,
)
def test_the_names_that_transformers_scripts_have_are_taken(written, expected):
    assert parse(*written) == expected


def test_values_are_left_as_they_are():
    assert parse("--output_dir", "my-runs", "--dataset_name=a-b-c=d") == {
        "output_dir": "my-runs",
        "dataset_name": "a-b-c=d",
    }


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (["--learing_rate", "1"], "there is no flag --learing_rate; did you mean --learning_rate?"),
        (["--save-step", "1"], "there is no flag --save-step; did you mean --save_steps?"),
        (["--per_device_train_batch", "1"], "did you mean --per_device_train_batch_size?"),
        (["--zzz"], "there is no flag --zzz (see npt pretrain --help)"),
        (
            ["--mixed_precision", "fp16"],
            "there is no flag --mixed_precision; a 4-bit base computes in fp32",
        ),
        (["--optimizer-type=adamw"], "there is no flag --optimizer-type; the optimizer is AdamW"),
        (["--modulation_scale", "0.1"], "--additive_scale"),
        (["--log_file", "x.log"], "metrics.jsonl"),
        (["--report-to", "wandb"], "there is no flag --report-to; write --use_wandb"),
        (["stray"], "'stray' belongs to no flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_flag_is_one_line_with_a_suggestion_and_the_help(capsys, written, said):
    line = refused(capsys, *written)
    assert (
        line.startswith("npt pretrain: error: ")
        and said in line
        and line.endswith("(see npt pretrain --help)")
    )


def test_no_other_name_hides_a_flag():
    assert not set(ALIASES) & set(FLAGS) and set(ALIASES.values()) <= set(FLAGS)
    assert not set(RETIRED) & {*FLAGS, *ALIASES}
    assert all(canonical(name, FLAGS) == name for name in FLAGS)


def test_a_file_of_settings_takes_them_too_and_none_twice(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("per-device-train-batch-size: 8\nload_in_4bit: true\n")
    assert read_yaml(str(file), CLASSES) == {"batch_size": 8, "use_quantization": True}
    file.write_text("batch_size: 8\nper_device_train_batch_size: 4\n")
    with pytest.raises(
        ConfigError, match="batch_size is given twice, once as per_device_train_batch_size"
    ):
        read_yaml(str(file), CLASSES)
    file.write_text("mixed_precision: fp16\n")
    with pytest.raises(
        ConfigError, match="there is no setting 'mixed_precision'; a 4-bit base computes in fp32"
    ):
        read_yaml(str(file), CLASSES)


def test_every_setting_has_a_group_of_at_most_a_dozen():
    counts = Counter(f.metadata["group"] for cls in CLASSES for f in fields(cls))
    assert set(counts) == set(GROUPS) and max(counts.values()) <= 12


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_has_what_most_runs_need_and_says_where_the_rest_is(capsys):
    short, every = helped(capsys, "pretrain", "--help"), helped(capsys, "pretrain", "--help-all")
    often = [flag_of(f) for cls in CLASSES for f in fields(cls) if f.metadata["often"]]
    assert 20 <= len(often) <= 30
    assert [name for name in FLAGS if f"--{name} " in short] == [
        name for name in FLAGS if name in often
    ]
    assert f"{len(FLAGS) - len(often)} more flags: npt pretrain --help_all" in short
    assert all(f"--{name} " in every for name in FLAGS)
    assert all(title in every for title in GROUPS.values())


@pytest.mark.parametrize("verb", ["evaluate", "generate", "collect", "doctor", "trace"])
def test_the_other_verbs_do_so_too(capsys, verb):
    short, every = helped(capsys, verb, "--help"), helped(capsys, verb, "--help_all")
    assert "--attn_implementation" not in short and "--attn_implementation" in every
    assert "--model_name" in short
