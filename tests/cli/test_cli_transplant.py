"""`npt transplant` as a user runs it."""

import json
from pathlib import Path

import pytest
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
