"""`npt trace`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from npt.cli.arguments import (
    add_adapter,
    add_any_base,
    base_config,
    limit,
    load,
    load_adapter,
    positive,
    with_adapter,
)
from npt.config import STRATEGIES, BaseConfig, DataConfig, TrainConfig
from npt.console import make_console
from npt.errors import ConfigError
from npt.flags import add_settings, build


def trace(given: dict[str, Any]) -> int:
    """Look for the operation that first makes a bad number, in the model's own pass or in an
    adapter's training step.
    """
    if given["strategy"] is not None and given["adapter"] is None:
        raise ConfigError(
            f"--strategy {given['strategy']} is of an adapter's training step; give its --adapter,"
            " or drop --strategy"
        )
    if given["any_base"] and given["adapter"] is None:
        raise ConfigError("--any_base means nothing without --adapter; add it, or drop --any_base")
    given = with_adapter(given)
    base, data = base_config(given), build(DataConfig, given)
    training = TrainConfig(strategy=given["strategy"] or TrainConfig.strategy)
    import itertools
    from functools import partial

    import npt
    from npt.data.batch import batches, pad_id_of
    from npt.data.report import no_sample
    from npt.data.samples import Samples
    from npt.data.source import check_source, open_source
    from npt.distill.strategies import drive
    from npt.files import to_json
    from npt.step.train_step import forward_backward

    console = make_console(stderr=given["json"])
    check_source(data)
    model, tokenizer = load(base, console)
    other: dict[str, str] = {}
    if given["adapter"] is not None:
        _, other = load_adapter(model, given, console)
    samples = Samples(open_source(data), tokenizer, data, seed=0, hold_out=False)
    made = batches(samples.epoch(0), given["batch_size"], pad_id_of(tokenizer), data.padding_side)
    verdict, seen = None, 0
    for batch in itertools.islice(made, given["batches"]):
        run = (
            None
            if given["adapter"] is None
            else partial(forward_backward, model, drive, batch, training)
        )
        verdict, seen = npt.trace(model, batch, run=run, limit=given["limit"]), seen + 1
        if verdict is not None:
            break
    if not seen:
        raise no_sample(samples.counts)
    what = (
        "the model's own pass"
        if given["adapter"] is None
        else f"a training step ({training.strategy})"
    )
    if given["json"]:
        print(
            to_json(
                {
                    "fault": None if verdict is None else verdict.as_dict(),
                    "batches": seen,
                    "traced": what,
                    **other,
                },
                indent=2,
            )
        )
    elif verdict is None:
        console.print(f"no fault in {seen} {'batch' if seen == 1 else 'batches'} of {what}")
    else:
        console.print(
            f"batch {seen - 1} of {what}:\n{verdict}", markup=False, highlight=False, soft_wrap=True
        )
    return 0 if verdict is None else 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 no fault, 1 a fault was found, 2 wrong arguments or data, 5 adapter"
        " unusable."
    )
    add_adapter(
        parser,
        required=False,
        help="trace the training step of a saved adapter (default: the base's own pass)",
    )
    add_any_base(parser)
    parser.add_argument(
        "--strategy", choices=STRATEGIES, help="of the adapter's training step (default: local)"
    )
    parser.add_argument(
        "--batches",
        type=positive,
        default=1,
        metavar="INT",
        help="batches to look at until a fault (default: 1)",
    )
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=4,
        metavar="INT",
        help="samples at a time (default: 4)",
    )
    parser.add_argument(
        "--limit",
        type=limit,
        default=math.inf,
        metavar="FLOAT",
        help="numbers beyond this size are faults (default: inf)",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    add_settings(
        parser,
        BaseConfig,
        DataConfig,
        leave_out=(
            "num_samples",
            "dataset_mix",
            "replay_dataset",
            "replay_ratio",
            "teacher_precision",
            "shard_base",
        ),
    )
