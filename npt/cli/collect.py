"""`npt collect`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from npt.cli.arguments import (
    add_adapter,
    add_any_base,
    base_config,
    jsonl,
    load,
    load_adapter,
    natural,
    positive,
    with_adapter,
)
from npt.config import SEED_MAX, BaseConfig, DataConfig
from npt.console import make_console
from npt.errors import ConfigError, DataError
from npt.flags import add_settings, build


def collect(given: dict[str, Any]) -> int:
    """Write the prompts at which a student's greedy token leaves its teacher's, as data to train
    on.
    """
    given = with_adapter(given)
    base, data = base_config(given), build(DataConfig, given)
    if given["seed"] > SEED_MAX:
        raise ConfigError(f"--seed is {given['seed']}; it must be at most {SEED_MAX}")
    from npt.adapters.fit import check_length
    from npt.base.load import read_config
    from npt.data.source import BUILTIN, check_source, open_source
    from npt.files import to_json
    from npt.tools.collect.collect import collect as run
    from npt.tools.collect.collect import prompt_length
    from npt.tools.collect.parts import check_output

    console = make_console(stderr=given["json"])
    check_output(Path(given["output"]))
    prompt_length(data, given["max_new_tokens"])
    check_source(data)
    check_length(data.max_length, read_config(base.model_name))
    if data.dataset_name == BUILTIN and data.dataset_split != "train":
        raise DataError(
            f"--dataset_split {data.dataset_split} of the built-in text is what runs are evaluated"
            " on; collect from 'train'"
        )
    model, tokenizer = load(base, console)
    identity, other = load_adapter(model, given, console)
    how = {name: given[name] for name in ("max_new_tokens", "num_prompts", "batch_size", "seed")}
    with console.status("collecting") as status:

        def report(progress: Any) -> None:
            status.update(f"{progress.prompts:,} prompts, {progress.disagreements:,} disagreements")

        result = run(
            model,
            tokenizer,
            open_source(data),
            given["output"],
            data_config=data,
            base=identity,
            report=report,
            **how,
        )
    figures = {**result.as_dict(), **other}
    if given["json"]:
        print(to_json(figures, indent=2))
    else:
        before = f", {result.resumed:,} of them earlier" if result.resumed else ""
        console.print(
            f"{figures['prompts']:,} prompts{before}: the student leaves its teacher in"
            f" {figures['disagreements']:,}; over {figures['tokens']:,} tokens top-1"
            f" {figures['top1']:.1%}, KL {figures['kl']:.4f} nats, acceptance"
            f" {figures['acceptance']:.1%}; written to {figures['output']}",
            soft_wrap=True,
        )
    return result.exit_status


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The same command again goes on where an earlier one ended. Exit status: 0 done, 2 wrong"
        " arguments, data or output, 5 adapter unusable, 128+n after finishing the batch on"
        " signal n."
    )
    add_adapter(parser)
    add_any_base(parser)
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE.jsonl",
        type=jsonl,
        help="file that is written, or gone on with",
    )
    parser.add_argument(
        "--max_new_tokens",
        type=positive,
        default=64,
        metavar="INT",
        help="tokens of a completion (default: 64)",
    )
    parser.add_argument(
        "--num_prompts",
        type=positive,
        default=256,
        metavar="INT",
        help="prompts in all (default: 256)",
    )
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=8,
        metavar="INT",
        help="prompts at a time (default: 8)",
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="INT",
        help="of the order of prompts (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    of_training = (
        "num_samples",
        "packing",
        "padding_side",
        "dataset_mix",
        "replay_dataset",
        "replay_ratio",
        "completion_column",
    )
    add_settings(
        parser, BaseConfig, DataConfig, leave_out=(*of_training, "teacher_precision", "shard_base")
    )
