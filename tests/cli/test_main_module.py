"""`python -m npt` is the command `npt`."""

from __future__ import annotations

import runpy

import pytest

import npt


def test_the_package_runs_as_a_module(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["npt", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("npt", run_name="__main__")
    assert ended.value.code == 0
    assert npt.__version__ in capsys.readouterr().out
