"""What comes from outside cannot steer a terminal, and an output that fails ends nothing."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npt.cli import main as command
from npt.cli.main import main
from npt.console import QuietConsole, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Kb", "a\\x1b[2Kb"),
        ("a\rb", "a\\rb"),
        ("a\u202eb\x9bc", "a\\u202eb\\x9bc"),
        ("tab\tand\nline \u00e9 \u4e2d [x]", "tab\tand\nline \u00e9 \u4e2d [x]"),
    ],
)
def test_control_characters_are_written_out(text, shown) -> None:
    assert printable(text) == shown
    stream = io.StringIO()
    QuietConsole(file=stream, width=120).say(text)
    assert stream.getvalue() == shown.replace("tab\t", "tab     ") + "\n"


def test_an_error_is_one_line_whatever_it_quotes(capsys, tmp_path) -> None:
    name = tmp_path / "a\nnpt: done\x1b[31m"
    assert main(["report", str(name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a\\nnpt: done\\x1b[31m" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_silences_a_console() -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        console = QuietConsole(file=stream)
        console.say("lost")
        assert console.quiet
        console.say("more")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("result", ["json", "nobody reads"])
def test_a_result_that_cannot_be_written_is_one_line(result) -> None:
    asked = ["doctor", "--data", "--json", "--max_records", "2"]
    code = f"import sys; from npt.cli.main import main; sys.exit(main({asked}))"
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if result == "nobody reads" else "/dev/full", "w", encoding="utf-8") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True
        )
    if result == "json":
        assert done.returncode == 2
        assert done.stderr == "npt: error: standard output: No space left on device\n"
    else:
        assert (done.returncode, done.stderr) == (0, "")


def test_what_the_disk_refuses_is_one_line(monkeypatch, capsys) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/here")

    monkeypatch.setattr("npt.cli.report.report", refuse)
    assert command.main(["report", "run"]) == 2
    assert capsys.readouterr().err == "npt: error: /data/here: Permission denied\n"
    with pytest.raises(PermissionError):
        command.main(["report", "run", "--debug"])
