"""Every form at a rank, trained from one walk: rows, file and plot."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from test_real import prose

from forms import FORMS, main
from run_tables import forms as table


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("text")
    for number in range(24):
        (found / f"{number}.txt").write_text(prose(number, 40), encoding="utf-8")
    return found


def test_all_forms_are_made_once_from_one_walk(text, tmp_path, capsys) -> None:
    out, picture = tmp_path / "rows.json", tmp_path / "rows.svg"
    flags = ["--text", str(text), "--layers", "7", "--divisors", "16", "--tokens", "512"]
    flags += ["--minutes", "0.0001", "--seeds", "0,1", "--out", str(out), "--plot", str(picture)]
    assert main(flags) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    rows = {(row["form"], row["seed"]): row for row in found["rows"]}
    assert set(rows) == {(form, seed) for form in FORMS for seed in (0, 1)} - {("cut", 1)}
    cut = rows["cut", 0]
    assert "trained" not in cut and cut["parameters"] == 2 * 12 * found["hidden"]
    sizes = [rows[form, 0]["parameters"] for form in ("trained", "M", "B", "M and B")]
    assert cut["parameters"] == sizes[0] < sizes[1] == sizes[2] < sizes[3]
    for (form, seed), row in rows.items():
        assert row["figures"]["kl"] > 0, (form, seed)
        # those that start from the cut keep it if nothing on the way was nearer
        if form not in ("no stream", "original"):
            kls = row["trained"]["choosing_kl"] if form != "cut" else [0.0]
            assert min(kls) == kls[row["trained"]["kept"] if form != "cut" else 0]
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")
    assert all(f"\n| {form} |" in table(found) for form in FORMS)
    capsys.readouterr()
    assert main(flags) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text()) == found


def test_what_cannot_be_is_one_line(text, tmp_path, capsys) -> None:
    out = tmp_path / "rows.json"
    out.write_text(json.dumps({"model": "other", "rows": []}))
    assert main(["--text", str(text), "--out", str(out)]) == 2
    assert f"--out {out} has rows of other settings" in capsys.readouterr().err
    assert main(["--forms", "cut,best", "--out", str(out)]) == 2
    assert "--forms names 'best'; choose from cut, trained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "given"), [("--divisors", "4,x"), ("--rates", "0"), ("--seeds", "-1")]
)
def test_no_list_of_numbers_is_refused(flag, given, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        main([f"{flag}={given}", "--out", str(tmp_path / "rows.json")])
    assert f"argument {flag}: invalid list of numbers value: '{given}'" in capsys.readouterr().err


def test_ranks_and_files_that_cannot_be_are_one_line(text, tmp_path, capsys) -> None:
    out = tmp_path / "rows.json"
    assert main(["--text", str(text), "--divisors", "0,4", "--out", str(out)]) == 2
    assert "--divisors are [0, 4]; the model's D is 192" in capsys.readouterr().err
    out.write_text('{"model": ')
    assert main(["--text", str(text), "--out", str(out)]) == 2
    assert f"--out {out} is not a file of this benchmark" in capsys.readouterr().err
    assert out.read_text() == '{"model": '
