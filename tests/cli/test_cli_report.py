"""`npt report`: exit status, one line on standard error, what is written where, and the
JSON output.
"""

import json

import pytest
from made_runs import event, make_run, refusal

from npt.cli.main import main


def test_a_run_gets_its_page_anew(tmp_path, capsys) -> None:
    folder = make_run(
        tmp_path / "run",
        events=[event("start"), refusal(3), event("done", steps=12)],
        fidelity=None,
    )
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Finished at step 12; refusals: 1" in out and "fidelity.json: missing" in out
    assert f"written to {folder / 'report.html'}" in out
    assert "<title>run: run report</title>" in (folder / "report.html").read_text(encoding="utf-8")


def test_json_holds_what_was_found(tmp_path, capsys) -> None:
    end = event("stopped", step=12, reason="4 refusals in a row")
    lines = [event("start"), refusal(3), refusal(5, "gradient"), end]
    folder = make_run(tmp_path / "run", events=lines)
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert main(["report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(folder / "report.html")
    expected = {"state": "stopped", "step": 12, "refused": 2, "kl": 0.02}
    assert expected.items() <= found.items()
    assert found["refused_by_kind"] == {"loss": 1, "gradient": 1}
    assert found["checkpoints"] == [{"step": 4, "folder": "step-00000004"}]
    assert found["missing"]["fidelity.json"].startswith("from an earlier end")


def test_a_run_killed_at_once_gets_a_page_and_can_be_resumed(tmp_path) -> None:
    from npt.runs.run_folder import is_run

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("", encoding="utf-8")
    assert main(["report", str(folder)]) == 0
    assert is_run(folder)
    assert main(["report", str(folder)]) == 0


@pytest.mark.parametrize("what", ["missing", "empty", "file", "other"])
def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys, what) -> None:
    place = tmp_path / what
    if what == "file":
        place.write_text("x")
    elif what != "missing":
        place.mkdir()
    if what == "other":
        (place / "letter.txt").write_text("x")
    assert main(["report", str(place)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(place) in error
    assert not list(tmp_path.rglob("report.html"))


def test_an_output_that_cannot_be_written_is_refused_in_one_line(tmp_path, capsys) -> None:
    folder = make_run(tmp_path / "run")
    for output in (tmp_path, tmp_path / "no" / "such" / "page.html"):
        assert main(["report", str(folder), "--output", str(output)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
