"""The picture of recorded tensor health and its page: what is drawn, and what a page may not do."""

import io
import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from npt.recorder import picture
from npt.recorder.picture import write_pictures
from npt.recorder.record import Record, Row, short_names

BAD = (208, 28, 44)  # the colour of a non-finite cell
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
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
    """A row of [2, 8] elements whose other statistics follow from the RMS."""
    values: dict[str, Any] = {"direction": "forward", "shape": (2, 8), "dtype": "bfloat16"}
    values |= {"count": 16, "nan": 0, "pos_inf": 0, "neg_inf": 0, "finite_share": 1.0}
    values |= dict.fromkeys(("min", "max", "mean", "std", "absmax"), rms)
    return Row(module=module, layer=layer, stage=stage, rms=rms, **values | more)


def record(step: int, nan: int = 0) -> Record:
    """Three layers, forward and backward; `nan` of each tensor from layer 1 on."""
    rows = [row("model.embed", rms=0.02)]
    for i in range(3):
        bad = nan if i else 0
        rows += [
            row(f"model.layers.{i}", i, "in", 1.0),
            row(f"model.layers.{i}.mlp", i, rms=4e3, nan=bad, source=len(rows)),
        ]
    backward = [replace(r, direction="gradient", source=None) for r in reversed(rows)]
    return Record(step, (*rows, *backward))


def drawn(records: list[Record], folder) -> tuple[np.ndarray, str]:
    png, html = write_pictures(records, folder)
    pixels = np.asarray(Image.open(io.BytesIO(png.read_bytes())).convert("RGB")).astype(int)
    return pixels, html.read_text(encoding="utf-8")


def red(pixels: np.ndarray) -> int:
    return int((np.abs(pixels - BAD).sum(-1) == 0).sum())


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    reader, seen = HTMLParser(), []
    reader.handle_starttag = lambda tag, attributes: seen.append((tag, dict(attributes)))
    reader.feed(text)
    return seen


def test_a_row_has_a_line_by_its_layer_and_a_column_by_the_rest_of_its_name() -> None:
    assert row("model.layers.3.mlp.up", 3, "in").cell == ("model.layers.3", "mlp.up in")
    assert row("model.layers.3", 3).cell == ("model.layers.3", "out")
    assert row("model.norm").cell == ("model.norm", "out") and row("").cell == ("", "out")
    assert row("", stage="out.loss").cell == ("loss", "out")
    names = short_names(["", "model", "model.norm", "a.layers.0", "a.layers.1", "b.layers.0"])
    named = ["whole model", "model", "norm", "a.layers.0", "1", "b.layers.0"]
    assert list(names.values()) == named


def test_the_page_says_what_it_shows_and_what_was_refused(tmp_path) -> None:
    records = [Record(2, (row("a"),)), Record(9, (row("a"),), micro_batch=1)]
    shown = "Shown: micro-batch 0 of step 2, 1 of step 9. No other micro-batch or step is on this"
    for refused, finding in (
        (0, "All 2 recorded tensors are finite, and none exploded"),
        (1, "All 2 recorded tensors are finite, but the run refused 1 micro-batch<"),
        (3, "All 2 recorded tensors are finite, but the run refused 3 micro-batches<"),
    ):
        _, html = write_pictures(records, tmp_path, refused=refused)
        page = html.read_text(encoding="utf-8")
        assert shown in page and finding in page


def loads_nothing(page: str) -> None:
    assert "://" not in page and "url(" not in page and "@import" not in page
    for _, attributes in tags(page):
        assert (attributes.get("src") or "data:image/png").startswith("data:image/png")
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))


def test_what_is_not_finite_is_red_and_named_and_growth_is_ranked(tmp_path) -> None:
    clean, page = drawn([record(1)], tmp_path)
    assert "3 tensors grew more than 1000-fold" in page and "Largest explosion of step 1" in page
    grown = page[page.index("Largest growth of the RMS</caption>") :]
    assert grown.index("model.layers.0.mlp out") < grown.index("model.layers.0 in")
    assert "× 4e+03" in grown
    assert "bad</td>" not in page and red(clean) == 0
    with Image.open(tmp_path / "health.png") as shown:
        assert shown.getpixel((0, 0))[3] == 0  # so that it lies on a dark page as on a light one
    assert 400 < clean.shape[0] < 4000 and 400 < clean.shape[1] < 4000
    bad, page = drawn([record(1), record(7, nan=4)], tmp_path)
    assert red(bad) > 1000
    loads_nothing(page)
    assert '<span class="alarm">4</span> of 28 recorded tensors' in page
    assert "First non-finite tensor: model.layers.1.mlp out in layer 1 at step 7" in page
    assert page.count(" bad<") == 2  # of the layers 1 and 2, at step 7
    listed = page[page.index("non-finite tensors</caption>") :]
    assert listed.index('<td class="n">7</td>') < listed.index("model.layers.1.mlp out")
    assert listed.index("model.layers.1.mlp out") < listed.index("model.layers.2.mlp out")


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_every_step_has_a_map_with_the_numbers_of_its_tensors(steps, monkeypatch, tmp_path) -> None:
    images = []
    original = picture._paint
    monkeypatch.setattr(
        picture, "_paint", lambda *args: images.append((args, original(*args))) or images[-1][1]
    )
    monkeypatch.setattr(Figure, "savefig", lambda self, stream, **how: None)  # what takes its time
    write_pictures([record(step) for step in range(steps)], tmp_path)
    assert len(images) == 2 * steps
    (_, shown, direction, lines, columns, _), image = images[0]
    sizes = np.full((len(lines), len(columns)), np.nan)
    for r in shown.rows:
        if r.direction == direction:
            sizes[lines.index(r.cell[0]), columns.index(r.cell[1])] = math.log10(r.rms)
    np.testing.assert_allclose(np.ma.filled(image.get_array(), np.nan), sizes)


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
        pytest.param((row("a", rms=1e-45), row("b", rms=3e38)), id="the ends of fp32"),
        pytest.param(
            tuple(row(f"layers.{i}", i, stage=f"s{k}") for i in range(200) for k in range(99)),
            id="very many",
        ),
        pytest.param(tuple(row(name, stage=name, nan=1) for name in HOSTILE), id="hostile names"),
    ],
)
def test_any_record_can_be_drawn_without_a_warning(rows, tmp_path, recwarn) -> None:
    pixels, page = drawn([Record(1, rows)], tmp_path)
    assert min(pixels.shape[:2]) > 200 and max(pixels.shape[:2]) < 4000
    assert sum(tag in ("script", "img") for tag, _ in tags(page)) == 1
    assert not recwarn.list


def test_the_same_records_give_the_same_bytes_whatever_the_users_settings(tmp_path) -> None:
    records = [record(1), record(2, nan=1)]
    first = [path.read_bytes() for path in write_pictures(records, tmp_path / "new" / "one")]
    settings = {"axes.facecolor": "red", "font.size": 30, "text.parse_math": True}
    with matplotlib.rc_context(settings):
        paths = write_pictures(records[::-1], tmp_path / "two")  # in any order
        assert matplotlib.rcParams["font.size"] == 30
    assert paths == [tmp_path / "two" / "health.png", tmp_path / "two" / "health.html"]
    assert [path.read_bytes() for path in paths] == first
    assert sorted(tmp_path.joinpath("two").iterdir()) == sorted(paths)


@pytest.mark.parametrize("rows", [None, (), (row("ids", dtype="int64"),)])
def test_nothing_to_draw_is_refused_and_writes_nothing(rows, tmp_path) -> None:
    records = [] if rows is None else [Record(1, rows)]
    with pytest.raises(ValueError, match="nothing to draw; record a step first"):
        write_pictures(records, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_picture_that_fails_leaves_the_old_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda self, stream, **how: stream.write(b"drawn"))
    before = [path.read_bytes() for path in write_pictures([record(1)], tmp_path)]

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(picture, "render", fail)
    with pytest.raises(MemoryError):
        write_pictures([record(2)], tmp_path)
    assert [(tmp_path / name).read_bytes() for name in ("health.png", "health.html")] == before
