"""Write the figures of README and docs/ from the JSON in benchmarks/results/.

    python benchmarks/fill.py            fill them in
    python benchmarks/fill.py --check    write nothing; a line for each figure that differs

A table lies between `<!-- NAME -->` and `<!-- end -->`; PLACES says which file it is made of. A
figure within a sentence has its source after it, in a comment of the name of a file without .json,
the path in it and a format:

    1.0033<!-- tiny:student.perplexity_ratio:.4f -->
    345 MiB<!-- cpu-0.2b:runs.local.peak_bytes/1048576:,.0f MiB -->

In a list a name means the entry that has it as `name`; `/N` or `*N` converts units, and what
follows the format's type is written as it is. The exit status of --check is 1 if something differs.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import real_tables  # noqa: E402
import run_tables  # noqa: E402
import speed_tables  # noqa: E402
from npt.files import write_bytes, write_text  # noqa: E402
from results_file import END, filled, mark  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Place:
    """A table: its files, their renderer, and the commands that write them."""

    files: tuple[str, ...]
    render: Callable[..., str]
    commands: tuple[str, ...]


def _speed(shape: str, flags: str = "") -> Place:
    command = f"python benchmarks/speed.py --shape {shape}{flags} --output benchmarks/results"
    return Place((shape,), speed_tables.markdown, (command,))


def _gpu_check(figures: dict[str, Any]) -> str:
    sys.path.append(str(ROOT / "debug"))  # a run needs the fault rig
    from gpu_sections.runner import markdown

    return markdown(figures["machine"], figures["small"], figures["sections"])


def _printed(name: str, render: Callable[..., str], command: str) -> Place:
    return Place((name,), render, (f"{command} > benchmarks/results/{name}.json",))


def _forms(name: str, settings: str) -> Place:
    out = f"benchmarks/results/{name}.json"
    return Place((name,), run_tables.forms, (f"python benchmarks/forms.py{settings} --out {out}",))


PLACES: dict[str, Place] = {
    "pretrain": Place(
        ("tiny",),
        run_tables.fidelity,
        ("make pretrain", "cp outputs/pretrain-.../fidelity.json benchmarks/results/tiny.json"),
    ),
    "residual-keep": Place(
        ("residual-keep",),
        run_tables.repaired,
        (
            "npt pretrain --residual keep ... --output_dir RUN",  # docs/results/fidelity.md
            "cp RUN/fidelity.json benchmarks/results/residual-keep.json",
        ),
    ),
    "embedded": Place(
        ("embedded",), run_tables.embedded, ("python -m npt.demo.build --output npt/demo/tiny",)
    ),
    "real.py": Place(
        ("real",),
        real_tables.markdown,
        ("python benchmarks/real.py --out benchmarks/results/real.json",),
    ),
    speed_tables.place("cpu-0.2b"): _speed("cpu-0.2b", " --sweep"),
    "gpu_check.py": Place(
        ("gpu_check",), _gpu_check, ("python benchmarks/gpu_check.py --output benchmarks/results",)
    ),
    "masking": _printed("masking", run_tables.masking, "python benchmarks/masking.py --json"),
    "forms-tiny": _forms("forms-tiny", ""),
    "forms-real": _forms("forms-real", " --model FILE.gguf --text FILE --minutes 8"),
    "widths": Place(
        ("widths",),
        run_tables.widths,
        (
            "python benchmarks/widths.py --output FOLDER",
            "cp FOLDER/study/trials.csv benchmarks/results/widths.csv",
        ),
    ),
    "fault-campaign": _printed(
        "faults", run_tables.campaign, "python debug/inject_fault.py --all --json"
    ),
    "fault-loops": _printed(
        "fault-loops", run_tables.compared, "python debug/inject_fault.py --compare --json"
    ),
    "fault-trainers": Place(
        tuple(f"fault-{name}" for name in run_tables.TRAINERS),
        run_tables.trainers,
        tuple(
            f"python debug/inject_fault.py --trainer {name} --all --json"
            f" > benchmarks/results/fault-{name}.json"
            for name in run_tables.TRAINERS
        ),
    ),
    "guards": Place(
        ("guards", "guard_lora"),
        run_tables.guards,
        tuple(
            f"python benchmarks/{name}.py --json > benchmarks/results/{name}.json"
            for name in ("guards", "guard_lora")
        ),
    ),
    "crash": _printed("crash", run_tables.crash, "python benchmarks/crash.py --kills 100 --json"),
    "fuzz": _printed("fuzz", run_tables.fuzz, "python benchmarks/fuzz.py --inputs 100000 --json"),
    "tracer": _printed("tracer", run_tables.tracer, "python debug/debug_nan.py --demo --json"),
}
"""Tables by name, as pages have them."""

COMMANDS = {
    **{file: place.commands for place in PLACES.values() for file in place.files},
    "recording": ("python benchmarks/recording.py --json > benchmarks/results/recording.json",),
}
"""What writes each file."""

ELSEWHERE = {
    "embedded": ROOT / "npt" / "demo" / "tiny" / "build.json",
    "widths": RESULTS / "widths.csv",
}
"""Files that are not JSON in benchmarks/results/."""

PENDING = frozenset({"recording", "crash", "fuzz"})
"""Files that were not written yet: tables and figures of theirs are left as they are."""

FIGURE = re.compile(
    r"<!-- *(?P<file>[\w.-]+):(?P<path>[\w.-]+?)(?P<scale>[*/][\d.e]+)?:(?P<form>[^:>]*?) *-->"
)
NUMBER = re.compile(r"[-+]?\d[\d,.]*(?:%| ?[A-Za-z/]+)?$")
"""Something like a figure right before its comment."""

FORM = re.compile(r"(?P<form>[^a-zA-Z%]*[a-zA-Z%])(?P<rest>.*)")


class SourceError(ValueError):
    """A figure's source that cannot be read."""


@dataclass(frozen=True)
class Difference:
    """A figure that is not what its source says."""

    line: int
    written: str
    expected: str
    source: str

    def __str__(self) -> str:
        return f"has {self.written!r}, but {self.source} says {self.expected!r}"


def pages() -> list[Path]:
    """Return the pages that have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(name: str, results: Path) -> Any:
    """Return the content of a file of figures, None if it was not written yet.

    Raises:
        SourceError: no such file.
    """
    path = ELSEWHERE.get(name, results / f"{name}.json")
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        return (
            list(csv.DictReader(io.StringIO(text))) if path.suffix == ".csv" else json.loads(text)
        )
    if name in PENDING:
        return None
    raise SourceError(f"benchmarks/results has no {path.name}")


def value_at(content: Any, path: str, scale: str | None) -> Any:
    """Return the value at a dotted path, converted.

    Raises:
        SourceError: no such path.
    """
    value = content
    for key in path.split("."):
        if isinstance(value, list) and not key.isdigit():
            value = {entry.get("name"): entry for entry in value}
        try:
            value = value[int(key) if isinstance(value, list) else key]
        except (KeyError, IndexError, TypeError):
            raise SourceError(f"it has no {path} (at {key!r})") from None
    if scale is None:
        return value
    factor = float(scale[1:])
    return value * factor if scale[0] == "*" else value / factor


def written_as(value: Any, form: str) -> str:
    """Return a figure by its format, and what follows the format's type.

    Raises:
        SourceError: the format does not fit.
    """
    found = FORM.fullmatch(form)
    try:
        return f"{format(value, found['form'])}{found['rest']}" if found else format(value, form)
    except (ValueError, TypeError) as error:
        raise SourceError(f"{value!r} cannot be written as {form!r}: {error}") from None


def figures_of(text: str, results: Path) -> Iterator[tuple[re.Match[str], Difference | None, int]]:
    """Yield each figure's comment, how the figure differs, and where the figure begins."""
    for comment in FIGURE.finditer(text):
        before = text[text.rfind("\n", 0, comment.start()) + 1 : comment.start()]
        before = before.replace("−", "-")
        line = text.count("\n", 0, comment.start()) + 1
        number = NUMBER.search(before)
        written = number[0] if number else ""
        source = comment[0][4:-3].strip()
        try:
            content = read(comment["file"], results)
            if content is None:
                continue
            value = value_at(content, comment["path"], comment["scale"])
            expected = written_as(value, comment["form"])
        except SourceError as error:
            yield comment, Difference(line, written, str(error), source), -1
            continue
        if not re.search(rf"(?<![\d.,]){re.escape(expected)}$", before):
            start = comment.start() - len(written)
            yield comment, Difference(line, written, expected, source), start


def tables_of(text: str, results: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each table's name, and its text as it is and as it should be, if they differ."""
    for name, place in PLACES.items():
        if mark(name) not in text:
            continue
        contents = [read(file, results) for file in place.files]
        if None in contents:
            continue
        _, _, rest = text.partition(mark(name))
        now, wanted = rest.partition(END)[0], f"\n{place.render(*contents)}\n"
        if now.strip() != wanted.strip():
            yield name, now, wanted


def problems(path: Path, results: Path = RESULTS) -> list[str]:
    """Return a line for each figure and table of a page that differs from its source."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    found = [
        f"{name}:{each.line}: {each}; run {command_of(comment['file'])}"
        for comment, each, _ in figures_of(text, results)
        if each is not None
    ]
    try:
        tables = list(tables_of(text, results))
    except SourceError as error:
        return [*found, f"{name}: {error}"]
    for place, now, wanted in tables:
        at = text.index(mark(place)) + len(mark(place))
        start = text.count("\n", 0, at + len(now) - len(now.lstrip()))
        lines = list(zip(now.strip().split("\n"), wanted.strip().split("\n"), strict=False))
        first = next((i for i, (a, b) in enumerate(lines) if a != b), len(lines))
        a, b = lines[first] if first < len(lines) else ("another number of lines", "")
        found.append(
            f"{name}:{start + 1 + first}: table {place!r} has {a!r}, but its JSON says {b!r};"
            " run python benchmarks/fill.py"
        )
    unknown = set(re.findall(r"^<!-- (.+) -->$", text, flags=re.M)) - {"end", *PLACES}
    found += [f"{name}: there is no table {each!r}" for each in sorted(unknown) if END in text]
    return found


def command_of(file: str) -> str:
    """Return what puts a figure right."""
    made = " && ".join(COMMANDS.get(file, ()))
    return "python benchmarks/fill.py" + (f" (its file is made by: {made})" if made else "")


def fill(path: Path, results: Path = RESULTS) -> bool:
    """Write the figures and tables of a page; return whether it changed."""
    before = text = path.read_text(encoding="utf-8")
    for name, _, wanted in list(tables_of(text, results)):
        text = filled(text, name, wanted[1:-1])
    for comment, difference, start in reversed(list(figures_of(text, results))):
        if difference is not None and start >= 0 and difference.written:
            text = text[:start] + difference.expected + text[comment.start() :]
    if text != before:
        write_text(path, text)
    return text != before


def draw(shape: str, results: Path = RESULTS) -> None:
    """Draw the pictures of a shape from its figures."""
    figures = read(shape, results)
    write_bytes(results / f"{shape}-runs.png", speed_tables.draw_runs(figures))
    if "sweep" in figures:
        write_bytes(results / f"{shape}-sweep.png", speed_tables.draw_sweep(figures))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    given = parser.parse_args(argv)
    if not given.check:
        for path in pages():
            if fill(path):
                print(f"filled {path.relative_to(ROOT)}")
    found = [line for path in pages() for line in problems(path)]
    found += [
        f"benchmarks/fill.py: {name}.json was written; take it out of PENDING"
        for name in sorted(PENDING)
        if (RESULTS / f"{name}.json").is_file()
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
