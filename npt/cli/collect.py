"""`npt collect`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, natural, tell
from npt.errors import ConfigError, DataError
from npt.files import check_file


def collect(flags: dict[str, Any]) -> int:
    """Collect prompts where student and teacher disagree.

    The file holds each prompt with the teacher's continuation, as training data, and with the
    student's. After an interruption the same command goes on.
    """
    from npt.data.source import OWN_HELDOUT, open_source
    from npt.figures import FIGURES
    from npt.tools.collect.collect import collect as run
    from npt.tools.collect.output import check_output
    from npt.tools.collect.prompts import written_prompts

    # what can be checked before the base is loaded
    prompts = flags["prompt"]
    output = Path(flags["output"])
    check_file(output, "--output", parents=True)
    check_output(output)
    if prompts is not None:
        _check_prompts(flags)
    task = begin(flags)
    data = task.data
    if data.dataset_name in OWN_HELDOUT and data.dataset_split != "train":
        raise DataError(
            f"--dataset_split {data.dataset_split} of the built-in text is reserved for evaluation:"
            " use --dataset_split train"
        )
    student = task.load()
    if prompts is None:
        records = open_source(data)
    else:
        # the run's column of contexts is not one of --prompt
        data = replace(data, context_column=None)
        records = written_prompts(prompts, student.tokenizer)
    names = ("max_new_tokens", "num_prompts", "batch_size", "seed")
    with task.console.status("collecting") as status:
        result = run(
            student.model,
            student.tokenizer,
            records,
            flags["output"],
            data_config=data,
            base=student.identity,
            report=lambda count: status.update(f"{count:,} prompts"),
            **{name: flags[name] for name in names},
        )
    figures = result.as_dict()
    earlier = f" ({result.resumed:,} compared earlier)" if result.resumed else ""
    stopped = []
    if result.signal is not None:
        stopped = [f"stopped by signal {result.signal}: repeat the command to go on"]
    tell(
        flags,
        {**figures, **student.other},
        f"student and teacher disagree in {figures['disagreements']:,} of {figures['prompts']:,}"
        f" prompts{earlier}; over {figures['tokens']:,} tokens top-1 {figures['top1']:.1%}, KL"
        f" {FIGURES['kl'].write(figures['kl'])} nats, acceptance {figures['acceptance']:.1%};"
        f" written to {figures['output']}",
        *stopped,
    )
    return result.exit_status


def _check_prompts(flags: dict[str, Any]) -> None:
    """Refuse an empty --prompt, and flags of a dataset next to one."""
    if not all(text.strip() for text in flags["prompt"]):
        raise ConfigError("--prompt is empty; write a text to continue")
    for name in ("dataset_name", "dataset_config", "dataset_split", "prompt_column", "text_column"):
        if name in flags:
            raise ConfigError(
                f"--{name} {flags[name]} has no effect with --prompt: remove one of the two"
            )


def _jsonl(text: str) -> str:
    if not text.endswith(".jsonl"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .jsonl")
    return text


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "file to write, or to continue"
    add("--output", required=True, type=_jsonl, metavar="FILE.jsonl", help=text)
    text = (
        "prompt to compare, or the user's message to a chat model; repeat it for more (default: the"
        " prompts or texts of --dataset_name)"
    )
    add("--prompt", action="append", metavar="TEXT", help=text)
    add_number(parser, "max_new_tokens", "tokens per completion", 64)
    add_number(parser, "num_prompts", "prompts to compare", 256)
    add_number(parser, "batch_size", "prompts per batch", 8)
    add_number(parser, "seed", "seed of the order of prompts", 0, natural)
    add_student(parser, data=True, leave_out=("packing", "completion_column", "context_column"))
