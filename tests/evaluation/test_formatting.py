"""How a figure is written: one unit, wherever it is read."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npt.evaluation.formatting import FIGURES
from npt.evaluation.metrics import Figures


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
        ("top1", 0.99988, 8.7e-5, "99.99 ± 0.01%"),
        ("kl", 2e-5, math.nan, "0.00002"),
        ("perplexity_ratio", 1.00003, math.nan, "1.00003"),
        ("perplexity", 38.86, 5.2331, "38.9 ± 5.2"),  # two significant digits of the error
        ("perplexity", 94.739, 24.371, "95 ± 24"),
        ("perplexity_ratio", 0.999998, 0.003774, "1.0000 ± 0.0038"),
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
