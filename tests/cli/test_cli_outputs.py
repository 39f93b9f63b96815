"""An output that cannot be written is refused before any weights are read."""

import resource
import shlex
from pathlib import Path

import pytest

import npt
from npt.cli.main import main

VERBS = {
    "consolidate --adapter A --text fact --output": "folder",
    "export --adapter A --output": "new folder",
    "import m.gguf": "new folder",
    "pretrain --output_dir": "run folder",
    "generate --adapter A --prompt a --html": "file",
    "report R --output": "file",
    "trace --against": "reference",
    "collect --adapter A --output": "jsonl",
}
"""The command before the name of its output, and what that is."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    model, _ = npt.load_base("tiny", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=2, layers="7"))
    return npt.save_adapter(model, tmp_path_factory.mktemp("adapters") / "adapter")


@pytest.fixture
def refuse(adapter, tmp_path, monkeypatch, capsys):
    """Run a command whose work must not begin; return its only line."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    # pretrain first: importing it takes what npt.cli.arguments holds
    for name in ("pretrain.load", "arguments.load"):
        monkeypatch.setattr(f"npt.cli.{name}", work)
    for name in ("adapters.files.export.from_pretrained", "base.gguf.convert.GGUFFile"):
        monkeypatch.setattr(f"npt.{name}", work)
    monkeypatch.setattr("npt.report.page.page", work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "R").mkdir()
    (tmp_path / "R" / "run.json").write_text("{}")

    def run(command: str, output: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        line = command.replace(" A ", f" {adapter} ")
        assert main([*shlex.split(line), output]) in (2, 5)
        printed = capsys.readouterr()
        (error,) = printed.err.splitlines()
        assert output in error and (printed.out == "" or "pretrain" in command)
        assert sorted(tmp_path.rglob("*")) == before
        return error

    return run


@pytest.mark.parametrize("command", VERBS)
def test_a_place_that_cannot_be_written(refuse, tmp_path, command) -> None:
    kind, end = VERBS[command], ".jsonl" if "collect" in command else ""
    file = tmp_path / f"file{end}"
    file.write_text("content")
    (tmp_path / f"folder{end}").mkdir()
    (tmp_path / f"folder{end}" / "other").touch()
    assert f"{file} is not a folder" in refuse(command, f"file{end}/out{end}")
    if "folder" in kind:
        assert "is a file: name a folder" in refuse(command, "file")
        assert "other" in refuse(command, "folder") or "is not empty" in refuse(command, "folder")
    elif kind != "reference":  # one that exists is read
        assert "is a folder: name a file" in refuse(command, f"folder{end}")
    if kind in ("file", "reference"):
        assert "the folder none does not exist" in refuse(command, "none/out")
    if kind in ("folder", "new folder"):
        assert "cannot be replaced as a whole" in refuse(command, "..") or kind == "new folder"
    assert "File name too long" in refuse(command, "x" * 300 + end)


@pytest.mark.parametrize("command", VERBS)
def test_a_full_disk(refuse, command) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        error = refuse(command, "new.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "new.jsonl cannot be written: File too large; free disk space or choose" in error
