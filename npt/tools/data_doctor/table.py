"""A data report for a terminal: the counts, a few samples with their loss mask, and what is to be
mended.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from npt.data.encoding import listed_columns
from npt.tools.data_doctor.report import DataReport, Shown, listed

OPEN, CLOSE = "⟦", "⟧"
"""What masked tokens stand between: where there is no colour, these tell them from targets."""

LEGEND = (
    (f"{OPEN}masked{CLOSE}", "dim"),
    (" tokens are no targets (label -100), ", ""),
    ("the rest", "green"),
    (
        (
            " are; … is what is left out. Special tokens by name, line ends and other unseen"
            " characters as escapes."
        ),
        "",
    ),
)

Part = tuple[str, str]
"""Text and its style."""


def print_report(report: DataReport, console: Console) -> None:
    """The report, on a console of any encoding."""
    _print(
        console,
        (report.name, "bold"),
        ("" if report.complete else f", its first {report.counts.records:,} records", ""),
    )
    console.print(_counts(report))
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
        _print(console, *_sample(shown))
    console.print()
    for problem in report.problems:
        _print(
            console,
            ("error: ", "bold red") if problem.fatal else ("hint: ", "yellow"),
            (str(problem), ""),
        )
    if not report.problems:
        _print(console, ("no problem found", "green"))


def _counts(report: DataReport) -> Table:
    counts = report.counts
    table = Table(show_header=False)
    table.add_column()
    table.add_column()

    def row(name: str, value: str) -> None:
        table.add_row(Text(name), Text(value))

    row(
        "records",
        f"{counts.records:,}"
        + (f"; blank lines: {report.blank_lines:,}" if report.blank_lines else ""),
    )
    row("broken", f"{report.broken_total:,}")
    heldout = (
        "held out: files of its own"
        if report.heldout is None
        else f"{_share(report.heldout, counts.samples)} held out"
    )
    row("samples", f"{counts.samples:,}, {heldout}")
    row("tokens", f"{counts.tokens:,}, {_share(report.targets, counts.tokens)} targets")
    row(
        "tokens of a sample", f"{report.shortest:,} to {report.longest:,}, median {report.median:,}"
    )
    without, packed = f"{report.padding:.1%}", f"{report.padding_packed:.1%}"
    padding = (
        f"{packed}, {without} without --packing"
        if report.packing
        else f"{without}, {packed} with --packing"
    )
    row(f"padding, batches of {report.batch_size}", padding)
    row("cut", f"{counts.cut_prompts:,} prompts, {counts.cut_completions:,} completions")
    row("skipped", listed(counts.skipped) or "0")
    if counts.noted:
        row("of conversations", listed(counts.noted))
    if counts.unused:
        row("columns not used", listed_columns(counts.unused))
    ids = "none" if report.id_min is None else f"{report.id_min:,} to {report.id_max:,}"
    row("ids", f"{ids} of a vocabulary of {report.vocab_size:,}, {report.outside:,} outside")
    row(
        "copies",
        f"{report.copies:.1%} of the samples" + ("" if report.copies_exact else " (estimated)"),
    )
    return table


def _sample(shown: Shown) -> list[Part]:
    parts = [(shown.id, "bold"), (f", {shown.tokens:,} tokens: ", "")]
    for stretch in shown.stretches:
        if stretch.kind == "masked":
            parts.append((f"{OPEN}{_quoted(stretch.text)}{CLOSE}", "dim"))
        elif stretch.kind == "target":
            parts.append((_quoted(stretch.text), "green"))
        else:
            parts.append((f" … {stretch.tokens:,} tokens … ", ""))
    return parts


def _quoted(text: str) -> str:
    """The brackets stand for masks only."""
    return text.replace(OPEN, "\\u27e6").replace(CLOSE, "\\u27e7")


def _print(console: Console, *parts: Part) -> None:
    """Print as it is, whatever the console's encoding lacks as escapes, and leave the wrapping to
    the terminal.
    """
    encoding = console.encoding
    text = Text()
    for piece, style in parts:
        text.append(
            piece.encode(encoding, "backslashreplace").decode(encoding), style=style or None
        )
    console.print(text, soft_wrap=True)


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"
