"""What a run does where its flags are silent."""

import json
import re

import pytest
from cli_words import flags

from npt.cli.defaults import WEB_TEXT, with_data, with_defaults
from npt.cli.main import main

SHORT = flags(
    "--use_quantization --max_steps 1 --max_length 32 --eval_samples 2 --batch_size 2 --layers 6-7"
)


NEAR = {"init": "calibrated", "additive_scale": 1.0, "learning_rate": 5e-5}
WHOLE = {"strategy": "end_to_end", "logit_kl_weight": 1.0}
BASE = {"model_name": "some/base"}
OTHERWISE = {"learning_rate": 1e-5, "loss": "direction", "adapter_rank": 4, "num_epochs": 2}
CHOSEN: dict[str, tuple[dict, dict, str]] = {
    # flags, what is chosen or stays, and what is left to the fields' own defaults
    "solved": (BASE, {**NEAR, **WHOLE, "targets": "stream"}, "adapter_rank max_steps"),
    "given otherwise": (OTHERWISE, OTHERWISE, "strategy max_steps"),
    "a random start": (
        {"init": "random", **BASE},
        {"init": "random", "save_steps": 500},
        "learning_rate additive_scale targets",
    ),
    "additive": ({**BASE, "modulation": "additive"}, {"targets": "stream"}, ""),
    "multiplicative": ({**BASE, "modulation": "multiplicative"}, NEAR, "targets"),
    "a bound": ({**BASE, "mult_bound": 0.3}, NEAR, "targets"),
    "a form": ({**BASE, "mult_form": "unbounded"}, NEAR, "targets"),
    "embedded": ({}, {**NEAR, "adapter_rank": 48, "max_steps": 150}, ""),
    "embedded, random": ({"init": "random"}, {"max_steps": 600}, "learning_rate"),
    "another text": ({"dataset_name": "mine.jsonl"}, NEAR, "max_steps"),
    "an adapter": (
        {"adapter": "RUN"},
        {"learning_rate": 5e-5},
        "init additive_scale adapter_rank targets",
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_defaults_suit_the_start_and_what_is_given_stays(case):
    given, expected, absent = CHOSEN[case]
    found = with_defaults(given).flags
    assert {**given, **expected}.items() <= found.items()
    assert not found.keys() & set(absent.split())


def test_a_start_that_was_chosen_is_said():
    found = with_defaults(BASE)
    (line,) = found.notes
    for words in ("closed-form start", "--learning_rate 5e-05", "--init random"):
        assert words in line
    assert with_defaults({"init": "calibrated", **BASE}).notes == ()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"residual": "keep"}, "--residual keep"),
        ({"mult_form": "half_sigmoid"}, "--mult_form half_sigmoid"),
        ({"targets": "gate,up"}, "--targets gate,up, without stream"),
    ],
    ids=str,
)
def test_a_start_is_random_where_none_can_be_solved_and_says_why(flags, reason):
    found = with_defaults({**flags, "init": "auto"})
    assert found.flags["init"] == "random"
    assert "learning_rate" not in found.flags
    assert "random start" in found.notes[0] and reason in found.notes[0]


def test_a_run_that_is_taken_up_keeps_what_it_began_with():
    before = {"init": "random", "additive_scale": 0.1, "strategy": "local", "adapter_rank": 16}
    found = with_defaults({"learning_rate": 0.02}, {**before, "learning_rate": 0.01})
    kept = {"init": "random", "additive_scale": 0.1, "strategy": "local", "learning_rate": 0.02}
    assert kept.items() <= found.flags.items()


def test_help_shows_the_defaults_that_a_run_without_flags_has(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["pretrain", "--help"])
    entries = re.split(r"\n  --", capsys.readouterr().out)
    shown = dict(
        re.findall(r"^(\w+) .*\(default: ([^)]*)\)", e, re.S)[0]
        for e in entries
        if "(default: " in e
    )
    for name, value in with_defaults({}).flags.items():
        assert shown[name] == ("auto" if name == "init" else str(value)), name
    assert shown["strategy"] == "end_to_end" and shown["learning_rate"] == "5e-05"
    assert shown["save_steps"] == "500" and shown["seed"] == "0"


def test_the_embedded_text_is_of_the_embedded_model_alone():
    assert with_data({}, "tiny") == ({}, ())
    found = with_data({}, "some/llama")
    assert found.flags == {"dataset_name": WEB_TEXT, "streaming": True}
    assert "no --dataset_name" in found.notes[0]


def test_no_data_and_no_hub_for_another_base_names_the_flag(tmp_path, capsys, monkeypatch):
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to any host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    from npt.base.load import EMBEDDED_FOLDER

    run = flags("pretrain --model_name", EMBEDDED_FOLDER, "--output_dir", tmp_path / "run", *SHORT)
    assert main([*run, "--dataset_name", "tatsu-lab/alpaca"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "tatsu-lab/alpaca" in line and "give --dataset_name a local file" in line
    assert main(run) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert WEB_TEXT in line and "no route to any host" in line and "--dataset_name" in line
    assert "no --dataset_name" in said.out and not (tmp_path / "run").exists()


def test_too_little_text_for_a_calibrated_start_is_an_error(tmp_path, capsys):
    data, rows = tmp_path / "little.jsonl", [[3, 4 + i, 5, 6 + i] for i in range(12)]
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    run = flags("pretrain --dataset_name", data, "--output_dir", tmp_path / "run", *SHORT)
    assert main(run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "calibration has" in line and "--init random" in line
    assert not (tmp_path / "run").exists()
