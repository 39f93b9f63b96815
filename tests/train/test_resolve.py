"""A command becomes a run: defaults, presets, a resumed run, a run that is looked at."""

import json
import re
import shutil

import pytest
from cli_words import flags
from safetensors.torch import load_file

from npt.cli import doctor
from npt.cli.main import main, make_parser
from npt.config import NPTConfig
from npt.errors import ConfigError
from npt.tools.sweep.spec import design_of
from npt.train.resolve import EMBEDDED, WEB_TEXT, resolve, with_defaults

SHORT = flags(
    "--use_quantization --max_steps 1 --max_length 32 --eval_samples 2 --batch_size 2 --layers 6-7"
)


NEAR = {"init": "calibrated", "additive_scale": 1.0, "learning_rate": 5e-5}
WHOLE = {"strategy": "end_to_end", "logit_kl_weight": 1.0}
BASE = {"model_name": "some/base", "dataset_name": "mine.jsonl"}
TOLD = {"context_column": "context"}
ALL = "stream,gate,up,down"
OTHERWISE = {"learning_rate": 1e-5, "loss": "direction", "adapter_rank": 4, "num_epochs": 2}
CHOSEN: dict[str, tuple[dict, dict, str]] = {
    # flags, what is chosen or stays, and what is left to the fields' own defaults
    "solved": (BASE, {**NEAR, **WHOLE, "targets": "stream"}, "max_steps"),
    "a code": (BASE, {"adapter_rank": 64, "active": 16, "token_rank": 64}, ""),
    "active numbers": ({"active": 9}, {"adapter_rank": 36, "token_rank": 36}, ""),
    "all active": ({"active": 0, **BASE}, {"adapter_rank": 64, "token_rank": 64}, ""),
    "a rank": ({"adapter_rank": 12}, {"token_rank": 12}, "active"),
    "a rank and no token part": ({"adapter_rank": 12, "token_rank": 0}, {"token_rank": 0}, ""),
    "ranks": ({"ranks": "8,16", **BASE}, {}, "adapter_rank active token_rank"),
    "given otherwise": (OTHERWISE, OTHERWISE, "strategy max_steps"),
    "a random start": (
        {"init": "random", **BASE},
        {"init": "random", "save_steps": 500},
        "learning_rate additive_scale targets",
    ),
    "additive": ({**BASE, "modulation": "additive"}, {**NEAR, "targets": ALL}, ""),
    "multiplicative": ({**BASE, "modulation": "multiplicative"}, {**NEAR, "targets": ALL}, ""),
    "a bound": ({**BASE, "mult_bound": 0.3}, {**NEAR, "targets": ALL}, ""),
    "a form": ({**BASE, "mult_form": "unbounded"}, {**NEAR, "targets": ALL}, ""),
    "an energy": ({**BASE, "regularization_lambda": 0.01}, {**NEAR, "targets": ALL}, ""),
    "no energy": ({**BASE, "regularization_lambda": 0.0}, {"targets": "stream"}, ""),
    "embedded": (
        {},
        {**NEAR, "adapter_rank": 192, "active": 48, "token_rank": 192, "max_steps": 150},
        "",
    ),
    "embedded, random": ({"init": "random"}, {"max_steps": 600}, "learning_rate"),
    "a context": ({**BASE, **TOLD}, {**NEAR, **WHOLE, "hidden_weight": 0.0}, "loss"),
    "a context, random": (
        {"init": "random", **BASE, **TOLD},
        {**WHOLE, "hidden_weight": 0.0},
        "learning_rate",
    ),
    "a context, otherwise": (
        {**TOLD, "logit_kl_weight": 2.0, "logit_loss": "reverse_kl"},
        {"logit_kl_weight": 2.0, "strategy": "end_to_end", "hidden_weight": 0.0},
        "",
    ),
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
    found, _ = with_defaults(given, given.get("model_name", EMBEDDED))
    assert {**given, **expected}.items() <= found.items()
    assert not found.keys() & set(absent.split())


def test_a_start_that_was_chosen_is_said():
    _, (line,) = with_defaults(BASE, "some/base")
    for words in ("closed-form start", "--learning_rate 5e-05", "--init random"):
        assert words in line
    assert with_defaults({"init": "calibrated", **BASE}, "some/base")[1] == []


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
    found, notes = with_defaults({**flags, "init": "auto"}, EMBEDDED)
    assert found["init"] == "random"
    assert "learning_rate" not in found
    assert "random start" in notes[0] and reason in notes[0]


def test_a_rank_voids_the_active_numbers_of_a_preset() -> None:
    run = resolve({"config": "tiny", "adapter_rank": 8})
    assert (run.adapter.rank, run.adapter.active, run.adapter.token_rank) == (8, 0, 8)
    run = resolve({"config": "tiny", "adapter_rank": 8, "active": 4})
    assert (run.adapter.rank, run.adapter.active, run.adapter.token_rank) == (8, 4, 8)
    run = resolve({"config": "tiny", "active": 12})
    assert (run.adapter.rank, run.adapter.active, run.adapter.token_rank) == (96, 12, 96)


RECOMMENDED = flags(
    "--adapter_rank 16 --use_quantization --share_embeddings --safe_mode --streaming --batch_size 1"
    " --gradient_accumulation_steps 8 --learning_rate 5e-5 --regularization_lambda 0.01"
    " --num_epochs 1 --warmup_steps 200 --log_steps 10 --save_steps 500"
)


def parsed(verb: str, words: list[str]) -> dict:
    """Return the flags that a verb's function is given."""
    found = vars(make_parser().parse_args([verb, *words]))
    return {name: value for name, value in found.items() if name not in ("debug", "verb")}


def test_the_recommended_command_and_its_preset_are_one_run_of_npt_layers_in_safe_mode():
    run = resolve(parsed("pretrain", RECOMMENDED))
    assert run.adapter.targets == NPTConfig.targets and run.adapter.modulation == "additive"
    assert run.adapter.init == "calibrated" and run.adapter.rank == 16
    assert run.training.regularization_lambda == 0.01 and run.training.learning_rate == 5e-5
    assert run.training.max_steps is None
    assert resolve(parsed("pretrain", ["--config", "seed"])) == run


def test_every_verb_makes_the_same_run_of_the_same_flags():
    words = flags("--use_quantization --max_steps 40 --safe_mode")
    run = resolve(parsed("pretrain", words))
    part = {"settings": {"use_quantization": True, "max_steps": 40, "safe_mode": True}}
    (trial,) = design_of({"parts": {"a": part}}, "study.yaml").trials
    assert trial.settings.parts == run.parts
    planned = doctor._run(parsed("doctor", ["--plan", *words]))
    assert planned.parts == run.parts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--targets stream --safe_mode", "--modulation additive has no effect"),
        ("--targets stream --regularization_lambda 0.1", "--regularization_lambda 0.1 has no"),
        ("--safe_mode --mult_bound 0.3", "--mult_bound 0.3 has no effect"),
        ("--targets gate --modulation multiplicative --additive_scale 2", "nothing is added"),
        ("--targets gate --calibration_tokens 9", "--calibration_tokens 9 has no effect"),
        ("--any_base", "--any_base has no effect"),
    ],
)
def test_a_setting_without_effect_is_refused_by_name(line, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve(parsed("pretrain", flags(line)))


@pytest.mark.parametrize(
    "line",
    [
        "--use_quantization --use_fp16",
        "--share_embeddings",
        "--max_steps 3 --num_epochs 2",
        "--ranks 4,4,4,4 --adapter_rank 8",
        "--run_name mine",
        "--config tiny --targets stream",  # the preset's modulation, not a flag's
    ],
)
def test_a_harmless_one_is_named(line):
    notes = resolve(parsed("pretrain", flags(line))).notes
    assert any("has no effect: " in note for note in notes)


def test_a_flag_takes_the_place_of_a_presets_rival():
    run = resolve(parsed("pretrain", flags("--config tiny --num_epochs 2")))
    assert run.training.max_steps is None and run.training.num_epochs == 2
    run = resolve(parsed("pretrain", flags("--config seed --modulation both")))
    assert run.adapter.modulation == "both"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run in safe mode, on a text of its own."""
    folder = tmp_path_factory.mktemp("trained")
    text = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(400))
    (folder / "mine.txt").write_text(text)
    line = "--max_steps 2 --safe_mode --no_smoke_test --calibration_tokens 1024 --layers 6-7"
    words = [*flags(line), "--dataset_name", str(folder / "mine.txt"), "--max_length", "48"]
    words += ["--eval_samples", "3", "--batch_size", "2", "--adapter_rank", "4"]
    run = ["pretrain", *words, "--output_dir", str(folder / "run")]
    assert main([*run, "--use_quantization"]) == 0
    return folder / "run"


def test_resume_alone_goes_on_with_the_runs_own_settings(trained):
    run = resolve({"resume": str(trained)})
    settings = json.loads((trained / "run.json").read_text())["settings"]
    assert run.data.dataset_name == settings["dataset_name"] and run.data.max_length == 48
    assert run.adapter.modulation == "additive" and run.base.use_quantization
    assert list(run.adapter.ranks) == settings["ranks"]
    assert resolve({"resume": str(trained), "max_steps": 3}).training.max_steps == 3
    assert main(["pretrain", "--resume", str(trained), "--max_steps", "3"]) == 0
    events = (trained / "events.jsonl").read_text().splitlines()
    assert [e["step"] for e in map(json.loads, events) if e["event"] == "save"] == [2, 3]


def test_a_run_killed_before_its_first_checkpoint_begins_from_its_adapter_again(trained, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(trained / "run.json", folder)
    again = resolve({"resume": "auto", "output_dir": str(folder), "adapter": str(trained)})
    assert again.start is not None and again.start.folder == trained / "adapter"


def test_a_run_is_resumed_from_its_output_folder_as_it_is_written(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shutil.copytree(trained, tmp_path / "~" / "run")
    assert resolve({"resume": "auto", "output_dir": "~/run"}).data.max_length == 48


def test_a_checkpoint_says_itself_how_it_was_trained(trained, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"max_length": 99}}))
    copy = tmp_path / "copies" / "step-00000002"
    shutil.copytree(next((trained / "checkpoints").glob("step-*2")), copy)
    run = resolve({"resume": str(copy), "output_dir": str(tmp_path / "new")})
    assert run.data.max_length == 48


def test_an_evaluation_measures_on_the_runs_own_held_out_text(trained, capsys):
    assert main(["evaluate", "--adapter", str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fidelity = json.loads((trained / "fidelity.json").read_text())
    assert found["student"]["kl"] == pytest.approx(fidelity["student"]["kl"], rel=1e-6)
    assert found["student"]["tokens"] == fidelity["student"]["tokens"]
    assert found["data"].endswith("mine.txt") and found["heldout"]


def test_a_safe_student_goes_on_with_multipliers_that_start_at_one(trained, tmp_path, capsys):
    words = flags("pretrain --max_steps 1 --eval_samples 3 --batch_size 2 --max_length 48")
    words += ["--adapter", str(trained), "--modulation", "both", "--no_smoke_test"]
    data = ["--dataset_name", str(trained.parent / "mine.txt")]
    assert main([*words, *data, "--output_dir", str(tmp_path / "run")]) == 0
    assert "multipliers, which start at 1" in " ".join(capsys.readouterr().out.split())
    before, after = (
        json.loads((folder / "fidelity.json").read_text()) for folder in (trained, tmp_path / "run")
    )
    assert after["initial"]["kl"] == before["student"]["kl"]
    tensors = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert all(bool(t.any()) for name, t in tensors.items() if ".M." in name)
    with pytest.raises(ConfigError, match="--adapter_rank is 5"):
        resolve({"adapter": str(trained), "adapter_rank": 5})


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
    for name, value in with_defaults({}, EMBEDDED)[0].items():
        assert shown[name] == ("auto" if name == "init" else str(value)), name
    assert shown["strategy"] == "end_to_end" and shown["learning_rate"] == "5e-05"
    assert shown["save_steps"] == "500" and shown["seed"] == "0"


def test_the_embedded_text_is_of_the_embedded_model_alone():
    assert "dataset_name" not in with_defaults({}, EMBEDDED)[0]
    found, notes = with_defaults({}, "some/llama")
    assert {"dataset_name": WEB_TEXT, "streaming": True}.items() <= found.items()
    assert "no --dataset_name" in notes[0]


def test_no_data_and_no_hub_for_another_base_names_the_flag(tmp_path, capsys, monkeypatch):
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to any host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    from npt.base.source import EMBEDDED_FOLDER

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
