"""`npt evaluate`."""

from __future__ import annotations

import argparse
import contextlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from npt.cli.arguments import (
    Task,
    add_number,
    add_student,
    begin,
    load_student,
    natural,
    print_json,
)
from npt.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "fp16")

NEEDS = {
    "lm_eval_tasks_path": "lm_eval",
    "lm_eval_limit": "lm_eval",
    "max_new_tokens": "divergence_prompts",
}
"""Flags that mean nothing without another."""


def evaluate(given: dict[str, Any]) -> int:
    """Measure a saved adapter against its teacher and its floor."""
    task = begin(given)
    given, data, console = task.given, task.data, task.console
    import npt
    from npt.data.chat import fix_date
    from npt.data.source import open_source, own_heldout
    from npt.evaluation.harness import find_tasks, lm_eval
    from npt.evaluation.heldout import evaluation_samples
    from npt.evaluation.table import print_fidelity, print_scores

    for flag, other in NEEDS.items():
        if given[flag] is not None and not given[other]:
            raise ConfigError(
                f"--{flag} is {given[flag]}, which means nothing without --{other}; add it or drop"
                " this"
            )
    tasks = given["lm_eval"]
    if tasks is not None:
        tasks = [name for name in tasks.split(",") if name.strip()]
        find_tasks(tasks, given["lm_eval_tasks_path"])
    heldout_data, begun = own_heldout(data), _date_of_run(given["adapter"].folder)

    def samples_of(model: Any, tokenizer: Any) -> tuple[list[Any], bool]:
        if begun is not None:
            fix_date(tokenizer, begun)
        records = heldout_data if heldout_data is not None else open_source(data)
        vocabulary = model.config.vocab_size
        return evaluation_samples(
            records, tokenizer, data, given["eval_samples"], vocabulary, heldout_data
        )

    reference, size, further = None, given["batch_size"], dict[str, Any]()
    if given["attribution"] is not None:
        reference = _reference(task, samples_of)
    student = load_student(task.base, given, console)
    model, tokenizer = student.model, student.tokenizer
    samples, heldout = samples_of(model, tokenizer)
    greedy = {key: given[key] for key in ("divergence_prompts", "max_new_tokens") if given[key]}
    fidelity = npt.evaluate(
        model, tokenizer, samples, batch_size=size, unquantized=reference, **greedy
    )
    if tasks is not None:
        path, most = given["lm_eval_tasks_path"], given["lm_eval_limit"]
        further["lm_eval"] = lm_eval(
            model, tokenizer, tasks, tasks_path=path, limit=most, batch_size=size
        )
    if given["json"]:
        print_json({**fidelity.as_dict(), **further, "heldout": heldout, **student.other})
        return 0
    print_fidelity(fidelity, console, "held-out" if heldout else "TRAINING")
    if "lm_eval" in further:
        print_scores(further["lm_eval"], console)
    return 0


def _date_of_run(adapter: Path) -> str | None:
    """Return the date that a chat template wrote in the run whose folder the adapter is in: in an
    evaluation on another day it is to see the same tokens. None if there is no such record."""
    for folder in (adapter, *adapter.resolve().parents[:3]):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            date = json.loads((folder / "run.json").read_text(encoding="utf-8"))["date"]
            return datetime.fromisoformat(date).isoformat()
    return None


def _reference(task: Task, samples_of: Any) -> Any:
    """Run the unquantised base on the samples; return the outputs that are kept. It is freed."""
    from npt.base.load import load_base, read_config
    from npt.base.precision import set_matmul_precision
    from npt.evaluation.attribution import reference_outputs

    base, precision = task.base, task.given["attribution"]
    if getattr(read_config(base.model_name), "quantization_config", None) is not None:
        raise ConfigError(
            f"--attribution needs the unquantised original, and {base.model_name} is stored in 4"
            " bit; name its original"
        )
    if base.quantization is None:
        raise ConfigError(
            "--attribution compares a 4-bit base with its original; add --use_quantization, or"
            " drop it"
        )
    attention = base.attn_implementation
    model, tokenizer = load_base(
        base.model_name, quantization=None, dtype=precision, attn_implementation=attention
    )
    set_matmul_precision(base.matmul_precision, model)
    samples, _ = samples_of(model, tokenizer)
    task.console.say(f"attribution: the unquantised base ({precision}) runs first")
    return reference_outputs(model, samples, batch_size=task.given["batch_size"])


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "eval_samples", "samples to evaluate on", 64)
    add_number(parser, "batch_size", "samples at a time", 8)
    text = "samples whose beginnings student and teacher continue greedily, to see where they part"
    add_number(parser, "divergence_prompts", text, 0, natural)
    add_number(parser, "max_new_tokens", "of such a continuation (default: 64)")
    text = (
        "run the base unquantised first (fp32, bf16 or fp16; default fp32), and say what"
        " quantisation costs and what the conversion"
    )
    parser.add_argument(
        "--attribution", nargs="?", const="fp32", choices=PRECISIONS, metavar="PRECISION", help=text
    )
    text = "tasks of lm-evaluation-harness, with commas between them (extra: eval)"
    parser.add_argument("--lm_eval", metavar="TASKS", help=text)
    text = "folder of YAML tasks; only these are known then"
    parser.add_argument("--lm_eval_tasks_path", metavar="DIR", help=text)
    add_number(parser, "lm_eval_limit", "documents of a task, at most")
    add_student(parser, data=True)
