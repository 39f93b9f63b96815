"""`npt evaluate`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, check_partners, natural, print_json


def evaluate(flags: dict[str, Any]) -> int:
    """Measure how closely a student matches its teacher.

    It measures on the held-out text of the adapter's run, unless --dataset_name names
    another. The floor is the student without context.
    """
    task = begin(flags)
    import npt
    from npt.evaluation.table import print_fidelity

    check_partners(flags, {"max_new_tokens": "divergence_prompts"})
    student = task.load()
    heldout = task.heldout(student.model, student.tokenizer)
    names = ("batch_size", "divergence_prompts", "max_new_tokens")
    given = {name: flags[name] for name in names if flags[name]}
    fidelity = npt.evaluate(student.model, student.tokenizer, heldout.samples, **given)
    if flags["json"]:
        about = {"heldout": heldout.held_out, "data": heldout.data}
        print_json({**fidelity.as_dict(), **about, **student.other})
    else:
        print_fidelity(fidelity, task.console, str(heldout))
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "eval_samples", "samples to evaluate on (default: as many as the run)")
    add_number(parser, "batch_size", "samples per batch", 8)
    text = "continue this many samples greedily and report where student and teacher diverge"
    add_number(parser, "divergence_prompts", text, 0, natural)
    add_number(parser, "max_new_tokens", "tokens per continuation (default: 64)")
    add_student(parser, data=True)
