"""The page about a run: what it says, with and without all files, and what it may never do."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import Reader, event, fidelity, figures, make_run, metrics, modulation, refusal

from npt.errors import CheckpointError
from npt.report.page import page, status, summary
from npt.report.run import read_run

pytestmark = pytest.mark.usefixtures("plain_charts")

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


def sound(folder: Path) -> None:
    """Verifies every checkpoint."""


def read(folder: Path, verify: Any = sound) -> Reader:
    return Reader(page(read_run(folder, verify), folder / "report.html"))


def test_a_finished_run_is_shown_as_a_whole(tmp_path) -> None:
    reader = read(make_run(tmp_path / "my-run"))
    assert "my-run: report of a run" in reader.text
    assert "Finished at step 12" in reader.text
    assert "says nothing" not in reader.text and "Not all of the run is here" not in reader.text
    assert list(reader.sections) == [
        "",
        "fidelity",
        "training",
        "layers",
        "modulation",
        "saved",
        "events",
        "configuration",
        "environment",
    ]
    assert (
        "98.3% of the way from its floor to its teacher in KL(teacher, model), nats: 0.0200 ±"
        " 0.0010" in reader.sections["fidelity"]
    )
    assert "The hardest is layer 2 with 0.03" in reader.sections["layers"]
    assert "at most 0.10% of the multipliers" in reader.sections["modulation"]
    assert "Over 2,048 held-out tokens after step 12" in reader.sections["modulation"]
    for setting in ("learning_rate", "0.01", "gate, up, down"):
        assert setting in reader.sections["configuration"]
    assert "2.13.0" in reader.sections["environment"]
    # fidelity, loss, gradient norm, rate, speed, heat map, layers, multipliers of three targets
    assert len(reader.of("svg", class_="chart")) == 10


def test_every_picture_has_words_and_every_chart_a_table(tmp_path) -> None:
    reader = read(make_run(tmp_path / "run"))
    pictures = reader.of("svg")
    assert len(pictures) == 10 and all(found.get("role") == "img" for found in pictures)
    assert all(len(found["aria-label"] or "") > 15 for found in pictures)
    assert any(
        "Loss: 0.1 at first, 0.008333 at last, between 0.008333 and 0.1" in found["aria-label"]
        for found in pictures
    )
    for heading in (
        "Logged figures at 12 of 12 steps",
        "NMSE by layer at some steps",
        "Fidelity to the teacher",
    ):
        assert heading in reader.text
    assert all(
        found.get("tabindex") == "0" and found.get("aria-label")
        for found in reader.of("div", class_="scroll")
    )


def test_refusals_are_at_their_steps_with_their_reasons(tmp_path, drawn) -> None:
    lines = [
        event("start"),
        refusal(3),
        refusal(7, "gradient", "gradient of model.layers.1.npt.A has norm inf"),
        event("done", steps=12),
    ]
    reader = read(make_run(tmp_path / "run", events=lines))
    told = reader.told
    assert "loss: step 3" in told and "gradient: step 7" in told
    assert "gradient of model.layers.1.npt.A has norm inf" in reader.sections["training"]
    assert (
        "2 refused, of which nothing is left in the adapters: 1 for gradient, 1 for loss."
        in reader.sections["training"]
    )
    assert "a.txt@0, b.txt@64" in reader.sections["training"]


def test_what_a_resume_undid_is_hollow_and_not_counted(tmp_path, drawn) -> None:
    saved = event("save", step=4, folder="checkpoints/step-00000004")
    resumed = event(
        "resume",
        step=4,
        checkpoint="x/checkpoints/step-00000004",
        changed={"learning_rate": [0.02, 0.01]},
    )
    lines = [
        event("start"),
        refusal(2),
        saved,
        refusal(6),
        event("start"),
        resumed,
        event("done", steps=12),
    ]
    reader = read(make_run(tmp_path / "run", events=lines))
    assert "loss: step 2" in reader.told and "loss, undone: step 6" in reader.told
    assert "1 refused, of which" in reader.text and "with hollow marks: 1." in reader.text
    assert "was 0.02 before step 4" in reader.sections["configuration"]


# --- what is missing
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "section"),
    [
        ("run", "configuration"),
        ("run", "environment"),
        ("metrics", "training"),
        ("events", "events"),
        ("events", "training"),
        ("fidelity", "fidelity"),
        ("fidelity", "layers"),
        ("modulation", "modulation"),
    ],
)
def test_a_missing_file_is_named_in_place_of_its_part(tmp_path, file, section) -> None:
    reader = read(make_run(tmp_path / "run", **{file: None}))
    name = f"{file}.jsonl" if file in ("metrics", "events") else f"{file}.json"
    assert f"{name} says nothing: it is not there." in reader.sections[section]
    assert f"{name}: it is not there" in reader.sections[""]


@pytest.mark.parametrize("file", ["run", "fidelity", "modulation"])
@pytest.mark.parametrize("content", ["", '{"a": 1', "[1]", '{"a": NaN}', "\x00\xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, file, content) -> None:
    reader = read(make_run(tmp_path / "run", **{file: content}))
    assert re.search(rf"{file}\.json: it (cannot be read|holds a list)", reader.sections[""])


@pytest.mark.parametrize(
    "content",
    [
        {"teacher": 3, "layers": 4},
        {"layers": {"0": 5, "1": {"targets": 6}, "2": {"targets": {"gate": 7}}}},
        {"settings": [1]},
    ],
)
@pytest.mark.parametrize("file", ["run", "fidelity", "modulation"])
def test_files_of_another_form_make_a_page_all_the_same(tmp_path, file, content) -> None:
    assert "report of a run" in read(make_run(tmp_path / "run", **{file: content})).text


def test_an_empty_folder_makes_a_page(tmp_path) -> None:
    reader = read(tmp_path)
    assert "No start is on record" in reader.text
    assert reader.text.count("it is not there") >= 10


def test_half_a_last_line_and_lines_that_are_none_are_skipped(tmp_path) -> None:
    folder = make_run(
        tmp_path / "run",
        metrics="".join(json.dumps(metrics(s)) + "\n" for s in (1, 2, 3))
        + "rubbish\n"
        + '{"step": 4, "lo',
    )
    record = read_run(folder)
    assert record.metrics.steps == [1, 2, 3]
    assert "metrics.jsonl: 1 of its lines cannot be read and are left out" in read(folder).text


def test_a_killed_run_takes_figures_of_checkpoint_and_evaluation(tmp_path) -> None:
    lines = [
        event("start"),
        event("evaluation", step=5, student=figures(0.3)),
        event("evaluation", step=10, student=figures(0.2)),
    ]
    folder = make_run(tmp_path / "run", events=lines, fidelity=None, modulation=None)
    saved = folder / "checkpoints" / "step-00000004"
    saved.mkdir(parents=True)
    initial = {
        "teacher": figures(0.0),
        "floor": figures(1.2),
        "student": figures(1.1),
        "layers": {"0": {"nmse_floor": 0.1, "nmse_student": 0.09}},
    }
    (saved / "state.json").write_text(json.dumps({"initial": initial}), encoding="utf-8")
    reader = read(folder)
    assert "No end is on record at step 12: killed, or running on another machine" in reader.text
    assert (
        "those that the checkpoint step-00000004 has; the student's are those of the evaluation at"
        " step 10" in reader.sections["fidelity"]
    )
    assert "0.2000 ± 0.0010, from 1.2000 at the floor" in reader.sections["fidelity"]
    assert "There is no student's yet" in reader.sections["layers"]
    assert "Held-out KL under way" in reader.sections["training"]


def test_figures_of_an_earlier_end_are_said_to_be_that(tmp_path) -> None:
    lines = [
        event("start"),
        event("done", steps=6),
        event("start"),
        event("resume", step=6, checkpoint="step-00000006", changed={}),
    ]
    reader = read(make_run(tmp_path / "run", events=lines, modulation=modulation(6)))
    assert "fidelity.json: it is of an earlier end of this run" in reader.sections["fidelity"]
    assert (
        "modulation.json: it is of step 6, the run has got to step 12"
        in reader.sections["modulation"]
    )


def test_figures_of_training_text_are_said_to_be_that(tmp_path) -> None:
    assert (
        "TRAINING text"
        in read(make_run(tmp_path / "run", fidelity={**fidelity(), "heldout": False})).sections[
            "fidelity"
        ]
    )


@pytest.mark.parametrize(
    ("last", "kind", "words"),
    [
        (event("done", steps=12), "good", "Finished at step 12"),
        (
            event("stopped", step=11, reason="4 refusals in a row"),
            "bad",
            "Stopped at step 12: 4 refusals in a row",
        ),
        (event("signal", number=15, step=12), "warn", "Ended by signal 15 at step 12"),
        (
            event("error", step=12, error="OSError", message="disk"),
            "bad",
            "Ended with an error at step 12: OSError: disk",
        ),
    ],
)
def test_the_end_of_a_run_is_told(tmp_path, last, kind, words) -> None:
    record = read_run(make_run(tmp_path / "run", events=[event("start"), last]))
    assert status(record)[0] == kind and status(record)[1].startswith(words)
    assert summary(record)["status"].startswith(words)


# --- odd numbers
# --------------------------------------------------------------------------------------------------


def test_one_step_makes_a_page(tmp_path) -> None:
    reader = read(make_run(tmp_path / "run", steps=1))
    assert "1 logged step." in reader.text and len(reader.of("svg", class_="chart")) == 10


def test_numbers_that_are_not_finite_are_said_and_drawn_as_such(tmp_path, drawn) -> None:
    lines = [
        metrics(step, loss=None, grad_norm=math.nan, **{"layers.1.nmse": None})
        for step in (1, 2, 3)
    ]
    hurt = fidelity(student=None)
    hurt["layers"]["1"]["nmse_student"] = None
    reader = read(
        make_run(
            tmp_path / "run",
            metrics=lines,
            fidelity=hurt,
            modulation=modulation(3, mean=None, saturated=None, bad=0.5),
        )
    )
    assert reader.told.count("not finite at steps 1, 2, 3") == 2  # loss and gradient norm
    said = [found["aria-label"] or "" for found in reader.of("svg")]
    assert any(label.startswith("Loss: no finite value, 3 times not finite") for label in said)
    assert "The student's KL(teacher, model), nats is not finite." in reader.sections["fidelity"]
    assert (
        "not finite" in reader.sections["fidelity"]
        and "of the way from" not in reader.sections["fidelity"]
    )
    assert "In 1 of 3 layers the student's is not finite" in reader.sections["layers"]
    assert "and 50.0% not finite" in reader.sections["modulation"]


def test_a_teacher_no_better_than_the_floor_leaves_no_way_to_draw(tmp_path) -> None:
    same = {name: figures(0.0) for name in ("teacher", "floor", "student")}
    reader = read(make_run(tmp_path / "run", fidelity={**same, "layers": {}}))
    assert "nothing to draw between floor and teacher" in reader.sections["fidelity"]


def test_a_student_outside_floor_and_teacher_stays_in_the_picture(tmp_path) -> None:
    for student in (5.0, -0.4):
        reader = read(make_run(tmp_path / f"run{student}", fidelity=fidelity(student)))
        pictures = [found["aria-label"] or "" for found in reader.of("svg")]
        share = "−316.7%" if student > 0 else "133.3%"
        assert f"KL(teacher, model), nats: the student has gone {share}" in pictures[0]


def test_a_student_that_is_almost_its_teacher_is_not_said_to_be_it(tmp_path) -> None:
    assert (
        "99.998%"
        in read(make_run(tmp_path / "run", fidelity=fidelity(0.00002))).sections["fidelity"]
    )


def test_what_only_some_evaluations_measure_is_listed(tmp_path) -> None:
    more = fidelity()
    more["attribution"] = {
        "unquantized_to_4bit": figures(0.016),
        "unquantized_to_npt": figures(0.03),
    }
    more["divergence"] = {"prompts": 12, "agreed": 31.5, "agreed_se": 4.0, "median": None}
    for values in more["layers"].values():
        values["free_running_student"] = 0.0625
    reader = read(make_run(tmp_path / "run", fidelity=more))
    assert (
        "unquantised to 4-bit" in reader.sections["fidelity"]
        and "0.0160 ± 0.0010" in reader.sections["fidelity"]
    )
    assert "31.5 ± 4.0" in reader.sections["fidelity"]
    assert (
        "student, on its own" in reader.sections["layers"]
        and reader.sections["layers"].count("0.0625") == 3
    )


def test_additive_adapters_have_no_histograms(tmp_path) -> None:
    only = modulation(12, counts=None, saturated=None, bad=None, mean=None, std=None)
    reader = read(make_run(tmp_path / "run", modulation=only))
    assert (
        "There are no multipliers: the modulation is additive only."
        in reader.sections["modulation"]
    )
    assert not any("multipliers" in (found["aria-label"] or "") for found in reader.of("svg"))


def test_saturated_multipliers_are_said(tmp_path) -> None:
    reader = read(make_run(tmp_path / "run", modulation=modulation(12, saturated=0.25)))
    assert (
        "at most 25.00% of the multipliers" in reader.sections["modulation"]
        and "next to no gradient" in reader.sections["modulation"]
    )


def test_the_page_of_a_long_run_keeps_its_spike_and_stays_small(tmp_path, drawn) -> None:
    lines = [
        metrics(step, layers=80, loss=900.0 if step == 54_321 else 1.0)
        for step in range(1, 100_001, 80)
    ]
    lines += [metrics(100_001, layers=80, loss=900.0), metrics(100_002, layers=80, loss=1.0)]
    events = [
        event("start"),
        *(refusal(step, "loss", HOSTILE * 9) for step in range(1, 100_000, 45)),
        event("done", steps=100_002),
    ]
    folder = make_run(
        tmp_path / "run",
        metrics=lines,
        events=events,
        fidelity=fidelity(layers=80),
        modulation=modulation(9, layers=80),
    )
    text = page(read_run(folder), folder / "report.html")
    assert len(text.encode()) < 1_000_000
    reader = Reader(text)
    assert "between 1 and 900" in next(
        found["aria-label"] or ""
        for found in reader.of("svg")
        if "Loss" in (found.get("aria-label") or "")
    )


# --- checkpoints and post-mortems
# --------------------------------------------------------------------------------------


def checkpoint(folder: Path, name: str) -> Path:
    made = folder / "checkpoints" / name
    made.mkdir(parents=True)
    (made / "state.json").write_text("{}", encoding="utf-8")
    return made


def test_checkpoints_are_linked_and_verified_broken_ones_say_why(tmp_path) -> None:
    folder = make_run(tmp_path / "run")
    for name in (
        "step-00000004",
        "step-00000008",
        "step-00000012.broken",
        "not-one",
        ".step-00000016.abc.partial",
    ):
        checkpoint(folder, name)

    def verify(path: Path) -> None:
        if path.name.endswith("broken"):
            raise CheckpointError(
                f"{path / 'state.json'}: sha256 00 of 2 bytes, the manifest says 11"
            )

    reader = read(folder, verify)
    links = [found["href"] for found in reader.of("a") if "step-" in (found["href"] or "")]
    assert links == [
        "./checkpoints/step-00000004/",
        "./checkpoints/step-00000008/",
        "./checkpoints/step-00000012.broken/",
    ]
    assert reader.sections["saved"].count("verified") == 2
    assert "step-00000012.broken/state.json: sha256 00 of 2 bytes" in reader.sections["saved"]
    assert str(tmp_path) not in reader.sections["saved"]


def test_a_post_mortem_says_why_the_run_stopped(tmp_path) -> None:
    folder = make_run(
        tmp_path / "run",
        events=[
            event("start"),
            event("stopped", step=3, reason="x", postmortem="postmortem/step-00000003"),
        ],
    )
    bundle = folder / "postmortem" / "step-00000003"
    assert "The post-mortem postmortem/step-00000003 is not there" in read(folder).sections["saved"]
    bundle.mkdir(parents=True)
    assert "Its record says nothing: it is not there" in read(folder).sections["saved"]
    record = {
        "reason": "4 refusals in a row",
        "refusals": [{"kind": "loss", "detail": "loss is nan"}],
        "verdict": {"where": "layer 3"},
    }
    (bundle / "postmortem.json").write_text(json.dumps(record), encoding="utf-8")
    reader = read(folder)
    assert (
        "4 refusals in a row. Refused last: loss: loss is nan. The first bad number: where layer 3."
        in reader.sections["saved"]
    )
    assert "./postmortem/step-00000003/" in [found["href"] for found in reader.of("a")]


def test_links_lead_from_where_the_page_is_to_the_run(tmp_path) -> None:
    folder = make_run(tmp_path / "runs" / "run")
    checkpoint(folder, "step-00000004")
    text = page(read_run(folder), tmp_path / "pages" / "page.html")
    assert 'href="./../runs/run/checkpoints/step-00000004/"' in text


def test_links_of_checkpoints_are_not_followed_out_of_the_folder(tmp_path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "checkpoints").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "checkpoints" / "step-00000004").symlink_to(tmp_path / "elsewhere")
    assert read_run(folder).checkpoints == []


# --- what it may never do
# ----------------------------------------------------------------------------------------------


def hostile(value: Any) -> Any:
    """Every text in a JSON value, keys included, made into an attack."""
    if isinstance(value, dict):
        return {
            (f"{key}{HOSTILE}" if key in ("torch", "rank") else key): hostile(entry)
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [hostile(entry) for entry in value]
    return HOSTILE if isinstance(value, str) else value


def test_no_text_of_a_run_becomes_markup(tmp_path, drawn) -> None:
    events = [
        event("start"),
        refusal(3),
        event("diagnosis", step=3, message="x"),
        event("evaluation", step=6, student=figures(0.1)),
    ]
    events = [
        {**hostile(line), "event": line["event"]}
        for line in [*events, event("warning", message="x"), event(HOSTILE)]
    ]
    events.append({**event("stopped", step=3, reason=HOSTILE, postmortem=HOSTILE)})
    plain = make_run(tmp_path / "plain", events=[event("start")])
    run = json.loads((plain / "run.json").read_text())
    run = {
        **hostile(run),
        HOSTILE: HOSTILE,
        "settings": {**hostile(run["settings"]), "run_name": HOSTILE, HOSTILE: HOSTILE},
    }
    odd = fidelity()
    odd["layers"] = {HOSTILE: odd["layers"]["1"]}
    odd["student"][HOSTILE] = 3.0
    found = modulation(12)
    found["layers"] = {HOSTILE: found["layers"]["1"]}
    folder = make_run(
        tmp_path / f"run{HOSTILE}".replace("/", ""),
        events=events,
        run=run,
        fidelity=odd,
        modulation=found,
    )
    bundle = folder / "postmortem" / "step-00000003"
    bundle.mkdir(parents=True)
    (bundle / "postmortem.json").write_text(
        json.dumps(
            {"reason": HOSTILE, "refusals": [{"kind": HOSTILE}], "verdict": {HOSTILE: HOSTILE}}
        )
    )
    checkpoint(folder, "step-00000004")

    def verify(path: Path) -> None:
        raise CheckpointError(HOSTILE)

    text = page(read_run(folder, verify), folder / "report.html")
    reader = Reader(text)
    assert "alert(1)" in reader.text  # it is shown
    assert not reader.of("img") and not reader.of("script")
    assert not [
        name
        for _, found in reader.elements
        for name in found
        if name.startswith("on") or name in ("src", "style", "srcdoc")
    ]


def test_the_policy_lets_only_the_pages_own_style_in(tmp_path, drawn) -> None:
    import base64
    import hashlib

    text = page(read_run(make_run(tmp_path / "run")), tmp_path / "report.html")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    content = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy and "script-src" not in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"https?://", text)
    assert all((found["href"] or "").startswith(("#", "./")) for found in Reader(text).of("a"))


def test_no_secret_and_no_environment_variable_is_in_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")
    folder = make_run(
        tmp_path / "run",
        events=[
            event("start"),
            event(
                "warning",
                message="GET https://me:hunter2@host/?token=hf_abcdefghijklmnopqrst failed",
            ),
        ],
    )
    run = json.loads((folder / "run.json").read_text())
    run["wandb_run"] = "k3y1d"
    (folder / "run.json").write_text(json.dumps(run))
    text = page(read_run(folder), folder / "report.html")
    for secret in ("0123456789secret", "hunter2", "hf_abcdefghijklmnopqrst", "k3y1d"):
        assert secret not in text


def test_the_same_folder_makes_the_same_page(tmp_path, drawn) -> None:
    folder = make_run(
        tmp_path / "run", events=[event("start"), refusal(3), event("done", steps=12)]
    )
    assert page(read_run(folder), folder / "a.html") == page(read_run(folder), folder / "a.html")


def test_reading_changes_nothing_in_the_folder(tmp_path) -> None:
    folder = make_run(tmp_path / "run")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*")}
    read(folder)
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*")
    } == before
