"""A study's page: what must be on it, however little the study has, and that it needs nothing
else.
"""

from __future__ import annotations

import base64
import functools
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from made_study import design, table

from npt.files import write_json
from npt.tools.sweep.page import page, write_study_report
from npt.tools.sweep.table import MEASURES, write_table

RECORD = {
    "name": "made <study>",
    "parts": {"forms": "what <this> is for"},
    "versions": {"npt": "0.1.0"},
}


def fresh(rows: Any = None) -> str:
    return page(RECORD, table() if rows is None else rows)


@functools.cache
def whole() -> str:
    """The page of the whole table."""
    return fresh()


def changed(**values: Any) -> list[dict[str, Any]]:
    return [{**row, **values} for row in table()]


def pictures(html: str) -> list[tuple[str, bytes]]:
    """Each plot's description, and its SVG."""
    found = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)">', html)
    return [(said, base64.b64decode(svg)) for svg, said in found]


def test_the_page_has_plots_and_every_trial() -> None:
    html = whole()
    for name in ("plots", "trials"):
        assert f'<h2 id="{name}">' in html and f'<a href="#{name}">' in html
    assert html.count("<tr>") > len(table()) and "28 trials, all of them ended" in html
    assert "npt 0.1.0" in html and "<td>0.03</td>" in html.replace(' class="n"', "")


def test_its_plots_are_optunas_and_say_what_they_show() -> None:
    told = [said for said, _ in pictures(whole())]
    assert told == [
        "Part forms: importance of each setting for the KL of stable trials.",
        "Part forms: KL of stable trials by learning_rate, mult_form.",
        "Part forms: importance of each setting for whether a trial is stable.",
        "Part sizes: importance of each setting for the KL of stable trials.",
        "Part sizes: KL of stable trials by learning_rate, adapter_rank.",
    ]
    for _, svg in pictures(whole()):
        assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    html = whole()
    assert "<study>" not in html and "what &lt;this&gt; is for" in html
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    assert "default-src 'none'" in html and "img-src data:" in html
    sources = set(re.findall(r'(?:src|href)="([^"]{0,12})', html))
    assert all(source.startswith(("#", "data:")) for source in sources)


def test_a_study_of_which_nothing_has_ended_says_so() -> None:
    html = fresh(changed(**dict.fromkeys(MEASURES)))
    assert "28 of 28 trials have not ended" in html and not pictures(html)


@pytest.mark.parametrize(
    "values", [{"outcome": "failed", "kl": None}, {"kl": 0.1}, {"kl": float("inf")}]
)
def test_a_study_whose_trials_fail_or_are_alike_still_has_its_page(values: dict[str, Any]) -> None:
    assert "28 trials" in fresh(changed(**values))


def test_names_that_no_picture_can_hold_are_drawn_all_the_same() -> None:
    rows = [{**r, "arms": r["arms"] and f'<b a="1">$\\frac{r["arms"]}\x00' * 9} for r in table()]
    rows += [{**row, "seed": seed} for seed in (1, 2, 3) for row in rows if row["arms"]]
    for _, svg in pictures(fresh(rows)):
        ET.fromstring(svg)


def test_a_folder_is_reported_from_its_table_alone_and_by_its_figures(tmp_path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    write_json(folder / "study.json", {"name": "made", "parts": dict(design().parts)})
    write_table(folder, table())
    found = write_study_report(folder, tmp_path / "elsewhere.html")
    assert (tmp_path / "elsewhere.html").is_file() and not (folder / "report.html").exists()
    assert found["outcomes"] == {"stable": 22, "worse": 2, "diverged": 4}
