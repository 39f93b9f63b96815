"""The plot of fidelity against parameters: what it reads, and what it refuses."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from fidelity_plot import RESULTS, Measured, Point, main, plot, read
from npt.errors import ConfigError


def figures_of_rows() -> dict[str, Any]:
    """As `real.py --out` writes it."""
    kls = {"nf4": (0, 0.2), "floor": (0, 6.5), "upper-half": (1000, 0.05), "best": (2000, 0.02)}
    plain = {f"{key}{se}": 0.5 for key in ("perplexity_ratio", "top1") for se in ("", "_se")}
    rest = {"tokens": 8192, "perplexity": 9.0, "perplexity_se": 0.1}
    rest |= {"acceptance": 0.9, "acceptance_se": 0.01}
    rows = [
        {
            "name": name,
            "about": f"about {name}",
            "parameters": parameters,
            "figures": {"kl": kl, "kl_se": 0.002, **plain, **rest},
            "minutes": 1.0,
            "code": "abc",
        }
        for name, (parameters, kl) in kls.items()
    ]
    machine = {"cpu": "C", "cores": 2, "threads": 1, "device": "cpu", "torch": "2", "python": "3"}
    return {
        "model": "some",
        "quantization": "nf4",
        "sizes": {"layers": 4, "hidden": 64, "ffn": 128, "vocab": 256},
        "text": {
            "name": "text",
            "length": 64,
            "heldout_documents": 3,
            "heldout_tokens": 8192,
            "fitted_tokens": 5000,
        },
        "machine": {**machine, "transformers": "5"},
        "rows": rows,
    }


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "real-some.json"
    path.write_text(json.dumps(figures_of_rows()))
    return path


def test_the_file_of_the_benchmark_is_read(file) -> None:
    measured = read(file)
    assert measured.model == "some" and measured.heldout == 8192
    assert measured.points[2] == Point("upper-half", 1000, 0.05, 0.002)
    assert [point.name for point in measured.students] == ["upper-half", "best"]
    assert measured.line("nf4") == 0.2 and measured.line("linear") is None


def test_what_is_committed_can_be_drawn() -> None:
    found = [read(path) for path in RESULTS.glob("real*.json")]
    assert found and all(measured.students for measured in found)
    ET.fromstring(plot(found))


def test_the_picture_is_a_file_of_its_own(file, tmp_path, capsys) -> None:
    out = tmp_path / "made.svg"
    assert main([str(file), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert root.tag.endswith("svg") and root.get("width") == "720"
    shown = "".join(root.itertext())
    assert "upper-half" in shown and "best" in shown and "prefers-color-scheme: dark" in shown
    assert "without attention" in shown and "http" not in text.replace("http://www.w3.org", "")
    assert "2 students, 8,192 tokens" in capsys.readouterr().out


def test_a_row_that_is_not_finite_is_left_out() -> None:
    points = [Point("a", 10, math.nan, 0), Point("b", 20, 0.1, math.nan), Point("c", 0, 0.2, 0)]
    measured = Measured("<b>", 10, points)
    assert [point.name for point in measured.students] == ["b"]
    assert "<b>" not in plot([measured]).replace("</style>", "")


@pytest.mark.parametrize("content", ["{}", "[1]", '{"rows": [{}]}', "not json"])
def test_a_file_of_something_else_is_refused(tmp_path, content, capsys) -> None:
    for name in ("x.json", "x.md"):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match="has no rows of"):
            read(tmp_path / name)
    assert main([str(tmp_path / "x.json"), "--out", str(tmp_path / "y.svg")]) == 2
    assert not (tmp_path / "y.svg").exists() and "x.json" in capsys.readouterr().err


def test_nothing_to_draw_is_said(tmp_path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot([Measured("a", 1, [Point("floor", 0, 1.0, 0.1)])])
