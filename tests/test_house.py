"""The size of the house. It only shrinks: a change that needs more room takes something out."""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import npt
from npt.cli.main import VERBS
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig

ROOT = Path(npt.__file__).parent.parent
SOURCES = (".py", ".j2", ".css", ".js")

LINES, CHARACTERS = 35_600, 1_475_000
"""Of the package without the demo; the way leads to 30,000 and 1,250,000."""

TEST_LINES = 52_300
"""On the way to 45,000."""

IMPORTED = {"from npt import Trainer": 20_600, "import npt.guard": 3_800}
"""Lines of npt that a statement reads."""

PATH = {"files": 28, "lines": 6_300, "depth": 12}
"""Of the way of a batch to its update (`benchmarks/reading_path.py`)."""

VERBS_AT_MOST, SETTINGS_AT_MOST = 14, 65


def files(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]


def test_the_package_fits_its_ceiling() -> None:
    texts = [path.read_text("utf-8") for path in files("npt") if "demo" not in path.parts]
    assert sum(text.count("\n") for text in texts) <= LINES
    assert sum(map(len, texts)) <= CHARACTERS


def test_the_tests_fit_theirs() -> None:
    assert sum(path.read_text("utf-8").count("\n") for path in files("tests")) <= TEST_LINES


@pytest.mark.parametrize("statement", IMPORTED)
def test_an_import_reads_no_more_than_it_needs(statement) -> None:
    code = f"""{statement}
import sys
names = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "npt"]
print(sum(open(name, encoding="utf-8").read().count("\\n") for name in names if name))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert int(ended.stdout) <= IMPORTED[statement], ended.stderr


def test_the_way_of_a_batch_is_short(capsys, monkeypatch) -> None:
    script = ROOT / "benchmarks" / "reading_path.py"
    monkeypatch.setattr(sys, "argv", [script.name, "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: figures[name] for name in PATH} == {
        name: min(figures[name], most) for name, most in PATH.items()
    }


def test_verbs_and_settings_are_few() -> None:
    settings = [
        f for c in (BaseConfig, NPTConfig, DataConfig, TrainConfig) for f in dataclasses.fields(c)
    ]
    assert len(VERBS) <= VERBS_AT_MOST and len(settings) <= SETTINGS_AT_MOST
