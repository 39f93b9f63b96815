"""`npt pretrain --adapter`: another run that begins from a saved adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_words import flags
from safetensors.torch import load_file

import npt
from npt.adapters.converted import adapter_parameters
from npt.cli.main import main

WEIGHTS = "adapter_model.safetensors"
pytestmark = pytest.mark.usefixtures("short_library")
SHORT = flags("--max_steps 1 --max_length 32 --eval_samples 2 --batch_size 2")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """Of a form that no default has, away from its start."""
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(
        model, npt.NPTConfig(rank=3, layers="5,7", targets=("down", "gate"), init="calibrated")
    )
    with torch.no_grad():
        for seed, parameter in enumerate(adapter_parameters(model).values()):
            parameter.copy_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            )
    return npt.save_adapter(model, tmp_path_factory.mktemp("adapters") / "first")


def test_it_begins_with_the_adapters_numbers_form_and_base(adapter, tmp_path, capsys):
    assert (
        main(
            [
                "pretrain",
                "--adapter",
                str(adapter),
                "--output_dir",
                str(tmp_path / "run"),
                "--learning_rate",
                "1e-6",
                *SHORT,
            ]
        )
        == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "base tiny: NF4" in out
        and "training starts from" in out
        and "converted 2 of 8 layers (5,7)" in out
    )
    before, after = load_file(adapter / WEIGHTS), load_file(tmp_path / "run" / "adapter" / WEIGHTS)
    assert before.keys() == after.keys()
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    assert 0 < max(moved) <= 2e-6  # one step of AdamW at 1e-6, and weight decay
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["adapter"] == str(adapter) and record["settings"]["rank"] == 3


def test_a_second_phase_is_resumed_from_its_own_checkpoint(adapter, tmp_path):
    run = ["pretrain", "--adapter", str(adapter), "--output_dir", str(tmp_path / "run"), *SHORT]
    assert main([*run, "--resume", "auto"]) == 0
    first = load_file(tmp_path / "run" / "adapter" / WEIGHTS)
    assert main([*run, "--resume", "auto", "--max_steps", "2"]) == 0
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [e["step"] for e in events if e["event"] == "save"] == [1, 2]
    assert any(
        not torch.equal(first[name], tensor)
        for name, tensor in load_file(tmp_path / "run" / "adapter" / WEIGHTS).items()
    )


def test_a_second_phase_on_a_base_of_ones_own_has_the_default_rate(tmp_path):
    model, tokenizer = npt.load_base("tiny", device="cpu")
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "llama")
    model, _ = npt.load_base(str(tmp_path / "llama"), device="cpu")
    npt.attach(model, npt.NPTConfig(rank=2, layers="7"))
    adapter = npt.save_adapter(model, tmp_path / "first")
    run = ["pretrain", "--adapter", str(adapter), "--output_dir", str(tmp_path / "run"), *SHORT]
    assert main([*run, "--dataset_name", "builtin"]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["learning_rate"] == 5e-5
