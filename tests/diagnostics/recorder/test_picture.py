"""The pictures of recorded tensor health: the content of each cell, the marks, and what a page
may not do.
"""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from npt.diagnostics.recorder import picture
from npt.diagnostics.recorder.grid import Mark, grid, layout, maximum, scale, spread, step_labels
from npt.diagnostics.recorder.notable import growths, near_overflow, non_finite
from npt.diagnostics.recorder.page import page
from npt.diagnostics.recorder.picture import draw, write_pictures
from npt.diagnostics.recorder.record import Record, Row

BAD = (208, 28, 44)  # the colour of a non-finite cell in the PNG
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "a\"b'c&amp;d",
    "{{data}}",
    r"$\frac{1}$",
    "日本",
    "\ud800 half",
    "two\nlines\x00",
    "x" * 300,
]


def row(
    module: str, layer: int | None = None, stage: str = "out", rms: float | None = 1.0, **more: Any
) -> Row:
    """A row of [2, 8] bf16 elements whose other statistics follow from the RMS."""
    count = more.get("count", 16)
    bad = sum(more.get(kind, 0) for kind in ("nan", "pos_inf", "neg_inf"))
    values: dict[str, Any] = {
        "direction": "forward",
        "shape": (2, 8),
        "dtype": "bfloat16",
        "count": count,
        "rms": rms,
    }
    values |= {
        "nan": 0,
        "pos_inf": 0,
        "neg_inf": 0,
        "finite_share": (count - bad) / count if count else 1.0,
    }
    values |= dict.fromkeys(("min", "max", "mean", "std", "absmax"))
    if rms is not None:
        values |= {"min": -2 * rms, "max": 3 * rms, "mean": 0.0, "std": rms, "absmax": 3 * rms}
    return Row(module=module, layer=layer, stage=stage, **values | more)


def record(
    step: int,
    layers: int = 3,
    spoil: Callable[[Row], Row] = lambda r: r,
    gradients: bool = True,
    micro_batch: int = 0,
) -> Record:
    """Embedding, layers with an attention and an MLP, a norm and a head, forward and then backward
    in the reverse order.

    `spoil` may replace any row.
    """
    forward = [row("model.embed_tokens", None, "out", 0.02)]
    for i in range(layers):
        name = f"model.layers.{i}"
        forward += [
            row(name, i, "in", 1.0 + i),
            row(f"{name}.self_attn", i, "out", 0.5 + i),
            row(name, i, "m_gate", 1.0, saturation=0.25),
            row(f"{name}.mlp", i, "out", 0.25 + i),
            row(name, i, "residual", 2.0 + i, update_ratio=0.125),
            row(name, i, "out", 2.0 + i),
        ]
    forward += [row("model.norm", None, "out", 1.0), row("lm_head", None, "out", 4.0)]
    rows = list(forward)
    if gradients:
        rows += [
            row(r.module, r.layer, r.stage, (r.rms or 0.0) * 1e-4, direction="gradient")
            for r in reversed(forward)
        ]
    return Record(step, tuple(spoil(r) for r in rows), micro_batch)


def poisoned(step: int) -> Record:
    """NaN from the MLP of layer 1 onward, all of the backward pass among it."""

    def spoil(r: Row) -> Row:
        behind = (
            r.direction == "gradient" or r.module in ("model.norm", "lm_head") or (r.layer or 0) > 1
        )
        behind |= (
            r.layer == 1 and r.stage in ("residual", "out") and not r.module.endswith("self_attn")
        )
        return replace(r, nan=4, finite_share=0.75) if behind else r

    return record(step, spoil=spoil)


COLUMNS = ("in", "self_attn out", "m_gate", "mlp out", "residual", "out")
LINES = ("embed_tokens", "0", "1", "2", "norm", "lm_head")


class TestGrid:
    def test_holds_each_number_at_its_layer_and_checkpoint(self) -> None:
        found = grid(record(1), "forward")
        assert found.lines == LINES and found.columns == COLUMNS and found.first is None
        none = math.nan
        expected = [
            [none, none, none, none, none, 0.02],
            [1.0, 0.5, 1.0, 0.25, 2.0, 2.0],
            [2.0, 1.5, 1.0, 1.25, 3.0, 3.0],
            [3.0, 2.5, 1.0, 2.25, 4.0, 4.0],
            [none, none, none, none, none, 1.0],
            [none, none, none, none, none, 4.0],
        ]
        np.testing.assert_array_equal(found.values, expected)
        np.testing.assert_array_equal(
            found.marks, np.where(np.isnan(expected), Mark.ABSENT, Mark.FINITE)
        )

    def test_puts_gradients_into_the_cells_of_their_values(self) -> None:
        forward, gradient = grid(record(1), "forward"), grid(record(1), "gradient")
        assert gradient.lines == forward.lines and gradient.columns == forward.columns
        np.testing.assert_allclose(gradient.values, forward.values * 1e-4)

    def test_of_gradients_alone_still_counts_layers_upward(self) -> None:
        only = Record(1, tuple(r for r in record(1).rows if r.direction == "gradient"))
        assert [x for x in grid(only, "gradient").lines if x.isdecimal()] == ["0", "1", "2"]

    def test_marks_what_is_not_finite_and_names_the_first_of_the_pass(self) -> None:
        found = grid(poisoned(1), "forward")
        assert found.first == (LINES.index("1"), COLUMNS.index("mlp out"))
        bad = found.marks == Mark.NAN
        assert bad.sum() == 3 + 6 + 2
        assert bad[LINES.index("1")].tolist() == [False, False, False, True, True, True]
        assert bad[LINES.index("2")].all() and not bad[LINES.index("0")].any()
        assert grid(poisoned(1), "gradient").first == (LINES.index("lm_head"), COLUMNS.index("out"))

    @pytest.mark.parametrize(
        ("counts", "mark"),
        [
            ({"nan": 1}, Mark.NAN),
            ({"nan": 1, "pos_inf": 1}, Mark.NAN),
            ({"pos_inf": 2}, Mark.INF),
            ({"neg_inf": 1}, Mark.INF),
            ({}, Mark.FINITE),
        ],
    )
    def test_tells_nan_from_infinity(self, counts, mark) -> None:
        assert grid(Record(1, (row("a", **counts),)), "forward").marks.tolist() == [[mark]]

    def test_shows_the_worst_of_several_calls_of_one_module(self) -> None:
        rows = (
            row("a", rms=1.0),
            row("a", rms=9.0),
            row("a", rms=2.0),
            row("b", rms=9.0),
            row("b", rms=1.0, nan=3),
        )
        found = grid(Record(1, rows), "forward")
        assert found.values.tolist() == [[9.0], [1.0]]
        assert found.marks.tolist() == [[Mark.FINITE], [Mark.NAN]]

    @pytest.mark.parametrize(
        ("quantity", "expected"),
        [
            ("rms", 2.0),
            ("absmax", 6.0),
            ("finite_share", 0.75),
            ("saturation", 0.5),
            ("update_ratio", 0.25),
            ("maximum_share", 6.0 / 65504),
        ],
    )
    def test_holds_the_quantity_that_was_asked_for(self, quantity, expected) -> None:
        one = row("a", rms=2.0, nan=4, saturation=0.5, update_ratio=0.25, dtype="float16")
        assert grid(Record(1, (one,)), "forward", quantity).values.tolist() == [[expected]]

    @pytest.mark.parametrize(
        "quantity", ["rms", "absmax", "maximum_share", "saturation", "update_ratio"]
    )
    def test_has_no_number_where_there_is_none(self, quantity) -> None:
        rows = (
            row("empty", rms=None, count=0, shape=(0, 8)),
            row("all bad", rms=None, nan=16),
            row("not a number", rms=math.nan),
        )
        assert np.isnan(grid(Record(1, rows), "forward", quantity).values).all()

    def test_of_another_layout_leaves_what_the_record_lacks_blank(self) -> None:
        small, large = record(1, layers=1), record(2, layers=3)
        found = grid(small, "forward", "rms", layout([small, large], "forward"))
        assert found.lines == LINES
        assert (found.marks[2:4] == Mark.ABSENT).all()

    def test_inserts_a_checkpoint_of_some_layers_after_its_predecessor(self) -> None:
        rows = [
            row("layers.0.a", 0),
            row("layers.0.c", 0),
            row("layers.1.a", 1),
            row("layers.1.b", 1),
            row("layers.1.c", 1),
        ]
        assert grid(Record(1, tuple(rows)), "forward").columns == ("a out", "b out", "c out")

    def test_keeps_two_stacks_of_layers_apart(self) -> None:
        rows = tuple(
            row(f"{stack}.layers.{i}", i, rms=float(k))
            for k, stack in enumerate(("encoder", "decoder"))
            for i in range(2)
        )
        found = grid(Record(1, rows), "forward")
        assert found.lines == (
            "encoder.layers.0",
            "encoder.layers.1",
            "decoder.layers.0",
            "decoder.layers.1",
        )
        assert found.values.tolist() == [[0.0], [0.0], [1.0], [1.0]]

    def test_gives_a_layer_that_its_modules_do_not_name_a_line_of_its_own(self) -> None:
        found = grid(Record(1, (row("block", 0), row("block", 1), row("", None))), "forward")
        assert found.lines == ("0", "1", "model") and found.columns == ("block out", "out")

    def test_names_modules_in_full_if_their_last_part_is_not_enough(self) -> None:
        assert grid(Record(1, (row("a.norm"), row("b.norm"), row("c.head"))), "forward").lines == (
            "a.norm",
            "b.norm",
            "head",
        )

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.sampled_from("abcd"),
                st.sampled_from([0, 1]),
                st.sampled_from(["forward", "gradient"]),
            )
        )
    )
    def test_finds_a_cell_for_every_row_whatever_their_order(self, places) -> None:
        rows = tuple(
            row(f"m.layers.{i}.{part}", i, nan=nan, direction=direction)
            for i, part, nan, direction in places
        )
        for direction in ("forward", "gradient"):
            found = grid(Record(1, rows), direction)
            mine = [r for r in rows if r.direction == direction]
            assert (
                sorted(set(found.lines))
                == sorted({str(r.layer) for r in mine})
                == list(found.lines)
            )
            expected = {(str(r.layer), f"{r.module[-1]} out"): Mark.FINITE for r in mine}
            expected |= {(str(r.layer), f"{r.module[-1]} out"): Mark.NAN for r in mine if r.nan}
            shown = {
                (a, b): found.marks[i, j]
                for i, a in enumerate(found.lines)
                for j, b in enumerate(found.columns)
                if found.marks[i, j]
            }
            assert shown == expected


class TestScale:
    def test_covers_all_numbers_where_they_lie_close(self) -> None:
        assert scale([0.01, 1.0, 100.0], "rms") == pytest.approx((-2, 2))

    def test_tells_others_apart_next_to_a_few_exploded_tensors(self) -> None:
        low, high = scale([1.0] * 50 + [10.0] * 50 + [1e30], "rms")
        assert low == pytest.approx(0) and high == pytest.approx(2)
        low, high = scale([1.0] * 60 + [1e30] * 40, "rms")
        assert low == pytest.approx(0) and high == pytest.approx(4)

    @pytest.mark.parametrize("numbers", [[], [0.0], [math.inf, math.nan], [3.0], [1e-45, 1e38]])
    def test_is_never_empty(self, numbers) -> None:
        low, high = scale(numbers, "rms")
        assert math.isfinite(low) and math.isfinite(high) and high - low > 0.1

    def test_of_a_share_is_fixed(self) -> None:
        assert scale([0.4, 0.5], "finite_share") == (0.0, 1.0)

    @pytest.mark.parametrize(
        ("dtype", "largest"),
        [("float16", 65504.0), ("torch.float16", 65504.0), ("int64", None), ("nonsense", None)],
    )
    def test_a_dtype_has_a_largest_number_if_it_is_one_of_floats(self, dtype, largest) -> None:
        assert maximum(dtype) == largest

    @given(st.integers(1, 300), st.integers(3, 12), st.data())
    def test_chosen_steps_include_the_first_the_last_and_the_wanted_one(
        self, count, at_most, data
    ) -> None:
        include = data.draw(st.integers(0, count - 1))
        chosen = spread(count, at_most, include)
        assert chosen == sorted(set(chosen)) and len(chosen) == min(count, at_most)
        assert {0, count - 1, include} <= set(chosen) <= set(range(count))


class TestNotable:
    def test_non_finite_tensors_come_in_the_order_in_which_they_appeared(self) -> None:
        found = non_finite([record(1), poisoned(2), poisoned(3)])
        assert (found[0].record, found[0].row.name) == (1, "model.layers.1.mlp out")
        assert [x.record for x in found] == sorted(x.record for x in found)
        assert len(found) == 2 * (11 + 21)

    def test_nearness_to_overflow_is_by_dtype_and_counts_a_tensor_once(self) -> None:
        records = [
            Record(i, (row("half", rms=100.0 * i, dtype="float16"), row("brain", rms=1e30)))
            for i in (1, 3, 2)
        ]
        found = near_overflow(records)
        assert [(x.record, x.row.module) for x in found] == [(1, "half"), (0, "brain")]
        assert found[0].share == 900 / 65504

    def test_growth_is_from_layer_to_layer_along_the_pass(self) -> None:
        up = [row(f"layers.{i}", i, rms=10.0**-i) for i in range(3)]
        down = [row(f"layers.{i}", i, rms=10.0**-i, direction="gradient") for i in (2, 1, 0)]
        assert growths([Record(1, tuple(up))]) == []
        found = growths([Record(1, tuple(up + down))])
        assert [(x.row.layer, x.since, x.before) for x in found] == [
            (1, "layer", 2),
            (0, "layer", 1),
        ]
        assert found[0].factor == pytest.approx(10)

    def test_growth_is_from_step_to_step(self) -> None:
        (found,) = growths(
            [Record(step, (row("a", rms=rms),)) for step, rms in ((1, 1.0), (5, 7.0), (9, 3.5))]
        )
        assert (found.record, found.factor, found.since, found.before, found.rms_before) == (
            1,
            7.0,
            "step",
            0,
            1.0,
        )

    def test_nothing_grows_out_of_zero_or_nothing(self) -> None:
        assert (
            growths(
                [
                    Record(step, (row("a", rms=rms),))
                    for step, rms in ((1, 0.0), (2, None), (3, math.nan), (4, 2.0))
                ]
            )
            == []
        )


class Reader(HTMLParser):
    """Every tag with its attributes, the text, and the content of the data element."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.data, self.inside = "", "", False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag) -> None:
        self.inside = False

    def handle_data(self, data) -> None:
        if self.inside:
            self.data += data
        else:
            self.text += data


class TestPage:
    def test_holds_every_number_of_every_step_in_three_digits(self) -> None:
        records = [record(1), poisoned(2)]
        data = json.loads(Reader(page(records)).data)
        assert (
            data["steps"] == ["step 1", "step 2"]
            and data["broken"] == [0, 32]
            and data["open"] == 1
        )
        for direction in ("forward", "gradient"):
            part = data["directions"][direction]
            assert [label for label, _ in part["lines"]] == list(LINES) and part["columns"] == list(
                COLUMNS
            )
            for one, cells in zip(records, part["cells"], strict=True):
                expected = grid(one, direction)
                assert len(cells) == expected.values.size
                for cell, value, mark in zip(
                    cells, expected.values.flat, expected.marks.flat, strict=True
                ):
                    assert (cell == 0) == (mark == Mark.ABSENT)
                    if cell != 0:
                        assert cell[1] == pytest.approx(value, rel=5e-3)  # three digits
                        assert (len(cell) > 7 and cell[7] == 4) == (mark == Mark.NAN)
            assert part["first"] == [None, list(grid(records[1], direction).first or ())]

    def test_holds_the_statistics_of_a_cell_in_the_order_of_the_script(self) -> None:
        one = row(
            "a",
            rms=1.234567,
            nan=1,
            pos_inf=2,
            neg_inf=3,
            saturation=0.5,
            update_ratio=0.25,
            dtype="float16",
            mean=-1.5e-12,
            std=1e-30,
        )
        data = json.loads(Reader(page([Record(1, (one, row("a", rms=0.1)))])).data)
        assert data["kinds"] == [["[2, 8]", "float16", 16, 65504.0]]
        assert data["directions"]["forward"]["cells"] == [
            [[0, 1.23, 3.7, -2.47, 3.7, -1.5e-12, 1e-30, 1, 2, 3, 0.5, 0.25, 2]]
        ]

    def test_the_script_can_tell_none_nan_and_infinite_statistics_apart(self) -> None:
        rows = (
            row("a", rms=None, count=0),
            row("b", rms=math.nan),
            row("c", rms=1.0, min=-math.inf, absmax=math.inf),
        )
        cells = json.loads(Reader(page([Record(1, rows)])).data)["directions"]["forward"]["cells"][
            0
        ]
        assert cells[0] == [0] + [None] * 6
        assert cells[1] == [1, None, None, None, None, 0, None]
        assert cells[2] == [1, 1, math.inf, -math.inf, 3, 0, 1]

    def test_offers_only_the_quantities_measured_in_a_direction(self) -> None:
        data = json.loads(Reader(page([record(1)])).data)
        common = ["rms", "absmax", "maximum_share", "finite_share"]
        assert [q["key"] for q in data["quantities"]] == [*common, "saturation", "update_ratio"]
        assert list(data["directions"]["forward"]["scales"]) == [
            *common,
            "saturation",
            "update_ratio",
        ]
        assert list(data["directions"]["gradient"]["scales"]) == common
        assert [
            q["key"]
            for q in json.loads(Reader(page([Record(1, (row("a", rms=None, nan=16),))])).data)[
                "quantities"
            ]
        ] == ["finite_share"]

    def test_puts_the_first_non_finite_tensor_on_top(self) -> None:
        text = Reader(page([record(4), poisoned(7)])).text
        findings = text[text.index("Non-finite tensors") : text.rindex("Heat map")]
        assert (
            findings.index("32 of 84 recorded tensors")
            < findings.index("model.layers.1.mlp out")
            < findings.index("model.layers.2 in")
        )
        assert "step 7" in findings and "step 4forward" not in findings[: findings.index("Nearest")]

    def test_says_so_where_all_is_finite(self) -> None:
        assert "None: all 42 recorded tensors are finite." in page([record(1)])

    def test_links_a_finding_to_its_cell_with_and_without_the_script(self) -> None:
        reader = Reader(page([record(1), poisoned(2)]))
        links = [a for tag, a in reader.tags if tag == "a" and "data-at" in a]
        assert links[0] == {
            "href": "#forward-1",
            "data-at": f"{LINES.index('1')} {COLUMNS.index('mlp out')}",
        }
        anchors = {a["id"] for _, a in reader.tags if "id" in a}
        assert {a["href"].removeprefix("#") for a in links} <= anchors

    def test_shows_every_step_without_the_script(self) -> None:
        text = page([record(step) for step in (1, 5, 12)])
        static = Reader(text[text.index('<details class="map"') : text.index("</main>")])
        for step in (1, 5, 12):
            for direction in ("forward", "gradient"):
                assert f"step {step}, {direction}" in static.text
        assert sum(tag == "td" for tag, _ in static.tags) == 3 * 2 * len(LINES) * len(COLUMNS)
        assert static.text.count("0.02") == 3  # the embedding, forward

    def test_marks_bad_cells_by_text_and_not_by_colour_alone(self) -> None:
        one = Record(
            1,
            (row("a", nan=1), row("b", pos_inf=1), row("c", rms=0.0), row("d", rms=None, count=0)),
        )
        text = page([one])
        for cell in ('<td class="b f">NaN<', "<td class=b>Inf<", "<td class=z>0<", "<td>–<"):
            assert cell in text

    @pytest.mark.parametrize("name", HOSTILE)
    def test_takes_any_name_as_text(self, name) -> None:
        rows = (
            row(name, stage=name, nan=1, dtype=name),
            row(f"m.layers.0.{name}", 0, name, rms=5.0, dtype=name),
        )
        plain, hostile = (
            Reader(page([Record(1, (row("a", nan=1), row("m.layers.0.b", 0, rms=5.0)))])),
            Reader(page([Record(1, rows)])),
        )
        assert [tag for tag, _ in hostile.tags if tag in ("script", "img")] == [
            tag for tag, _ in plain.tags if tag in ("script", "img")
        ]
        data = json.loads(hostile.data)["directions"]["forward"]
        assert data["lines"][0][1] == name and data["columns"][0] == name
        page([Record(1, rows)]).encode("utf-8")

    def test_loads_nothing(self) -> None:
        text = page([record(1), poisoned(2)])
        assert "://" not in text and "url(" not in text and "@import" not in text
        for tag, attributes in Reader(text).tags:
            assert tag not in ("img", "iframe", "object", "embed") and "src" not in attributes
            assert (attributes.get("href") or "#").startswith(("#", "data:,"))

    def test_shows_as_many_steps_as_fit_and_lists_findings_of_all(self, monkeypatch) -> None:
        monkeypatch.setattr(
            "npt.diagnostics.recorder.page.CELLS", 5 * 2 * len(LINES) * len(COLUMNS)
        )
        text = page([poisoned(i) if i in (4, 7) else record(i) for i in range(12)])
        data = json.loads(Reader(text).data)
        assert (
            len(data["steps"]) == 5
            and {"step 0", "step 4", "step 11"} <= set(data["steps"])
            and "step 7" not in data["steps"]
        )
        assert "5 of 12 steps are shown" in text and "<td>step 7</td>" in text

    def test_the_scale_is_viridis_with_the_ink_that_contrasts_more(self) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import to_hex, to_rgb

        def luminance(colour: str) -> float:
            red, green, blue = (
                c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
            )
            return 0.2126 * red + 0.7152 * green + 0.0722 * blue

        def contrast(one: str, other: str) -> float:
            low, high = sorted((luminance(one), luminance(other)))
            return (high + 0.05) / (low + 0.05)

        shown = re.findall(
            r"\.c(\d+) \{ background: (#\w{6}); color: (#\w{6}) \}", page([record(1)])
        )
        assert [int(i) for i, _, _ in shown] == list(range(24))
        assert [back for _, back, _ in shown] == [
            to_hex(colormaps["viridis"]((i + 0.5) / 24)) for i in range(24)
        ]
        assert all(
            contrast(back, ink) >= contrast(back, "#000000" if ink == "#ffffff" else "#ffffff")
            for _, back, ink in shown
        )

    @pytest.mark.slow
    def test_of_a_large_run_stays_below_ten_megabytes(self) -> None:
        stages = [f"self_attn.some_proj_{k} out" for k in range(40)]
        statistics = {"min": -1.2345e-5, "max": 1.2345e-5, "mean": -1.2345e-9}
        rows = tuple(
            row(
                f"model.layers.{i}.{stage.split()[0]}",
                i,
                rms=1.2345e-6 * (i + 1),
                direction=direction,
                **statistics,
            )
            for direction in ("forward", "gradient")
            for i in range(80)
            for stage in stages
        )
        text = page([Record(step, rows) for step in range(2)])
        assert len(json.loads(Reader(text).data)["steps"]) == 2
        # of twenty steps: what a page has once, whatever its steps, is in these two too
        assert len(text.encode()) < 10e6 * 2 / 20


class TestPicture:
    def pixels(self, content: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)

    def red(self, content: bytes) -> int:
        return int((np.abs(self.pixels(content) - BAD).sum(-1) == 0).sum())

    def test_is_a_png_that_can_be_looked_at(self) -> None:
        height, width, _ = self.pixels(draw([record(step) for step in range(1, 3)])).shape
        assert 600 < width < 4000 and 600 < height < 5000

    def test_shows_what_is_not_finite_in_a_colour_that_nothing_else_has(self) -> None:
        clean, bad = self.red(draw([record(1)])), self.red(draw([poisoned(1)]))
        # 32 cells of some hundred pixels each; the legend has a few in both
        assert bad > clean + 10_000

    def test_panel_draws_the_numbers_and_a_symbol_for_each_bad_cell(self) -> None:
        from matplotlib.figure import Figure

        records = [poisoned(1)]
        block = picture._block(records, "forward", alone=True)
        axes = Figure().add_subplot()
        found = grid(records[0], "forward", "rms", block.where)
        picture._panel(axes, found, block, named=True)
        numbers, special = (image.get_array() for image in axes.images)
        finite = found.marks == Mark.FINITE
        np.testing.assert_allclose(
            np.ma.filled(numbers, np.nan)[finite], np.log10(found.values[finite])
        )
        assert np.isnan(np.ma.filled(numbers, np.nan)[~finite]).all()
        np.testing.assert_array_equal(np.ma.filled(special, np.nan) == 1, found.marks == Mark.NAN)
        crosses = next(line for line in axes.lines if line.get_marker() == "x")
        assert {(y, x) for x, y in zip(*crosses.get_data(), strict=True)} == set(
            zip(*np.nonzero(found.marks == Mark.NAN), strict=True)
        )
        (frame,) = axes.patches
        assert (frame.get_y() + 0.5, frame.get_x() + 0.5) == found.first

    @pytest.mark.parametrize("steps", [1, 2, 6, 7, 30])
    def test_shows_at_most_six_steps_the_first_bad_one_among_them(self, steps, monkeypatch) -> None:
        from matplotlib.figure import Figure

        shown: list[str] = []
        monkeypatch.setattr(
            picture,
            "_figure",
            lambda _, labels, chosen: shown.extend(labels[i] for i in chosen) or Figure(),
        )
        draw([poisoned(i) if i == 5 else record(i, layers=1) for i in range(steps)])
        assert (
            len(shown) == min(steps, 6)
            and shown[0] == "step 0"
            and shown[-1] == f"step {steps - 1}"
        )
        assert steps <= 5 or "step 5" in shown

    @pytest.mark.parametrize(
        "rows",
        [
            pytest.param((row("", rms=None, count=0, shape=(0,)),), id="one empty tensor"),
            pytest.param(
                (row("a", rms=None, nan=16), row("b", rms=math.nan), row("c", rms=math.inf)),
                id="no number at all",
            ),
            pytest.param((row("a", rms=0.0), row("b", rms=0.0)), id="only zeros"),
            pytest.param((row("a", dtype="int64", rms=3.0), row("b")), id="integers"),
            pytest.param((row("a", direction="gradient"),), id="gradients alone"),
            pytest.param(
                (row("a", rms=1e-45), row("b", rms=3e38, absmax=math.inf)), id="the ends of fp32"
            ),
            pytest.param(
                tuple(row(f"layers.{i}", i, stage=f"s{k}") for i in range(3) for k in range(200)),
                id="very many checkpoints",
            ),
            pytest.param(
                tuple(row(f"layers.{i}", i, nan=i % 2) for i in range(200)), id="very many layers"
            ),
            pytest.param(tuple(row(name, stage=name) for name in HOSTILE), id="hostile names"),
        ],
    )
    def test_any_record_can_be_drawn_without_a_warning(self, rows, tmp_path, recwarn) -> None:
        png, html = write_pictures([Record(1, rows)], tmp_path)
        height, width, _ = self.pixels(png.read_bytes()).shape
        assert 500 < width < 4000 and 200 < height < 5000
        assert json.loads(Reader(html.read_text(encoding="utf-8")).data)
        assert not recwarn.list

    def test_token_ids_and_positions_have_no_place_in_a_picture(self, tmp_path) -> None:
        ids, state = row("ids", dtype="int64", rms=1e3), row("state")
        both, alone = (
            write_pictures([Record(1, rows)], tmp_path / str(len(rows)))
            for rows in ((ids, state), (state,))
        )
        assert [path.read_bytes() for path in both] == [path.read_bytes() for path in alone]
        with pytest.raises(ValueError, match="nothing to draw"):
            write_pictures([Record(1, (ids,))], tmp_path)

    def test_names_at_the_margin_are_not_cut_off(self) -> None:
        rows = [row(f"model.layers.0.{'w' * 60}", 0, "w" * 60), row("w" * 60)]
        image = self.pixels(draw([Record(1, tuple(rows))]))
        assert (
            (image[:, :4] == 255).all()
            and (image[:, -4:] == 255).all()
            and (image[-4:] == 255).all()
        )

    def test_the_users_matplotlib_settings_stay_out_and_unchanged(self) -> None:
        import matplotlib

        one = record(1, layers=1, gradients=False)
        plain = draw([one])
        with matplotlib.rc_context(
            {"axes.facecolor": "red", "font.size": 30, "text.parse_math": True}
        ):
            assert draw([one]) == plain
            assert matplotlib.rcParams["font.size"] == 30 and matplotlib.rcParams["text.parse_math"]


class TestWritePictures:
    def test_writes_two_files_with_the_same_bytes_for_the_same_records(self, tmp_path) -> None:
        records = [record(1, layers=1), poisoned(2)]
        first = [path.read_bytes() for path in write_pictures(records, tmp_path / "new" / "one")]
        paths = write_pictures(records[::-1], tmp_path / "two")  # in any order
        assert paths == [tmp_path / "two" / "health.png", tmp_path / "two" / "health.html"]
        assert [path.read_bytes() for path in paths] == first
        assert sorted(tmp_path.joinpath("two").iterdir()) == sorted(paths)

    def test_micro_batches_of_one_step_are_told_apart(self) -> None:
        assert step_labels([record(3), record(3, micro_batch=1), record(4)]) == [
            "step 3, micro-batch 0",
            "step 3, micro-batch 1",
            "step 4",
        ]

    @pytest.mark.parametrize("records", [[], [Record(1, ())]])
    def test_nothing_to_draw_is_refused_in_one_line_and_writes_nothing(
        self, records, tmp_path
    ) -> None:
        with pytest.raises(
            ValueError, match=r"no tensor in any of [01] records.*record at least one step"
        ) as caught:
            write_pictures(records, tmp_path / "new")
        assert "\n" not in str(caught.value) and not (tmp_path / "new").exists()

    def test_a_picture_that_fails_leaves_the_old_files(self, tmp_path, monkeypatch) -> None:
        one = record(1, layers=1, gradients=False)
        before = [path.read_bytes() for path in write_pictures([one], tmp_path)]

        def fail(_):
            raise MemoryError

        monkeypatch.setattr(picture, "page", fail)
        with pytest.raises(MemoryError):
            write_pictures([record(2, layers=1, gradients=False)], tmp_path)
        assert [(tmp_path / name).read_bytes() for name in ("health.png", "health.html")] == before

    def test_matplotlib_is_loaded_for_drawing_only_and_pyplot_never(self, tmp_path) -> None:
        script = (
            "import sys; from npt.diagnostics.recorder.picture import write_pictures; from"
            " npt.diagnostics.recorder.record import Record, Row\nassert 'matplotlib' not in"
            " sys.modules\nrow = Row('a', None, 'out', 'forward', (1,), 'float32', 1, 1.0, 0, 0,"
            " 0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0)\nwrite_pictures([Record(1, (row,))],"
            f" {str(tmp_path)!r})\nassert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not"
            " in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)
