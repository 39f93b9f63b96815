"""A study's page: what must be on it, however little the study has, and that it needs nothing
else.
"""

from __future__ import annotations

import functools
import re

import pytest
from made_study import table

from npt.tools.sweep.page import Study, page
from npt.tools.sweep.table import MEASURES

pytestmark = pytest.mark.usefixtures("plain_charts")


@functools.cache
def whole() -> tuple[Study, str]:
    """The page of the whole table, which tests only read."""
    return fresh()


def made(rows=None) -> tuple[Study, str]:
    return whole() if rows is None else fresh(rows)


def fresh(rows=None) -> tuple[Study, str]:
    study = Study(
        "made <study>", table() if rows is None else rows, {"forms": "what <this> is for"}
    )
    return study, page(study)


def row_of(name: str, *numbers: str) -> str:
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    return f'<td class="name">{name}</td>{cells}'


def test_the_page_has_map_limits_faults_pareto_effects_and_variance() -> None:
    study, html = made()
    assert set(study.pictures) >= {
        "map-1-forms",
        "map-2-sizes",
        "limits",
        "faults",
        "pareto",
        "variance",
        "effects-1-forms",
        "effects-2-sizes",
    }
    assert all(
        content.startswith('<svg class="chart"') and "aria-label" in content
        for content in study.pictures.values()
    )
    for name in (
        "stability",
        "limits",
        "faults",
        "fidelity",
        "effects",
        "seeds",
        "trials",
        "reading",
    ):
        assert f'<h2 id="{name}">' in html and f'<a href="#{name}">' in html
    assert "1 of 2 such batches were refused" in html
    assert re.search(row_of("plain", "0.03", "0.1"), html)


def test_the_edge_of_the_map_is_in_its_table() -> None:
    _, html = made()
    assert row_of("sigmoid", "0.01", "0.1") in html
    assert row_of("one_plus_tanh", "0.001", "0.01") in html
    assert "(2/2 failed)" in html


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    _, html = made()
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    assert "default-src 'none'" in html and "img-src data:" in html
    sources = set(re.findall(r'(?:src|href)="([^"]{0,12})', html))
    assert all(source.startswith(("#", "data:")) for source in sources)


def test_names_and_notes_are_escaped_and_pictures_say_what_they_show() -> None:
    _, html = made()
    assert (
        "<study>" not in html
        and "made &lt;study&gt;" in html
        and "what &lt;this&gt; is for" in html
    )
    assert all(alt for alt in re.findall(r'<svg [^>]*aria-label="([^"]*)"', html))


def test_the_same_table_gives_the_same_page() -> None:
    assert fresh()[1] == whole()[1]


def test_a_setting_that_has_not_ended_at_a_rate_has_an_empty_cell() -> None:
    rates = sorted({row["learning_rate"] for row in table() if row["parts"] == "forms"})
    rows = [
        {name: None if name in MEASURES else value for name, value in row.items()}
        if row["parts"] == "forms"
        and row["learning_rate"] == rates[-1]
        and row["mult_form"] == "sigmoid"
        else row
        for row in table()
    ]
    _, html = made(rows)
    (line,) = re.findall(r'<td class="name">sigmoid</td>.*?</tr>', html)[:1]
    assert line.endswith('<td class="n"></td></tr>')


def test_a_study_of_which_nothing_has_ended_says_so() -> None:
    rows = [
        {name: None if name in MEASURES else value for name, value in row.items()}
        for row in table()
    ]
    study, html = made(rows)
    assert f"{len(rows)} of {len(rows)} trials have not ended" in html and not study.pictures


@pytest.mark.parametrize("outcome", ["worse", "diverged", "failed"])
def test_a_study_in_which_everything_fails_still_has_its_page(outcome) -> None:
    rows = [
        {
            **row,
            "outcome": outcome,
            "kl": None,
            "loss_before_fault": None,
            "loss_worst_behind": None,
        }
        for row in table()
    ]
    _, html = made(rows)
    assert outcome != "worse" or "Trains at no rate of these: sigmoid, one_plus_tanh." in html


def changed(part, change, rows=None):
    """The made rows, those of a part changed."""
    return [
        {**row, **(change(row) if row["parts"] == part else {})}
        for row in (table() if rows is None else rows)
    ]


def test_a_fault_without_a_finite_loss_is_said_and_not_compared() -> None:
    refused = changed(
        "faults", lambda row: {"fault_loss": None, "fault_harm": None, "kl": 1e-9, "kl_start": 1.0}
    )
    _, html = made(refused)
    assert html.count('<td class="n">not finite</td>') == 4  # loss and harm of two trials
    front = html[html.index('id="fidelity"') : html.index('id="effects"')]
    assert (
        "fp16" not in front
        and "fp32" not in front
        and "only the sigmoid form".lower() in front.lower()
    )


def test_a_row_is_called_by_its_seed_only_among_other_seeds() -> None:
    assert "fp16, seed" not in made()[1]
    rows = table()
    rows += [{**row, "seed": 1} for row in rows if row["parts"] == "faults"]
    html = made(rows)[1]
    assert "fp16, seed 0" in html and "fp16, seed 1" in html and "plain, seed" not in html


def test_limits_of_several_parts_are_told_apart() -> None:
    rows = table()
    again = [{**row, "parts": "limits, alpha 1"} for row in rows if row["parts"] == "limits"]
    html = made(rows + again)[1]
    assert "limits: plain" in html and "limits, alpha 1: plain" in html


def test_seconds_of_the_frontier_are_those_of_start_and_training(monkeypatch) -> None:
    _, html = made([{**row, "seconds": 1e6} for row in table()])
    front = html[html.index('id="fidelity"') : html.index('id="effects"')]
    assert '<td class="n">5.7</td>' in front  # rank 32: 0.5 + 2 + 3.2
    assert "1e+06" not in front and "1,000,000" not in front


def test_parts_whose_names_differ_in_a_sign_have_two_pictures() -> None:
    rows = [
        {**row, "parts": {"forms": "a b", "sizes": "a/b"}.get(row["parts"], row["parts"])}
        for row in table()
    ]
    assert {"map-1-a-b", "map-2-a-b", "effects-1-a-b", "effects-2-a-b"} <= made(rows)[
        0
    ].pictures.keys()


def test_seeds_without_any_kl_have_a_spread_all_the_same() -> None:
    _, html = made(changed("forms", lambda row: {"kl": 0.0, "outcome": "stable"}))
    assert 'id="seeds"' in html and "KL spreads by" not in html


def test_a_map_of_many_settings_draws_the_first_ones_and_lists_all(monkeypatch) -> None:
    monkeypatch.setattr("npt.tools.sweep.page.LINES", 1)
    _, html = fresh()
    assert (
        "The first 1 of 2 settings are drawn." in html
        and '<tr><td class="name">one_plus_tanh</td>' in html
    )


def test_one_trial_is_a_study() -> None:
    study, html = made(table()[:1])
    assert "1 trials, all of them ended" in html and "map-1-forms" not in study.pictures


def test_a_folder_is_reported_from_its_table_alone_and_by_its_figures(tmp_path) -> None:
    from made_study import design

    from npt.files import write_json
    from npt.tools.sweep.page import write_study_report
    from npt.tools.sweep.table import write_table

    folder = tmp_path / "made"
    folder.mkdir()
    write_json(folder / "study.json", {"name": "made", "trials": len(design().trials)})
    write_table(folder, table())
    found = write_study_report(folder, tmp_path / "elsewhere.html")
    assert (tmp_path / "elsewhere.html").is_file() and not (folder / "report.html").exists()
    assert sorted(path.stem for path in (folder / "figures").iterdir()) == found["pictures"]
    assert found["outcomes"] == {"stable": 22, "worse": 2, "diverged": 4}
    sigmoid, tanh = found["maps"]["forms"]
    assert sigmoid == {
        "setting": "sigmoid",
        "trains_up_to": 1e-2,
        "fails_at": 1e-1,
        "best_kl": pytest.approx(1 / (16 * 0.01**0.25)),
        "at_rate": 1e-2,
    }
    assert (tanh["trains_up_to"], tanh["fails_at"]) == (1e-3, 1e-2)
    assert found["limits"] == [{"setting": "plain", "seed": 0, "low": 0.03, "high": 0.1}]


def test_the_head_says_what_every_trial_has_in_common(tmp_path) -> None:
    from made_study import design

    from npt.files import write_json
    from npt.tools.sweep.page import write_study_report
    from npt.tools.sweep.table import write_table

    write_json(
        tmp_path / "study.json",
        {"name": "small", "trials": 4, "versions": {"npt": "0.1.0", "torch": "2.13.0"}},
    )
    (tmp_path / "spec.yaml").write_text(
        "name: small\nsettings: {model_name: tiny, use_quantization: true, max_steps: 40}\n"
        "parts: {a: {seeds: [0, 1], grid: {learning_rate: [0.01, 0.1]}}}\n",
        encoding="utf-8",
    )
    write_table(tmp_path, table())
    write_study_report(tmp_path)
    head = (tmp_path / "report.html").read_text(encoding="utf-8").partition("<nav")[0]
    assert design().name != "small" and "small: report of a study" in head
    assert (
        "model_name tiny, use_quantization true" in head
        and "max_steps 40; varied: learning_rate, seed" in head
    )
    assert "npt 0.1.0, torch 2.13.0" in head
