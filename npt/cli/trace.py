"""`npt trace`."""

from __future__ import annotations

import argparse
import math
from functools import partial
from itertools import islice
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, limit, load, load_adapter, tell
from npt.config import STRATEGIES, TrainConfig
from npt.errors import ConfigError


def trace(given: dict[str, Any]) -> int:
    """Look for the operation that first makes a bad number, in the model's own pass or in an
    adapter's training step.
    """
    for flag in ("strategy", "any_base"):
        if given[flag] and given["adapter"] is None:
            shown = f"--{flag} {given[flag]}" if flag == "strategy" else f"--{flag}"
            raise ConfigError(
                f"{shown} has no effect without --adapter: add --adapter, or remove --{flag}"
            )
    given, base, data, console = begin(given)
    import npt
    from npt.data.batch import batches
    from npt.data.encoding import no_sample
    from npt.data.samples import Samples
    from npt.data.source import open_source
    from npt.distill.step import forward_backward
    from npt.distill.strategies import drive

    model, tokenizer = load(base, console, adapter=given["adapter"])
    run, traced = None, "the model's own pass"
    other: dict[str, str] = {}
    if given["adapter"] is not None:
        _, other = load_adapter(model, given, console)
        training = TrainConfig(strategy=given["strategy"] or TrainConfig.strategy)
        run = partial(forward_backward, model, drive)
        traced = f"a training step ({training.strategy})"
    samples = Samples(open_source(data), tokenizer, data, seed=0, hold_out=False)
    verdict, count = None, 0
    for batch in islice(batches(samples.epoch(0), given["batch_size"]), given["batches"]):
        step = None if run is None else partial(run, batch, training)
        verdict, count = npt.trace(model, batch, run=step, limit=given["limit"]), count + 1
        if verdict is not None:
            break
    if not count:
        raise no_sample(samples.counts)
    lines = [f"no fault in {count} {'batch' if count == 1 else 'batches'} of {traced}"]
    if verdict is not None:
        lines = [f"batch {count - 1} of {traced}:", *str(verdict).split("\n")]
    fault = None if verdict is None else verdict.as_dict()
    tell(given, {"fault": fault, "batches": count, "traced": traced, **other}, *lines)
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
    help = "trace the training step of a saved adapter (default: the base's own pass)"
    add_student(parser, data=True, required=False, help=help)
