"""`npt doctor` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import npt
from npt.cli.main import main


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the data loads no base."""
    monkeypatch.setattr(npt, "load_base", None)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.jsonl"
    lines = [json.dumps({"prompt": f"x_{i} =", "completion": f" {i * i}"}) for i in range(60)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n{"text" "x"}\n{"text": "fine"}\n{"text": 3}\n')
    return path


def test_sound_data_end_0_with_counts_and_samples(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--data", str(sound)]) == 0
    out, err = capsys.readouterr()
    for words in ("records", "60", "0 outside", "⟦<s>x_", "no problem found"):
        assert words in out
    assert out.count(" tokens: ⟦") == 3 and err == ""


def test_broken_data_end_2_with_every_line_column_and_problem(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--data", str(broken)]) == 2
    out = capsys.readouterr().out
    assert f"{broken}, line 2, column 9: not JSON (Expecting ':' delimiter)" in out
    assert f"{broken}, line 4: record broken.jsonl:4 has an int as 'text'" in out
    assert "error: 2 broken places" in out


def test_json_is_all_of_standard_output(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data", str(broken), "--json"]) == 2
    values = json.loads(capsys.readouterr().out)["data"]
    assert [(b["line"], b["column"]) for b in values["broken"]] == [(2, 9), (4, None)]
    assert (values["samples"], values["trainable"]) == (2, False)


def test_ids_outside_the_vocabulary_end_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"input_ids": [5, 99999]}\n')
    assert main(["doctor", "--data", str(path)]) == 2
    assert (
        "1 ids outside the vocabulary [0, 2048), the first in sample ids.jsonl:1@0"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("before", [True, False])
def test_data_may_be_named_as_in_training(
    sound: Path, before: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--dataset_name", str(sound)]
    assert main(["doctor", *(["--data", *named] if not before else [*named, "--data"])]) == 0
    one = capsys.readouterr().out
    assert main(["doctor", "--data", str(sound)]) == 0
    assert capsys.readouterr().out == one


def test_the_flags_of_training_hold(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max_length", "4", "--packing", "--max_records", "10", "--json"]
    assert main(["doctor", "--data", str(sound), *arguments]) == 0
    values = json.loads(capsys.readouterr().out)["data"]
    assert (values["records"], values["longest"]) == (10, 4)


def test_replayed_data_are_looked_at_as_well(
    sound: Path, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--data", str(sound), "--replay_dataset", str(broken), "--json"]) == 2
    values = json.loads(capsys.readouterr().out)
    assert (values["data"]["trainable"], values["replay"]["trainable"]) == (True, False)


BAD = {
    "nothing asked for": ([], ["--data [NAME]"]),
    "data without being asked for": (["--dataset_name", "builtin"], ["--data [NAME]"]),
    "two names": (["--data", "a.txt", "--dataset_name", "b.txt"], ["a.txt", "b.txt"]),
    "missing file": (["--data", "none.jsonl"], ["none.jsonl", "dataset_name"]),
    "samples longer than the model": (["--data", "--max_length", "2000"], ["2000", "1024"]),
    "no such model": (["--data", "--model_name", "./none"], ["./none"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, named = BAD[case]
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert [word for word in named if word not in err] == []


@pytest.mark.parametrize("arguments", [["--max_records", "0"], ["--num_samples", "3"]])
def test_flags_that_cannot_be_are_refused_by_the_parser(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--data", *arguments])
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


# --- plans
# --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _counted_by_a_formula(request: pytest.FixtureRequest) -> None:
    """Plan by a formula: only tests that ask for `counted` need real counts."""
    if "counted" not in request.fixturenames:
        request.getfixturevalue("counted_by_a_formula")


@pytest.fixture
def counted() -> None:
    """Counts on models without numbers, as outside of these tests."""


PLAN = [
    "doctor",
    "--plan",
    "--shape",
    "64,160,6,4,2,500",
    "--max_length",
    "32",
    "--use_quantization",
]


def plan_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict:
    assert main([*PLAN, "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)["plan"]


def test_a_plan_shows_all_memory_and_time_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        main([*PLAN, "--strategy", "end_to_end", "--logit_kl_weight", "0.5", "--layers", "1,3"])
        == 0
    )
    out, err = capsys.readouterr()
    for words in (
        "base, NF4",
        "AdamW's two moments",
        "state before the step",
        "logits",
        "activations kept of every layer",
        "; it fits into the",
    ):
        assert words in out
    for words in (
        "converted layers (2)",
        "layers before them (1)",
        "other layers (3)",
        "optimizer step",
        "tokens per second",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80 and err == ""


def test_a_plan_as_json_holds_the_terms_that_add_up_to_the_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_of(capsys, "--no_trial", "--gradient_accumulation_steps", "3")
    memory = plan["memory"]
    for phase, size in memory["phases"].items():
        assert sum(term["bytes"] for term in memory["terms"] if phase in term["phases"]) == size
    assert memory["peak_bytes"] == max(memory["phases"].values()) and plan["fits"]
    assert (plan["time"], plan["measured"], plan["tokens_per_step"]) == ({}, {}, 3 * 4 * 32)


def test_a_plan_is_shown_against_what_is_measured(
    counted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = plan_of(
        capsys, "--no_trial", "--measure", "--stages", "local:0.5,propagated:0.5", "--layers", "4,5"
    )["measured"]
    assert list(measured) == ["local", "propagated"]
    for found in measured.values():
        assert abs(found["errors"]["step"]) < 0.15 and found["seconds"] > 0
    assert abs(measured["local"]["errors"]["peak_bytes"]) < 0.15


def test_the_embedded_model_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["doctor", "--plan", "--no_trial", "--max_length", "32", "--layers", "7", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["plan"]["name"] == "tiny"


def test_a_budget_of_ranks_is_planned_and_said_to_be_approximate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calibrated = ["--no_trial", "--layers", "1,3,4", "--init", "calibrated"]
    small, large = (
        plan_of(capsys, *calibrated, "--rank_budget", budget) for budget in ("9", "100")
    )
    assert (small["ranks"], large["ranks"]) == ([3, 3, 3], [34, 34, 34])
    assert (
        small["ranks_are_approximate"]
        and small["memory"]["peak_bytes"] < large["memory"]["peak_bytes"]
    )
    assert main([*PLAN, *calibrated, "--rank_budget", "9"]) == 0
    assert "ranks are planned as if they were even" in capsys.readouterr().out


def test_a_calibrated_start_is_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--layers", "1,3,4", "--init", "calibrated", "--calibration_tokens", "1000"]
    found = plan_of(capsys, "--no_trial", *settings)["calibration"]
    assert found["device_bytes"] == 0 and found["seconds"] is None
    assert found["host_bytes"] > 3 * 2 * 8 * 64**2
    timed = plan_of(capsys, *settings)["calibration"]
    assert 0 < timed["eigendecomposition_seconds"] < timed["seconds"]
    assert main([*PLAN, "--no_trial", *settings]) == 0
    out = capsys.readouterr().out
    assert "the cost of --init calibrated before the first step" in out
    assert plan_of(capsys, "--no_trial")["calibration"] is None


def test_a_limit_shows_what_training_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    whole = plan_of(capsys, "--no_trial")["memory"]
    limited = plan_of(capsys, "--no_trial", "--max_memory", str(whole["phases"]["micro-batch"] - 1))
    assert (
        limited["fits"]
        and limited["memory"]["samples_at_once"] == 2
        and whole["samples_at_once"] == 4
    )


def test_what_does_not_fit_ends_2_with_the_settings_that_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "doctor",
        "--plan",
        "--shape",
        "64,160,6,4,2,500",
        "--max_length",
        "32",
        "--batch_size",
        "1",
        "--layers",
        "5",
    ]
    assert main([*arguments, "--no_trial", "--json"]) == 0
    limit = str(json.loads(capsys.readouterr().out)["plan"]["memory"]["peak_bytes"] - 1)
    assert main([*arguments, "--no_trial", "--max_memory", limit]) == 2
    out = capsys.readouterr().out
    assert "; it does not fit into --max_memory" in out and "--use_quantization would" in out
    assert main([*arguments, "--measure", "--no_trial", "--max_memory", limit]) == 2
    assert "--measure" in capsys.readouterr().err


def test_data_and_plan_may_be_asked_for_together(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["doctor", "--data", str(sound), "--plan", "--no_trial", "--max_length", "32", "--json"]
        )
        == 0
    )
    assert set(json.loads(capsys.readouterr().out)) == {"data", "plan"}


BAD_PLANS = {
    "a flag of plans without one": (
        ["--data", "--adapter_rank", "4"],
        ["--adapter_rank", "--plan"],
    ),
    "a batch without a plan": (["--data", "--batch_size", "8"], ["--batch_size", "--plan"]),
    "a shape without a plan": (["--data", "--shape", "llama-3.1-8b"], ["--shape", "--plan"]),
    "an unknown shape": (["--plan", "--shape", "gpt"], ["gpt", "llama-3.1-8b"]),
    "a shape and a model": (
        ["--plan", "--shape", "cpu-0.2b", "--model_name", "tiny"],
        ["cpu-0.2b", "tiny"],
    ),
    "layers out of range": (["--plan", "--layers", "40"], ["40", "0 to 7"]),
    "a size without a unit that is known": (
        ["--plan", "--max_memory", "10 gigs"],
        ["max_memory", "10 gigs", "10GiB"],
    ),
    "several devices": (["--plan", "--device_map", "auto"], ["--device_map"]),
    "no GPU": (["--plan", "--device", "cuda"], ["--device", "GPU"]),
    "a safe mode that is none": (
        ["--plan", "--safe_mode", "--modulation", "multiplicative"],
        ["--safe_mode", "multiplicative"],
    ),
    "a budget that nothing spends": (
        ["--plan", "--rank_budget", "20"],
        ["--rank_budget", "--init calibrated"],
    ),
    "a budget that is too small": (
        ["--plan", "--init", "calibrated", "--layers", "all", "--rank_budget", "2"],
        ["--rank_budget is 2"],
    ),
    "a shape beyond all bounds": (
        ["--plan", "--shape", f"64,160,{10**30},4,2,500"],
        ["--shape", "from 1 to"],
    ),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_plans_that_cannot_be_made_are_one_line_and_status_2(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments, named = BAD_PLANS[case]
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert [word for word in named if word not in err] == []


def test_the_verb_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "doctor" in capsys.readouterr().out


class TestPlanForACardThatIsNotHere:
    FLAGS = ("doctor", "--plan", "--model_name", "org/Llama-3.2-1B-Instruct", "--use_quantization")
    FLAGS += ("--layers", "upper_half", "--max_length", "256", "--init", "random")

    def plan(self, capsys: Any, *flags: str) -> tuple[int, str]:
        status = main([*self.FLAGS, *flags])
        return status, capsys.readouterr().out

    def test_it_needs_neither_the_card_nor_the_hub(self, capsys) -> None:
        status, said = self.plan(capsys, "--gpu", "24GB", "--max_steps", "500")
        assert status == 0 and "on a card of 24 GiB" in said
        assert re.search(r"start [\d.]+ GiB, training [\d.]+ GiB, of 24 GiB\n", said)
        assert re.search(r"[\d.]+ hours for 500 steps .* 40% of the 35.6 TFLOP/s of rtx-3090", said)

    def test_hours_go_with_the_steps_and_the_cards_speed(self, capsys) -> None:
        def hours(*flags: str) -> float:
            return json.loads(self.plan(capsys, "--json", *flags)[1])["plan"]["hours"]

        slow = hours("--gpu", "NVIDIA A100 80GB")
        assert slow == hours("--gpu", "a100-80gb", "--max_steps", "1000")
        assert hours("--gpu", "h100", "--max_steps", "500") == pytest.approx(slow * 156 / 494 / 2)

    def test_one_that_is_too_small_is_said(self, capsys) -> None:
        status, said = self.plan(capsys, "--gpu", "1GB")
        assert status == 2 and "does not fit into the 424.00 MiB that CUDA leaves of 1 GiB" in said

    @pytest.mark.parametrize("text", ["", "rtx", "0GB", "900GB", "24 cats"])
    def test_what_is_no_card_is_refused_with_those_that_are(self, text, capsys) -> None:
        assert main([*self.FLAGS, "--gpu", text]) == 2
        said = capsys.readouterr().err
        assert f"--gpu is {text!r}; " in said and "rtx-4090" in said and said.count("\n") == 1

    def test_steps_are_not_run_on_it(self, capsys) -> None:
        assert main([*self.FLAGS, "--gpu", "24GB", "--measure"]) == 2
        assert "--measure runs steps on the device that is here" in capsys.readouterr().err
