"""Figures in README and the documentation are those of the files that they come from."""

import json

import pytest

import fill
import pictures
import tables

FIGURES = {
    "student": {"perplexity_ratio": 1.00331, "top1": 0.9594, "kl": -0.25},
    "runs": [{"name": "local", "peak_bytes": 361 << 20, "seconds": [1.5, 2.5]}],
    "tokens": 16095,
}


@pytest.fixture
def results(tmp_path):
    """A folder with `run.json`."""
    (tmp_path / "run.json").write_text(json.dumps(FIGURES))
    return tmp_path


class TestFigures:
    @pytest.mark.parametrize(
        "text",
        [
            "a ratio of 1.0033<!-- run:student.perplexity_ratio:.4f -->.",
            "(95.9%<!-- run:student.top1:.1% -->)",
            "| x | −0.250<!-- run:student.kl:.3f --> |",
            "361 MiB<!-- run:runs.local.peak_bytes/1048576:.0f MiB -->",
            "2,500<!-- run:runs.0.seconds.1*1000:,.0f -->",
            "16,095<!-- run:tokens:, -->",
        ],
    )
    def test_a_figure_that_its_file_has_passes(self, text, results) -> None:
        page = f"# Page\n\n{text}\n"
        assert fill.filled(page, results) == (page, [])

    def test_a_stale_one_is_named_and_filled_in(self, results) -> None:
        text = "# Page\n\nIt is 1.0049<!-- run:student.perplexity_ratio:.4f --> here.\n"
        page, problems = fill.filled(text, results)
        assert page == text.replace("1.0049", "1.0033")
        (line,) = problems
        assert line.startswith("3: has '1.0049'") and line.endswith("says '1.0033'")

    @pytest.mark.parametrize("number", ["21.0033", "1.00331", "1,0033", "none"])
    def test_a_part_of_another_number_does_not_pass(self, number, results) -> None:
        text = f"{number}<!-- run:student.perplexity_ratio:.4f -->"
        assert len(fill.filled(text, results)[1]) == 1

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("run:student.nothing:.1f", "it has no student.nothing (at 'nothing')"),
            ("run:runs.other.seconds:.1f", "(at 'other')"),
            ("run:student:.1f", "cannot be written as '.1f'"),
            ("gone:a:.1f", "benchmarks/results has no gone.json"),
        ],
    )
    def test_a_source_that_cannot_be_read_is_named(self, source, words, results) -> None:
        text = f"1.0<!-- {source} -->"
        page, (line,) = fill.filled(text, results)
        assert page == text and line.startswith("1: ") and words in line and source in line


class TestTables:
    @pytest.fixture(autouse=True)
    def one_table(self, monkeypatch):
        entry = (lambda figures: f"{figures['tokens']:,} tokens\n", ("run",))
        monkeypatch.setattr(fill, "TABLES", {"run --x": entry})

    def test_a_table_is_filled_and_then_passes(self, results) -> None:
        text = "# Page\n\n<!-- run --x -->\nold\n<!-- end -->\n\nmore\n"
        page, (line,) = fill.filled(text, results)
        assert line.startswith("3: table 'run --x' has 'old'")
        assert page == text.replace("old\n", "\n16,095 tokens\n\n")
        assert fill.filled(page, results) == (page, [])

    def test_an_unknown_table_is_named(self, results) -> None:
        text = "<!-- another -->\nold\n<!-- end -->\n"
        assert fill.filled(text, results) == (text, ["1: there is no table 'another'"])


def test_every_page_has_the_figures_of_its_files() -> None:
    assert fill.main(["--check"]) == 0


def test_every_table_has_a_page() -> None:
    text = "".join(page.read_text("utf-8") for page in fill.pages())
    assert [name for name in fill.TABLES if f"<!-- {name} -->\n" not in text] == []


def figures(kl: float) -> dict[str, float]:
    values = {"perplexity": 11.0, "perplexity_ratio": 1 + kl, "kl": kl, "top1": 1 - kl}
    values |= {"acceptance": 1 - kl / 2}
    return {**values, **{f"{key}_se": 0.001 for key in values}, "tokens": 16095}


class TestRenderers:
    """Of cases that no committed file has."""

    def test_a_run_without_figures_of_its_start(self) -> None:
        run = {"teacher": figures(0.0), "floor": figures(0.5), "student": figures(0.004)}
        rows = tables.fidelity({**run, "initial": None, "layers": {}}).splitlines()
        assert rows[0].startswith("| 16,095 held-out tokens | perplexity | ratio |")
        assert [row.split(" | ")[0] for row in rows[2:]] == [
            "| floor (without context)",
            "| student after training",
            "| teacher (the base)",
        ]
        assert "| 11.000 | 1.0040 ± 0.0010 | 0.0040 ± 0.0010 | 99.6 ± 0.1% |" in rows[3]

    def test_cases_that_failed(self) -> None:
        case = {"name": "NaN in a gate", "verdict": "survived", "located": True, "passed": True}
        case |= {"unguarded": "changed"}
        harmed = {**case, "verdict": "harmed", "located": False, "passed": False}
        whole = {"cases": [case, harmed, case], "passed": 2, "total": 3, "false_alarms": 0}
        shown = tables.campaign(whole)
        assert shown.startswith("2 of 3 cases passed, 0 false alarms.\n\n")
        assert "| survived | 2 | 2 | 2 |\n| harmed | 1 | 0 | 0 |\n" in shown
        one = {"cases": [case], "passed": 1, "total": 1, "false_alarms": 0}
        none = {"cases": [], "passed": 0, "total": 0, "false_alarms": 0}
        others = [none] * (len(tables.TRAINERS) - 3)
        shown = tables.trainers(one, one, {**one, "cases": [harmed]}, *others)
        assert "| `accelerate` | 1 | 1 | 1 | 0 | 0 | 0 |\n" in shown
        assert "\nFailed: NaN in a gate in hf (harmed).\n" in shown


class TestPictures:
    @pytest.fixture
    def one_picture(self, monkeypatch, results, tmp_path):
        def draw(figures):
            points = [("a", [1.0, 2.0], [figures["tokens"], 5.0])]
            return pictures.picture("tokens", points, x="step", log=False)

        monkeypatch.setattr(fill, "ROOT", tmp_path)
        monkeypatch.setattr(fill, "RESULTS", results)
        monkeypatch.setattr(fill, "pages", list)
        monkeypatch.setattr(fill, "PICTURES", {"a.svg": (draw, "run")})
        return tmp_path / "a.svg"

    def test_one_that_does_not_show_its_file_is_named_and_drawn(self, one_picture, capsys) -> None:
        assert fill.main(["--check"]) == 1 and not one_picture.exists()
        assert capsys.readouterr().out.startswith("a.svg does not show run.json; run python")
        assert fill.main([]) == 0 and one_picture.read_text().startswith("<svg")
        assert fill.main(["--check"]) == 0
        one_picture.write_text(one_picture.read_text().replace("16095", "16096"))
        assert fill.main(["--check"]) == 1

    def test_another_way_of_drawing_the_same_points_passes(self, one_picture) -> None:
        fill.main([])
        *drawing, points = one_picture.read_text().splitlines()
        one_picture.write_text("\n".join([*drawing, "<!-- more -->", points, ""]))
        assert fill.main(["--check"]) == 0

    def test_every_picture_is_on_a_page(self) -> None:
        text = "".join(page.read_text("utf-8") for page in fill.pages())
        names = [path.rpartition("/")[2] for path in fill.PICTURES]
        assert [name for name in names if name not in text] == []
