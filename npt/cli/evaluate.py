"""`npt evaluate`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, check_partners, natural, print_json


def evaluate(flags: dict[str, Any]) -> int:
    """Measure how closely a student matches its teacher.

    The floor is the same model without attention in the converted layers.
    """
    task = begin(flags)
    import npt
    from npt.evaluation.table import print_fidelity

    check_partners(flags, {"max_new_tokens": "divergence_prompts"})
    student = task.load()
    model, tokenizer = student.model, student.tokenizer
    samples, heldout = task.heldout_samples(model, tokenizer)
    greedy = {key: flags[key] for key in ("divergence_prompts", "max_new_tokens") if flags[key]}
    fidelity = npt.evaluate(model, tokenizer, samples, batch_size=flags["batch_size"], **greedy)
    if flags["json"]:
        print_json({**fidelity.as_dict(), "heldout": heldout, **student.other})
    else:
        print_fidelity(fidelity, task.console, "held-out" if heldout else "TRAINING")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "eval_samples", "samples to evaluate on", 64)
    add_number(parser, "batch_size", "samples per batch", 8)
    text = "continue this many samples greedily and report where student and teacher diverge"
    add_number(parser, "divergence_prompts", text, 0, natural)
    add_number(parser, "max_new_tokens", "tokens per continuation (default: 64)")
    add_student(parser, data=True)
