"""`npt trace`."""

from __future__ import annotations

import argparse
import math
from functools import partial
from itertools import islice
from typing import Any

from npt.cli.arguments import (
    add_number,
    add_student,
    limit,
    load,
    load_adapter,
    print_json,
    with_base,
)
from npt.config import STRATEGIES, DataConfig, TrainConfig
from npt.console import make_console
from npt.errors import ConfigError
from npt.flags import build


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
    given, base = with_base(given)
    data = build(DataConfig, given)
    import npt
    from npt.data.batch import batches
    from npt.data.report import no_sample
    from npt.data.samples import Samples
    from npt.data.source import check_source, open_source
    from npt.distill.step import forward_backward
    from npt.distill.strategies import drive

    console = make_console(stderr=given["json"])
    check_source(data)
    model, tokenizer = load(base, console, adapter=given["adapter"])
    run, traced = None, "the model's own pass"
    other: dict[str, str] = {}
    if given["adapter"] is not None:
        _, other = load_adapter(model, given, console)
        training = TrainConfig(strategy=given["strategy"] or TrainConfig.strategy)
        run = partial(forward_backward, model, drive)
        traced = f"a training step ({training.strategy})"
    samples = Samples(open_source(data), tokenizer, data, seed=0, hold_out=False)
    made = batches(samples.epoch(0), given["batch_size"])
    verdict, seen = None, 0
    for batch in islice(made, given["batches"]):
        step = None if run is None else partial(run, batch, training)
        verdict, seen = npt.trace(model, batch, run=step, limit=given["limit"]), seen + 1
        if verdict is not None:
            break
    if not seen:
        raise no_sample(samples.counts)
    if given["json"]:
        fault = None if verdict is None else verdict.as_dict()
        print_json({"fault": fault, "batches": seen, "traced": traced, **other})
    elif verdict is None:
        console.say(f"no fault in {seen} {'batch' if seen == 1 else 'batches'} of {traced}")
    else:
        console.say(f"batch {seen - 1} of {traced}:", *str(verdict).split("\n"))
    return 0 if verdict is None else 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 no fault, 1 a fault was found, 2 wrong arguments or data, 5 adapter"
        " unusable."
    )
    parser.add_argument(
        "--strategy", choices=STRATEGIES, help="of the adapter's training step (default: local)"
    )
    add_number(parser, "batches", "batches to look at until a fault", 1)
    add_number(parser, "batch_size", "samples at a time", 4)
    add_number(parser, "limit", "numbers beyond this size are faults", math.inf, limit)
    add_student(
        parser,
        data=True,
        required=False,
        help="trace the training step of a saved adapter (default: the base's own pass)",
    )
