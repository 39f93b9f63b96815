"""What a run does where its flags are silent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from npt.cli.defaults import with_config, with_data, with_defaults
from npt.cli.main import main
from npt.config import NPTConfig
from npt.train.sources import DATASETS

WEB_TEXT = DATASETS["slimpajama"]["dataset_name"]
SHORT = [
    "--use_quantization",
    "--max_steps",
    "1",
    "--max_length",
    "32",
    "--eval_samples",
    "2",
    "--batch_size",
    "2",
    "--layers",
    "6-7",
]


class TestStart:
    def test_it_is_solved_by_default_with_the_settings_that_suit_it(self):
        found = with_defaults({"model_name": "some/base"})
        expected = {
            "init": "calibrated",
            "additive_scale": 1.0,
            "learning_rate": 5e-5,
            "strategy": "end_to_end",
            "logit_kl_weight": 1.0,
        }
        assert expected.items() <= found.given.items() and found.fallback
        (line,) = found.said
        assert (
            "a start in closed form" in line
            and "--learning_rate 5e-05" in line
            and "--init random" in line
        )
        assert "adapter_rank" not in found.given and "max_steps" not in found.given

    @pytest.mark.parametrize(
        ("flags", "reason"),
        [
            ({"shard_base": True}, "--shard_base"),
            ({"device_map": "auto"}, "--device_map"),
            ({"residual": "keep"}, "--residual keep"),
            ({"mult_form": "half_sigmoid"}, "--mult_form half_sigmoid"),
            ({"targets": "gate,up"}, "--targets gate,up, without stream"),
        ],
        ids=str,
    )
    def test_it_is_random_where_none_can_be_solved_and_says_why(self, flags, reason):
        found = with_defaults({**flags, "init": "auto"})
        assert (
            found.given["init"] == "random"
            and "learning_rate" not in found.given
            and not found.fallback
        )
        assert "a random start" in found.said[0] and reason in found.said[0]

    def test_what_is_given_stays_and_what_is_asked_for_is_not_said(self):
        given = {
            "init": "calibrated",
            "learning_rate": 1e-5,
            "loss": "mse",
            "adapter_rank": 4,
            "num_epochs": 2,
            "save_steps": 7,
        }
        found = with_defaults(given)
        assert given.items() <= found.given.items() and found.said == () and not found.fallback
        # the objective and the length were given otherwise
        assert "strategy" not in found.given and "max_steps" not in found.given

    def test_a_random_start_keeps_the_fields_own_rate_and_scale(self):
        assert with_defaults({"init": "random", "model_name": "some/base"}).given == {
            "init": "random", "model_name": "some/base", "save_steps": 500,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("flags", "alone"),
        [
            ({}, True),
            ({"modulation": "additive"}, True),
            ({"modulation": "multiplicative"}, False),
            ({"mult_bound": 0.3}, False),
            ({"mult_form": "unbounded"}, False),
        ],
        ids=str,
    )
    def test_a_flag_about_multipliers_is_not_left_without_effect(self, flags, alone):
        found = with_defaults({**flags, "model_name": "some/base"}).given
        assert found["init"] == "calibrated"
        assert (found.get("targets") == "stream") == alone

    def test_the_embedded_model_ends_in_minutes(self):
        assert (
            with_defaults({}).given.items()
            >= {
                "adapter_rank": 48,
                "max_steps": 150,
                "calibration_tokens": 32768,
                "learning_rate": 5e-5,
            }.items()
        )
        assert with_defaults({"init": "random"}).given["max_steps"] == 600
        assert "max_steps" not in with_defaults({"dataset_name": "mine.jsonl"}).given

    def test_a_run_that_is_taken_up_keeps_what_it_began_with(self):
        before = {
            "init": "random",
            "additive_scale": 0.1,
            "learning_rate": 0.01,
            "strategy": "local",
            "adapter_rank": 16,
        }
        found = with_defaults({"learning_rate": 0.02}, before)
        assert {
            "init": "random",
            "additive_scale": 0.1,
            "strategy": "local",
            "learning_rate": 0.02,
        }.items() <= found.given.items()

    def test_with_an_adapter_its_form_is_left_alone(self):
        found = with_defaults({"adapter": "RUN"}).given
        assert (
            not found.keys() & {"init", "additive_scale", "adapter_rank"}
            and found["learning_rate"] == 5e-5
        )


def test_help_shows_the_defaults_that_a_run_without_flags_has(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["pretrain", "--help_all"])
    words = " ".join(capsys.readouterr().out.split())
    shown = {
        match[1]: match[2]
        for match in re.finditer(r" --(\w+) (?:(?! --\w+ ).)*?\(default: ([^)]*)\)", words)
    }
    for name, value in with_defaults({}).given.items():
        if name != "init":
            assert shown[name].partition(";")[0] == str(value), name
    assert shown["strategy"] == "end_to_end; --init random: local"
    assert shown["learning_rate"] == "5e-05; --init random: 0.001"
    assert shown["max_steps"] == "150; another base: unset; --init random: 600"
    assert shown["dataset_name"] == f"builtin; another base: {WEB_TEXT}"
    assert shown["save_steps"] == "500" and shown["seed"] == "0"


class TestData:
    def test_the_embedded_text_is_of_the_embedded_model_alone(self):
        assert with_data({}, "tiny").given == {} and with_data({}, "tiny").said == ()
        found = with_data({}, "some/llama")
        assert (
            found.given == {"dataset_name": WEB_TEXT, "streaming": True}
            and "no --dataset_name" in found.said[0]
        )

    def test_short_names_are_written_out_and_flags_win(self, tmp_path, monkeypatch):
        for name, flags in DATASETS.items():
            assert with_data({"dataset_name": name}, "tiny").given == flags
        found = with_data(
            {"dataset_name": "wikitext", "dataset_config": "wikitext-2-raw-v1"}, "tiny"
        ).given
        assert found == {
            "dataset_name": "Salesforce/wikitext",
            "dataset_config": "wikitext-2-raw-v1",
        }
        monkeypatch.chdir(tmp_path)
        Path("wikitext").mkdir()
        assert with_data({"dataset_name": "wikitext"}, "tiny").given == {"dataset_name": "wikitext"}

    def test_flags_win_over_a_file(self, tmp_path):
        config = tmp_path / "run.yaml"
        config.write_text("dataset_name: c\nseed: 2", encoding="utf-8")
        given = {"seed": 1, "config": str(config)}
        assert with_config(given) == {"dataset_name": "c", **given}

    def test_no_data_and_no_hub_for_another_base_names_the_flag(
        self, tmp_path, capsys, monkeypatch
    ):
        import datasets

        def unreachable(*_: object, **__: object) -> None:
            raise ConnectionError("no route to any host")

        monkeypatch.setattr(datasets, "load_dataset", unreachable)
        from npt.base.load import EMBEDDED_FOLDER

        run = [
            "pretrain",
            "--model_name",
            str(EMBEDDED_FOLDER),
            "--output_dir",
            str(tmp_path / "run"),
            *SHORT,
        ]
        assert main([*run, "--dataset_name", "alpaca"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "tatsu-lab/alpaca" in line and "give --dataset_name a local file" in line
        assert main(run) == 2
        said = capsys.readouterr()
        (line,) = said.err.splitlines()
        assert WEB_TEXT in line and "no route to any host" in line and "--dataset_name" in line
        assert "no --dataset_name" in said.out and not (tmp_path / "run").exists()


def test_too_little_text_for_a_solved_start_means_a_random_one(tmp_path, capsys):
    data = tmp_path / "little.jsonl"
    data.write_text(
        "".join(json.dumps({"input_ids": [3, 4 + i, 5, 6 + i]}) + "\n" for i in range(12))
    )
    run = ["pretrain", "--dataset_name", str(data), "--output_dir", str(tmp_path / "run"), *SHORT]
    assert main(run) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a random start, because of too little text" in out
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["init"] == "random" and settings["additive_scale"] == NPTConfig().additive_scale
    # it is not asked for a solved start now
    assert main([*run, "--resume", "auto", "--max_steps", "2"]) == 0


def test_too_little_text_for_a_start_that_was_asked_for_is_an_error(tmp_path, capsys):
    data = tmp_path / "little.jsonl"
    data.write_text(
        "".join(json.dumps({"input_ids": [3, 4 + i, 5, 6 + i]}) + "\n" for i in range(12))
    )
    assert (
        main(
            [
                "pretrain",
                "--dataset_name",
                str(data),
                "--init",
                "calibrated",
                "--output_dir",
                str(tmp_path / "run"),
                *SHORT,
            ]
        )
        == 2
    )
    assert "calibration has" in capsys.readouterr().err
