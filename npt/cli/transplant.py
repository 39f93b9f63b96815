"""`npt transplant`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import (
    add_adapter,
    add_any_base,
    base_config,
    load,
    load_adapter,
    positive,
    with_adapter,
)
from npt.config import BaseConfig
from npt.console import make_console
from npt.flags import add_settings


def transplant(given: dict[str, Any]) -> int:
    """Put the modulation of one text's token in the place of another's, and show what
    comes next.
    """
    given = with_adapter(given)
    base = base_config(given)
    import npt
    from npt.files import to_json

    console = make_console(stderr=given["json"])
    model, tokenizer = load(base, console)
    _, other = load_adapter(model, given, console)
    texts = {name: list(tokenizer(given[name])["input_ids"]) for name in ("text_from", "text_to")}
    result = npt.transplant(
        model, texts["text_from"], texts["text_to"], given["token_from"], given["token_to"]
    )
    top, divergences = result.top(given["top"]), result.divergences()
    words = {
        "donor": texts["text_from"][result.token_from],
        "receiver": texts["text_to"][result.token_to],
    }
    names = {name: tokenizer.decode([token]) for name, token in words.items()}
    if given["json"]:
        listed = {
            name: [
                {"id": token, "token": tokenizer.decode([token]), "probability": p}
                for token, p in tokens
            ]
            for name, tokens in top.items()
        }
        places = {
            "token_from": result.token_from,
            "token_to": result.token_to,
            "from": names["donor"],
            "to": names["receiver"],
        }
        print(to_json({**places, "top": listed, "kl": divergences, **other}, indent=2))
        return 0
    from rich.table import Table

    where = (
        f"token {result.token_to} ({names['receiver']!r}) modulated as token {result.token_from}"
        f" ({names['donor']!r}) of the donor"
    )
    table = Table(title=f"Next token: {where}", title_justify="left")
    for heading in ("donor's text", "receiver's text", "receiver's, transplanted"):
        table.add_column(heading)
    for row in zip(*(top[name] for name in ("donor", "receiver", "transplanted")), strict=True):
        table.add_row(*(f"{p:6.1%}  {tokenizer.decode([token])!r}" for token, p in row))
    console.print(table)
    moved, ahead, apart = (
        divergences[name]
        for name in ("receiver_to_transplanted", "donor_to_transplanted", "donor_to_receiver")
    )
    console.print(
        f"KL to the transplanted distribution, in nats: {moved:.4f} from the receiver's own,"
        f" {ahead:.4f} from the donor's (which is {apart:.4f} from the receiver's)",
        soft_wrap=True,
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 done, 2 wrong arguments, 5 adapter unusable."
    parser.add_argument(
        "--text_from", required=True, metavar="TEXT", help="the donor: where the modulation is read"
    )
    parser.add_argument(
        "--text_to", required=True, metavar="TEXT", help="the receiver: where it is put"
    )
    parser.add_argument(
        "--token_from",
        type=int,
        default=-1,
        metavar="INT",
        help="token of the donor (default: -1, the last)",
    )
    parser.add_argument(
        "--token_to",
        type=int,
        default=-1,
        metavar="INT",
        help="token of the receiver (default: -1, the last)",
    )
    parser.add_argument(
        "--top", type=positive, default=8, metavar="INT", help="next tokens shown (default: 8)"
    )
    add_adapter(parser)
    add_any_base(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of a table"
    )
    add_settings(parser, BaseConfig, leave_out=("teacher_precision", "shard_base"))
