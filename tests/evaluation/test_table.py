"""The fidelity table says all it was given, each column under its name."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from npt.evaluation.evaluate import Fidelity
from npt.evaluation.greedy import Divergence
from npt.evaluation.metrics import Figures
from npt.evaluation.table import divergence_line, print_fidelity


def some(seed: int, se: float = 0.0625) -> Figures:
    """perplexity seed + 2.5, ratio seed + 1.5, KLs seed / 8 and seed / 16, shares seed / 10 and two
    more.
    """
    shares = (seed / 10, se, seed / 10 + 0.05, se)
    return Figures(
        12345,
        seed + 2.5,
        se,
        seed + 1.5,
        se,
        seed / 8,
        se,
        *shares,
        seed / 16,
        se,
        seed / 10 + 0.1,
        se,
    )


LAYERS = {
    1: {
        "nmse_floor": 0.5,
        "nmse_student": 0.125,
        "free_running_floor": 0.625,
        "free_running_student": 0.1875,
    },
    12: {
        "nmse_floor": 0.25,
        "nmse_student": 0.0625,
        "free_running_floor": 0.75,
        "free_running_student": 0.3125,
    },
}
DIVERGENCE = Divergence(20, 64, 12, 7, 1, 1200, 31.25, 2.5, 27.0, 0.0185, 0.004)


def shown(fidelity: Fidelity, width: int = 200) -> list[str]:
    out = io.StringIO()
    print_fidelity(fidelity, Console(file=out, width=width))
    return out.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]


def row(lines: list[str], label: str) -> list[str]:
    found = [cells(line) for line in lines if cells(line)[0] == label]
    return found[0]


def test_every_model_has_its_column_with_figures_and_errors() -> None:
    lines = shown(Fidelity(some(0), some(3), some(2), None, LAYERS))
    (headings,) = [cells(line) for line in lines if "teacher (the base)" in line]
    assert headings == ["floor (attention dropped)", "student", "teacher (the base)"]
    for column, seed in enumerate((3, 2, 0), 1):
        for label, value in (
            ("perplexity", f"{seed + 2.5:.3f} ± 0.062"),
            ("ratio", f"{seed + 1.5:.4f} ± 0.0625"),
            ("KL, nats", f"{seed / 8:.4f} ± 0.0625"),
            ("reverse KL", f"{seed / 16:.4f} ± 0.0625"),
            ("top-1", f"{10 * seed:.1f} ± 6.2%"),
            ("top-5", f"{10 * seed + 10:.1f} ± 6.2%"),
            ("acceptance", f"{10 * seed + 5:.1f} ± 6.2%"),
        ):
            assert row(lines, label)[column] == value, (label, seed)
    assert [line for line in lines if "12,345 held-out tokens" in line]


def test_a_trained_student_is_shown_before_and_after() -> None:
    layers = {
        i: {**values, "nmse_initial": 0.375, "free_running_initial": 0.4375}
        for i, values in LAYERS.items()
    }
    lines = shown(Fidelity(some(0), some(3), some(1), some(2), layers))
    (headings,) = [cells(line) for line in lines if "teacher (the base)" in line]
    assert headings[1:3] == ["student before training", "student after training"]
    assert row(lines, "ratio")[2:4] == ["3.5000 ± 0.0625", "2.5000 ± 0.0625"]
    assert row(lines, "12") == [
        "12",
        "0.25000",
        "0.37500",
        "0.06250",
        "0.75000",
        "0.43750",
        "0.31250",
    ]


def test_every_layer_has_its_row_unconverted_ones_without_forced_nmse() -> None:
    between = {5: {"free_running_floor": 0.6875, "free_running_student": 0.21875}}
    lines = shown(Fidelity(some(0), some(3), some(2), None, LAYERS, between))
    assert row(lines, "1") == ["1", "0.50000", "0.12500", "0.62500", "0.18750"]
    assert row(lines, "5") == ["5", "", "", "0.68750", "0.21875"]
    assert [cells(line)[0] for line in lines if cells(line)[0] in ("1", "5", "12")] == [
        "1",
        "5",
        "12",
    ]


def test_attribution_has_its_columns() -> None:
    names = ("unquantized_to_4bit", "4bit_to_npt", "unquantized_to_npt")
    lines = shown(
        Fidelity(
            some(0),
            some(3),
            some(2),
            attribution={name: some(i) for i, name in enumerate(names, 4)},
        )
    )
    start = next(i for i, line in enumerate(lines) if "What quantisation costs" in line)
    assert cells(lines[start + 2]) == ["unquantised to 4-bit", "4-bit to NPT", "unquantised to NPT"]
    assert row(lines[start:], "KL, nats")[1:] == [
        "0.5000 ± 0.0625",
        "0.6250 ± 0.0625",
        "0.7500 ± 0.0625",
    ]


def test_positions_have_their_rows() -> None:
    lines = shown(Fidelity(some(0), some(3), some(2), positions={"64-127": some(4)}))
    figures = ["5.5000 ± 0.0625", "0.5000 ± 0.0625", "40.0 ± 6.2%"]
    assert row(lines, "64-127") == ["64-127", "12,345", *figures]


def test_partings_are_said_with_what_the_limit_hides() -> None:
    assert divergence_line(DIVERGENCE) == (
        "Greedy texts of student and teacher after 20 prompts, up to 64 tokens: 12 part, 7 are the"
        " same at the limit, 1 ended the same. 31.2 ± 2.5 tokens agree on average (at least: the"
        " limit cuts some off); half have parted within 27 tokens; 0.0185 ± 0.0040 partings per"
        " token."
    )
    line = divergence_line(replace(DIVERGENCE, censored=0, ended=0, median=math.nan))
    assert "at least" not in line and "ended" not in line and "fewer than half part" in line


def test_an_error_that_is_unknown_or_none_is_left_out() -> None:
    unknown = shown(Fidelity(some(0, math.nan), some(3, math.nan), some(2, math.nan), None, LAYERS))
    assert not [line for line in unknown[1:] if "nan" in line or "±" in line]
    none = shown(Fidelity(some(0, 0.0), some(3), some(2), None, LAYERS))
    assert row(none, "KL, nats")[-1] == "0.0000"


def test_figures_that_an_earlier_version_did_not_take_have_no_row() -> None:
    old = [
        replace(
            some(i), reverse_kl=math.nan, reverse_kl_se=math.nan, top5=math.nan, top5_se=math.nan
        )
        for i in (0, 3, 2)
    ]
    lines = shown(Fidelity(old[0], old[1], old[2], None, LAYERS))
    labels = [cells(line)[0] for line in lines]
    assert "reverse KL" not in labels and "top-5" not in labels and "top-1" in labels
    # a student from an old file with a new floor
    lines = shown(Fidelity(some(0), some(3), old[2], None, LAYERS))
    assert row(lines, "top-5")[2] == "–"


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_every_figure_whole_and_on_one_line(width) -> None:
    layers = {
        i: {**values, "nmse_initial": 0.375, "free_running_initial": 0.4375}
        for i, values in LAYERS.items()
    }
    names = ("unquantized_to_4bit", "4bit_to_npt", "unquantized_to_npt")
    whole = Fidelity(
        some(0), some(3), some(1), some(2), layers, {}, 9, DIVERGENCE,
        {name: some(1) for name in names}, {"1024-2047": some(1)},
    )  # fmt: skip
    lines = shown(whole, width)
    assert "…" not in "".join(lines) and max(map(len, lines)) <= width
    assert not [line for line in lines if line.rstrip("│ ").endswith("±")]
    assert (
        len(
            [
                line
                for line in lines
                if "±" in line and line.strip("│ ").startswith(("ratio", "KL", "top", "reverse"))
            ]
        )
        == 10
    )
