"""An adapter on a model that its user loaded with transformers, whose default is the checkpoint's
own dtype: every verb loads the base as he did.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from students import enlarge
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import npt
from npt.base.source import EMBEDDED_FOLDER
from npt.cli.main import main

OWN = {
    "bf16": {},
    "nf4, scales once": {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
}
DATA = ("--eval_samples", "2", "--max_length", "32")
VERBS = {
    "evaluate": DATA,
    "generate": ("--prompt", "def f(x):", "--max_new_tokens", "2"),
    "consolidate": ("--text", "x = 1", "--output", "out", *DATA),
    "export": ("--output", "out"),
    "trace": ("--max_length", "32"),
    "pretrain": ("--output_dir", "out", "--max_steps", "1", *DATA),
}


@pytest.fixture(scope="module")
def adapter(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    AutoTokenizer.from_pretrained(EMBEDDED_FOLDER).save_pretrained(folder / "base")
    AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER).save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", **OWN[request.param])
    npt.attach(model, npt.NPTConfig(rank=2, layers="3"))
    enlarge(model, b=100)
    return npt.save_adapter(model, folder / "adapter")


@pytest.mark.usefixtures("any_gain")
@pytest.mark.parametrize(  # the bases in turns
    ("adapter", "verb"), [*zip(itertools.cycle(OWN), VERBS, strict=False)], indirect=["adapter"]
)
def test_every_verb_loads_the_base_as_its_user_did(
    adapter, verb, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"x{i} = {i} + {i}  # sum number {i}\n" * 4}) for i in range(200)]
    Path("text.jsonl").write_text("\n".join(lines))
    data = () if verb in ("generate", "export") else ("--dataset_name", "text.jsonl")
    status = main([verb, "--adapter", str(adapter), *VERBS[verb], *data])
    assert status == 0, capsys.readouterr().err


def test_the_line_about_the_base_names_its_dtype(tmp_path, capsys) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.bfloat16)
    npt.attach(model, npt.NPTConfig(rank=2, layers="3"))
    npt.save_adapter(model, tmp_path / "adapter", base_name="tiny")
    assert main(["generate", "--adapter", str(tmp_path / "adapter"), "--prompt", "x"]) == 0
    assert "base tiny: unquantised, computes in bf16" in capsys.readouterr().err
