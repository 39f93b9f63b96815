"""The demonstration: every planted fault is found exactly, the clean model gives no alarm, and a
wrong verdict does not pass.
"""

import functools
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import debug_nan
from faults import tracer_demo
from faults.bench import no_fault
from faults.module_cases import ModuleCase
from faults.places import Truth, marked_lines
from faults.rivals import RIVALS, Finding, ask, score
from faults.tracer_cases import Case, all_cases
from faults.tracer_demo import (
    Line,
    compare,
    false_alarms,
    find_fault,
    planted,
    print_lines,
    print_rows,
    small,
    summary,
)
from npt.tracer.verdict import CAUSES, Verdict

CASES = all_cases()


SMALL = [c for c in CASES if isinstance(c, ModuleCase)]


def case(id: str) -> Any:
    (found,) = [c for c in CASES if c.id == id]
    return found


@pytest.fixture(scope="module")
def shared_student():
    """One for each setting: a trace and a plant leave it as it was."""
    return functools.cache(tracer_demo.Student)


# A bad element of a plain weight, and what only one pass shows, are planted in models of every kind
# by the tracer's own tests.
COVERED = {"norm-weight", "embedding-row", "head-weight", "transient"}


EMBEDDED = [c for c in CASES if isinstance(c, Case) and c.id not in COVERED]


@pytest.mark.parametrize("fault", EMBEDDED, ids=lambda c: c.id)
def test_the_planted_fault_is_found_exactly(fault, shared_student, monkeypatch) -> None:
    if fault.act is None:  # nothing is done to the student for good
        monkeypatch.setattr(tracer_demo, "Student", shared_student)
    is_found_exactly(fault)


@pytest.mark.parametrize("fault", SMALL, ids=lambda c: c.id)
def test_the_fault_in_a_small_module_is_found_exactly(fault) -> None:
    is_found_exactly(fault)
    subject = small(fault, bad=False)
    assert tracer_demo.trace(subject.model, subject.batch, run=subject.run) is None


def is_found_exactly(fault: Case | ModuleCase) -> None:
    line = find_fault(fault)
    assert line.error == ""
    assert line.found == str(line.truth)
    assert line.verdict is not None and line.verdict.cause == line.truth.cause
    assert line.passed
    # What a reader goes by, besides the place: a sentence, a remedy that fits, and a text that is
    # whole.
    assert line.verdict.remedy == CAUSES[line.truth.cause]
    assert line.verdict.explanation in str(line.verdict)
    json.dumps(line.verdict.as_dict(), allow_nan=False)


def test_the_clean_model_gives_no_alarm(shared_student, monkeypatch) -> None:
    monkeypatch.setattr(tracer_demo, "Student", shared_student)
    assert false_alarms() == 0


def test_there_are_faults_of_every_kind_and_each_has_an_id_of_its_own() -> None:
    assert len(CASES) >= 20 and len({c.id for c in CASES}) == len(CASES)
    assert len(marked_lines()) >= 30 and set(marked_lines()) <= {c.id for c in CASES}
    kinds = {"forward", "backward", "weight", "absmax", "cast", "mask", "division", "data"}
    assert {c.group for c in CASES} >= kinds


# --- a verdict that is wrong anywhere does not pass

TRUTH = Truth("forward", "model.layers.5.mlp", "log", (2, 9), "invalid argument", (0, 2))
PLACE = {"phase": "forward", "layer": 5, "module": "model.layers.5.mlp", "operation": "log"}
TENSOR = {"source": "a.py:1", "tensor": "output of log", "index": (2, 9), "row": 0, "token": 2}
WORDS = {"cause": "invalid argument", "reached": "loss", "explanation": ""}
RIGHT = Verdict(**PLACE, **TENSOR, **WORDS, value=0.0)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *(("phase", "backward"), ("layer", 4), ("layer", None), ("module", "model.layers.5")),
        *(("operation", "sqrt"), ("operation", "log in LogBackward0"), ("index", (2, 8))),
        *(("index", (9, 2)), ("index", ()), ("cause", "unknown"), ("row", 1), ("token", 3)),
        *(("token", None), ("row", None)),
    ],
)
def test_a_verdict_that_is_wrong_in_one_field_does_not_pass(field, wrong) -> None:
    verdict = replace(RIGHT, **{field: wrong})
    assert TRUTH.fits(RIGHT) and not TRUTH.fits(verdict)
    line = Line(case("forward-log"), TRUTH, verdict)
    assert not line.passed and line.as_dict()["passed"] is False


def test_a_truth_without_a_token_asks_for_none() -> None:
    truth = replace(TRUTH, token=None)
    assert truth.fits(replace(RIGHT, row=None, token=None)) and truth.fits(RIGHT)


def test_nothing_found_and_a_tracer_that_breaks_do_not_pass(monkeypatch) -> None:
    monkeypatch.setattr(tracer_demo, "trace", lambda *_, **__: None)
    line = find_fault(case("forward-log"))
    assert not line.passed and line.found == "nothing"

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(tracer_demo, "trace", broken)
    line = find_fault(case("forward-log"))
    assert not line.passed and line.found == line.error == "RuntimeError: no idea"


def test_a_tracer_that_always_names_one_fault_does_not_pass(shared_student, monkeypatch) -> None:
    monkeypatch.setattr(tracer_demo, "Student", shared_student)
    verdict = find_fault(case("forward-log")).verdict
    monkeypatch.setattr(tracer_demo, "trace", lambda *_, **__: verdict)
    assert [
        find_fault(case(id)).passed
        for id in ("forward-log", "forward-sqrt", "slope-sqrt", "token-id")
    ] == [True, False, False, False]
    assert false_alarms() > 0


def test_a_plant_is_what_makes_the_fault() -> None:
    """The same run without the plant is clean, so what is found is what was planted."""
    for id in ("norm-epsilon", "slope-sqrt"):
        line = find_fault(replace(case(id), fault=no_fault))
        assert line.verdict is None and not line.passed


def test_a_verdict_with_another_line_does_not_pass() -> None:
    line = find_fault(case("negative-base"))
    assert line.passed and line.verdict is not None
    wrong = replace(line.verdict, source=line.verdict.source.replace(".py:", ".py:1"))
    assert not replace(line, verdict=wrong).passed


# --- other tools


def said(tool: str, id: str) -> Finding | None:
    with planted(case(id)) as subject:
        return ask(RIVALS[tool], subject)


@pytest.mark.parametrize(
    ("tool", "id", "finding"),
    [
        ("anomaly mode", "zero-distance", Finding("SqrtBackward0", phase="backward")),
        ("anomaly mode", "gradient-penalty", Finding("PowBackward0", phase="backward")),
        ("DebugUnderflowOverflow", "negative-base", Finding(module="2", phase="forward")),
        ("forward hooks", "half-scores", Finding(module="scores", phase="forward")),
        ("forward hooks", "sure-answer", None),
    ],
)
def test_a_tool_is_heard_as_it_reports(tool, id, finding) -> None:
    if tool == "anomaly mode":
        finding = replace(finding, line=marked_lines()[id])
    assert said(tool, id) == finding


def test_a_pass_that_raises_gives_every_tool_its_traceback() -> None:
    for tool in RIVALS:
        finding = said(tool, "token-id")
        assert finding is not None and finding.operation == "embedding" and finding.phase == "data"


def test_a_tool_leaves_no_hook_behind() -> None:
    for tool in RIVALS.values():
        subject = small(case("half-scores"), bad=True)
        ask(tool, subject)
        assert not any(module._forward_hooks for module in subject.model.modules())


def test_names_of_one_operation_count_and_others_do_not() -> None:
    truth = case("zero-distance").truth
    for name in ("div in SqrtBackward0", "SqrtBackward0", "sqrt"):
        assert score(Finding(name), truth, None).operation
    for name in ("MeanBackward0", "where", "", None):
        assert not score(Finding(name), truth, None).operation
    nothing = score(None, truth, "a.py:1")
    assert not (nothing.operation or nothing.module or nothing.line or nothing.phase)
    outside = case("sure-answer").truth
    assert score(Finding("log", ""), outside, None).module
    assert not score(Finding("log", None), outside, None).module


def test_the_row_of_each_tool_is_counted() -> None:
    lines = [find_fault(case(id)) for id in ("sure-answer", "zero-distance", "half-scores")]
    rows = {row.name: row.as_dict() for row in compare(lines, 0, passes=False)}
    assert list(rows) == ["npt.trace", *RIVALS]
    parts = ("operation", "module", "line", "phase", "nothing", "total", "lines")
    counted = {name: [row[part] for part in parts] for name, row in rows.items()}
    assert counted["npt.trace"] == [3, 3, 3, 3, 0, 3, 3]
    assert counted["anomaly mode"] == [2, 0, 2, 1, 0, 3, 3]
    assert counted["DebugUnderflowOverflow"] == counted["forward hooks"] == [0, 1, 0, 1, 2, 3, 3]
    blind = [replace(line, verdict=None) for line in lines]
    assert compare(blind, 0, passes=False)[0].as_dict()["nothing"] == 3


def test_a_mask_is_a_false_alarm_of_hooks_and_none_of_the_tracer() -> None:
    subject = small(case("half-scores"), bad=False)
    assert tracer_demo.trace(subject.model, subject.batch, run=subject.run) is None
    for tool, alarm in (("anomaly mode", False), ("forward hooks", True)):
        assert (ask(RIVALS[tool], subject) is not None) == alarm


def test_the_table_of_tools_shows_what_each_named() -> None:
    rows = compare([find_fault(case("negative-base"))], 0, passes=False)
    console = Console(file=(out := io.StringIO()), width=160)
    print_rows(console, rows)
    assert "npt.trace" in out.getvalue() and "of 1 faults, 1 of them" in out.getvalue()


# --- the script


def script(
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    cases: tuple[str, ...] | None = None,
    alarms: int | None = None,
) -> int:
    if cases is not None:
        monkeypatch.setattr(debug_nan, "all_cases", lambda: [case(id) for id in cases])
    if alarms is not None:
        monkeypatch.setattr(debug_nan, "false_alarms", lambda: alarms)
    monkeypatch.setattr("sys.argv", ["debug_nan.py", *arguments])
    return debug_nan.main()


def test_the_demonstration_as_json_has_its_form(monkeypatch, capsys) -> None:
    assert (
        script(monkeypatch, "--demo", "--json", cases=("forward-log", "adapter-nan"), alarms=0) == 0
    )
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"cases", "passed", "total", "false_alarms", "clean_passes"}
    assert (figures["passed"], figures["total"], figures["false_alarms"]) == (2, 2, 0)
    for found in figures["cases"]:
        assert {"planted", "found", "passed"} <= set(found)
        assert found["planted"] == found["found"] and found["passed"] is True


@pytest.mark.parametrize(("blind", "alarms"), [(True, 0), (False, 3)])
def test_a_missed_fault_or_a_false_alarm_ends_it_with_1(blind, alarms, monkeypatch, capsys) -> None:
    if blind:
        monkeypatch.setattr(tracer_demo, "trace", lambda *_, **__: None)
    assert script(monkeypatch, "--demo", "--json", cases=("forward-log",), alarms=alarms) == 1
    figures = json.loads(capsys.readouterr().out)
    assert (figures["passed"], figures["false_alarms"]) == (int(not blind), alarms)
    assert (figures["cases"][0]["found"] == "nothing") == blind


def test_one_case_is_told_with_all_that_is_known(monkeypatch, capsys) -> None:
    assert script(monkeypatch, "--case", "forward-log") == 0
    out = capsys.readouterr().out
    assert "planted: the logarithm of 0" in out and "log of 0 is -inf" in out and "remedy: " in out


def test_the_table_shows_planted_against_found() -> None:
    lines = [find_fault(case("forward-log"))]
    missed = replace(lines[0], verdict=None)
    console = Console(file=(out := io.StringIO()), width=160)
    print_lines(console, [*lines, missed], 0)
    table = out.getvalue()
    assert table.count("forward: log, 5.mlp.act_fn [2, 9]") == 3 and "nothing" in table
    assert "located 1 of 2 faults exactly, 0 false alarms" in table
    assert summary([*lines, missed], 0)["passed"] == 1


@pytest.mark.parametrize(
    "arguments",
    [("--demo", "--foo"), ("--case", "none-such"), ("--limit", "-1"), ("--dem",), ("--rivals",)],
)
def test_wrong_arguments_are_one_line_and_status_2(monkeypatch, capsys, arguments) -> None:
    with pytest.raises(SystemExit) as ended:
        script(monkeypatch, *arguments)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("debug_nan.py") and "error: " in lines[0]


def test_without_demo_the_script_is_short_for_npt_trace(monkeypatch, capsys) -> None:
    assert script(monkeypatch, "--max_length", "16", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "fault": None,
        "batches": 1,
        "traced": "forward pass of the base",
    }
