"""The page about a run: what it says, with and without all files, and what it may never do."""

import base64
import hashlib
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_runs import Reader, event, fidelity, figures, make_run, metrics, refusal
from rich.console import Console

from npt.evaluation.evaluate import Fidelity
from npt.evaluation.metrics import Figures
from npt.evaluation.table import print_fidelity
from npt.report import sections
from npt.report.page import SECTIONS, page, status, summary
from npt.report.run import RunRecord

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
START = event("start")


def read(folder: Path, **files: Any) -> Reader:
    """Read the page of a folder; of a made run there if files are named."""
    if files or not folder.exists():
        make_run(folder, **files)
    return Reader(page(RunRecord(folder), folder / "report.html"))


def test_a_finished_run_is_shown_as_a_whole(tmp_path) -> None:
    reader = read(tmp_path / "my-run")
    assert "my-run: run report" in reader.text and "Finished at step 12" in reader.text
    assert "missing" not in reader.text
    assert list(reader.sections) == ["", *SECTIONS]
    for section, words in (
        ("", "closes 98.3% of the KL between its floor (without context) and its teacher"),
        ("", "0.0200 ± 0.0010 nats, against 1.2000 at the floor.Next: to compare student"),
        ("fidelity", "Fidelity to the teacher"),
        ("layers", "The worst layer is 2, with 0.03"),
        ("configuration", "learning_rate"),
        ("configuration", "gate, up, down"),
        ("configuration", "2.13.0"),
    ):
        assert words in reader.sections[section]
    # loss, gradient norm, rate, speed, the layers over the steps and at the end
    assert len(reader.charts) == 6 and all(len(words) > 15 for words in reader.charts)
    assert "per token: first 0.1, last 0.008333, 0.008333 to 0.1" in reader.charts[0]
    boxes = reader.of("div", class_="scroll")
    assert all(box.get("tabindex") == "0" and box.get("aria-label") for box in boxes)


def test_page_and_console_write_a_figure_alike_json_the_fraction(tmp_path) -> None:
    figures = fidelity()
    figures["student"] |= {"kl": 0.00622, "kl_se": 0.00025, "acceptance": 0.9661}
    figures["student"]["acceptance_se"] = 0.0013
    reader = read(tmp_path / "run", fidelity=figures)
    names = ("teacher", "floor", "student", "initial")
    models = [Figures.from_dict(figures[name]) for name in names]
    stream = io.StringIO()
    print_fidelity(Fidelity(*models), Console(file=stream, width=160))
    for written in ("0.0062 ± 0.0003", "96.6 ± 0.1%"):
        assert written in reader.sections["fidelity"] and written in stream.getvalue()
    found = summary(RunRecord(tmp_path / "run"))
    assert (found["acceptance"], found["acceptance_se"]) == (0.9661, 0.0013)


def test_refusals_are_listed_with_their_reasons(tmp_path) -> None:
    detail = "gradient of model.layers.1.npt.A has norm inf"
    lines = [START, refusal(3), refusal(7, "gradient", detail), event("done", steps=12)]
    reader = read(tmp_path / "run", events=lines)
    for words in (
        "2 refused (skipped without effect on the adapters): 1 for gradient, 1 for loss.",
        detail,
        "a.txt@0, b.txt@64",
    ):
        assert words in reader.sections["training"]
    assert reader.charts[0].endswith("; 2 refusals")


def changed(after: float, error: float) -> dict[str, Any]:
    """As a run writes it that began at a KL of 0.001."""
    numbers = {"before": 0.001, "before_se": 1e-4, "after": after, "after_se": 1e-4}
    return {"figure": "kl", **numbers, "change": after - 0.001, "change_se": error}


NOT_FINITE = {**changed(0.0, 0.0), "after": None, "change": None}


@pytest.mark.parametrize(
    ("change", "losses", "kind", "words"),
    [
        (
            changed(0.0009, 1e-5), [0.5, 0.4], "good",
            "Training lowered the KL to the teacher on held-out text by 10%, from 0.00100 to"
            " 0.00090 nats (−0.00010 ± 0.00001).",
        ),
        (changed(0.0009, 1e-5), [0.5, 0.4], "good", "npt generate --adapter . --compare"),
        (changed(0.0009, 9e-5), [0.5, 0.4], "warn", "did not change the KL to the teacher"),
        (changed(0.0009, 9e-5), [0.5, 0.4], "warn", "this rank allows (16), so raise --adapter"),
        (changed(0.002, 1e-4), [0.4, 0.5], "bad", "teacher on held-out text 2-fold"),
        (changed(0.002, 1e-4), [0.4, 0.5], "bad", "a lower rate, such as --learning_rate 0.001"),
        (changed(0.002, 1e-4), [0.5, 0.4], "bad", "train on more text with --dataset_name"),
        (NOT_FINITE, [0.5, 0.4], "bad", "on held-out text is not finite."),
        ({"figure": "x"}, [0.5, 0.4], "good", "fidelity.json: unexpected content"),
        ([1], [0.5, 0.4], "good", "fidelity.json: unexpected content"),
        (None, [0.5, 0.4], "good", "by 98%, from 1.1000 to 0.0200 nats"),  # earlier versions
    ],
)  # fmt: skip
def test_training_is_credited_with_what_it_changed(tmp_path, change, losses, kind, words) -> None:
    measured = {**fidelity(), "change": change}
    logged = [metrics(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    reader = read(tmp_path / "run", fidelity=measured, metrics=logged)
    assert words in reader.text
    assert reader.of("div", class_="status")[0]["class"] == f"status {kind}"


def test_what_the_start_had_closed_already_is_said(tmp_path) -> None:
    assert "(8.3% before training): 0.0200 ± 0.0010 nats" in read(tmp_path / "run").sections[""]


def test_a_single_logged_step_is_a_table_and_no_chart_of_one_dot(tmp_path) -> None:
    reader = read(tmp_path / "run", metrics=[metrics(7)])
    assert len(reader.charts) == 1  # of the layers
    assert "Gradient norm before clipping70.3" in reader.sections["training"].replace("\n", "")


@pytest.mark.parametrize(
    ("shares", "words", "alarms"),
    [
        ((0.0, 0.0), "none is saturated", 0),
        ((0.2, 0.004), "no problem: at most 0.4% of the multipliers of layer 1", 0),
        ((0.0, 0.04), "4% of the multipliers of layer 1 are at a bound", 0),
        ((0.001, 0.16), "lower --learning_rate or raise --additive_scale", 1),
    ],
)
def test_saturation_is_told_by_layer(tmp_path, shares, words, alarms) -> None:
    logged = []
    for step, share in enumerate(shares, start=1):
        told = {"layers.0.at_bounds": 0.0, "layers.1.at_bounds": share, "layers.1.code_norm": step}
        logged.append(metrics(step, **told))
    reader = read(tmp_path / "run", metrics=logged)
    assert words in reader.sections["layers"] and "1 → 2" in reader.sections["layers"]
    assert len(reader.of("p", class_="alarm")) == alarms
    assert "Modulation" not in read(tmp_path / "old", metrics=[metrics(1), metrics(2)]).text


# --- what is missing
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "sections"),
    [
        ("run.json", ["configuration"]),
        ("metrics.jsonl", ["training"]),
        ("events.jsonl", ["events", "training"]),
        ("fidelity.json", ["fidelity", "layers"]),
    ],
)
def test_a_missing_file_is_named_in_place_of_its_part(tmp_path, file, sections) -> None:
    reader = read(tmp_path / "run", **{file.partition(".")[0]: None})
    for section in sections:
        assert f"{file}: missing" in reader.sections[section]


@pytest.mark.parametrize("file", ["run", "fidelity"])
@pytest.mark.parametrize(
    "content",
    [
        "", '{"a": 1', "[1]", '{"a": NaN}', "\x00\xff", {"teacher": 3, "layers": 4},
        {"layers": {"0": 5, "2": {"targets": {"gate": 7}}}}, {"settings": [1], "versions": 3},
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_named_or_shown_as_far_as_it_goes(
    tmp_path, file, content
) -> None:
    reader = read(tmp_path / "run", **{file: content})
    if isinstance(content, str):
        assert re.search(rf"{file}\.json: (cannot be read|is damaged|holds a list)", reader.text)
    assert "Finished at step 12" in reader.text


def test_an_empty_folder_makes_a_page(tmp_path) -> None:
    reader = read(tmp_path)
    assert "No start is recorded" in reader.text
    assert reader.text.count("missing") >= 6


def test_a_killed_run_shows_its_evaluations(tmp_path) -> None:
    evaluations = [event("evaluation", step=step, student=figures(0.2)) for step in (5, 10)]
    reader = read(tmp_path / "run", events=[START, *evaluations], fidelity=None)
    assert "Still running or killed at step 12: no end is recorded" in reader.text
    assert "Held-out KL" in reader.sections["training"]
    assert "held-out KL 0.2000 ± 0.0010 nats" in reader.sections["events"]


def test_figures_of_something_else_are_said_to_be_that(tmp_path) -> None:
    resumed = event("resume", step=6, checkpoint="step-00000006", changed={})
    lines = [START, event("done", steps=6), START, resumed]
    figures = {**fidelity(), "heldout": False}
    reader = read(tmp_path / "run", events=lines, fidelity=figures)
    assert "fidelity.json: from an earlier end of this run" in reader.sections["fidelity"]
    assert "TRAINING text" in reader.sections["fidelity"]


@pytest.mark.parametrize(
    ("last", "kind", "words"),
    [
        (event("done", steps=12), "good", "Finished at step 12"),
        (event("stopped", step=11, reason="4 in a row"), "bad", "Stopped at step 12: 4 in a row"),
        (event("signal", number=15, step=12), "warn", "Ended by signal 15 at step 12"),
        (
            event("error", step=12, error="OSError", message="disk"),
            "bad",
            "Ended with an error at step 12: OSError: disk",
        ),
    ],
)
def test_the_end_of_a_run_is_told(tmp_path, last, kind, words) -> None:
    record = RunRecord(make_run(tmp_path / "run", events=[START, last]))
    assert status(record)[0] == kind and status(record)[1].startswith(words)
    assert summary(record)["status"].startswith(words)


# --- odd numbers
# --------------------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_are_said(tmp_path) -> None:
    bad = {"loss": None, "grad_norm": math.nan, "layers.1.nmse": None}
    hurt = fidelity(student=None)
    hurt["layers"]["1"]["nmse_student"] = None
    lines = [metrics(step, **bad) for step in (1, 2, 3)]
    reader = read(tmp_path / "run", metrics=lines, fidelity=hurt)
    assert "no finite value, 3 times not finite" in reader.charts[0]
    said = reader.sections
    assert "The student's KL to its teacher is not finite." in said[""]
    assert "of the KL" not in said[""]
    assert "In 1 of 3 layers the student's NMSE is not finite" in said["layers"]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (fidelity(300.0), "is worse than its floor (without context): 300.0000 ± 0.0010 nats,"),
        (fidelity(-0.4), "The student closes 133.3% of"),
        (fidelity(0.00002), "99.998%"),
        (
            {name: figures(0.0) for name in ("teacher", "floor", "student")},
            "Fidelity to the teacher",
        ),
    ],
)
def test_a_student_is_told_from_its_teacher_wherever_it_lies(tmp_path, figures, words) -> None:
    text = read(tmp_path / "run", fidelity=figures).text
    assert words in text and not re.search(r"\d{20}", text)  # no ratio of exp(300) in full


def test_what_only_some_evaluations_measure_is_listed(tmp_path) -> None:
    more = fidelity()
    more["attribution"] = {"unquantized_to_4bit": figures(0.016)}
    more["divergence"] = {"prompts": 12, "agreed": 31.5, "agreed_se": 4.0}
    more["positions"] = {"64-127": figures(0.25)}
    for values in more["layers"].values():
        values["free_running_student"] = 0.0625
    said = read(tmp_path / "run", fidelity=more).sections
    for words in ("unquantised to 4-bit", "0.0160 ± 0.0010", "31.5 ± 4", "64-127", "0.2500 ±"):
        assert words in said["fidelity"]
    assert "student, free-running" in said["layers"] and said["layers"].count("0.0625") == 3


def test_a_run_that_gave_up_names_its_step_and_what_is_not_finite(tmp_path) -> None:
    """It was to make 20 steps, logs every fourth and made nine."""
    stopped = event("stopped", step=9, reason="3 refusals in a row")
    folder = make_run(
        tmp_path / "run",
        events=[event("start", total_steps=20), *(refusal(10) for _ in range(3)), stopped],
        metrics=[metrics(step) for step in (1, 4, 8)],
        fidelity=None,
    )
    reader = read(folder)
    assert "Stopped in step 10 (9 completed): 3 refusals in a row" in reader.text
    assert "steps9 of 20" in reader.text
    assert "tokens at step 8512" in reader.text
    found = summary(RunRecord(folder))
    assert (found["step"], found["refused_in_step"], found["total_steps"]) == (9, 10, 20)


# --- checkpoints and post-mortems
# --------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, name: str) -> None:
    (folder / "checkpoints" / name).mkdir(parents=True)


def test_checkpoints_are_linked(tmp_path) -> None:
    folder = make_run(tmp_path / "runs" / "run")
    for name in ("step-00000004", "step-00000012.broken"):
        checkpoint(folder, name)
    reader = read(folder)
    links = [found["href"] for found in reader.of("a") if "step-" in (found["href"] or "")]
    assert links == ["./checkpoints/step-00000004/", "./checkpoints/step-00000012.broken/"]
    assert str(tmp_path) not in reader.sections["saved"]
    text = page(RunRecord(folder), tmp_path / "pages" / "page.html")
    assert 'href="./../runs/run/checkpoints/step-00000004/"' in text


def test_a_post_mortem_says_why_the_run_stopped(tmp_path) -> None:
    stopped = event("stopped", step=3, reason="x", postmortem="postmortem/step-00000003")
    folder = make_run(tmp_path / "run", events=[START, stopped])
    bundle = folder / "postmortem" / "step-00000003"
    bundle.mkdir(parents=True)
    assert "postmortem.json: missing" in read(folder).sections["saved"]
    record = {
        "reason": "4 refusals in a row",
        "refusals": [{"kind": "loss", "detail": "loss is nan"}],
        "findings": [{"verdict": {"where": "layer 3"}}],
    }
    (bundle / "postmortem.json").write_text(json.dumps(record), encoding="utf-8")
    reader = read(folder)
    saved = reader.sections["saved"]
    assert "4 refusals in a row. Last refusal: loss is nan. First bad operation" in saved
    assert "./postmortem/step-00000003/" in [found["href"] for found in reader.of("a")]


# --- what it may never do
# --------------------------------------------------------------------------------------------------


def hostile(value: Any) -> Any:
    """Every text in a JSON value, some keys included, made into an attack."""
    if isinstance(value, dict):
        keys = {key: f"{key}{HOSTILE}" if key in ("torch", "rank", "0") else key for key in value}
        return {keys[key]: hostile(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [hostile(entry) for entry in value]
    return HOSTILE if isinstance(value, str) else value


def test_no_text_of_a_run_becomes_markup(tmp_path, drawn) -> None:
    lines = [
        START, refusal(3), event("diagnosis", step=3, message="x"),
        event("evaluation", step=6, student=figures(0.1)), event("warning", message="x"),
    ]  # fmt: skip
    lines = [{**hostile(line), "event": line["event"]} for line in lines]
    lines += [event(HOSTILE), event("stopped", step=3, reason=HOSTILE, postmortem=HOSTILE)]
    folder = tmp_path / f"run{HOSTILE}".replace("/", "")
    odd = fidelity()
    odd["student"][HOSTILE] = 3.0
    make_run(folder, events=lines, fidelity=hostile(odd))
    run = json.loads((folder / "run.json").read_text())
    run = hostile(run) | {HOSTILE: HOSTILE, "settings": {"run_name": HOSTILE, HOSTILE: HOSTILE}}
    (folder / "run.json").write_text(json.dumps(run))
    bundle = folder / "postmortem" / "step-00000003"
    bundle.mkdir(parents=True)
    record = {"reason": HOSTILE, "refusals": [{"kind": HOSTILE}]}
    record["findings"] = [{"verdict": {HOSTILE: HOSTILE}}]
    (bundle / "postmortem.json").write_text(json.dumps(record))
    checkpoint(folder, "step-00000004")
    reader = read(folder)
    assert "alert(1)" in reader.text  # it is shown
    assert not reader.of("script")
    assert all((found["src"] or "").startswith("data:image/svg") for found in reader.of("img"))
    names = {name for _, attributes in reader.elements for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("style", "srcdoc")]


def test_the_policy_lets_only_the_pages_own_style_in(tmp_path, drawn) -> None:
    text = page(RunRecord(make_run(tmp_path / "run")), tmp_path / "report.html")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    content = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy and "script-src" not in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert all((found["href"] or "").startswith(("#", "./")) for found in Reader(text).of("a"))


def test_a_record_of_many_figures_is_read_in_linear_time() -> None:
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str.__eq__(self, other)

    student = {Name(f"figure_{number}"): 0.5 for number in range(1000)}
    found = sections.fidelity(SimpleNamespace(fidelity={"student": student}))  # type: ignore[arg-type]
    assert found is not None and len(found["tables"][0][0]) == 1001
    assert len(compared) < 10 * len(student)


def test_no_secret_and_no_environment_variable_is_in_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")
    message = "GET https://me:hunter2@host/?token=hf_abcdefghijklmnopqrst failed"
    warning = event("warning", message=message)
    run = {"settings": {"rank": 16}, "wandb_run": "k3y1d"}
    folder = make_run(tmp_path / "run", events=[START, warning], run=run)
    text = page(RunRecord(folder), folder / "report.html")
    for secret in ("0123456789secret", "hunter2", "hf_abcdefghijklmnopqrst", "k3y1d"):
        assert secret not in text
