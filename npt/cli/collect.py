"""`npt collect`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, natural, tell
from npt.errors import DataError
from npt.files import check_file


def collect(flags: dict[str, Any]) -> int:
    """Collect prompts where student and teacher disagree.

    The file holds each prompt with the teacher's continuation, as training data.
    """
    from npt.data.source import OWN_HELDOUT, open_source
    from npt.evaluation.formatting import FIGURES
    from npt.tools.collect.collect import collect as run

    task = begin(flags)
    data = task.data
    if data.dataset_name in OWN_HELDOUT and data.dataset_split != "train":
        raise DataError(
            f"--dataset_split {data.dataset_split} of the built-in text is reserved for evaluation:"
            " use --dataset_split train"
        )
    check_file(Path(flags["output"]), "--output", parents=True)
    student = task.load()
    names = ("max_new_tokens", "num_prompts", "batch_size", "seed")
    with task.console.status("collecting") as status:
        result = run(
            student.model,
            student.tokenizer,
            open_source(data),
            flags["output"],
            data_config=data,
            base=student.identity,
            report=lambda count: status.update(f"{count:,} prompts"),
            **{name: flags[name] for name in names},
        )
    figures = result.as_dict()
    tell(
        flags,
        {**figures, **student.other},
        f"student and teacher disagree in {figures['disagreements']:,} of {figures['prompts']:,}"
        f" prompts; over {figures['tokens']:,} tokens top-1 {figures['top1']:.1%}, KL"
        f" {FIGURES['kl'].write(figures['kl'])} nats, acceptance {figures['acceptance']:.1%};"
        f" written to {figures['output']}",
    )
    return result.exit_status


def _jsonl(text: str) -> str:
    if not text.endswith(".jsonl"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .jsonl")
    return text


def add_flags(parser: argparse.ArgumentParser) -> None:
    where = {"metavar": "FILE.jsonl", "help": "file to write"}
    parser.add_argument("--output", required=True, type=_jsonl, **where)
    add_number(parser, "max_new_tokens", "tokens per completion", 64)
    add_number(parser, "num_prompts", "prompts to compare", 256)
    add_number(parser, "batch_size", "prompts per batch", 8)
    add_number(parser, "seed", "seed of the order of prompts", 0, natural)
    add_student(parser, data=True, leave_out=("packing", "completion_column"))
