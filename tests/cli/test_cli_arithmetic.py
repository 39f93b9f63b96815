"""The flags that change how a run's products are computed, and nothing else."""

import json
from typing import Any

import pytest
import torch
from cli_words import flags

from npt.cli.main import main
from npt.distill import step as train_step

pytestmark = pytest.mark.usefixtures("short_library")

SHORT = (
    "pretrain --use_quantization --init random --max_steps 1 --eval_samples 1 --max_length 32"
    " --batch_size 2 --no_smoke_test --log_steps 1"
)


def test_the_precision_of_products_is_set_for_the_run_and_recorded(tmp_path, monkeypatch):
    seen = []
    fill = train_step.summed

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return fill(*arguments, **named)

    monkeypatch.setattr("npt.train.loop.summed", watched)
    try:
        line = f"{SHORT} --matmul_precision high --compute_dtype bf16 --output_dir"
        assert main(flags(line, tmp_path / "run")) == 0
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["high"]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    for part in ("precision", "settings"):
        assert record[part]["matmul_precision"] == "high"
    assert record["settings"]["compute_dtype"] == "bf16"
    assert set(record["precision"]["compute_dtype"]) == {"bfloat16", "float32"}
    assert main(flags(f"{SHORT} --matmul_precision high --model_name /nowhere")) == 2
    assert torch.get_float32_matmul_precision() == "highest"
