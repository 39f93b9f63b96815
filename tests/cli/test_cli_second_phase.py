"""`npt pretrain --adapter`: another run that begins from a saved adapter."""

import json
from pathlib import Path

import pytest
import torch
from cli_words import flags, saved_adapter
from safetensors.torch import load_file

import npt
from npt.cli.main import main

WEIGHTS = "adapter_model.safetensors"
pytestmark = pytest.mark.usefixtures("short_library")
SHORT = "pretrain --max_steps 1 --max_length 32 --eval_samples 2 --batch_size 2 --no_smoke_test"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """Of a form that no default has, away from its start."""
    form = {"rank": 3, "layers": "5,7", "targets": ("down", "gate"), "init": "calibrated"}
    return saved_adapter(tmp_path_factory.mktemp("adapters") / "first", 0.05, **form)


def run(adapter: Path, folder: Path, line: str = "") -> int:
    return main(flags(f"{SHORT} {line} --adapter", adapter, "--output_dir", folder))


def test_it_begins_with_the_adapters_numbers_form_and_base(adapter, tmp_path, capsys):
    assert run(adapter, tmp_path / "run", "--learning_rate 1e-6") == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("base tiny: NF4", "training starts from", "converted 2 of 8 layers (5,7)"):
        assert words in out
    before, after = load_file(adapter / WEIGHTS), load_file(tmp_path / "run" / "adapter" / WEIGHTS)
    assert before.keys() == after.keys()
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    assert 0 < max(moved) <= 2e-6  # one step of AdamW at 1e-6, and weight decay
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["adapter"] == str(adapter) and record["settings"]["rank"] == 3


def test_a_second_phase_is_resumed_from_its_own_checkpoint(adapter, tmp_path):
    folder = tmp_path / "run"
    assert run(adapter, folder, "--resume auto") == 0
    first = load_file(folder / "adapter" / WEIGHTS)
    assert run(adapter, folder, "--resume auto --max_steps 2") == 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "save"] == [1, 2]
    second = load_file(folder / "adapter" / WEIGHTS)
    assert any(not torch.equal(first[name], tensor) for name, tensor in second.items())


def test_a_second_phase_on_a_base_of_ones_own_has_the_default_rate(tmp_path):
    model, tokenizer = npt.load_base("tiny", device="cpu")
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "llama")
    model, _ = npt.load_base(str(tmp_path / "llama"), device="cpu")
    npt.attach(model, npt.NPTConfig(rank=2, layers="7"))
    adapter = npt.save_adapter(model, tmp_path / "first")
    assert run(adapter, tmp_path / "run", "--dataset_name builtin") == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["learning_rate"] == 5e-5
