"""The command for a borrowed GPU: its lines, its files and its exit status, whatever the sections
do; cheap sections for real.
"""

import json
import signal
import time

import pytest
import torch

import gpu_check
import h100_hour
from gpu_sections import SECTIONS as SECTIONS_OF_A_CARD
from gpu_sections import numbers, runner


def passes(bench, found):
    found.check("one", True)
    found.check("two", True)
    found.notes.append("as it should")
    found.figures["nan"] = float("nan")
    found.tables.append("| a |\n|---|\n| 1 |")


def fails(bench, found):
    found.check("good", True)
    found.check("bad", False, "3 > 2")
    found.target("speed", False, "1 < 2")


def misses(bench, found):
    found.check("good", True)
    found.target("speed", False, "1.5x, at least 2x")
    found.target("memory", True, "little")


def crashes(bench, found):
    found.check("before", True)
    raise ValueError("first line\nsecond line")


def needs(bench, found):
    bench.need_cuda()


def hangs(bench, found):
    found.check("before", True)
    try:
        time.sleep(20)
    except Exception:  # as an observer would catch it
        found.check("after", True)


def killed(bench, found):
    raise KeyboardInterrupt


ACTS = (passes, fails, misses, crashes, needs, hangs, killed)
SECTIONS = {act: runner.Section(number, act.__name__, act) for number, act in enumerate(ACTS, 1)}


@pytest.fixture
def run(tmp_path):
    """Run sections: exit status, lines, and what the file holds."""

    def run(*acts, minutes: float = 1.0, card: str = "cpu"):
        lines: list[str] = []
        (tmp_path / "work").mkdir(exist_ok=True)
        bench = runner.Bench(torch.device("cpu"), True, tmp_path / "work")
        report = runner.Report(tmp_path, {"device": card, "torch": "2"}, True, "report")
        sections = [SECTIONS[act] for act in acts]
        status = runner.run_sections(sections, bench, report, minutes, lines.append)
        return status, lines, json.loads((tmp_path / "report.json").read_text())["sections"]

    return run


def verdicts(sections) -> list[str]:
    return [section["verdict"] for section in sections]


def test_each_outcome_has_its_line_and_its_verdict(run):
    status, lines, sections = run(passes, fails, misses, crashes, needs)
    assert status == 1
    starts = [line.rpartition(", ")[0] for line in lines]  # without the seconds
    name = "{:<34} ".format
    assert starts == [
        f"PASS  1 {name('passes')}2 of 2, as it should",
        f"FAIL  2 {name('fails')}1 of 2, bad: 3 > 2, target missed: speed: 1 < 2",
        f"MISS  3 {name('misses')}1 of 1, target missed: speed: 1.5x, at least 2x",
        f"FAIL  4 {name('crashes')}1 of 1, ValueError: first line",
        f"-     5 {name('needs')}needs CUDA",
    ]
    assert verdicts(sections) == ["PASS", "FAIL", "MISS", "FAIL", "needs CUDA"]
    assert sections[0]["figures"] == {"nan": None}  # standard JSON
    assert sections[1]["checks"][1] == {"name": "bad", "passed": False, "detail": "3 > 2"}
    missed = {"name": "speed", "met": False, "detail": "1.5x, at least 2x"}
    assert sections[2]["targets"][0] == missed
    assert run(passes, misses, needs)[0] == 0  # a missed target is no failure


def test_a_section_over_time_is_cut_off_and_the_rest_is_not_reached(run):
    alarm, started = signal.getsignal(signal.SIGALRM), time.perf_counter()
    status, lines, sections = run(hangs, passes, minutes=0.3 / 60)
    assert time.perf_counter() - started < 10 and status == 3
    assert verdicts(sections) == ["not reached", "not reached"]
    # what it had found is kept, nothing caught the end
    assert [check["name"] for check in sections[1]["checks"]] == ["before"]
    assert "not reached, 1 of 1, cut off by --minutes" in lines[0] and "not reached" in lines[1]
    assert signal.getsignal(signal.SIGALRM) == alarm  # pytest-timeout's, whose time runs
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (alarm not in (signal.SIG_DFL, None))


def test_killed_in_a_section_the_files_hold_all_that_ended(run, tmp_path):
    """A KeyboardInterrupt is one of all that ends the process: nothing is written when it does."""
    with pytest.raises(KeyboardInterrupt):
        run(passes, fails, killed, misses)
    sections = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert [section["name"] for section in sections] == ["passes", "fails"]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("### cpu, 20") and text.endswith("| a |\n|---|\n| 1 |\n")
    assert "| 2 fails | FAIL |" in text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_later_runs_add_to_the_folder_and_another_machine_starts_anew(run):
    run(fails, passes)
    assert [section["number"] for section in run(misses)[2]] == [1, 2, 3]
    # one that was not reached replaces none that was
    sections = run(hangs, fails, minutes=0.2 / 60)[2]
    assert verdicts(sections) == ["PASS", "FAIL", "MISS", "not reached"]
    assert [section["number"] for section in run(passes, card="another")[2]] == [1]


@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_each_of_the_three_calls_without_a_gpu(part, tmp_path, capsys):
    flags = ["--small", "--device", "cpu", "--output", str(tmp_path / "out"), "--part", str(part)]
    assert gpu_check.main(flags) == 0, capsys.readouterr().out
    sections = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["sections"]
    ran = [section["number"] for section in sections]
    assert ran == sorted({s.number for s in SECTIONS_OF_A_CARD} & {*gpu_check.PARTS[part]})
    others = {s["number"] for s in sections if s["verdict"] not in ("PASS", "MISS")}
    assert others == ({6} if part == 1 else set())  # needs CUDA
    if part == 1:
        figures = {section["number"]: section["figures"] for section in sections}
        assert 0 < figures[3]["Linear4bit error, highest"] < 2e-5
        assert 1e-3 < figures[3]["product error, bf16"] < 4e-3
        assert "| 256x256 | 1 | " in (tmp_path / "out" / "gpu_check.md").read_text()


def test_an_hour_in_small_leaves_its_rows_stage_by_stage(tmp_path, capsys, monkeypatch):
    flags = ["--small", "--device", "cpu", "--output", str(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(h100_hour.Hour, "train", lambda hour, *given: killed(*given))
        with pytest.raises(KeyboardInterrupt):
            h100_hour.main(flags)
    (_, _, measured) = json.loads((tmp_path / "h100_hour.json").read_text())["sections"]
    assert list(measured["figures"]["rows"]) == ["floor", "teacher", "cut"]
    assert h100_hour.main([*flags, "--minutes", "0.6"]) == 0, capsys.readouterr().out
    sections = json.loads((tmp_path / "h100_hour.json").read_text())["sections"]
    rows = sections[4]["figures"]["rows"]
    assert rows["floor"]["kl"] > 10 * rows["cut"]["kl"] > 0 == rows["teacher"]["kl"]
    assert rows["trained"]["kl"] != rows["cut"]["kl"]
    assert all(sections[stage]["figures"]["tokens"] > 0 for stage in range(1, 5))
    assert "| cut (closed-form start) |" in (tmp_path / "h100_hour.md").read_text()


def test_products_that_are_off_fail(tmp_path, monkeypatch, capsys):
    plain = numbers.multiply
    monkeypatch.setattr(numbers, "multiply", lambda *arguments: plain(*arguments) * 1.0001)
    flags = ["--small", "--device", "cpu", "--only", "3", "--output", str(tmp_path)]
    assert gpu_check.main(flags) == 1
    assert capsys.readouterr().out.startswith("FAIL  3 ")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--only", "3,15"], "--only has no section '15'"),
        (["--part", "4"], "--part: invalid choice"),
        (["--minutes", "0"], "--minutes 0 is not positive"),
        (["--output", "/proc/nowhere/out"], "--output /proc/nowhere/out"),
    ],
)
def test_flags_that_cannot_work_are_refused(tmp_path, flags, named, capsys):
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["--small", "--device", "cpu", "--output", str(tmp_path), *flags])
    assert caught.value.code == 2 and named in capsys.readouterr().err
