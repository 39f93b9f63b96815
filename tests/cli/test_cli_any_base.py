"""`--any_base`: a verb that loads an adapter refuses another base, and with the flag takes it and
says so.
"""

import json
from pathlib import Path

import pytest
from cli_words import flags, saved_adapter

import npt
from npt.adapters.files import hub
from npt.cli.main import main, make_parser

pytestmark = pytest.mark.usefixtures("short_library")

SHORT = "--max_length 32"
VERBS = {
    "evaluate": f"{SHORT} --eval_samples 2",
    "generate": "--prompt import --max_new_tokens 2",
    "trace": f"{SHORT} --batch_size 1",
    "transplant": "--text_from import --text_to def",
    "collect": f"{SHORT} --max_new_tokens 4 --num_prompts 2 --output",
    "consolidate": f"{SHORT} --text x=1 --eval_samples 2 --output",
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    form = {"layers": "6,7", "rank": 4, "additive_scale": 1.0}
    return saved_adapter(tmp_path_factory.mktemp("adapters") / "nf4", **form)


@pytest.fixture(scope="module")
def _fp4():
    return npt.load_base("tiny", quantization="fp4", device="cpu")


@pytest.fixture
def fp4(_fp4, monkeypatch):
    """The same model in FP4, which is loaded once for all verbs."""
    monkeypatch.setattr(npt, "load_base", lambda *_, **__: _fp4)
    yield _fp4[0]
    npt.unconsolidate(_fp4[0], None)
    npt.detach(_fp4[0])


def call(adapter: Path, verb: str, tmp_path: Path, *more: str) -> int:
    output = [str(tmp_path / "output.jsonl")] if VERBS[verb].endswith("--output") else []
    own = [*flags(VERBS[verb]), *output, *flags("--use_quantization --quant_type fp4 --adapter")]
    return main([verb, *own, str(adapter), *more])


def test_every_verb_that_loads_an_adapter_has_the_flag() -> None:
    verbs = make_parser("npt")._subparsers._group_actions[0].choices  # type: ignore[union-attr,index]
    having = {name for name, verb in verbs.items() if "--any_base" in verb.format_help()}  # type: ignore[attr-defined]
    assert having == {*VERBS, "pretrain"}


def test_another_base_is_refused_with_the_remedy(adapter, fp4, tmp_path, capsys) -> None:
    assert call(adapter, "transplant", tmp_path) == 5
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "was trained on another base ('tiny'): 4-bit codes " in line and "--any_base" in line


@pytest.mark.usefixtures("any_gain")
@pytest.mark.parametrize("verb", VERBS)
def test_another_base_is_taken_with_a_warning_and_is_in_the_json(
    adapter, fp4, tmp_path, capsys, monkeypatch, verb
) -> None:
    """The adapter is looked for once: a run that continues may have another best one the next
    time, and a hub takes its time.
    """
    looked: list[Path] = []
    places = hub.adapter_places
    monkeypatch.setattr(hub, "adapter_places", lambda path: looked.append(path) or places(path))
    assert call(adapter, verb, tmp_path, "--any_base", "--json") == 0
    assert looked == [adapter]
    out, err = capsys.readouterr()
    ours = npt.base_identity(fp4).codes
    said = json.loads(out)["other_base"]
    assert said.startswith("4-bit codes ") and f"{ours[:12]}, expected " in said
    (warning,) = [line for line in err.splitlines() if line.startswith("warning: --any_base")]
    assert said in warning and str(adapter) in warning
    if verb == "consolidate":
        history = json.loads((tmp_path / "output.jsonl" / "consolidated.json").read_text())
        assert history["updates"][0]["record"]["other_base"] == said


def test_nothing_is_said_of_the_adapters_own_base(adapter, capsys) -> None:
    own = flags(f"transplant {VERBS['transplant']} --use_quantization --any_base --json --adapter")
    assert main([*own, str(adapter)]) == 0
    out, err = capsys.readouterr()
    assert "other_base" not in json.loads(out) and "--any_base" not in err
