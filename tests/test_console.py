"""What comes from outside cannot steer a terminal, and an output that fails ends nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

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
