"""Runs sections one after the other: a line for each, figures in a file that is whole at any
moment, and an exit status.

A section is a function of a `Bench` and of `Findings`, to which it adds checks, figures and targets
as it goes. What it raises is its failure and ends nothing else; what it had found by then is kept.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from npt.base.device import wait_for
from npt.files import write_json, write_text

PASS, FAIL, MISS = "PASS", "FAIL", "MISS"
NEEDS_CUDA, NEEDS_TWO, LEFT = "needs CUDA", "needs two GPUs", "not reached"

DONE, FAILED, CUT = 0, 1, 3
"""Exit statuses: nothing failed; something did; nothing did, but not all was reached."""

JSON, MARKDOWN = "gpu_check.json", "gpu_check.md"


class UnavailableError(Exception):
    """This machine cannot run a section at all. Its text is the verdict: `NEEDS_CUDA` or
    `NEEDS_TWO`.
    """


class OutOfTimeError(BaseException):
    """The time of all sections is over; no handler of `Exception` on the way keeps it from ending
    the section.
    """


@dataclass
class Findings:
    """The findings of a section so far.

    checks: [name, passed, detail]. targets: [name, met, detail], of which a missed one is no
    failure. figures: by name. tables: in Markdown. notes: for the closing line, what was left out
    among them.
    """

    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    targets: list[tuple[str, bool, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Something that holds on every machine."""
        self.checks.append((name, bool(passed), detail))

    def attempt(self, name: str, act: Callable[[], Any]) -> None:
        """A check that `act` does not raise."""
        message = ""
        try:
            act()
        except Exception as error:
            message = one_line(error)
        self.check(name, not message, message)

    def below(self, name: str, value: float, limit: float) -> None:
        """A check that a value is finite and at most its limit."""
        self.check(
            name, math.isfinite(value) and value <= limit, f"{value:.3g}, at most {limit:.3g}"
        )

    def target(self, name: str, met: bool, detail: str) -> None:
        """Check a figure that must be reached, and report it if it is not."""
        self.targets.append((name, bool(met), detail))


@dataclass
class Bench:
    """The place that sections run in.

    folder: for what they write, removed at the end. small: tiny models and shapes.
    """

    device: torch.device
    small: bool
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, small: Any, large: Any) -> Any:
        return small if self.small else large

    def need_cuda(self) -> None:
        """
        Raises:
            UnavailableError: there is no GPU.
        """
        if not self.cuda:
            raise UnavailableError(NEEDS_CUDA)

    def seconds(self, act: Callable[[], Any], repeats: int = 5, warmups: int = 1) -> float:
        """The median time of a call: between events on a GPU, by the clock elsewhere."""
        for _ in range(warmups):
            act()
        wait_for(self.device)
        spent = []
        for _ in range(repeats):
            if self.cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                act()
                end.record()
                end.synchronize()
                spent.append(start.elapsed_time(end) / 1000)
            else:
                started = time.perf_counter()
                act()
                spent.append(time.perf_counter() - started)
        return sorted(spent)[len(spent) // 2]


@dataclass(frozen=True)
class Section:
    """number: by which it is selected. name: for its line."""

    number: int
    name: str
    run: Callable[[Bench, Findings], None]


@dataclass
class Result:
    """The outcome of a section."""

    number: int
    name: str
    verdict: str
    text: str
    seconds: float
    ended: str
    findings: Findings

    @property
    def line(self) -> str:
        judged = self.verdict in (PASS, FAIL, MISS)
        told = ", ".join(
            part
            for part in ("" if judged else self.verdict, self.text, f"{self.seconds:.1f} s")
            if part
        )
        return f"{self.verdict if judged else '-':<4} {self.number:>2} {self.name:<34} {told}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("name", "passed", "detail"), ("name", "met", "detail")
        found = asdict(self.findings)
        found["checks"], found["targets"] = (
            [dict(zip(keys, entry, strict=True)) for entry in found[kind]]
            for keys, kind in zip(names, ("checks", "targets"), strict=True)
        )
        return {
            "number": self.number,
            "name": self.name,
            "verdict": self.verdict,
            "text": self.text,
        } | {"seconds": round(self.seconds, 2), "ended": self.ended, **found}


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300].removesuffix(": ")


def run_section(section: Section, bench: Bench, left: float) -> Result:
    """Run one section, whatever error it raises; it is cut off when `left` seconds are over."""
    found, started = Findings(), time.perf_counter()
    failure = verdict = None
    try:
        with _as_it_was(bench.device), _deadline(left):
            section.run(bench, found)
    except UnavailableError as error:
        verdict = str(error)
    except OutOfTimeError:
        verdict, failure = LEFT, "cut off by --minutes"
    except Exception as error:
        failure = one_line(error)
    seconds = time.perf_counter() - started
    if bench.cuda:
        # After the handlers, which hold the frames and so the tensors of what failed.
        gc.collect()
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # of an earlier kernel
            failure = failure or one_line(error)
    verdict, text = _judged(found, verdict, failure)
    return Result(section.number, section.name, verdict, text, seconds, _now(), found)


def _judged(found: Findings, verdict: str | None, failure: str | None) -> tuple[str, str]:
    """The verdict, and the text of the section's line."""
    failed = [
        f"{name}: {detail}" if detail else name
        for name, passed, detail in found.checks
        if not passed
    ]
    missed = [f"{name}: {detail}" for name, met, detail in found.targets if not met]
    counted = f"{len(found.checks) - len(failed)} of {len(found.checks)}" if found.checks else ""
    if verdict is None:
        verdict = FAIL if failed or failure else MISS if missed else PASS
    parts = [counted, *found.notes]
    if failure:
        parts.append(failure)
    if failed:
        parts.append(
            "; ".join(failed[:3]) + (f" and {len(failed) - 3} more" if len(failed) > 3 else "")
        )
    if missed:
        parts.append("target missed: " + "; ".join(missed))
    return (FAIL if failed else verdict), ", ".join(part for part in parts if part)


@contextmanager
def _as_it_was(device: torch.device) -> Iterator[None]:
    """Restore after sections what they set for the whole process."""
    precision = torch.get_float32_matmul_precision()
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the main thread once so much time is over."""

    def over(*_: Any) -> None:
        raise OutOfTimeError

    before, started = signal.signal(signal.SIGALRM, over), time.monotonic()
    # somebody else's alarm, such as that of a test with a time limit
    due, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if due:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, due - (time.monotonic() - started)))


class Report:
    """The file of all results, and their rows in Markdown; sections that ran earlier, on the same
    machine into the same folder, stay.
    """

    def __init__(self, folder: Path, machine: dict[str, Any], small: bool):
        self.folder, self.machine, self.small = folder, machine, small
        self.sections: dict[int, dict[str, Any]] = {}
        try:
            earlier = json.loads((folder / JSON).read_text(encoding="utf-8"))
            if (earlier["machine"], earlier["small"]) == (json.loads(json.dumps(machine)), small):
                self.sections = {section["number"]: section for section in earlier["sections"]}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # there is none that could be added to

    def add(self, result: Result) -> None:
        """Write the files anew, with one more result; one that was not reached replaces none that
        was.
        """
        if result.verdict == LEFT and result.number in self.sections:
            return
        self.sections[result.number] = result.as_dict()
        ordered = [self.sections[number] for number in sorted(self.sections)]
        write_json(
            self.folder / JSON, {"machine": self.machine, "small": self.small, "sections": ordered}
        )
        write_text(self.folder / MARKDOWN, markdown(self.machine, self.small, ordered))


def markdown(machine: dict[str, Any], small: bool, sections: Iterable[dict[str, Any]]) -> str:
    """The results as a part of docs/results/gpu-check.md."""
    ordered = list(sections)
    libraries = ", ".join(
        f"{name} {machine[name]}"
        for name in ("torch", "cuda", "transformers", "bitsandbytes")
        if machine.get(name)
    )
    date = max((section["ended"][:10] for section in ordered), default="")
    lines = [
        f"### {machine['device']}, {date}",
        "",
        f"`benchmarks/gpu_check.py{' --small' if small else ''}`, {libraries}.",
        "",
    ]
    lines += ["| section | verdict | result | seconds |", "|---|---|---|---|"]
    for section in ordered:
        text = section["text"].replace("|", "\\|")
        lines.append(
            f"| {section['number']} {section['name']} | {section['verdict']} | {text} |"
            f" {section['seconds']:.1f} |"
        )
    for section in ordered:
        for table in section["tables"]:
            lines += ["", table]
    return "\n".join(lines) + "\n"


def run_sections(
    sections: Iterable[Section],
    bench: Bench,
    report: Report,
    minutes: float,
    say: Callable[[str], None],
) -> int:
    """Run sections in their order until the time is over.

    Args:
        sections: to run.
        bench: where.
        report: told of each as it ends.
        minutes: for all of them.
        say: told each one's line.

    Returns:
        The exit status.
    """
    until = time.perf_counter() + 60 * minutes
    verdicts = []
    for section in sections:
        left = until - time.perf_counter()
        not_reached = Result(section.number, section.name, LEFT, "", 0.0, _now(), Findings())
        result = run_section(section, bench, left) if left > 0 else not_reached
        report.add(result)
        say(result.line)
        verdicts.append(result.verdict)
        shutil.rmtree(bench.folder, ignore_errors=True)
        bench.folder.mkdir(parents=True, exist_ok=True)
    if FAIL in verdicts:
        return FAILED
    return CUT if LEFT in verdicts else DONE


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
