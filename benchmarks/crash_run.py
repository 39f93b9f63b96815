"""The run that benchmarks/crash.py makes over and over, in a process of its own.

python benchmarks/crash_run.py FOLDER STEPS
"""

from __future__ import annotations

import io
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import npt
from npt.runs.run_folder import RunFolder

MODEL = "tiny"


def work(folder: Path, steps: int, timed: bool = False) -> None:
    """Resume the run, and end this process with its exit status.

    Args:
        folder: of the run.
        steps: that it has.
        timed: write to `times.json` next to its folder how long the run and its saves took.
    """
    model, tokenizer = npt.load_base(MODEL, quantization="nf4", device="cpu")
    alive(folder).touch()
    sys.exit(
        _timed(model, tokenizer, folder, steps) if timed else run(model, tokenizer, folder, steps)
    )


def alive(folder: Path) -> Path:
    """Return the file that a process makes next to the folder when it begins."""
    return folder.with_suffix(".alive")


def run(model: Any, tokenizer: Any, folder: Path, steps: int) -> int:
    """Make the run and return its exit status."""
    npt.attach(model, npt.NPTConfig(rank=2, layers="6,7"))
    config = npt.TrainConfig(
        max_steps=steps,
        num_epochs=99,
        batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=4,
        log_steps=1,
        save_steps=1,
        save_total_limit=1,
        eval_steps=4,
        smoke_test=False,
        output_dir=str(folder),
        resume="auto",
    )
    data = npt.DataConfig(max_length=16, packing=True)
    console = Console(file=io.StringIO())
    trainer = npt.Trainer(
        model,
        tokenizer,
        records(30),
        config,
        data_config=data,
        eval_data=records(1, seed=1),
        console=console,
    )
    return trainer.train().exit_status


def _timed(model: Any, tokenizer: Any, folder: Path, steps: int) -> int:
    saving, original = 0.0, RunFolder.save_checkpoint

    def save(*arguments: Any) -> Path:
        nonlocal saving
        started = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            saving += time.perf_counter() - started

    RunFolder.save_checkpoint = save  # type: ignore[method-assign, assignment]
    started = time.perf_counter()
    status = run(model, tokenizer, folder, steps)
    times = {"all": time.perf_counter() - started, "saving": saving}
    (folder.parent / "times.json").write_text(json.dumps(times))
    return status


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return short records of token ids, one in ten with an id that is refused."""
    source = random.Random(seed)
    made = [[source.randrange(3, 2000) for _ in range(source.randint(4, 14))] for _ in range(count)]
    for ids in made[5::10]:
        ids[1] = 10**6
    return [{"id": f"{seed}-{number}", "input_ids": ids} for number, ids in enumerate(made)]


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
