"""What comes from outside cannot steer a terminal, and an output that fails ends nothing."""

import errno
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from npt.cli import main as command
from npt.cli.main import main
from npt.console import QuietConsole, complain, put, say
from npt.errors import printable
from npt.files import write_text
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


def encoded(encoding: str) -> tuple[io.BytesIO, io.TextIOWrapper]:
    """Return bytes, and the stream that writes text to them."""
    written = io.BytesIO()
    return written, io.TextIOWrapper(written, encoding=encoding)


def test_a_console_escapes_what_its_encoding_lacks() -> None:
    table = Table()
    table.add_row("0.123456 \u00b1 0.000001")
    for encoding, shown in {"ascii": b"\\xb1", "cp1252": b"\xb1", "utf-8": b"\xc2\xb1"}.items():
        written, stream = encoded(encoding)
        console = QuietConsole(file=stream, width=60)
        console.print(table)
        console.say("\u2713 caf\udce9")
        text = written.getvalue()
        assert b"0.123456 " + shown + b" 0.000001" in text  # whole: a table cuts what is too long
        assert b"caf\\udce9" in text and (encoding == "utf-8" or b"\\u2713" in text)
        assert not console.quiet


def test_a_result_is_escaped_too(monkeypatch) -> None:
    written, stream = encoded("ascii")
    monkeypatch.setattr("sys.stdout", stream)
    put("caf\u00e9 \udce9")
    assert written.getvalue() == b"caf\\xe9 \\udce9\n"
    monkeypatch.setattr("sys.stdout", None)  # as by `npt ... >&-`
    put("nobody reads")
    monkeypatch.setattr("sys.stderr", None)
    complain("nobody reads")


class Gone(io.StringIO):
    """A terminal that was closed: writing to it is an input/output error."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_spinners_and_bars_end_nothing(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream in (Gone(), io.StringIO()):
        console = QuietConsole(file=stream, force_terminal=True)
        with console.status("measuring"):
            stream.close()
            console.say("a line")
        console.say("a line")
        assert console.quiet


def test_an_argument_that_is_not_text_is_refused_before_the_work(capsys, tmp_path) -> None:
    (tmp_path / "c.yaml").write_text('output_dir: "\\udce9"\n')
    for arguments in (["--output_dir=caf\udce9"], ["--dataset_name", "caf\udce9"]):
        with pytest.raises(SystemExit) as ended:
            main(["pretrain", *arguments])
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and "caf\\udce9' is not UTF-8 text: rename the file" in line
    assert main(["pretrain", "--config", str(tmp_path / "c.yaml")]) == 2
    assert "output_dir is '\\udce9'" in capsys.readouterr().err


def test_a_file_in_a_folder_that_is_not_utf8_is_written(tmp_path) -> None:
    write_text(tmp_path / "page.html", "caf\udce9")
    assert (tmp_path / "page.html").read_bytes() == b"caf\\udce9"


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


def test_a_locale_in_which_a_library_cannot_read_its_files_is_one_line(monkeypatch, capsys) -> None:
    def read(*_: object) -> int:
        raise UnicodeDecodeError("ascii", b"\xe2", 0, 1, "ordinal not in range(128)")

    monkeypatch.setattr("npt.cli.report.report", read)
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: "ascii")
    assert command.main(["report", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("npt: error: Python reads files as ascii") and "PYTHONUTF8=1" in line
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: "UTF-8")
    with pytest.raises(UnicodeDecodeError):  # a bug
        command.main(["report", "run"])


def test_a_librarys_thread_that_the_disk_refuses_is_one_line(monkeypatch, capsys) -> None:
    def write(given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events")

    def work(*_: object) -> int:
        thread = threading.Thread(target=write, args=[None])
        thread.start()
        thread.join()
        return 0

    monkeypatch.setattr("npt.cli.report.report", work)
    before = threading.excepthook
    assert command.main(["report", "run"]) == 0 and threading.excepthook is before
    assert capsys.readouterr().err == "warning: [Errno 28] No space left on device: 'events'\n"
