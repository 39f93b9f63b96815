"""Verdicts: the text says everything that is known and nothing that is not, and the JSON has a word
for every number.
"""

import json
import math
from dataclasses import replace

import pytest

from npt.tracer.verdict import CAUSES, OUTSIDE, Operand, Verdict

VERDICT = Verdict(
    cause="division by zero",
    phase="forward",
    layer=5,
    module="model.layers.5.mlp",
    operation="div",
    source="model.py:12 in MLP.forward: x / y",
    tensor="output of div [2, 3] float32",
    index=(1, 2),
    value=math.nan,
    reached="loss",
    explanation="0 / 0 is nan",
    operands=(
        Operand("self", "float32", (2, 3), 1, 0, 4.0, 0.0),
        Operand("other", "constant", (), 0, 0, 0.0, 0.0),
    ),
    row=1,
    token=2,
    sample="s7",
)


def test_the_text_says_everything_in_order() -> None:
    assert str(replace(VERDICT, grew="first past 10 in mul")).splitlines() == [
        "division by zero: 0 / 0 is nan",
        "  forward: div in model.layers.5.mlp",
        (
            "  first bad: output of div [2, 3] float32 at [1, 2]: nan, row 1, token 2 of sample s7;"
            " it reached loss"
        ),
        "  line: model.py:12 in MLP.forward: x / y",
        "  input: self [2, 3] float32, max abs 4, 1 NaN, 0 at the bad element",
        "  input: other = 0",
        "  grew: first past 10 in mul",
        f"  remedy: {CAUSES['division by zero']}",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token": None}, ": nan, row 1 of sample s7; it"),
        ({"sample": None}, ": nan, row 1, token 2; it"),
        ({"row": None, "index": (), "sample": None}, "[2, 3] float32: nan; it"),
        ({"row": None, "index": ()}, "[2, 3] float32: nan, in sample s7; it"),
        ({"phase": "state"}, ": nan, first in row 1, token 2 of sample s7; it"),
        ({"module": "", "operation": ""}, f"  forward: no operation in {OUTSIDE}\n"),
    ],
)
def test_what_is_not_known_is_not_mentioned(changes, words) -> None:
    assert words in str(replace(VERDICT, **changes))


def test_an_operand_tells_its_bad_numbers_and_no_size_of_truth_values() -> None:
    assert str(Operand("mask", "bool", (3,), 0, 0, 1.0)) == "mask [3] bool"
    assert str(Operand("x", "float16", (), 0, 2, 7.5)) == "x [] float16, max abs 7.5, 2 Inf"
    assert str(Operand("value", "constant", (), 1, 0, math.nan, math.nan)) == "value = nan"


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (1.5, 1.5)]
)
def test_json_has_a_word_for_every_number(value, word) -> None:
    verdict = replace(
        VERDICT, value=value, operands=(Operand("self", "float32", (2,), 0, 0, 1.0, value),)
    )
    read = json.loads(json.dumps(verdict.as_dict(), allow_nan=False))
    assert read["value"] == read["operands"][0]["value"] == word
    assert read["index"] == [1, 2] and read["layer"] == 5 and read["row"] == 1
