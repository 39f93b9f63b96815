"""A data report on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from npt.data.report import listed_columns
from npt.tools.data_doctor.report import DataReport, listed

OPEN, CLOSE = "⟦", "⟧"
"""Brackets of masked tokens: without colour they tell them from targets."""

LEGEND = (
    (f"{OPEN}masked{CLOSE}", "dim"),
    (" tokens are no targets (label -100), ", ""),
    ("the rest", "green"),
    (
        " are; … is what is left out. Special tokens by name, line ends and other unseen"
        " characters as escapes.",
        "",
    ),
)


def print_report(report: DataReport, console: Console) -> None:
    """Print the report, on a console of any encoding."""
    some = "" if report.complete else f", its first {report.counts.records:,} records"
    _print(console, (report.name, "bold"), (some, ""))
    table = Table(show_header=False)
    for name, value in _rows(report).items():
        table.add_row(Text(name), Text(value))
    console.print(table)
    if report.broken:
        console.print()
        for broken in report.broken:
            _print(console, (str(broken), ""))
        if report.broken_total > len(report.broken):
            _print(console, (f"and {report.broken_total - len(report.broken):,} more", ""))
    for number, shown in enumerate(report.shown):
        console.print()
        if number == 0:
            _print(console, *LEGEND)
        parts = [(shown.id, "bold"), (f", {shown.tokens:,} tokens: ", "")]
        for stretch in shown.stretches:
            # brackets of the text itself, as escapes
            text = stretch.text.replace(OPEN, "\\u27e6").replace(CLOSE, "\\u27e7")
            if stretch.kind == "masked":
                parts.append((f"{OPEN}{text}{CLOSE}", "dim"))
            elif stretch.kind == "target":
                parts.append((text, "green"))
            else:
                parts.append((f" … {stretch.tokens:,} tokens … ", ""))
        _print(console, *parts)
    console.print()
    for problem in report.problems:
        kind = ("error: ", "bold red") if problem.fatal else ("hint: ", "yellow")
        _print(console, kind, (str(problem), ""))
    if not report.problems:
        _print(console, ("no problem found", "green"))


def _rows(report: DataReport) -> dict[str, str]:
    counts = report.counts

    def share(part: int, whole: int) -> str:
        return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"

    blank = f"; blank lines: {report.blank_lines:,}" if report.blank_lines else ""
    heldout = "held out: files of its own"
    if report.heldout is not None:
        heldout = f"{share(report.heldout, counts.samples)} held out"
    padding = (f"{report.padding:.1%}", "without"), (f"{report.padding_packed:.1%}", "with")
    (now, _), (other, word) = padding[:: -1 if report.packing else 1]
    ids = "none" if report.id_min is None else f"{report.id_min:,} to {report.id_max:,}"
    lengths = f"{report.shortest:,} to {report.longest:,}, median {report.median:,}"
    rows = {
        "records": f"{counts.records:,}{blank}",
        "broken": f"{report.broken_total:,}",
        "samples": f"{counts.samples:,}, {heldout}",
        "tokens": f"{counts.tokens:,}, {share(report.targets, counts.tokens)} targets",
        "tokens of a sample": lengths,
        f"padding, batches of {report.batch_size}": f"{now}, {other} {word} --packing",
        "cut": f"{counts.cut_prompts:,} prompts, {counts.cut_completions:,} completions",
        "skipped": listed(counts.skipped) or "0",
        "of conversations": listed(counts.noted),
        "columns not used": listed_columns(counts.unused),
        "ids": f"{ids} of a vocabulary of {report.vocab_size:,}, {report.outside:,} outside",
        "copies": f"{report.copies:.1%} of the samples"
        + ("" if report.copies_exact else " (estimated)"),
    }
    return {name: value for name, value in rows.items() if value}


def _print(console: Console, *parts: tuple[str, str]) -> None:
    """Print texts with their styles; what the console's encoding lacks as escapes, unwrapped."""
    text = Text()
    for piece, style in parts:
        plain = piece.encode(console.encoding, "backslashreplace").decode(console.encoding)
        text.append(plain, style=style or None)
    console.print(text, soft_wrap=True)
