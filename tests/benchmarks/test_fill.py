"""Figures in README and the documentation are those of the files that they come from."""

from __future__ import annotations

import json

import pytest

import fill
import run_tables
from results_file import mark

FIGURES = {
    "student": {"perplexity_ratio": 1.00331, "top1": 0.9594, "kl": -0.25},
    "runs": [{"name": "local", "peak_bytes": 361 << 20, "seconds": [1.5, 2.5]}],
    "tokens": 16095,
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder with `run.json`, known to be written; `later.json` is pending."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(FIGURES))
    monkeypatch.setattr(fill, "PENDING", frozenset({"later"}))
    return folder


def checked(text, results):
    page = results.parent / "page.md"
    page.write_text(text)
    return page, fill.problems(page, results)


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
            "anything<!-- later:a.b:.1f -->",
        ],
    )
    def test_a_figure_that_its_file_has_passes(self, text, results) -> None:
        assert checked(f"# Page\n\n{text}\n", results)[1] == []

    def test_a_stale_one_is_named_and_filled_in(self, results) -> None:
        text = "# Page\n\nIt is 1.0049<!-- run:student.perplexity_ratio:.4f --> here.\n"
        page, found = checked(text, results)
        assert found == [
            "page.md:3: has '1.0049', but run:student.perplexity_ratio:.4f says '1.0033'; run"
            " python benchmarks/fill.py"
        ]
        assert fill.fill(page, results) and not fill.fill(page, results)
        assert page.read_text() == text.replace("1.0049", "1.0033")

    @pytest.mark.parametrize("written", ["21.0033", "1.00331", "1,0033", "none"])
    def test_a_part_of_another_number_does_not_pass(self, written, results) -> None:
        text = f"{written}<!-- run:student.perplexity_ratio:.4f -->"
        assert len(checked(text, results)[1]) == 1

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("run:student.nothing:.1f", "it has no student.nothing (at 'nothing')"),
            ("run:runs.other.seconds:.1f", "(at 'other')"),
            ("run:student:.1f", "cannot be written as '.1f'"),
            ("gone:a:.1f", "benchmarks/results has no gone.json"),
        ],
    )
    def test_a_source_that_cannot_be_read_is_named(self, source, said, results) -> None:
        (line,) = checked(f"1.0<!-- {source} -->", results)[1]
        assert line.startswith("page.md:1: ") and said in line and source in line


class TestTables:
    @pytest.fixture
    def place(self, monkeypatch):
        made = fill.Place(("run",), lambda figures: f"{figures['tokens']:,} tokens\n", ("make it",))
        monkeypatch.setattr(fill, "PLACES", {"run": made})

    def test_a_table_is_filled_and_then_passes(self, place, results) -> None:
        page, found = checked("# Page\n\n<!-- run -->\nold\n<!-- end -->\n\nmore\n", results)
        assert len(found) == 1 and found[0].startswith("page.md:4: table 'run' has 'old'")
        assert fill.fill(page, results)
        assert (
            page.read_text() == "# Page\n\n<!-- run -->\n\n16,095 tokens\n\n<!-- end -->\n\nmore\n"
        )
        assert fill.problems(page, results) == []

    def test_an_unknown_table_is_named(self, place, results) -> None:
        text = "<!-- another -->\nold\n<!-- end -->\n"
        assert checked(text, results)[1] == ["page.md: there is no table 'another'"]


def test_every_page_has_the_figures_of_its_files() -> None:
    found = [line for page in fill.pages() for line in fill.problems(page)]
    assert not found, "\n" + "\n".join(found)


def test_what_is_pending_was_not_written_and_has_a_command() -> None:
    written = {path.stem for path in fill.RESULTS.glob("*.json")}
    assert not fill.PENDING & written, "take it out of PENDING in benchmarks/fill.py"
    elsewhere = {path.stem for path in fill.RESULTS.glob("*.csv")} | fill.ELSEWHERE.keys()
    assert fill.COMMANDS.keys() - fill.PENDING <= written | elsewhere
    assert fill.COMMANDS.keys() >= fill.PENDING


def test_every_table_has_a_page() -> None:
    text = "".join(page.read_text("utf-8") for page in fill.pages())
    assert [name for name in fill.PLACES if mark(name) not in text] == []


def figures(kl: float) -> dict[str, float]:
    values = {"perplexity": 11.0, "perplexity_ratio": 1 + kl, "kl": kl, "top1": 1 - kl}
    values |= {"acceptance": 1 - kl / 2}
    return {**values, **{f"{key}_se": 0.001 for key in values}, "tokens": 16095}


class TestRenderers:
    def test_fidelity(self) -> None:
        run = {"teacher": figures(0.0), "floor": figures(0.5), "student": figures(0.004)}
        shown = run_tables.fidelity({**run, "initial": None, "layers": {}})
        rows = shown.splitlines()
        assert rows[0].startswith("| held-out text, 16,095 tokens | perplexity | ratio |")
        assert [row.split(" | ")[0] for row in rows[2:]] == [
            "| floor: attention dropped from these layers",
            "| student after training",
            "| teacher: the base",
        ]
        assert "| 11.000 | 1.0040 ± 0.0010 | 0.0040 ± 0.0010 | 99.6 ± 0.1% |" in rows[3]

    def test_a_repaired_base(self) -> None:
        against = {"unquantized_to_4bit": figures(0.5), "unquantized_to_npt": figures(0.004)}
        run = {"teacher": figures(0.0), "attribution": against}
        rows = run_tables.repaired(run).splitlines()
        assert rows[2].startswith("| the 4-bit base | 1.5000") and len(rows) == 4

    def test_limits_by_width(self) -> None:
        rows = [
            {"parts": part, "arms": f"D {d}", "limit_low": str(1 / d), "limit_high": str(2 / d)}
            for part in run_tables.PARTS
            for d in (100, 200)
        ]
        assert "| 0.010, 0.020 | 0.0050, 0.0100 | D^-1.00 |" in run_tables.widths(rows)

    def test_the_guards(self) -> None:
        own = {"ratio": 0.998, "ratio_quartiles": [0.95, 1.04], "added_synchronisations": 0}
        lora = {"ratio": 1.02, "quartiles": [0.98, 1.09], "memory": {}}
        shown = run_tables.guards(own, lora)
        assert "| NPT on the embedded model | 0.998 | 0.95 to 1.04 | 0 |\n" in shown

    def test_masking(self) -> None:
        arms = {"masked": figures(0.1), "ignored": figures(0.2)}
        case = {"left_out": "prompts of text", "loss": "cross_entropy", "steps": 20, **arms}
        shown = run_tables.masking({"cases": [case], "batch_size": 8, "samples": 96})
        assert "| prompts of text | cross-entropy | 20 | 1.1000 ± 0.0010, 0.1000" in shown
        assert "over 96 held-out samples" in shown

    def test_forms(self) -> None:
        row = {"form": "cut", "divisor": 4, "seed": 0, "parameters": 73728}
        rows = [{**row, "figures": figures(0.006)}]
        rows.append({**row, "form": "B", "divisor": 8, "figures": figures(0.009)})
        for seed, kl in enumerate((0.004, 0.005)):
            rows.append({**row, "form": "M", "seed": seed, "figures": figures(kl)})
        about = {"model": "tiny", "layers": "all", "minutes": 2.0, "tokens": 4096, "text": "T"}
        shown = run_tables.forms({**about, "heldout_tokens": 8174, "rows": rows}).splitlines()
        assert len(shown) == 7 and shown[2].startswith("| cut | – | 0.006 ± ")
        assert shown[2].endswith("%, 0.074 M |")
        assert (
            shown[3].startswith("| M | – | 0.0045 ± ") and "(of 2 seeds, 0.001 apart)" in shown[3]
        )
        assert shown[-1].endswith("starts from 4,096 tokens; measured on 8,174 tokens of T.")

    def test_the_fault_campaigns(self) -> None:
        case = {"name": "NaN in a gate", "verdict": "survived", "located": True, "passed": True}
        case |= {"unguarded": "changed"}
        harmed = {**case, "verdict": "harmed", "located": False, "passed": False}
        whole = {"cases": [case, harmed, case], "passed": 2, "total": 3, "false_alarms": 0}
        shown = run_tables.campaign(whole)
        assert shown.startswith("2 of 3 cases passed, 0 false alarms.\n\n")
        assert "| survived | 2 | 2 | 2 |\n| harmed | 1 | 0 | 0 |\n" in shown
        assert run_tables.tracer(whole).endswith("| 3 | 2 | 0 |\n")
        one = {"cases": [case], "passed": 1, "total": 1, "false_alarms": 0}
        none = {"cases": [], "passed": 0, "total": 0, "false_alarms": 0}
        shown = run_tables.trainers(one, one, {**one, "cases": [harmed]}, none)
        assert "| NaN in a gate | equal | equal | harmed | | changed |\n" in shown
        rows = [{"id": "a", "name": "NaN", "ours": "survives", "clip_only": "poisoned"}]
        assert "| planted | NPT | clip only |\n" in run_tables.compared(rows)
