"""`npt sweep`: what it refuses before anything runs, and a study through workers that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from npt.cli.main import main
from npt.sweep.spec import read_design
from npt.sweep.storage import Storage
from npt.sweep.table import read_table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def spec(tmp_path: Path, small: dict[str, Any]) -> Path:
    path = tmp_path / "study.yaml"
    parts = {"forms": {"seeds": [0, 1], "grid": {"mult_form": ["sigmoid", "one_plus_tanh"], "learning_rate": [1e-3, 1e-2, 1e-1]}}}
    path.write_text(yaml.safe_dump({"name": "small", "settings": small, "parts": parts}))
    return path


def start(spec: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "npt.cli", "sweep", str(spec), "--study", str(folder), *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finished(folder: Path, spec: Path) -> int:
    if not (folder / "study.db").exists():
        return 0
    return Storage(f"sqlite:///{folder / 'study.db'}", "small").progress(read_design(str(spec)).by_key).finished


def test_a_dry_run_lists_the_trials_and_makes_nothing(spec, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", str(spec), "--dry_run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 13 and out[-1].startswith("12 trials in 1 parts") and "forms lr 0.001 one_plus_tanh seed 1" in out[3]
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"adapter_rank": 4096}, "part forms: --adapter_rank is 4096, larger than the model's hidden size 64"),
        ({"layers": "7"}, "part forms: --layers names layer 7"),
        ({"dataset_name": "/nowhere/x.jsonl"}, "/nowhere/x.jsonl"),
        ({"model_name": "/nowhere/model"}, "there is no model folder"),
        ({"residual": "keep"}, "--residual keep starts equal to its base"),
        ({"learning_rat": 1}, "there is no setting 'learning_rat'; did you mean learning_rate?"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_no_run_could_start_with_is_refused_before_anything_is_made(spec, tmp_path, capsys, small, change, said) -> None:
    content = yaml.safe_load(spec.read_text())
    content["settings"] = {**small, **change}
    spec.write_text(yaml.safe_dump(content))
    assert main(["sweep", str(spec), "--study", str(tmp_path / "study")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "study").exists()


def test_a_folder_of_something_else_is_left_alone(spec, tmp_path, capsys) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "letter.txt").write_text("x")
    assert main(["sweep", str(spec), "--study", str(folder)]) == 2
    assert "holds something other than a study" in capsys.readouterr().err and [p.name for p in folder.iterdir()] == ["letter.txt"]


@pytest.mark.slow
def test_a_study_whose_processes_are_killed_goes_on_where_it_was_and_repeats_nothing(spec, tmp_path, capsys) -> None:
    folder = tmp_path / "study"
    first = start(spec, folder, "--workers", "2")
    end = time.monotonic() + 120
    while finished(folder, spec) < 3 and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)  # the parent and both workers, in the middle of their trials
    first.communicate()
    before = {key: row["ended"] for key, row in Storage(f"sqlite:///{folder / 'study.db'}", "small").rows().items()}
    assert 3 <= len(before) < 12
    # Trials in flight are waited for as long as a worker may be silent; here it need not be that long.
    code = "import npt.sweep.storage as s; s.GRACE_SECONDS = 2.0; s.Storage.__init__.__kwdefaults__['grace'] = 2.0\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    os.environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    try:
        second = start(spec, folder, "--workers", "2")
        out, _ = second.communicate(timeout=240)
    finally:
        os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].split(os.pathsep, 1)[1]
    assert second.returncode == 0, out
    assert "12 trials, 0 new" in out
    rows = Storage(f"sqlite:///{folder / 'study.db'}", "small").rows()
    assert len(rows) == 12 and {key: rows[key]["ended"] for key in before} == before
    table = read_table(folder)
    assert Counter(row["outcome"] for row in table).total() == 12 and all(row["kl"] is not None for row in table)
    # The same settings on the same base give the same figures, whichever worker computed them.
    assert main(["report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] == 12 and "map-forms" in found["pictures"]
    assert (folder / "report.html").is_file() and (folder / "figures" / "map-forms.png").is_file()


@pytest.mark.slow
def test_a_signal_ends_a_study_and_its_trials_wait_again_at_once(spec, tmp_path) -> None:
    folder = tmp_path / "study"
    process = start(spec, folder)
    end = time.monotonic() + 120
    while finished(folder, spec) < 1 and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    progress = Storage(f"sqlite:///{folder / 'study.db'}", "small").progress(read_design(str(spec)).by_key)
    assert progress.running == 0 and progress.lost == 0 and progress.finished + progress.waiting == 12
