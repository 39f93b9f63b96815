"""`npt consolidate`."""

from __future__ import annotations

import argparse
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
from npt.config import TARGETS, BaseConfig, DataConfig
from npt.console import make_console
from npt.errors import ConfigError, DataError
from npt.flags import add_settings, build

OF_AN_UPDATE: dict[str, Any] = {
    "text": None,
    "context": "",
    "token": -1,
    "alpha": 0.5,
    "max_kl": 0.01,
    "layers": None,
    "targets": None,
    "search": False,
}
"""Flags of an update that is made, and what they are where they are not given."""


def consolidate(given: dict[str, Any]) -> int:
    """Make what a text does to one token part of the model, and report what is recalled and what
    forgotten.
    """
    given = with_adapter(given)
    base, data = base_config(given), build(DataConfig, given)
    if given["undo"]:
        beside = [
            f"--{name}"
            for name in OF_AN_UPDATE
            if given[name] is not None and given[name] is not False
        ]
        if beside:
            raise ConfigError(
                f"--undo takes the last update back and makes none, so {', '.join(beside)} mean"
                " nothing beside it; drop them"
            )
    given = {
        name: OF_AN_UPDATE[name] if value is None and name in OF_AN_UPDATE else value
        for name, value in given.items()
    }
    if given["text"] is None and not given["undo"]:
        raise ConfigError(
            "--text is missing: the fact that is to become part of the model (or --undo, to take"
            " the last one back)"
        )
    from functools import partial

    import npt
    from npt.adapters.consolidate import update_from
    from npt.adapters.files.adapter_files import adapter_hash
    from npt.adapters.fit import resolve_layers
    from npt.adapters.token_modulation import as_row, modulation_of, token_index
    from npt.data.source import check_source, open_source, own_heldout
    from npt.evaluation.heldout import evaluation_samples
    from npt.files import to_json
    from npt.tools.editing.edit_metrics import (
        PROBE_SAMPLES,
        Before,
        Choice,
        encode_fact,
        largest_alpha,
        search,
    )
    from npt.tools.editing.edit_table import print_retention

    console = make_console(stderr=given["json"])
    check_source(data)
    model, tokenizer = load(base, console)
    identity, other = load_adapter(model, given, console)
    if given["undo"]:
        (taken,) = npt.unconsolidate(model)
        npt.save_adapter(model, given["output"], base=identity)
        left = len(npt.consolidated(model))
        if given["json"]:
            print(
                to_json(
                    {"undone": taken.record, "updates": left, "output": given["output"], **other},
                    indent=2,
                )
            )
        else:
            console.print(
                f"took back {taken}; {left} updates are left in {given['output']}", soft_wrap=True
            )
        return 0

    fact = encode_fact(tokenizer, given["text"], given["context"])
    ids = fact.in_context if given["context"] else fact.alone
    token = token_index(as_row(model, list(ids)), given["token"])
    config = given["adapter"].config
    have = resolve_layers(config.layers, model.config.num_hidden_layers)
    layers = (
        have
        if given["layers"] is None
        else resolve_layers(given["layers"], model.config.num_hidden_layers)
    )
    # At the same cost the additions to the residual stream alone recall most; a search begins from
    # everything there is.
    usual = config.targets if given["search"] or "down" not in config.targets else ("down",)
    targets = (
        usual if given["targets"] is None else tuple(t.strip() for t in given["targets"].split(","))
    )
    # what cannot work is said at once
    update_from(modulation_of(model, ids, token), given["alpha"], layers=layers, targets=targets)
    own = own_heldout(data)
    records = own if own is not None else open_source(data)
    samples, heldout = evaluation_samples(
        records, tokenizer, data, given["eval_samples"], model.config.vocab_size, own
    )
    # What alpha is chosen on is not what is reported on.
    chosen_on, reported_on = samples[::2], samples[1::2]
    if not reported_on:
        raise DataError(
            f"{len(samples)} sample of held-out text is too few to choose alpha on one part and"
            " report on another; give more"
        )
    with console.status("measuring") as status:
        fitting = Before(model, tokenizer, fact, chosen_on, given["batch_size"])
        tried = []
        if given["search"]:
            probe = Before(model, tokenizer, fact, chosen_on[:PROBE_SAMPLES], given["batch_size"])
            start = Choice(token, targets, layers, given["alpha"])
            tried = search(
                model,
                probe,
                start,
                given["max_kl"],
                ids,
                lambda what: status.update(f"trying {what}"),
            )
            token, targets, layers = tried[0].token, tried[0].targets, tried[0].layers
        record = {
            "text": given["text"],
            "context": given["context"],
            "adapter_hash": adapter_hash(model),
            **other,
        }
        modulation = modulation_of(model, ids, token)
        make = partial(update_from, modulation, layers=layers, targets=targets, record=record)
        alpha = largest_alpha(model, fitting, make, given["alpha"], given["max_kl"])
        before = Before(model, tokenizer, fact, reported_on, given["batch_size"])
        update = make(alpha)
        npt.consolidate(model, update)
        retention = before.against(model)
    npt.save_adapter(model, given["output"], base=identity)
    choice = {
        **update.record,
        "asked_alpha": given["alpha"],
        "max_kl": given["max_kl"],
        "updates": len(npt.consolidated(model)),
    }
    if given["json"]:
        found = {"tried": [c.as_dict() for c in tried]} if given["search"] else {}
        print(
            to_json(
                {
                    **choice,
                    **retention.as_dict(),
                    "heldout": heldout,
                    "output": given["output"],
                    **found,
                },
                indent=2,
            )
        )
    else:
        print_retention(retention, console, "held-out" if heldout else "TRAINING", tried)
        word = tokenizer.decode([modulation.token_id])
        bounded = (
            f" ({given['alpha']:g} was asked for: --max_kl {given['max_kl']:g})"
            if alpha < given["alpha"]
            else ""
        )
        console.print(
            f"token {token} ({word!r}), layers {update.record['layers']}, {', '.join(targets)},"
            f" alpha {alpha:.3g}{bounded}; update {choice['updates']} is in {given['output']}",
            soft_wrap=True,
        )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 done, 2 wrong arguments or data, 5 adapter unusable."
    parser.add_argument("--text", metavar="FACT", help="the fact")
    parser.add_argument(
        "--context",
        metavar="TEXT",
        help="what stands in front of the fact when it is read (default: nothing)",
    )
    parser.add_argument(
        "--token", type=int, metavar="INT", help="whose modulation is taken (default: -1, the last)"
    )
    parser.add_argument(
        "--alpha",
        type=float,
        metavar="FLOAT",
        help="strength, above 0 and at most 1 (default: 0.5)",
    )
    parser.add_argument(
        "--max_kl",
        type=limit,
        metavar="FLOAT",
        help=(
            "held-out divergence that may come of it, nats per token; alpha is lowered to keep it"
            " (default: 0.01; inf: no bound)"
        ),
    )
    parser.add_argument(
        "--layers", help="of the adapter's layers, those that are changed (default: all of them)"
    )
    parser.add_argument(
        "--targets",
        help=(
            f"of the adapter's targets {','.join(TARGETS)}, those that are changed (default: down"
            " where it is one)"
        ),
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="try other targets, tokens and layers at the same cost, and take the best",
    )
    parser.add_argument(
        "--undo", action="store_true", help="take the adapter's last update back instead"
    )
    add_adapter(parser)
    add_any_base(parser)
    parser.add_argument(
        "--output",
        required=True,
        metavar="FOLDER",
        help="folder for the adapter with the update beside it",
    )
    parser.add_argument(
        "--eval_samples",
        type=positive,
        default=64,
        metavar="INT",
        help="samples of held-out text (default: 64)",
    )
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=8,
        metavar="INT",
        help="samples at a time (default: 8)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of tables"
    )
    add_settings(
        parser,
        BaseConfig,
        DataConfig,
        leave_out=(
            "num_samples",
            "padding_side",
            "dataset_mix",
            "replay_dataset",
            "replay_ratio",
            "teacher_precision",
            "shard_base",
        ),
    )
