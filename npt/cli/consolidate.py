"""`npt consolidate`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, limit, tell
from npt.errors import ConfigError, DataError, first_line
from npt.files import check_folder

LEAST_GAIN = 0.1
"""Nats by which an update must raise the fact's log-probability: less changes no answer."""


def consolidate(flags: dict[str, Any]) -> int:
    """Write a fact permanently into a student.

    Turn one token's modulation into an update of the weights; report its effects.
    """
    task = begin(flags)
    from safetensors import SafetensorError

    import npt
    from npt.adapters.consolidate import update_from
    from npt.adapters.files.adapter_files import WEIGHTS_NAME, adapter_hash, check_replaceable
    from npt.adapters.token_modulation import modulation_of
    from npt.tools.editing.edit_metrics import Baseline, encode_fact, largest_alpha, print_retention

    output = Path(flags["output"])
    size = (task.flags["adapter"].folder / WEIGHTS_NAME).stat().st_size
    check_folder(output, "--output", size=size)
    check_replaceable(output)
    student = task.load()
    model, tokenizer = student.model, student.tokenizer
    fact = encode_fact(tokenizer, flags["text"], flags["context"])
    ids = fact.in_context if flags["context"] else fact.alone
    config = task.flags["adapter"].config
    # at the same cost, updates of down recall the most
    targets = ("down",) if "down" in config.targets else config.targets
    record = {name: flags[name] for name in ("text", "context")}
    record |= {"adapter_hash": adapter_hash(model), **student.other}
    modulation = modulation_of(model, ids, flags["token"])
    make = partial(update_from, modulation, targets=targets, record=record)
    max_alpha, max_kl, batch_size = flags["alpha"], flags["max_kl"], flags["batch_size"]
    make(max_alpha)  # raise errors before measuring
    heldout = task.heldout(model, tokenizer)
    samples = heldout.samples
    # one half chooses alpha, the other half measures it
    chosen_on, reported_on = samples[::2], samples[1::2]
    if not reported_on:
        raise DataError(
            f"{len(samples)} held-out sample is too few to choose alpha on one half and measure on"
            " the other: raise --eval_samples or add data"
        )
    with task.console.status("measuring"):
        baseline = Baseline(model, fact, chosen_on, batch_size)
        alpha = largest_alpha(model, baseline, make, max_alpha, max_kl)
        baseline = Baseline(model, fact, reported_on, batch_size)
        update = make(alpha)
        npt.consolidate(model, update)
        retention = baseline.against(model)
    gain = retention["recall"]["student"]["gain"]
    if not gain >= LEAST_GAIN:
        raise ConfigError(
            f"the update changes the student's log-probability of the fact by only {gain:+.3f} nats"
            f" at alpha {alpha:.3g}, so nothing was written: raise --alpha or --max_kl, or use a"
            " student that modulates gate, up or down more"
        )
    if not flags["json"]:
        print_retention(retention, task.console, str(heldout))
    try:
        npt.save_adapter(model, output, base=student.identity)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(
            f"--output {output} cannot be written: {why}; free disk space or choose"
            f" another place, and add --alpha {alpha:.9g} --max_kl inf to skip the search"
        ) from error
    updates = len(npt.consolidated(model))
    choice = {**update.record, "asked_alpha": max_alpha, "max_kl": max_kl, "updates": updates}
    bounded = f" (lowered from {max_alpha:g} by --max_kl {max_kl:g})" if alpha < max_alpha else ""
    tell(
        flags,
        {
            **choice,
            **retention,
            "heldout": heldout.held_out,
            "data": heldout.data,
            "output": flags["output"],
        },
        f"token {modulation.token} ({tokenizer.decode([modulation.token_id])!r}), layers"
        f" {update.record['layers']}, {', '.join(targets)}, alpha {alpha:.3g}{bounded}; wrote"
        f" update {updates} to {flags['output']}",
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", required=True, metavar="FACT", help="fact to write into the model")
    text = "text that precedes the fact (default: none)"
    add("--context", metavar="TEXT", default="", help=text)
    add_number(parser, "token", "token to use; negative counts from the end", -1, int)
    add_number(parser, "alpha", "maximum strength, above 0 and at most 1", 0.5, float)
    text = "lower alpha until held-out KL is at most this, in nats per token (inf: any)"
    add_number(parser, "max_kl", text, 0.01, limit)
    text = "folder to write the adapter and its update to"
    add("--output", required=True, metavar="FOLDER", help=text)
    add_number(parser, "eval_samples", "held-out samples (default: as many as the run)")
    add_number(parser, "batch_size", "samples per batch", 8)
    add_student(parser, data=True)
