"""Files that an earlier version wrote are read by this one: adapter, run folder and checkpoint.

`tests/assets/before/README.md` says how they were made.
"""

import hashlib
import json
import platform
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import npt
from npt.adapters.converted import adapter_parameters
from npt.cli.main import main

BEFORE = Path(__file__).parents[1] / "assets" / "before"
WEIGHTS = "adapter_model.safetensors"


def machine() -> dict[str, str]:
    """Return what decides the order in which a sum is taken."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": (names or [platform.processor()])[0],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


@pytest.fixture(scope="module")
def student():
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.load_adapter(model, BEFORE / "adapter")
    return model.eval(), tokenizer


def test_an_adapter_gives_the_logits_stored_with_it(student) -> None:
    stored = load_file(BEFORE / "logits.safetensors")
    with torch.no_grad():
        logits = student[0](input_ids=stored["input_ids"]).logits[:, -2:]
    # fp32; another processor sums in another order, and eight layers amplify that a little
    torch.testing.assert_close(logits, stored["logits"], rtol=1e-3, atol=1e-3)


def test_an_adapter_is_saved_again_as_it_was(student, tmp_path) -> None:
    folder = npt.save_adapter(student[0], tmp_path / "again")
    before = json.loads((BEFORE / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    now = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    # statistics of 4-bit weights are rounded otherwise on some processors
    for hashed in ("base_hash", "base_parts"):
        assert (now.pop(hashed) is None) == (before.pop(hashed) is None)
    for retired in ("init_std_a", "init_std_b", "init_a", "init_std_m"):
        del before["npt"][retired]
    before["base_loading"]["dtype"] = None  # which earlier files lack
    before["npt"] |= {"active": 0, "token_rank": 0}
    assert now == before
    assert {p.name for p in folder.iterdir()} == {p.name for p in (BEFORE / "adapter").iterdir()}
    assert (folder / WEIGHTS).read_bytes() == (BEFORE / "adapter" / WEIGHTS).read_bytes()


def test_report_reads_a_run_folder(tmp_path, capsys) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(BEFORE / "run"), "--output", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["refused"]) == ("done", 4, 0)
    figures = json.loads((BEFORE / "run" / "fidelity.json").read_text(encoding="utf-8"))
    assert found["kl"] == figures["student"]["kl"] and found["missing"] == {}
    assert page.stat().st_size > 0


def test_a_run_folder_is_loaded_as_its_last_adapter() -> None:
    model, tokenizer = npt.from_pretrained(BEFORE / "run")
    ids = tokenizer("The quick brown", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids).logits).all()
    stored = load_file(BEFORE / "run" / "adapter" / WEIGHTS)
    for name, parameter in adapter_parameters(model).items():
        assert torch.equal(parameter, stored[f"base_model.model.{name}"])


def test_a_checkpoint_resumes_to_the_run_without_a_stop(tmp_path, monkeypatch) -> None:
    shutil.copy(BEFORE / "texts.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)  # the data's name is a setting that must stay the same
    arguments = {"--model_name": "tiny", "--adapter_rank": 2, "--layers": 3, "--init": "random"}
    arguments |= {"--dataset_name": "texts.jsonl", "--max_length": 32, "--batch_size": 2}
    arguments |= {"--max_steps": 4, "--log_steps": 1, "--eval_samples": 2, "--smoke_test": "false"}
    arguments |= {"--resume": BEFORE / "step-00000002", "--output_dir": "resumed"}
    flags = [str(word) for pair in arguments.items() for word in pair]
    assert main(["pretrain", "--use_quantization", *flags]) == 0
    resumed, whole = (p / "adapter" / WEIGHTS for p in (tmp_path / "resumed", BEFORE / "run"))
    made_on = json.loads((BEFORE / "made_on.json").read_text(encoding="utf-8"))
    expected = made_on.pop("final_adapter_sha256")
    assert hashlib.sha256(whole.read_bytes()).hexdigest() == expected
    if machine() == made_on:
        assert hashlib.sha256(resumed.read_bytes()).hexdigest() == expected
    # Elsewhere products differ in their last bits, and Adam divides by the size of the gradient:
    # an entry may be off by some percent of one step, which is at most the learning rate.
    found, wanted = load_file(resumed), load_file(whole)
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)
