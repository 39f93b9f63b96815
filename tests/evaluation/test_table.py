"""The fidelity table says all it was given, each column under its name."""

import io
import math
import re

from rich.console import Console

from npt.evaluation.evaluate import Fidelity
from npt.evaluation.greedy import Divergence
from npt.evaluation.metrics import Figures
from npt.evaluation.table import divergence_line, print_fidelity


def some(seed: int, se: float = 0.0625) -> Figures:
    """perplexity seed + 2.5, ratio seed + 1.5, KL seed / 8, shares seed / 10 and 0.05 more."""
    values = (seed + 2.5, seed + 1.5, seed / 8, seed / 10, seed / 10 + 0.05)
    return Figures(12345, *(part for value in values for part in (value, se)))


_KEYS = ("nmse_floor", "nmse_student", "free_running_floor", "free_running_student")
LAYERS = {
    1: dict(zip(_KEYS, (0.5, 0.125, 0.625, 0.1875), strict=True)),
    12: dict(zip(_KEYS, (0.25, 0.0625, 0.75, 0.3125), strict=True)),
}
DIVERGENCE = Divergence(20, 64, 12, 1200, 31.25, 2.5)


def shown(fidelity: Fidelity, width: int = 200) -> list[str]:
    out = io.StringIO()
    print_fidelity(fidelity, Console(file=out, width=width))
    return out.getvalue().splitlines()


def cells(line: str) -> list[str]:
    """The columns of a line: two spaces or more are between them."""
    return re.split(r" {2,}", line.strip())


def row(lines: list[str], label: str) -> list[str]:
    return next(cells(line) for line in lines if cells(line)[0] == label)


def test_every_model_has_its_column_with_figures_and_errors() -> None:
    lines = shown(Fidelity(some(0), some(3), some(1), some(2), LAYERS))
    assert row(lines, "floor") == ["floor", "before", "student", "teacher"]
    for column, seed in enumerate((3, 2, 1, 0), 1):
        for label, value in (
            ("perplexity", f"{seed + 2.5:.3f} ± 0.062"),
            ("ratio", f"{seed + 1.5:.3f} ± 0.062"),
            ("KL, nats", f"{seed / 8:.3f} ± 0.062"),
            ("top-1", f"{10 * seed:.1f} ± 6.2%"),
            ("acceptance", f"{10 * seed + 5:.1f} ± 6.2%"),
        ):
            assert row(lines, label)[column] == value, (label, seed)
    assert [line for line in lines if "12,345 held-out tokens" in line]
    assert row(lines, "1") == ["1", "0.50000", "0.12500", "0.62500", "0.18750"]
    before = shown(Fidelity(some(0), some(3), some(2), None, LAYERS))
    assert row(before, "floor") == ["floor", "student", "teacher"]


def test_attribution_and_positions_have_their_tables() -> None:
    names = ("unquantized_to_4bit", "4bit_to_npt", "unquantized_to_npt")
    attribution = {name: some(i) for i, name in enumerate(names, 4)}
    positions = {"64-127": some(4)}
    whole = Fidelity(some(0), some(3), some(2), attribution=attribution, positions=positions)
    lines = shown(whole)
    start = next(i for i, line in enumerate(lines) if "Cost of quantisation" in line)
    headings = row(lines[start:], "unquantised to 4-bit")
    assert headings == ["unquantised to 4-bit", "4-bit to NPT", "unquantised to NPT"]
    figures = row(lines[start:], "KL, nats")
    assert figures[1:] == ["0.500 ± 0.062", "0.625 ± 0.062", "0.750 ± 0.062"]
    figures = ["5.500 ± 0.062", "0.500 ± 0.062", "40.0 ± 6.2%"]
    assert row(lines, "64-127") == ["64-127", "12,345", *figures]


def test_partings_are_said_in_a_line() -> None:
    assert divergence_line(DIVERGENCE) == (
        "Greedy continuations of 20 prompts, up to 64 tokens: student and teacher diverge in 12;"
        " they agree for 31.2 ± 2.5 tokens on average."
    )


def test_an_error_that_is_unknown_or_none_is_left_out() -> None:
    unknown = shown(Fidelity(some(0, math.nan), some(3, math.nan), some(2, math.nan), None, LAYERS))
    assert not [line for line in unknown[1:] if "nan" in line or " ± " in line]
    none = shown(Fidelity(some(0, 0.0), some(3), some(2), None, LAYERS))
    assert row(none, "KL, nats")[-1] == "0.0000"


def test_a_terminal_of_80_columns_shows_every_figure_whole_and_on_one_line() -> None:
    before = {"nmse_initial": 0.375, "free_running_initial": 0.4375}
    layers = {i: {**values, **before} for i, values in LAYERS.items()}
    names = ("unquantized_to_4bit", "4bit_to_npt", "unquantized_to_npt")
    attribution = {name: some(1) for name in names}
    whole = Fidelity(
        some(0), some(3), some(1), some(2), layers, DIVERGENCE, attribution, {"1024-2047": some(1)}
    )
    lines = shown(whole, 80)
    assert "…" not in "".join(lines) and max(map(len, lines)) <= 80
    assert not [line for line in lines if line.rstrip().endswith("±")]
    starts = ("ratio", "KL", "top", "acceptance")
    assert len([line for line in lines if "±" in line and line.strip().startswith(starts)]) == 8
