"""The embedded model's loss curve under NF4, pinned: a change of numerics anywhere shows here
first.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import npt

TEXT = Path(__file__).parent / "assets" / "inventory.txt"

# Losses of the first eight steps, from `curve(strategy, ...)` below. A change that moves them on
# purpose says why in its commit.
PINNED = {
    "local": [0.088173, 0.083096, 0.083984, 0.062976, 0.063911, 0.054807, 0.057215, 0.055421],
    "end_to_end": [0.244121, 0.226671, 0.238338, 0.171717, 0.175132, 0.148965, 0.160303, 0.162147],
}


def curve(strategy: str, folder: Path) -> list[float]:
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(additive_scale=1.0), seed=0)
    config = npt.TrainConfig(
        strategy=strategy,
        max_steps=8,
        batch_size=2,
        num_epochs=8,
        learning_rate=1e-2,
        log_steps=1,
        eval_samples=1,
        output_dir=str(folder),
    )
    data = [{"text": TEXT.read_text(encoding="utf-8")}]
    settings = npt.DataConfig(max_length=64)
    npt.Trainer(
        model, tokenizer, data, config, data_config=settings, console=Console(file=io.StringIO())
    ).train()
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("strategy", PINNED)
def test_the_loss_curve_is_the_pinned_one(strategy: str, tmp_path: Path) -> None:
    # Other processors sum in another order: single products differ by 1e-6, and eight steps of
    # Adam, which divides by the size of the gradient, amplify that.
    assert curve(strategy, tmp_path / "run") == pytest.approx(PINNED[strategy], rel=5e-3)
