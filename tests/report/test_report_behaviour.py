"""The part of a run's page on `behaviour.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npt.report.page import page
from npt.report.run import read_run
from tests.helpers.made_runs import Reader, behaviour, event, make_run


def read(run: Path) -> Reader:
    return Reader(page(read_run(run), run / "report.html"))


def section(run: Path, **changed: Any) -> str:
    return read(make_run(run, behaviour=behaviour(12, **changed))).sections["behaviour"]


def test_a_run_without_it_has_no_such_part(tmp_path):
    found = read(make_run(tmp_path / "run"))
    assert "behaviour" not in found.sections and "behaviour.json" not in found.text


def test_all_four_parts_are_shown_and_explained(tmp_path):
    said = section(tmp_path / "run")
    for words in (
        "with the adapters disabled",
        "the model has 16 positions",
        "beginnings of 16 held-out texts",
        "40.5 ± 3.2 tokens agree on average, at least",
        "6 rows of up to 16 tokens of held-out builtin-prose; 3 of them are one document each",
        "Of 3 codes the teacher has 50 ± 50%",
        "log-probability of −9.21",
        "through the tokenizer's chat template, up to 64 tokens: 1 of 2 are the same",
        "0.1000 ± 0.0100 nats per token",
        "They part after 5 tokens: the teacher writes '\\n' (to the teacher 30.0% likely, to the",
        "[6 line ends]",
        "The same for all 9 tokens",
    ):
        assert words in said, words


def test_what_only_one_of_the_two_wrote_is_marked(tmp_path):
    found = read(make_run(tmp_path / "run", behaviour=behaviour(12)))
    names = [name for name, _ in found.elements]
    assert names.count("mark") == 2 and names.count("article") == 2


@pytest.mark.parametrize("part", ["answers", "agreement", "positions", "needles"])
def test_a_part_that_was_not_measured_is_left_out(tmp_path, part):
    assert len(section(tmp_path / "run", **{part: None})) < len(section(tmp_path / "whole"))


def test_answers_cannot_write_into_the_page(tmp_path):
    answer = {"kind": "<b>", "prompt": "<script>", "shared": "<i>\n</p>", "teacher": "<script>x"}
    said = behaviour(12, answers={"answers": [answer, 3]}, notes=["<img>"])
    found = read(make_run(tmp_path / "run", behaviour=said))
    assert not {"script", "i", "b", "img"} & {name for name, _ in found.elements}
    assert "<script>x" in found.sections["behaviour"]


@pytest.mark.parametrize(
    "content", [{}, {"answers": 3, "needles": {"by_depth": [{}]}}, {"positions": {"octaves": [{}]}}]
)
def test_numbers_that_are_missing_break_nothing(tmp_path, content):
    assert read(make_run(tmp_path / "run", behaviour=content)).text


def test_numbers_that_are_not_finite_are_shown_as_such(tmp_path):
    octave = {"first": 0, "last": 1, "tokens": 4, "teacher": None, "student": None, "kl": None}
    positions = {"context_length": 4, "rows": 1, "whole": 1, "octaves": [octave]}
    assert "not finite" in section(tmp_path / "run", positions=positions)


def test_it_says_if_it_is_of_another_step_or_cannot_be_read(tmp_path):
    old = make_run(tmp_path / "old", behaviour=behaviour(6))
    assert "it is of step 6, the run has got to step 12" in read(old).sections["behaviour"]
    broken = read(make_run(tmp_path / "broken", behaviour="{"))
    assert "behaviour.json says nothing" in broken.sections["behaviour"]


def test_a_run_that_was_asked_for_it_says_if_it_is_missing(tmp_path):
    run = {"settings": {"behaviour": True}, "layers": []}
    asked = make_run(tmp_path / "run", run=run, events=[event("start")])
    assert "behaviour.json says nothing: it is not there" in read(asked).sections["behaviour"]
