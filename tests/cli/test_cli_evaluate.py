"""`npt evaluate` as a user runs it, with measurements only if they are asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_words import flags

import npt
from npt.adapters.converted import adapter_parameters
from npt.cli.main import main
from npt.evaluation.evaluate import Fidelity

pytestmark = pytest.mark.usefixtures("short_library")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=4, layers="4,6"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return npt.save_adapter(model, tmp_path_factory.mktemp("adapters") / "some")


def command(adapter, *arguments: str) -> list[str]:
    return [
        "evaluate",
        "--adapter",
        str(adapter),
        *flags("--max_length 32 --eval_samples 3"),
        *arguments,
    ]


WHOLE = flags("--use_quantization --attribution --divergence_prompts 2 --max_new_tokens 4")


def test_all_that_is_asked_for_is_in_the_json(adapter, capsys) -> None:
    assert main(command(adapter, *WHOLE, "--json")) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["heldout"] is True and found["layers"].keys() == {"4", "6"}
    assert found["divergence"]["prompts"] == 2 and found["divergence"]["max_new_tokens"] == 4
    assert list(found["positions"]) == ["0-1", "2-3", "4-7", "8-15", "16-31"]
    tokens = sum(figures["tokens"] for figures in found["positions"].values())
    assert tokens == found["student"]["tokens"]
    assert found["attribution"].keys() == {
        "unquantized_to_4bit",
        "4bit_to_npt",
        "unquantized_to_npt",
    }
    assert found["attribution"]["4bit_to_npt"] == found["student"]
    assert (
        0
        < found["attribution"]["unquantized_to_4bit"]["kl"]
        < found["attribution"]["unquantized_to_npt"]["kl"]
    )
    memory = found["attribution_memory"]
    assert (
        memory["unquantized_model_bytes"] == 3_542_208 * 4
        and memory["kept_head_bytes"] == 2048 * 192 * 4
    )
    assert memory["kept_state_bytes"] == found["teacher"]["tokens"] * 192 * 4
    assert "is gone; kept of it are final states" in err
    read = Fidelity.from_dict(found)
    assert read.divergence is not None and read.student.tokens == tokens


def test_the_tables_show_it(adapter, capsys) -> None:
    assert main(command(adapter, *WHOLE)) == 0
    out = capsys.readouterr().out
    for part in (
        "floor",
        "acceptance",
        "student, free",
        "16-31",
        "unquantised to 4-bit",
        "after 2 prompts",
    ):
        assert part in out, part


def test_nothing_more_is_measured_than_is_asked_for(adapter, capsys) -> None:
    assert main(command(adapter, "--use_quantization", "--json")) == 0
    assert not json.loads(capsys.readouterr().out).keys() & {
        "divergence",
        "attribution",
        "attribution_memory",
        "lm_eval",
    }


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_original_may_run_in_sixteen_bits(adapter, precision: str, capsys) -> None:
    assert main(command(adapter, "--use_quantization", "--attribution", precision, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["attribution"]["unquantized_to_4bit"]["kl"] > 0
    assert found["attribution_memory"]["unquantized_model_bytes"] <= 3_542_208 * 4
