"""`npt evaluate`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, check_partners, natural, print_json


def evaluate(flags: dict[str, Any]) -> int:
    """Measure a saved adapter against its teacher and its floor."""
    task = begin(flags)
    import npt
    from npt.evaluation.harness import find_tasks, lm_eval
    from npt.evaluation.table import print_fidelity, print_scores

    partners = dict.fromkeys(("lm_eval_tasks_path", "lm_eval_limit"), "lm_eval")
    check_partners(flags, partners | {"max_new_tokens": "divergence_prompts"})
    names, path, size = flags["lm_eval"], flags["lm_eval_tasks_path"], flags["batch_size"]
    if names is not None:
        names = [name for name in names.split(",") if name.strip()]
        find_tasks(names, path)
    student = task.load()
    model, tokenizer = student.model, student.tokenizer
    samples, heldout = task.heldout_samples(model, tokenizer)
    greedy = {key: flags[key] for key in ("divergence_prompts", "max_new_tokens") if flags[key]}
    fidelity = npt.evaluate(model, tokenizer, samples, batch_size=size, **greedy)
    scores = {}
    if names is not None:
        limit = flags["lm_eval_limit"]
        scores["lm_eval"] = lm_eval(
            model, tokenizer, names, tasks_path=path, limit=limit, batch_size=size
        )
    if flags["json"]:
        print_json({**fidelity.as_dict(), **scores, "heldout": heldout, **student.other})
        return 0
    print_fidelity(fidelity, task.console, "held-out" if heldout else "TRAINING")
    if scores:
        print_scores(scores["lm_eval"], task.console)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "eval_samples", "samples to evaluate on", 64)
    add_number(parser, "batch_size", "samples at a time", 8)
    text = "samples whose beginnings student and teacher continue greedily, to see where they part"
    add_number(parser, "divergence_prompts", text, 0, natural)
    add_number(parser, "max_new_tokens", "of such a continuation (default: 64)")
    text = "tasks of lm-evaluation-harness, with commas between them (extra: eval)"
    parser.add_argument("--lm_eval", metavar="TASKS", help=text)
    text = "folder of YAML tasks; only these are known then"
    parser.add_argument("--lm_eval_tasks_path", metavar="DIR", help=text)
    add_number(parser, "lm_eval_limit", "documents of a task, at most")
    add_student(parser, data=True)
