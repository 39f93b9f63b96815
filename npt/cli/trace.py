"""`npt trace`."""

from __future__ import annotations

import argparse
import copy
import math
from itertools import islice
from pathlib import Path
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, check_partners, limit, tell
from npt.config import STRATEGIES
from npt.errors import ConfigError
from npt.files import check_file


def trace(flags: dict[str, Any]) -> int:
    """Find the first operation that produces a NaN or Inf.

    Trace the base's forward pass or, with --adapter, a training step. With
    --against, find the first operation that differs from a reference.
    """
    check_partners(flags, dict.fromkeys(("strategy", "any_base"), "adapter"))
    task = begin(flags)
    training = task.look.training
    trains = flags["adapter"] is not None
    if trains:
        task.data.check_objective(training)
    against = flags["against"]
    if against is not None and (flags["batches"] > 1 or math.isfinite(flags["limit"])):
        raise ConfigError("--against compares a single batch: remove --batches and --limit")
    # a reference file that does not exist yet is written
    written = against not in (None, "cpu", "cuda") and not Path(against).exists()
    if written:
        check_file(Path(against), "--against")
    import torch

    import npt
    from npt.batch import batches
    from npt.data.encoding import no_sample
    from npt.data.samples import Samples
    from npt.data.source import open_source
    from npt.device import check_card
    from npt.distill.step import forward_backward
    from npt.distill.strategies import drive

    student = task.load()
    step = None
    traced = f"training step, {training.strategy}" if trains else "forward pass of the base"
    # copied, since quantising on the other device would change a few 4-bit codes
    reference = against
    if against in ("cpu", "cuda"):
        check_card(torch.device(against))
        reference = copy.deepcopy(student.model).to(against)
    data = open_source(task.data)
    samples = Samples(data, student.tokenizer, task.data, seed=0, hold_out=False)
    verdict = None
    count = 0
    for batch in islice(batches(samples.epoch(0), flags["batch_size"]), flags["batches"]):
        if trains:
            # with arguments, so that a reference runs its own step
            def step(model: Any = student.model, batch: Any = batch) -> Any:
                return forward_backward(model, drive, batch, training)
        else:
            batch = batch.taught

        verdict = npt.trace(student.model, batch, run=step, limit=flags["limit"], against=reference)
        count += 1
        if verdict is not None:
            break
    if not count:
        raise no_sample(samples.counts)
    traced = traced if against is None else f"{traced} compared with {against}"
    if verdict is not None:
        lines = [f"batch {count - 1} ({traced}):", *str(verdict).split("\n")]
    elif written:
        lines = [f"wrote the reference {against}: after a change, rerun the command to compare"]
    elif against is not None:
        lines = [f"no difference beyond rounding ({traced})"]
    else:
        lines = [f"no fault in {count} batch{'es' if count > 1 else ''} ({traced})"]
    figures = {
        "fault": verdict and verdict.as_dict(),
        "batches": count,
        "traced": traced,
        **student.other,
    }
    tell(flags, figures, *lines)
    return 0 if verdict is None else 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="strategy of the training step (default: that of the adapter's run)",
    )
    add_number(parser, "batches", "maximum number of batches to trace", 1)
    add_number(parser, "batch_size", "samples per batch", 4)
    add_number(parser, "limit", "also report absolute values above this", math.inf, limit)
    parser.add_argument(
        "--against",
        metavar="REFERENCE",
        help="compare with the same weights on cpu or cuda, or with a file (written if new)",
    )
    help = "trace a training step of a saved adapter (default: the base's forward pass)"
    add_student(parser, data=True, required=False, help=help)
