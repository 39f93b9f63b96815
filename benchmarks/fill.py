"""Fill the figures of README and docs/ from the JSON in benchmarks/results/.

    python benchmarks/fill.py            write the figures
    python benchmarks/fill.py --check    write nothing; print a line for each figure that differs

A table stands between `<!-- NAME -->` and `<!-- end -->`; TABLES maps its name to its files. A
figure in a sentence is followed by its source, a comment with a file name without .json, the path
in the file, and a format:

    1.0033<!-- tiny:student.perplexity_ratio:.4f -->
    345 MiB<!-- cpu-0.2b:runs.local.peak_bytes/1048576:,.0f MiB -->

In a list, a path names an entry by its `name`. `/N` or `*N` converts units. Text after the format's
type is copied. PICTURES are drawn from files too. With --check the exit status is 1 if a figure or
the points of a picture differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import pictures  # noqa: E402
import tables  # noqa: E402
from npt.console import put  # noqa: E402
from npt.files import write_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "pretrain": (tables.fidelity, ("tiny",)),
    "residual-keep": (tables.repaired, ("residual-keep",)),
    "embedded": (tables.embedded, ("embedded",)),
    "real.py": (tables.real, ("real",)),
    "real.py, codes": (tables.real, ("real-code",)),
    "real.py, bits": (tables.rounded, ("real-code",)),
    "move.py": (tables.moved, ("move",)),
    "edit.py": (tables.edited, ("edit",)),
    "edit_contexts.py": (tables.edited_contexts, ("edit",)),
    "speed.py --shape cpu-0.2b": (tables.speed, ("cpu-0.2b",)),
    "speed.py --shape smollm2-135m": (tables.speed, ("smollm2-135m",)),
    "step_cost.py": (tables.step_cost, ("step_cost",)),
    "gpu_check.py": (tables.gpu_check, ("gpu_check",)),
    "fault-campaign": (tables.campaign, ("faults",)),
    "fault-trainers": (tables.trainers, tuple(f"fault-{name}" for name in tables.TRAINERS)),
    "conformance": (tables.conformance, ("conformance",)),
    "guards": (tables.guards, ("guards", "guard_lora", "guard_layers")),
    "tracer": (tables.tracer, ("tracer",)),
    "tracers": (tables.tracers, ("tracer",)),
    "kernels": (tables.kernels, ("kernels",)),
}
"""The renderer and the files of each table, by its name on the page."""

PICTURES: dict[str, tuple[Callable[..., str], str]] = {
    "docs/assets/numbers.svg": (pictures.numbers, "real-code"),
    "docs/assets/bits.svg": (pictures.bits_by_layer, "real-code"),
}
"""What draws each picture, and the file that it draws."""

ELSEWHERE = {"embedded": ROOT / "npt" / "demo" / "tiny" / "build.json"}
"""Files outside benchmarks/results/."""

TABLE = re.compile(r"^<!-- (?P<name>[^\n]+) -->\n(?P<body>.*?)^<!-- end -->$", re.M | re.S)
FIGURE = re.compile(
    r"(?P<number>[-+−]?\d[\d,.]*(?:%| ?[A-Za-z/]+)?)?"
    r"(?P<source><!-- *(?P<file>[\w.-]+):(?P<path>[\w.-]+?)(?P<scale>[*/][\d.e]+)?"
    r":(?P<form>[^:>]*?) *-->)"
)
FORM = re.compile(r"(?P<form>[^a-zA-Z%]*[a-zA-Z%])(?P<rest>.*)")


class SourceError(ValueError):
    """The source of a figure cannot be read."""


def pages() -> list[Path]:
    """Return the pages with figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(name: str, results: Path) -> Any:
    """Return the content of a file of figures.

    Raises:
        SourceError: the file does not exist.
    """
    path = ELSEWHERE.get(name, results / f"{name}.json")
    if not path.is_file():
        raise SourceError(f"benchmarks/results has no {path.name}")
    return json.loads(path.read_text(encoding="utf-8"))


def value_at(content: Any, path: str, scale: str | None) -> Any:
    """Return the value at a dotted path, converted by `scale`.

    Raises:
        SourceError: the path does not exist.
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


def formatted(value: Any, form: str) -> str:
    """Return a figure in its format, with the text after the format's type.

    Raises:
        SourceError: the format does not fit the value.
    """
    parts = FORM.fullmatch(form)
    try:
        return f"{format(value, parts['form'])}{parts['rest']}" if parts else format(value, form)
    except (ValueError, TypeError) as error:
        raise SourceError(f"{value!r} cannot be written as {form!r}: {error}") from None


def filled(text: str, results: Path = RESULTS) -> tuple[str, list[str]]:
    """Return a page with current figures, and a line for each table and figure that differed."""
    problems: list[str] = []

    def note(place: int, message: str) -> None:
        problems.append(f"{text.count(chr(10), 0, place) + 1}: {message}")

    def with_table(match: re.Match[str]) -> str:
        name, body = match["name"], match["body"]
        if name not in TABLES:
            note(match.start(), f"there is no table {name!r}")
            return match[0]
        render, files = TABLES[name]
        try:
            table = render(*(read(file, results) for file in files)).strip()
        except SourceError as error:
            note(match.start(), f"table {name!r}: {error}")
            return match[0]
        if body.strip() != table:
            old, new = body.strip().splitlines(), table.splitlines()
            pairs = zip([*old, "nothing"], [*new, "nothing"], strict=False)
            first = next(((a, b) for a, b in pairs if a != b), ("", ""))
            note(match.start(), f"table {name!r} has {first[0]!r}, but its file says {first[1]!r}")
        return f"<!-- {name} -->\n\n{table}\n\n<!-- end -->"

    def with_figure(match: re.Match[str]) -> str:
        number, source = match["number"] or "", match["source"]
        try:
            content = read(match["file"], results)
            figure = formatted(value_at(content, match["path"], match["scale"]), match["form"])
        except SourceError as error:
            note(match.start(), f"{source}: {error}")
            return match[0]
        if number.replace("−", "-") == figure:
            return match[0]
        note(match.start(), f"has {number!r}, but {source} says {figure!r}")
        return f"{figure}{source}" if number else match[0]

    filled_in = FIGURE.sub(with_figure, text)
    return TABLE.sub(with_table, filled_in), problems


def points_of(drawn: str) -> str:
    """Return the last line of a picture, which has its points."""
    return drawn.rstrip().rpartition("\n")[2]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; print what is out of date"
    )
    check = parser.parse_args(argv).check
    stale = False
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new, problems = filled(text)
        if not check and new != text:
            write_text(page, new)
            put(f"filled {page.relative_to(ROOT)}")
            _, problems = filled(new)
        for problem in problems:
            put(f"{page.relative_to(ROOT)}:{problem}; run python benchmarks/fill.py")
        stale = stale or bool(problems)
    for path, (draw, name) in PICTURES.items():
        file, drawn = ROOT / path, draw(read(name, RESULTS))
        if file.is_file() and points_of(file.read_text(encoding="utf-8")) == points_of(drawn):
            continue
        if check:
            put(f"{path} does not show {name}.json; run python benchmarks/fill.py")
            stale = True
        else:
            write_text(file, drawn)
            put(f"drew {path}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
