"""`npt evaluate` as a user runs it, with measurements only if they are asked for."""

import json
from pathlib import Path

import pytest
from cli_words import flags, saved_adapter

from npt.cli.main import main
from npt.evaluation.evaluate import Fidelity

pytestmark = pytest.mark.usefixtures("short_library")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    return saved_adapter(tmp_path_factory.mktemp("adapters") / "some", 0.1, rank=4, layers="4,6")


def call(adapter, line: str) -> int:
    where = flags("evaluate --use_quantization --max_length 32 --eval_samples 3 --adapter", adapter)
    return main([*where, *flags(line)])


WHOLE = "--divergence_prompts 2 --max_new_tokens 4"


def test_all_that_is_asked_for_is_in_the_json(adapter, capsys) -> None:
    assert call(adapter, f"{WHOLE} --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["heldout"] is True and found["layers"].keys() == {"4", "6"}
    assert found["divergence"]["prompts"] == 2 and found["divergence"]["max_new_tokens"] == 4
    assert list(found["positions"]) == ["0-1", "2-3", "4-7", "8-15", "16-31"]
    tokens = sum(figures["tokens"] for figures in found["positions"].values())
    assert tokens == found["student"]["tokens"]
    read = Fidelity.from_dict(found)
    assert read.divergence is not None and read.student.tokens == tokens


def test_the_tables_show_it(adapter, capsys) -> None:
    assert call(adapter, WHOLE) == 0
    out = capsys.readouterr().out
    for part in ("floor", "acceptance", "student, free", "16-31"):
        assert part in out, part
    assert "of 2 prompts" in out


def test_nothing_more_is_measured_than_is_asked_for(adapter, capsys) -> None:
    assert call(adapter, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert not found.keys() & {"divergence", "attribution"}
