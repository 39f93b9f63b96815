"""Run sections in turn: print a line for each, keep the results file complete, and return an exit
status.

A section is a function of a `Bench` and `Findings`, to which it adds checks, figures and targets.
An error fails its section only, and the findings so far are kept.
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

from npt.base.precision import fp32_products, matmul_precision
from npt.device import wait_for
from npt.files import write_json, write_text
from tables import gpu_check as markdown

PASS, FAIL, MISS = "PASS", "FAIL", "MISS"
NEEDS_CUDA, LEFT = "needs CUDA", "not reached"

DONE, FAILED, CUT = 0, 1, 3
"""Exit statuses: nothing failed; a section failed; nothing failed, but time ran out."""


class UnavailableError(Exception):
    """This machine cannot run the section. The text is the verdict."""


class OutOfTimeError(BaseException):
    """The time of all sections is over. Not an `Exception`, so that no handler in a section
    catches it.
    """


@dataclass
class Findings:
    """The findings of a section so far.

    Attributes:
        checks: name, passed, detail.
        targets: name, met, detail. A missed target is not a failure.
        figures: by name.
        tables: in Markdown.
        notes: for the section's line.
    """

    checks: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Add a check that must pass on every machine."""
        self.checks.append({"name": name, "passed": bool(passed), "detail": detail})

    def below(self, name: str, value: float, limit: float) -> None:
        """Check that a value is finite and at most its limit."""
        good = math.isfinite(value) and value <= limit
        self.check(name, good, f"{value:.3g}, at most {limit:.3g}")

    def target(self, name: str, met: bool, detail: str) -> None:
        """Add a target, reported if it is missed."""
        self.targets.append({"name": name, "met": bool(met), "detail": detail})

    def judged(self, failure: str) -> tuple[str, str]:
        """Return the verdict and the text of the section's line. failure: the error it raised."""
        failed = [
            f"{check['name']}: {check['detail']}".removesuffix(": ")
            for check in self.checks
            if not check["passed"]
        ]
        missed = [f"{each['name']}: {each['detail']}" for each in self.targets if not each["met"]]
        counted = f"{len(self.checks) - len(failed)} of {len(self.checks)}" if self.checks else ""
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        parts = [counted, *self.notes, failure, "; ".join(failed[:3]) + more]
        parts += ["target missed: " + "; ".join(missed)] if missed else []
        verdict = FAIL if failed or failure else MISS if missed else PASS
        return verdict, ", ".join(part for part in parts if part)


@dataclass
class Bench:
    """The environment of the sections.

    Attributes:
        device: where they compute.
        small: use tiny models and shapes.
        folder: for their files, removed at the end.
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
            UnavailableError: without a GPU.
        """
        if not self.cuda:
            raise UnavailableError(NEEDS_CUDA)

    def seconds(self, act: Callable[[], Any], repeats: int = 5, warmups: int = 1) -> float:
        """Return the median time of a call."""
        spent = []
        for _ in range(warmups + repeats):
            wait_for(self.device)
            started = time.perf_counter()
            act()
            wait_for(self.device)
            spent.append(time.perf_counter() - started)
        return sorted(spent[warmups:])[repeats // 2]


@dataclass(frozen=True)
class Section:
    """A section.

    Attributes:
        number: for --only.
        name: for its line.
        run: adds its findings.
    """

    number: int
    name: str
    run: Callable[[Bench, Findings], None]


Result = dict[str, Any]
"""A section's number, name, verdict, text, seconds, end and findings."""


def line_of(result: Result) -> str:
    """Return the printed line of a section."""
    judged = result["verdict"] in (PASS, FAIL, MISS)
    words = ["" if judged else result["verdict"], result["text"], f"{result['seconds']:.1f} s"]
    mark = result["verdict"] if judged else "-"
    text = ", ".join(word for word in words if word)
    return f"{mark:<4} {result['number']:>2} {result['name']:<34} {text}"


def one_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300].removesuffix(": ")


def run_section(section: Section, bench: Bench, left: float) -> Result:
    """Run a section, catching its error; cut it off after `left` seconds."""
    findings, started = Findings(), time.perf_counter()
    failure = unjudged = ""
    try:
        with _as_it_was(bench.device), _deadline(left):
            section.run(bench, findings)
    except UnavailableError as error:
        unjudged = str(error)
    except OutOfTimeError:
        unjudged, failure = LEFT, "cut off by --minutes"
    except Exception as error:
        failure = one_line(error)
    seconds = time.perf_counter() - started
    if bench.cuda:
        # after the handlers, which keep the frames and so the tensors alive
        gc.collect()
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # an earlier kernel's error
            failure = failure or one_line(error)
    verdict, text = findings.judged(failure)
    failed = any(not check["passed"] for check in findings.checks)
    return {
        "number": section.number,
        "name": section.name,
        "verdict": verdict if failed or not unjudged else unjudged,
        "text": text,
        "seconds": round(seconds, 2),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(findings),
    }


@contextmanager
def _as_it_was(device: torch.device) -> Iterator[None]:
    """Restore the process-wide settings that sections change."""
    torch.manual_seed(0)
    try:
        with fp32_products(matmul_precision()):
            yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the main thread after so many seconds."""

    def over(*_: Any) -> None:
        raise OutOfTimeError

    if seconds <= 0:
        raise OutOfTimeError
    before, started = signal.signal(signal.SIGALRM, over), time.monotonic()
    # an alarm that is set already, such as pytest-timeout's
    due, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if due:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, due - (time.monotonic() - started)))


class Report:
    """The results as JSON and Markdown. Results of earlier sections, from the same machine and in
    the same folder, are kept.

    Args:
        program: name of the files.
    """

    def __init__(self, folder: Path, machine: dict[str, Any], small: bool, program: str):
        self.path, self.machine, self.small = folder / f"{program}.json", machine, small
        self.sections: dict[int, Result] = {}
        try:
            earlier = json.loads(self.path.read_text(encoding="utf-8"))
            if (earlier["machine"], earlier["small"]) == (json.loads(json.dumps(machine)), small):
                self.sections = {section["number"]: section for section in earlier["sections"]}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no earlier results

    def add(self, result: Result) -> None:
        """Add a result and rewrite the files. A section that was not reached does not replace an
        earlier result.
        """
        if result["verdict"] == LEFT and result["number"] in self.sections:
            return
        self.sections[result["number"]] = result
        ordered = [self.sections[number] for number in sorted(self.sections)]
        figures = {"program": self.path.stem, "machine": self.machine, "small": self.small}
        figures |= {"sections": ordered}
        write_json(self.path, figures)
        write_text(self.path.with_suffix(".md"), markdown(figures))


def run_sections(
    sections: Iterable[Section],
    bench: Bench,
    report: Report,
    minutes: float,
    say: Callable[[str], None],
) -> int:
    """Run sections in order until the minutes are over, passing each result to `report` and its
    line to `say`; return the exit status.
    """
    until = time.perf_counter() + 60 * minutes
    verdicts = []
    for section in sections:
        result = run_section(section, bench, until - time.perf_counter())
        report.add(result)
        say(line_of(result))
        verdicts.append(result["verdict"])
        shutil.rmtree(bench.folder, ignore_errors=True)
        bench.folder.mkdir(parents=True, exist_ok=True)
    if FAIL in verdicts:
        return FAILED
    return CUT if LEFT in verdicts else DONE
