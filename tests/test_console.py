"""What comes from outside cannot steer a terminal, and an output that fails ends nothing."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from npt.cli import main as command
from npt.cli.main import main
from npt.console import QuietConsole, say
from npt.errors import printable
from npt.tracer.verdict import Verdict


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
    assert stream.getvalue() == shown.replace("tab\t", "tab     ").replace("\n", "\\n") + "\n"


FORGED = "x\nnpt: done\x1b[31m\r"


def assert_harmless(text: str) -> None:
    assert "npt: done" in text and not {"\x1b", "\r"} & set(text)
    assert not any(line.startswith("npt: done") for line in text.splitlines())


def test_tables_bars_and_titles_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    console = QuietConsole(file=stream, width=60)
    table = Table("\x1b[1mhead", title="\x1b]0;title\x07")
    table.add_row(Text("\x1b[2Kcell"))
    for shown in (table, Panel("in\x1b[2K", title="\x9b2K"), Text("\u202ebidi"), "[b]\x1b[2K"):
        console.print(shown)
    assert "\\x1b[2K" in stream.getvalue() and printable(stream.getvalue()) == stream.getvalue()


def test_a_verdict_keeps_its_lines_whatever_it_quotes() -> None:
    verdict = Verdict(
        cause="cast overflow",
        phase="forward",
        module=FORGED,
        source=FORGED,
        tensor=FORGED,
        value=1.0,
        reached=FORGED,
        explanation="why",
    )
    assert_harmless(str(verdict))
    assert len(str(verdict).splitlines()) == 5


def test_names_of_files_forge_no_line_of_a_run(tmp_path, capsys) -> None:
    data = tmp_path / f"{FORGED}.jsonl"
    lines = [json.dumps({"text": f"text {i} of some words"}) for i in range(9)]
    data.write_text("\n".join(lines))
    run = "--init random --layers 7 --max_steps 1 --max_length 16 --batch_size 1 --eval_samples 1"
    where = ["--dataset_name", str(data), "--output_dir", str(tmp_path / FORGED)]
    assert main(["pretrain", *run.split(), "--no_smoke_test", *where]) == 0
    assert_harmless(capsys.readouterr().out)
    assert main(["doctor", "--data", str(data)]) == 0
    assert_harmless(capsys.readouterr().out)


def test_a_callers_own_console_gets_safe_lines_too() -> None:
    stream = io.StringIO()
    say(Console(file=stream), FORGED)
    assert_harmless(stream.getvalue())


def test_the_parsers_own_errors_are_one_line(capsys) -> None:
    for arguments in (["--max_steps", FORGED], [FORGED], ["--" + FORGED], ["--init", FORGED]):
        with pytest.raises(SystemExit) as ended:
            main(["pretrain", *arguments])
        (line,) = capsys.readouterr().err.split("\n")[:-1]
        assert ended.value.code == 2
        assert_harmless(line)


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
@pytest.mark.parametrize("result", ["a full disk", "nobody reads"])
def test_a_result_that_cannot_be_written_is_one_line(result) -> None:
    code = (
        "import sys; from npt.cli import main, report; from npt.console import put;"
        " report.report = lambda given: put('a result'); sys.exit(main.main(['report', '.']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if result == "nobody reads" else "/dev/full", "w", encoding="utf-8") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True
        )
    if result == "a full disk":
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
