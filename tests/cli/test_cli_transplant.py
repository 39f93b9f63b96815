"""`npt transplant` as a user runs it."""

import json
from pathlib import Path

import pytest
import torch
from cli_words import flags
from students import enlarge

import npt
from npt.cli.main import main


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """Of the embedded model, strong enough that a transplant shows."""
    model, _ = npt.load_base("tiny", quantization="nf4")
    npt.attach(model, npt.NPTConfig(layers="4-7", rank=8, additive_scale=1.0))
    enlarge(model, a=10, b=200)
    return npt.save_adapter(model, tmp_path_factory.mktemp("adapters") / "strong")


def call(adapter: Path, line: str) -> int:
    texts = ["--text_from", "import os", "--text_to", "def f(x", *flags(line)]
    return main([*flags("transplant --use_quantization --adapter", adapter), *texts])


def test_shows_what_comes_next_and_how_far_it_moved(adapter, capsys):
    assert call(adapter, "--top 3") == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("modulation of donor", "KL, nats: receiver to", "%"):
        assert words in out
    assert call(adapter, "--token_to 1 --top 3 --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_to"] == 1 and found["to"] == "def"
    for name in ("donor", "receiver", "transplanted"):
        probabilities = [token["probability"] for token in found["top"][name]]
        assert len(probabilities) == 3 and 1 > probabilities[0] >= probabilities[2] > 0
    assert found["kl"]["receiver_to_transplanted"] > 0


@pytest.mark.parametrize("flag", ["--token_from", "--token_to"])
def test_a_token_that_is_not_there_is_refused_in_one_line(adapter, capsys, flag):
    assert call(adapter, f"{flag} 99") == 2
    err = capsys.readouterr().err
    assert "there is no token 99: the text has" in err and "Traceback" not in err


def move(adapter: Path, line: str) -> int:
    text = ["--text_to", "def f(x"]
    return main(
        [*flags("transplant --use_quantization --top 3 --adapter", adapter), *text, *flags(line)]
    )


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A context and queries, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "context.txt").write_text("import os\r\nimport sys\r\n")
    (tmp_path / "queries.txt").write_text("def f(x\n\ndef g(x\n")
    return tmp_path


def test_the_code_of_a_context_is_added_saved_and_added_again(adapter, files, capsys):
    assert (
        move(adapter, "--from_context context.txt --scale 0.5 --output a.safetensors --json") == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert list(found["top"]) == ["receiver", "in_context", "moved"] and found["to"] == "x"
    assert found["kl"]["receiver_to_moved"] > 0 and found["kl"]["in_context_to_moved"] > 0
    assert found["numbers"] == sum(found["numbers_by_layer"].values()) == 4 * 8
    code = npt.ContextCode.load(files / "a.safetensors")
    assert code.record == found["record"] and found["output"] == "a.safetensors"
    assert code.record["context"] == "context.txt" and code.record["scale"] == 0.5
    assert move(adapter, "--code a.safetensors a.safetensors --json") == 0
    twice = json.loads(capsys.readouterr().out)
    assert move(adapter, "--from_context context.txt --json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert list(twice["top"]) == ["receiver", "moved"] and twice["kl"] == {
        "receiver_to_moved": whole["kl"]["receiver_to_moved"]  # a half and a half, exactly
    }
    assert twice["record"]["sum"] == [code.record] * 2


def test_the_code_is_the_mean_over_the_queries(adapter, files, capsys):
    assert move(adapter, "--from-context context.txt --queries queries.txt --token_to 1") == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "next token after receiver token 1 ('def'), with the code of context.txt added",
        "receiver in context",
        "receiver, code added",
        "KL, nats: receiver to moved",
        "the code has 32 numbers that are not 0, 8.0 in each of 4 layers",
    ):
        assert words in out
    assert move(adapter, "--from_context context.txt --queries queries.txt --json") == 0
    assert json.loads(capsys.readouterr().out)["record"]["queries"] == 2


def test_a_code_of_another_adapter_is_refused_in_one_line(adapter, files, capsys):
    ones = {index: torch.ones(8) for index in range(4, 8)}
    npt.ContextCode(ones, {"adapter_hash": "0"}).save(files / "other.safetensors")
    assert move(adapter, "--code other.safetensors") == 2
    err = capsys.readouterr().err
    assert "--code other.safetensors was computed with another adapter" in err
    npt.ContextCode({1: torch.ones(8)}).save(files / "other.safetensors")
    assert move(adapter, "--code other.safetensors") == 2
    assert "rank 8 for layer 1, the model has no adapter" in capsys.readouterr().err
