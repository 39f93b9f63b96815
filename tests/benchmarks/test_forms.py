"""Every form at a rank: rows, their file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_real import prose

from forms import main
from tables import forms as table


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(24):
        (folder / f"{number}.txt").write_text(prose(number, 40), encoding="utf-8")
    return folder


def test_forms_are_made_once(text, tmp_path, capsys) -> None:
    out = tmp_path / "rows.json"
    flags = ["--text", str(text), "--layers", "7", "--divisors", "16", "--tokens", "512"]
    flags += ["--steps", "1", "--seeds", "0,1", "--forms", "cut,M,original", "--out", str(out)]
    assert main(flags) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    rows = {(row["form"], row["seed"]): row for row in found["rows"]}
    assert set(rows) == {("cut", 0), ("M", 0), ("M", 1), ("original", 0), ("original", 1)}
    cut = rows["cut", 0]
    assert "trained" not in cut and cut["parameters"] == 2 * 12 * found["hidden"]
    assert cut["parameters"] < rows["M", 0]["parameters"]
    assert all(row["figures"]["kl"] > 0 for row in found["rows"])
    assert all(f"\n| {form} |" in table(found) for form in ("cut", "M", "original"))
    capsys.readouterr()
    assert main(flags) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text()) == found


@pytest.mark.parametrize(
    ("flags", "content", "words"),
    [
        ((), '{"model": "other", "rows": []}', "has rows of other settings"),
        ((), '{"model": ', "is not a file of this benchmark"),
        (("--forms", "cut,best"), "", "--forms names 'best'; choose from cut, trained"),
        (("--divisors", "0,4"), "", "--divisors are [0, 4]; the model's D is 192"),
    ],
)
def test_what_cannot_be_is_one_line(flags, content, words, text, tmp_path, capsys) -> None:
    out = tmp_path / "rows.json"
    out.write_text(content)
    assert main(["--text", str(text), "--out", str(out), *flags]) == 2
    assert words in capsys.readouterr().err and out.read_text() == content
