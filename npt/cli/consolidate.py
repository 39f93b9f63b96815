"""`npt consolidate`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from npt.cli.arguments import (
    Student,
    add_number,
    add_student,
    add_switch,
    begin,
    limit,
    load_student,
    tell,
)
from npt.config import TARGETS, DataConfig
from npt.errors import ConfigError, DataError
from npt.files import check_room

_DEFAULTS: dict[str, Any] = {
    "text": None,
    "context": "",
    "token": -1,
    "alpha": 0.5,
    "max_kl": 0.01,
    "layers": None,
    "targets": None,
}
"""Flags of a new update with their defaults, which the parser does not know: --undo refuses those
that were given."""


def consolidate(given: dict[str, Any]) -> int:
    """Make what a text does to one token part of the model, and report what is recalled and what
    forgotten.
    """
    unused = [f"--{name}" for name in _DEFAULTS if given["undo"] and given[name] is not None]
    if unused:
        raise ConfigError(
            f"--undo takes the last update back and makes none, so {', '.join(unused)} mean"
            " nothing with it; drop them"
        )
    if given["text"] is None and not given["undo"]:
        raise ConfigError(
            "--text is missing: the fact that is to become part of the model (or --undo, to take"
            " the last one back)"
        )
    given = given | {name: value for name, value in _DEFAULTS.items() if given[name] is None}
    given, base, data, console = begin(given)
    student = load_student(base, given, console)
    if given["undo"]:
        return _undo(student, given)
    return _update(student, data, given, console)


def _undo(student: Student, given: dict[str, Any]) -> int:
    import npt

    (taken,) = npt.unconsolidate(student.model)
    npt.save_adapter(student.model, given["output"], base=student.identity)
    left, output = len(npt.consolidated(student.model)), given["output"]
    figures = {"undone": taken.record, "updates": left, "output": output, **student.other}
    tell(given, figures, f"took back {taken}; {left} updates are left in {output}")
    return 0


def _update(student: Student, data: DataConfig, given: dict[str, Any], console: Any) -> int:
    import npt
    from npt.adapters.consolidate import update_from
    from npt.adapters.converted import adapter_parameters
    from npt.adapters.files.adapter_files import adapter_hash, check_replaceable
    from npt.adapters.fit import resolve_layers
    from npt.adapters.token_modulation import modulation_of
    from npt.data.source import open_source, own_heldout
    from npt.evaluation.heldout import evaluation_samples
    from npt.tools.editing.edit_metrics import Baseline, encode_fact, largest_alpha, print_retention

    model, tokenizer, output = student.model, student.tokenizer, Path(given["output"])
    check_replaceable(output)
    check_room(output, sum(p.nbytes for p in adapter_parameters(model).values()))
    fact = encode_fact(tokenizer, given["text"], given["context"])
    ids = fact.in_context if given["context"] else fact.alone
    config = given["adapter"].config
    layers = resolve_layers(given["layers"] or config.layers, model.config.num_hidden_layers)
    # At the same cost the additions to the residual stream alone recall most.
    targets = ("down",) if "down" in config.targets else config.targets
    if given["targets"] is not None:
        targets = tuple(target.strip() for target in given["targets"].split(","))
    record = {name: given[name] for name in ("text", "context")}
    record |= {"adapter_hash": adapter_hash(model), **student.other}
    modulation = modulation_of(model, ids, given["token"])
    make = partial(update_from, modulation, layers=layers, targets=targets, record=record)
    max_alpha, max_kl, batch_size = given["alpha"], given["max_kl"], given["batch_size"]
    make(max_alpha)  # refuse what cannot work before measuring
    heldout_data = own_heldout(data)
    records = heldout_data if heldout_data is not None else open_source(data)
    samples, heldout = evaluation_samples(
        records, tokenizer, data, given["eval_samples"], model.config.vocab_size, heldout_data
    )
    # alpha is chosen on one half and reported on the other
    chosen_on, reported_on = samples[::2], samples[1::2]
    if not reported_on:
        raise DataError(
            f"{len(samples)} sample of held-out text is too few to choose alpha on one part and"
            " report on another; give more"
        )
    with console.status("measuring"):
        baseline = Baseline(model, fact, chosen_on, batch_size)
        alpha = largest_alpha(model, baseline, make, max_alpha, max_kl)
        baseline = Baseline(model, fact, reported_on, batch_size)
        update = make(alpha)
        npt.consolidate(model, update)
        retention = baseline.against(model)
    if not given["json"]:
        print_retention(retention, console, "held-out" if heldout else "TRAINING")
    npt.save_adapter(model, output, base=student.identity)
    updates = len(npt.consolidated(model))
    choice = {**update.record, "asked_alpha": max_alpha, "max_kl": max_kl, "updates": updates}
    bounded = f" ({max_alpha:g} was asked for: --max_kl {max_kl:g})" if alpha < max_alpha else ""
    tell(
        given,
        {**choice, **retention, "heldout": heldout, "output": given["output"]},
        f"token {modulation.token} ({tokenizer.decode([modulation.token_id])!r}), layers"
        f" {update.record['layers']}, {', '.join(targets)}, alpha {alpha:.3g}{bounded}; update"
        f" {updates} is in {given['output']}",
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 done, 2 wrong arguments or data, 5 adapter unusable."
    add = parser.add_argument
    add("--text", metavar="FACT", help="the fact")
    add("--context", metavar="TEXT", help="text read before the fact (default: nothing)")
    add_number(parser, "token", "whose modulation is taken (default: -1, the last)", kind=int)
    add_number(parser, "alpha", "strength, above 0 and at most 1 (default: 0.5)", kind=float)
    bound = (
        "held-out divergence that may come of it, nats per token; alpha is lowered to keep it"
        " (default: 0.01; inf: no bound)"
    )
    add_number(parser, "max_kl", bound, kind=limit)
    add("--layers", help="of the adapter's layers, those that are changed (default: all of them)")
    targets = (
        f"of the adapter's targets {','.join(TARGETS)}, those that are changed (default: down if it"
        " is one of them)"
    )
    add("--targets", help=targets)
    add_switch(parser, "undo", "take the adapter's last update back instead")
    output = "folder for the adapter together with the update"
    add("--output", required=True, metavar="FOLDER", help=output)
    add_number(parser, "eval_samples", "samples of held-out text", 64)
    add_number(parser, "batch_size", "samples at a time", 8)
    add_student(parser, data=True)
