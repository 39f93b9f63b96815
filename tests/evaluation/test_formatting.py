"""How a figure is written: one unit, wherever it is read."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npt.evaluation.metrics import Figures
from npt.figures import FIGURES, Change, change_line, verdict


def test_every_figure_that_a_file_has_is_written_in_one_way() -> None:
    fields = {name for name in Figures.__dataclass_fields__ if not name.endswith("_se")}
    assert fields - {"tokens"} == set(FIGURES)


@pytest.mark.parametrize(
    ("key", "value", "error", "written"),
    [
        ("kl", 0.00622, 0.00025, "0.0062 ± 0.0003"),
        ("kl", 0.000921, 3.9e-5, "0.00092 ± 0.00004"),
        ("top1", 0.952, 0.0031, "95.2 ± 0.3%"),
        ("acceptance", 1.0, 0.0, "100.0%"),
        ("acceptance", 1.0 - 1e-7, 1e-8, "100.0%"),  # rounding of fp32
        ("top1", 0.99988, 8.7e-5, "99.988 ± 0.009%"),
        ("kl", 2e-5, math.nan, "0.00002"),
        ("perplexity_ratio", 1.00003, math.nan, "1.00003"),
        ("perplexity", 38.86, 5.2331, "38.9 ± 5.2"),  # two significant digits of the error
        ("perplexity", 94.739, 24.371, "95 ± 24"),
        ("perplexity_ratio", 0.999998, 0.003774, "1.0000 ± 0.0038"),
        ("kl", 0.00128, 5.4e-5, "0.00128 ± 0.00005"),
        ("kl", 0.0996, 0.0997, "0.10 ± 0.10"),
        ("kl", -0.00001, 0.0003, "0.0000 ± 0.0003"),
        ("kl", 2.13e-5, 1.2e-6, "0.000021 ± 0.000001"),
        ("perplexity", math.inf, math.nan, "not finite"),
        ("kl", math.nan, 0.1, "not finite"),
        ("kl", -0.0003, math.nan, "−0.0003"),
    ],
)
def test_a_figure_is_written_with_its_unit_and_error(key, value, error, written) -> None:
    assert FIGURES[key].write(value, error) == written


@given(
    st.sampled_from([key for key, figure in FIGURES.items() if figure.ideal is not None]),
    st.floats(0, 1),
)
def test_what_is_not_the_teachers_figure_never_reads_as_it(key, away) -> None:
    figure = FIGURES[key]
    value = figure.ideal + (-away if figure.percent else away)
    assert (figure.write(value) == figure.write(figure.ideal)) == (abs(value - figure.ideal) < 1e-6)


KL = "the KL to the teacher on held-out text"


@pytest.mark.parametrize(
    ("numbers", "kind", "line"),
    [
        (
            ("kl", 0.00113, 4e-5, 0.00106, 4e-5, -7.1e-5, 6e-6), "lower",
            f"Training lowered {KL} by 6.2%, from 0.001130 to 0.001060"
            " nats (−0.000071 ± 0.000006).",
        ),
        (
            ("kl", 0.00113, 4e-5, 0.0467, 0.0017, 0.04557, 0.0017), "higher",
            f"Training raised {KL} 41.3-fold, from 0.00113 to 0.0467 nats"
            " (+0.0456 ± 0.0017).",
        ),
        (
            ("kl", 2.1e-5, 1e-6, 2.0e-5, 1e-6, -1e-6, 8e-7), "noise",
            f"Training did not change {KL} beyond noise: from 0.0000210 to"
            " 0.0000200 nats (−0.0000010 ± 0.0000008).",
        ),
        (
            ("kl", 2.1e-5, 1e-6, 2.05e-5, 1e-6, -5e-7, 1e-7), "noise",  # of rounding
            f"Training did not change {KL} beyond noise: from 0.0000210 to"
            " 0.0000205 nats (−0.0000005 ± 0.0000001).",
        ),
        (
            ("perplexity", 10.95, 1.52, 9.5, 1.3, -1.45, 0.05), "lower",
            "Training lowered the perplexity of held-out text by 13%, from 10.950 to 9.500"
            " (−1.450 ± 0.050).",
        ),
        (
            ("kl", 0.1, math.nan, 0.05, math.nan, -0.05, math.nan), "lower",
            f"Training lowered {KL} by 50%, from 0.1000 to 0.0500 nats"
            " (−0.0500).",
        ),
        (
            ("kl", 0.1, 0.0, 0.1, 0.0, 0.0, 0.0), "noise",
            f"Training did not change {KL} beyond noise: from 0.1000 to"
            " 0.1000 nats (+0.0000 ± 0.0000).",
        ),
        (
            ("kl", 1.1, 0.01, 0.0001, 0.00001, -1.0999, 0.01), "lower",
            f"Training lowered {KL} by 99.99%, from 1.100 to 0.00010 nats"
            " (−1.100 ± 0.010).",
        ),
        (
            ("kl", 0.1, 0.01, math.nan, math.nan, math.nan, math.nan), "not finite",
            f"After training, {KL} is not finite.",
        ),
        (
            ("kl", 0.0, 0.0, 300.0, 20.0, 300.0, 20.0), "higher",
            f"Training raised {KL}, from 0.0000 to 300 nats"
            " (+300 ± 20).",
        ),
    ],
)  # fmt: skip
def test_a_change_is_told_from_noise_and_written_with_its_error(numbers, kind, line) -> None:
    change = Change(*numbers)
    assert verdict(change.change, change.change_se) == kind
    assert change_line(change, "held-out text") == line
