"""The program itself: as a module, its threads, and the scripts of shells."""

import inspect
import os
import runpy
import shutil
import subprocess

import pytest

import npt
from npt.cli import main as module
from npt.cli.main import VERBS, make_parser


def test_the_package_runs_as_a_module(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["npt", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("npt", run_name="__main__")
    assert ended.value.code == 0
    assert npt.__version__ in capsys.readouterr().out


def test_the_list_of_verbs_says_what_each_says_of_itself() -> None:
    """The list is a text of its own, so that it imports no verb."""
    parser = make_parser()
    verbs = parser._subparsers._group_actions[0].choices  # type: ignore[union-attr,index]
    assert [*verbs] == [*VERBS]
    for name, summary in VERBS.items():
        description = inspect.cleandoc(verbs[name].description)  # type: ignore[index,call-overload]
        assert description.partition("\n")[0] == f"{summary}.", name
    listed = parser.format_help()
    assert all(f"  {name:<12} {summary}\n" in listed for name, summary in VERBS.items())


@pytest.mark.parametrize(
    ("load", "set_before", "expected"),
    [(0.1, None, None), (1.9, None, "PASSIVE"), (1.9, "ACTIVE", "ACTIVE")],
    ids=["alone", "with others", "somebody has said how"],
)
def test_they_sleep_where_others_compute_and_nobody_has_said_how(
    monkeypatch, load, set_before, expected
):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_before is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_before)
    module._share_cores()
    assert os.environ.get("OMP_WAIT_POLICY") == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_verbs_flags_and_choices_and_its_shell_reads_it(shell, tmp_path) -> None:
    shtab = pytest.importorskip("shtab")
    text = shtab.complete(make_parser(), shell)
    for word in (*VERBS, "learning_rate", "end_to_end"):
        assert word in text, word
    assert "no_smoke_test" not in text  # negations are there to be typed
    (tmp_path / "script").write_text(text)
    program = shutil.which(shell)
    if program is not None:
        ran = subprocess.run(
            [program, "-n", str(tmp_path / "script")], capture_output=True, text=True, timeout=60
        )
        assert (ran.returncode, ran.stderr) == (0, "")
