"""The run that benchmarks/crash.py kills and resumes, in its own process."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import npt
from npt.console import silent_console

MODEL = "tiny"


def work(folder: Path, steps: int) -> None:
    """Resume the run and exit with its status."""
    model, tokenizer = npt.load_base(MODEL, quantization="nf4", device="cpu")
    alive(folder).touch()
    sys.exit(run(model, tokenizer, folder, steps))


def alive(folder: Path) -> Path:
    """Return the file that a process creates next to the folder once the model is loaded."""
    return folder.with_suffix(".alive")


def run(model: Any, tokenizer: Any, folder: Path, steps: int) -> int:
    """Train and return the exit status."""
    npt.attach(model, npt.NPTConfig(rank=2, layers="6,7"))
    saving = {"save_steps": 1, "save_total_limit": 1, "eval_steps": 4, "log_steps": 1}
    length = {"max_steps": steps, "num_epochs": 99, "warmup_steps": 4, "batch_size": 1}
    given: dict[str, Any] = {**saving, **length, "gradient_accumulation_steps": 2}
    given |= {"output_dir": str(folder), "resume": "auto", "learning_rate": 1e-2}
    config = npt.TrainConfig(smoke_test=False, **given)
    data = npt.DataConfig(max_length=16, packing=True)
    rest: dict[str, Any] = {"eval_data": records(1, seed=1), "console": silent_console()}
    trainer = npt.Trainer(model, tokenizer, records(30), config, data_config=data, **rest)
    return trainer.train().exit_status


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return short records of token ids; one in ten has an id outside the vocabulary."""
    source = random.Random(seed)
    made = [[source.randrange(3, 2000) for _ in range(source.randint(4, 14))] for _ in range(count)]
    for ids in made[5::10]:
        ids[1] = 10**6
    return [{"id": f"{seed}-{number}", "input_ids": ids} for number, ids in enumerate(made)]
