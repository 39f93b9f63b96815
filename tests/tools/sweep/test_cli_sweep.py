"""`npt sweep`: what it refuses before anything runs, and a study through workers that are
killed.
"""

import contextlib
import csv
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from forked import Forked, forked_npt

from npt.cli.main import main
from npt.tools.sweep import study
from npt.tools.sweep import worker as sweep_worker
from npt.tools.sweep.spec import read_design
from npt.tools.sweep.storage import Storage
from npt.tools.sweep.table import CSV


@pytest.fixture
def spec(tmp_path, small: dict[str, Any]) -> Path:
    path = tmp_path / "study.yaml"
    parts = {
        "forms": {
            "seeds": [0, 1],
            "grid": {
                "mult_form": ["sigmoid", "one_plus_tanh"],
                "learning_rate": [1e-3, 1e-2, 1e-1],
            },
        }
    }
    path.write_text(yaml.safe_dump({"name": "small", "settings": small, "parts": parts}))
    return path


def start(spec: Path, folder: Path, *more: str) -> Forked:
    """Start `npt sweep`, its workers forked too, with all output in a file next to the folder."""
    return Forked(
        lambda: main(["sweep", str(spec), "--study", str(folder), *more]),
        folder.with_suffix(".log"),
    )


@pytest.fixture
def forked_workers(monkeypatch) -> None:
    monkeypatch.setattr(study, "subprocess", SimpleNamespace(Popen=forked_npt))
    look_often(monkeypatch)


def look_often(monkeypatch) -> None:
    """Look every tenth of a second whether workers have ended."""
    monkeypatch.setattr(study, "POLL_SECONDS", 0.1)


def test_a_dry_run_lists_the_trials_and_makes_nothing(spec, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)  # not installed
    assert main(["sweep", str(spec), "--dry_run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert (
        len(out) == 13
        and out[-1].startswith("12 trials in 1 parts")
        and "forms, learning_rate 0.001, mult_form one_plus_tanh, seed 1" in out[3]
    )
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"adapter_rank": 4096},
            "part forms: --adapter_rank is 4096, larger than the model's hidden size 64",
        ),
        ({"layers": "7"}, "part forms: --layers names layer 7"),
        ({"dataset_name": "/nowhere/x.jsonl"}, "/nowhere/x.jsonl"),
        ({"model_name": "/nowhere/model"}, "there is no model folder"),
        ({"residual": "keep"}, "--residual keep starts equal to its base"),
        ({"dataset_name": "builtin", "dataset_split": "nowhere"}, "the built-in text has no split"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_no_run_could_start_with_makes_no_folder(
    spec, tmp_path, capsys, small, change, said
) -> None:
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
    assert "holds something other than a study" in capsys.readouterr().err and [
        p.name for p in folder.iterdir()
    ] == ["letter.txt"]
    assert main(["sweep", str(spec), "--study", str(folder / "letter.txt")]) == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("killed_at", ["write_json", "write_bytes"])
def test_a_study_killed_as_it_began_continues_in_its_folder(
    spec, tmp_path, empty_study, monkeypatch, killed_at
) -> None:
    import npt.tools.sweep.study as module

    folder, design = tmp_path / "study", read_design(str(spec))

    def kill(path: Path, content: Any) -> None:
        # what a process that is killed as it writes leaves
        path.with_name(f".{path.name}.abcd_123.partial").write_bytes(b"")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, killed_at, kill)
        folder.mkdir()
        shutil.copy(empty_study, folder / "study.db")
        module.open_storage(folder, None, design)
        with pytest.raises(KeyboardInterrupt):
            module.open_folder(folder, spec, design, None, {})
    assert not (folder / "spec.yaml").exists()
    module.check_folder(folder, spec, design)
    module.open_folder(folder, spec, design, None, {})
    assert module.design_in(folder).by_key.keys() == design.by_key.keys()


def test_a_folder_of_another_study_is_left_alone(spec, tmp_path, capsys) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "study.json").write_text('{"name": "large"}')
    assert main(["sweep", str(spec), "--study", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "holds the study 'large'" in error and error.count("\n") == 1
    assert [p.name for p in folder.iterdir()] == ["study.json"]


@pytest.mark.parametrize(
    "storage",
    [
        "nonsense",
        "sqlite://",
        "postgresql://u:secret@host:port/x",
        "mars://x",
        "postgresql://user:secret@localhost:1/x",
        "sqlite:////proc/nowhere/x.db",
    ],
)
def test_a_storage_that_cannot_be_used_makes_no_folder(spec, tmp_path, capsys, storage) -> None:
    folder = tmp_path / "study"
    assert main(["sweep", str(spec), "--study", str(folder), "--storage", storage]) == 2
    error = capsys.readouterr().err
    assert (
        "--storage" in error
        and error.count("\n") == 1
        and "secret" not in error
        and not folder.exists()
    )


def test_a_worker_does_the_study_of_the_folder(spec, tmp_path, small) -> None:
    from npt.tools.sweep.study import open_folder, open_storage

    content = {"name": "small", "settings": {**small, "max_steps": 2}, "parts": {"a": {}}}
    spec.write_text(yaml.safe_dump(content))
    folder, design = tmp_path / "study", read_design(str(spec))
    open_folder(folder, spec, design, None, {})
    storage = open_storage(folder, None, design)
    storage.enqueue(design.trials)
    spec.write_text("no specification any more")
    assert main(["sweep", str(spec), "--study", str(folder), "--parent", str(os.getppid())]) == 0
    progress = storage.progress(design.by_key)
    assert (progress.finished, progress.open) == (1, 0)


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def wait_for(count: int, folder: Path) -> None:
    end, database = time.monotonic() + 120, folder / "study.db"
    while time.monotonic() < end:
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as found,
        ):
            if (
                found.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0]
                >= count
            ):
                return
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_study_continues_and_repeats_nothing(
    spec, tmp_path, monkeypatch, forked_workers
) -> None:
    content = yaml.safe_load(spec.read_text())
    content["parts"]["forms"]["grid"]["learning_rate"] = [1e-3, 1e-1]
    content["parts"]["forms"]["seeds"] = [0]
    content["settings"]["max_steps"] = 3
    spec.write_text(yaml.safe_dump(content))
    folder = tmp_path / "study"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a killed run's folder stays
    first = start(spec, folder, "--workers", "2")
    wait_for(1, folder)
    # both workers and the parent, in the middle of their trials
    for pid in (*children(first.pid), first.pid):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    before = {
        key: row["ended"]
        for key, row in Storage(f"sqlite:///{folder / 'study.db'}", "small").rows().items()
    }
    assert 1 <= len(before) < 4
    # Trials in flight are waited for as long as a worker may be silent; here it need not be that
    # long.
    monkeypatch.setitem(Storage.__init__.__kwdefaults__, "grace", 1.0)
    monkeypatch.setitem(Storage.__init__.__kwdefaults__, "beat", 0.1)
    monkeypatch.setattr(sweep_worker, "WAIT_SECONDS", 0.2)
    assert start(spec, folder, "--workers", "2").wait() == 0
    assert "4 trials, 0 new" in folder.with_suffix(".log").read_text()
    rows = Storage(f"sqlite:///{folder / 'study.db'}", "small").rows()
    assert len(rows) == 4 and {key: rows[key]["ended"] for key in before} == before
    with (folder / CSV).open(encoding="utf-8", newline="") as stream:
        assert [float(row["kl"]) == rows[row["key"]]["kl"] for row in csv.DictReader(stream)] == [
            True
        ] * 4


@pytest.mark.usefixtures("obeyed_signals")
@pytest.mark.slow
def test_a_signal_ends_a_study_and_its_trials_wait_again_at_once(
    spec, tmp_path, forked_workers
) -> None:
    folder = tmp_path / "study"
    process = start(spec, folder)
    wait_for(1, folder)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    progress = Storage(f"sqlite:///{folder / 'study.db'}", "small").progress(
        read_design(str(spec)).by_key
    )
    assert (
        progress.running == 0
        and progress.failed == 0
        and progress.finished + progress.waiting == 12
    )
