"""Effects, shares of variance, edges and frontiers, against what was put into the tables."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_study import RATES, table

from npt.tools.sweep.analysis import (
    RATE_CLASSES,
    failure,
    frontier,
    log_kl,
    of_part,
    parts_of,
    stability_map,
)
from npt.tools.sweep.effects import analyse

COLUMNS = [
    "learning_rate",
    "adapter_rank",
    "mult_form",
    "compute_dtype",
    "seed",
    "fault_step",
    "use_quantization",
]


def rows(values, **settings):
    """A row for each value of a response `y`, with the settings' values at its place."""
    return [
        {"outcome": "stable", "seed": i, "y": y, **{name: v[i] for name, v in settings.items()}}
        for i, y in enumerate(values)
    ]


def test_effects_of_a_balanced_design_are_its_marginal_means() -> None:
    a, b = ["x", "x", "y", "y"] * 3, [1, 2, 1, 2] * 3
    noise = random.Random(0)
    y = [10 * (p == "y") + 3 * (q == 2) + noise.gauss(0, 0.1) for p, q in zip(a, b, strict=True)]
    found = analyse(rows(y, a=a, b=b), ["a", "b"], lambda row: row["y"], "y")
    assert found is not None
    for effect in found.effects:
        own = [
            v
            for v, p, q in zip(y, a, b, strict=True)
            if effect.level == (p if effect.setting == "a" else str(q))
        ]
        assert effect.mean == pytest.approx(sum(own) / len(own)) and effect.count == 6
        assert (
            effect.low is not None
            and effect.high is not None
            and effect.low < effect.mean < effect.high
        )
    # In a balanced design the shares are the classical sums of squares over their total.
    mean = sum(y) / 12
    total = sum((v - mean) ** 2 for v in y)
    between = [
        6 * sum((e.mean - mean) ** 2 for e in found.effects if e.setting == name)
        for name in ("a", "b")
    ]
    assert [found.shares[name] for name in ("a", "b")] == pytest.approx(
        [part / total for part in between]
    )
    assert sum(found.shares.values()) + found.together + (found.seeds or 0.0) == pytest.approx(1.0)


def test_an_unbalanced_design_does_not_tilt_an_effect() -> None:
    a, b = ["x"] * 6 + ["y"] * 6, [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 1]
    # raw means would give 5 + 100 * 4/6
    y = [5.0 * (p == "y") + 100.0 * (q == 2) for p, q in zip(a, b, strict=True)]
    found = analyse(rows(y, a=a, b=b), ["a", "b"], lambda row: row["y"], "y")
    assert found is not None
    means = {(e.setting, e.level): e.mean for e in found.effects}
    assert means["a", "y"] - means["a", "x"] == pytest.approx(5.0) and means["b", "2"] - means[
        "b", "1"
    ] == pytest.approx(100.0)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    source, covered, count = random.Random(1), 0, 300
    for _ in range(count):
        y = [1.0 * (i % 2) + source.gauss(0, 1) for i in range(10)]
        found = analyse(rows(y, a=[i % 2 for i in range(10)]), ["a"], lambda row: row["y"], "y")
        assert found is not None
        low, high = found.effects[1].low, found.effects[1].high
        assert low is not None and high is not None
        covered += low <= 1.0 <= high
    # three standard errors of a share
    assert abs(covered / count - 0.95) < 3 * math.sqrt(0.95 * 0.05 / count)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=12, max_size=40
    )
)
def test_the_chance_to_fail_and_its_interval_lie_between_0_and_1(trials) -> None:
    """An additive model of trials that fail at one setting alone goes below 0 at the others."""
    a, b, failed = zip(*trials, strict=True)
    found = analyse(
        rows([float(f) for f in failed], a=a, b=b),
        ["a", "b"],
        lambda row: row["y"],
        "y",
        share=True,
    )
    for effect in () if found is None else found.effects:
        assert effect.count == sum(
            str(levels[effect.setting == "b"]) == effect.level for *levels, _ in trials
        )
        assert effect.low is not None and effect.high is not None
        assert (
            0.0 <= effect.low < effect.mean < effect.high <= 1.0 and effect.high - effect.low > 0.05
        )


def test_half_a_trial_of_each_kind_is_added_to_each_group() -> None:
    """Two rates of six trials of which none and all fail: least squares would say 0 and 1 for
    certain.
    """
    found = analyse(
        rows([0.0] * 6 + [1.0] * 6, rate=[0.1] * 6 + [1.0] * 6),
        ["rate"],
        lambda row: row["y"],
        "y",
        share=True,
    )
    assert found is not None
    assert [effect.mean for effect in found.effects] == pytest.approx([0.5 / 7, 6.5 / 7], abs=1e-7)
    low, high = found.effects
    assert low.high is not None and high.low is not None
    assert low.high == pytest.approx(1 - high.low) and low.high > 0.3


def test_an_uneven_design_does_not_tilt_the_chance_to_fail() -> None:
    """Level 1 of b was mostly tried where a fails: more of its trials failed, and not by its
    doing.
    """
    # failures and trials; b changes no odds
    cells = {(0, 0): (2, 8), (0, 1): (1, 4), (1, 0): (3, 4), (1, 1): (6, 8)}
    trials = [
        (a, b, float(k < failed)) for (a, b), (failed, count) in cells.items() for k in range(count)
    ]
    a, b, failed = zip(*trials, strict=True)
    found = analyse(rows(failed, a=a, b=b), ["a", "b"], lambda row: row["y"], "y", share=True)
    assert found is not None
    chances = {(e.setting, e.level): e.mean for e in found.effects}
    # 5 and 7 of 12 failed; the penalty is worth half of one of 24 trials
    assert abs(chances["b", "1"] - chances["b", "0"]) < 0.02
    assert chances["a", "1"] - chances["a", "0"] == pytest.approx(0.5, abs=0.1)  # the same


def test_what_settings_do_together_is_told_from_the_noise_of_seeds() -> None:
    a, b = [0, 0, 1, 1] * 4, [0, 1, 0, 1] * 4
    noise = random.Random(2)
    # neither does anything alone
    y = [float(p ^ q) + noise.gauss(0, 0.05) for p, q in zip(a, b, strict=True)]
    found = analyse(rows(y, a=a, b=b), ["a", "b"], lambda row: row["y"], "y")
    assert (
        found is not None
        and found.together > 0.95
        and found.seeds is not None
        and 0 < found.seeds < 0.05
    )
    assert max(found.shares.values()) < 0.01


def test_noise_is_counted_by_degrees_of_freedom() -> None:
    noise = random.Random(3)
    a, b = [i // 2 % 6 for i in range(24)], [i // 12 for i in range(24)]
    # nothing but noise: the additive model leaves 17 degrees of freedom, of which seeds have 12
    y = [noise.gauss(0, 1) for _ in a]
    found = analyse(rows(y, a=a, b=b), ["a", "b"], lambda row: row["y"], "y")
    assert found is not None and found.seeds is not None
    cells: dict[tuple[int, int], list[float]] = {}
    for key, value in zip(zip(a, b, strict=True), y, strict=True):
        cells.setdefault(key, []).append(value)
    mean = sum(y) / 24
    pure = sum((v - sum(cell) / 2) ** 2 for cell in cells.values() for v in cell) / sum(
        (v - mean) ** 2 for v in y
    )
    left = 1 - sum(found.shares.values())
    assert found.seeds == pytest.approx(min(left, pure / 12 * 17)) and found.seeds > pure


def test_without_seeds_what_is_left_is_called_both() -> None:
    y = [
        float(p ^ q) + 0.1 * i
        for i, (p, q) in enumerate(zip([0, 0, 1, 1] * 2, [0, 1, 0, 1] * 2, strict=True))
    ]
    found = analyse(
        rows(y, a=[0, 0, 1, 1] * 2, b=[0, 1, 0, 1] * 2, c=list(range(8))),
        ["a", "b"],
        lambda row: row["y"],
        "y",
    )
    assert found is not None and found.seeds is not None and found.rest == "together"
    found = analyse(
        rows([1.0, 2.0, 4.0, 3.0] * 3, a=list("xxyyzzuuvvww"), b=[0, 1] * 6),
        ["a", "b"],
        lambda row: row["y"],
        "y",
    )
    assert found is not None and found.seeds is None and found.rest == "together and noise"


def test_an_effect_that_cannot_be_told_from_another_is_left_out() -> None:
    a, c = ["x", "x", "y", "y", "z", "z"] * 2, [0, 1] * 6
    b = ["p", "p", "q", "q", "q", "q"] * 2  # p is x: what it does nobody can say
    y = [10.0 * (p == "x") + 3.0 * (p == "z") + q for p, q in zip(a, c, strict=True)]
    found = analyse(
        rows([v + 0.01 * i for i, v in enumerate(y)], a=a, b=b, c=c),
        ["a", "b", "c"],
        lambda row: row["y"],
        "y",
    )
    assert found is not None and {effect.setting for effect in found.effects} == {"c"}
    low, high = (effect.mean for effect in found.effects)
    assert high - low == pytest.approx(1.0, abs=0.05)  # the drift of 0.01 a trial


def test_numbers_of_many_kinds_are_put_into_classes() -> None:
    y = [float(i) for i in range(40)]
    found = analyse(rows(y, a=[i / 7 for i in range(40)]), ["a"], lambda row: row["y"], "y")
    assert found is not None and [effect.count for effect in found.effects] == [10, 10, 10, 10]
    assert [effect.mean for effect in found.effects] == pytest.approx([4.5, 14.5, 24.5, 34.5])


@pytest.mark.parametrize("values", [[], [1.0] * 9, [1.0, 2.0, 3.0]])
def test_where_there_is_nothing_to_tell_nothing_is_told(values) -> None:
    assert (
        analyse(
            rows(values, a=[i % 2 for i in range(len(values))]), ["a"], lambda row: row["y"], "y"
        )
        is None
    )


def test_every_response_has_the_same_classes_of_a_number() -> None:
    found = [
        {**row, "a": 0.1 * i, "b": "xy"[i % 2]}
        for i, row in enumerate(rows([float(i % 7) for i in range(40)]))
    ]
    of_all = analyse(found, ["a", "b"], lambda row: row["y"], "all")
    of_some = analyse(
        found,
        ["a", "b"],
        lambda row: row["y"] if 0.45 < row["a"] < 3.1 or row["y"] == 3 else None,
        "some",
    )
    assert of_all is not None and of_some is not None and of_some.trials < of_all.trials
    assert [effect.level for effect in of_some.effects] == [
        effect.level for effect in of_all.effects
    ]


def test_a_map_has_its_edge_between_what_trains_and_what_does_not() -> None:
    found = stability_map(table(), "forms", COLUMNS)
    assert found is not None
    assert found.heads == tuple(f"{rate:g}" for rate in RATES)
    sigmoid, tanh = found.lines
    assert (sigmoid.name, sigmoid.good, sigmoid.bad) == ("sigmoid", 1e-2, 1e-1)
    assert (tanh.name, tanh.good, tanh.bad) == ("one_plus_tanh", 1e-3, 1e-2)
    assert [tanh.cells[j].failed for j in range(4)] == [0, 0, 2, 2]
    assert sigmoid.cells[3].diverged == 0 and tanh.cells[3].diverged == 2
    assert sigmoid.cells[0].count == 2


def trained(rates, limit=1e9, **settings):
    """Rows of a part `a`, of which those above a rate have diverged; settings are a list each, or
    one value for all.
    """
    return [
        {
            "parts": "a",
            "arms": "",
            "outcome": "stable" if rate <= limit else "diverged",
            "kl": 0.1,
            "seed": 0,
            "learning_rate": rate,
        }
        | {name: value[i] if isinstance(value, list) else value for name, value in settings.items()}
        for i, rate in enumerate(rates)
    ]


def test_a_map_keeps_settings_apart_that_are_laid_over_arms() -> None:
    found = trained(
        [1e-3, 1e-2] * 4,
        arms=["x", "x", "y", "y"] * 2,
        rank=[4] * 4 + [8] * 4,
        form=["s", "s", "t", "t"] * 2,
    )
    drawn = stability_map(found, "a", ["learning_rate", "rank", "form"])
    # an arm decides the form
    assert drawn is not None
    names = [line.name for line in drawn.lines]
    assert names == ["x, rank 4", "x, rank 8", "y, rank 4", "y, rank 8"]
    cells = [cell for line in drawn.lines for cell in line.cells.values()]
    assert all(cell.count == 1 for cell in cells) and len(cells) == 8


@given(
    st.lists(st.floats(1e-6, 10.0), min_size=14, max_size=40, unique=True), st.floats(1e-6, 10.0)
)
def test_many_rates_are_put_into_classes_with_true_edges(rates, limit) -> None:
    drawn = stability_map(trained(rates, limit), "a", ["learning_rate"])
    assert drawn is not None and len(drawn.heads) == RATE_CLASSES
    (line,) = drawn.lines
    assert sum(cell.count for cell in line.cells.values()) == len(rates)
    assert line.cells.keys() <= set(range(RATE_CLASSES))
    below = [rate for rate in rates if rate <= limit]
    above = [rate for rate in rates if rate > limit]
    assert (line.good, line.bad) == (max(below, default=None), min(above, default=None))


def test_trials_that_sought_a_limit_are_in_no_map() -> None:
    rows_ = trained([1e-3, 1e-2, 1e-1])
    rows_[2] |= {"limit_low": 1e-1, "limit_high": None}  # the whole bracket trains
    drawn = stability_map(rows_, "a", ["learning_rate"])
    assert drawn is not None and drawn.heads == ("0.001", "0.01")


def test_a_part_without_rates_has_no_map() -> None:
    assert (
        stability_map(table(), "faults", COLUMNS) is None
        and stability_map(table(), "limits", COLUMNS) is None
    )


def test_the_lines_of_a_map_go_by_size_and_names_as_they_come() -> None:
    ranks, forms = [16, 4, 16, 4, 16, 4, 16, 4], ["s", "s", "b", "b"] * 2
    drawn = stability_map(
        trained([1e-3] * 4 + [1e-2] * 4, rank=ranks, form=forms),
        "a",
        ["learning_rate", "form", "rank"],
    )
    assert drawn is not None
    names = [line.name for line in drawn.lines]
    assert names == ["form s, rank 4", "form s, rank 16", "form b, rank 4", "form b, rank 16"]
    assert [line.cells[0].count for line in drawn.lines] == [1] * 4


def test_a_random_design_with_one_rate_a_setting_has_no_map() -> None:
    rates, ranks = [1e-3, 1e-2, 1e-1], [4, 8, 16]
    assert stability_map(trained(rates, rank=ranks), "a", ["learning_rate", "rank"]) is None
    again = trained([*rates, 1e-2], rank=[*ranks, 4])
    # one setting has two rates: an edge may lie there
    assert stability_map(again, "a", ["learning_rate", "rank"]) is not None


def test_a_trial_of_two_parts_is_in_both() -> None:
    found = [{"parts": "a;b", "arms": ";plain"}, {"parts": "b", "arms": "safe"}]
    assert parts_of(found) == ["a", "b"]
    assert [row["arms"] for row in of_part(found, "a")] == [""] and [
        row["arms"] for row in of_part(found, "b")
    ] == ["plain", "safe"]


def test_failures_and_stable_runs_are_two_responses() -> None:
    stable, worse = {"outcome": "stable", "kl": 0.01}, {"outcome": "worse", "kl": 0.01}
    assert (log_kl(stable), log_kl(worse)) == (-2.0, None) and (
        failure(stable),
        failure(worse),
    ) == (0.0, 1.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20))
def test_the_frontier_is_what_no_other_point_beats_in_both(points) -> None:
    best = frontier(points)
    for i, point in enumerate(points):
        beaten = any(
            other[0] <= point[0] and other[1] <= point[1] and other != point for other in points
        )
        if i in best:
            assert not beaten
        else:
            assert beaten or any(points[k] == point for k in best)
