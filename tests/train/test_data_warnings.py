"""Before its first step, a run says which columns it does not use, and warns of copies."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

import npt


def run(folder: Path, records: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """What a run of one step prints, and its warnings."""
    model, tokenizer = npt.load_base("tiny", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=2, layers="7", init="random"))
    config = npt.TrainConfig(
        output_dir=str(folder), max_steps=1, batch_size=1, eval_samples=1, smoke_test=False
    )
    console = Console(file=io.StringIO(), width=400)
    npt.Trainer(model, tokenizer, records, config, console=console, report=False).train()
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    return console.file.getvalue(), warnings


def test_copies_and_columns_not_used_are_said_before_the_first_step(tmp_path) -> None:
    records = [{"prompt": "q", "completion": "an answer", "weight": 1}] * 40
    printed, warnings = run(tmp_path, records)
    columns = "data: columns not used: 'weight' in 40 records (of the first 40)"
    assert 0 <= printed.index(columns) < printed.index("step 1/1")
    assert printed.count("columns not used") == 1
    copies, heldout = (line for line in warnings if line.startswith("data: "))
    assert copies.startswith("data: 97.5% of the samples are copies of others")
    assert heldout.startswith("data: no sample is held out")


def test_data_without_copies_have_no_warning(tmp_path) -> None:
    printed, warnings = run(tmp_path, [{"text": f"text number {i}"} for i in range(200)])
    assert not [line for line in warnings if line.startswith("data: ")]
    assert "columns not used" not in printed
