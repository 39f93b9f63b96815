"""`npt transplant`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, load_student, print_json


def transplant(given: dict[str, Any]) -> int:
    """Put the modulation of one text's token in the place of another's, and show what
    comes next.
    """
    given, base, _, console = begin(given)
    import npt
    from npt.data.continuation import prompt_tokens

    model, tokenizer, _, other = load_student(base, given, console)
    donor, receiver = (prompt_tokens(tokenizer, given[f"text_{end}"]) for end in ("from", "to"))
    result = npt.transplant(model, donor, receiver, given["token_from"], given["token_to"])
    top, divergences = result.top(given["top"]), result.divergences()
    word_from = tokenizer.decode([donor[result.token_from]])
    word_to = tokenizer.decode([receiver[result.token_to]])
    if given["json"]:
        listed = {
            name: [{"id": i, "token": tokenizer.decode([i]), "probability": p} for i, p in tokens]
            for name, tokens in top.items()
        }
        positions = {"token_from": result.token_from, "token_to": result.token_to}
        words = {"from": word_from, "to": word_to}
        print_json({**positions, **words, "top": listed, "kl": divergences, **other})
        return 0
    from rich.table import Table

    title = (
        f"Next token: token {result.token_to} ({word_to!r}) modulated as token"
        f" {result.token_from} ({word_from!r}) of the donor"
    )
    table = Table("donor's text", "receiver's text", "receiver's, transplanted", title=title)
    for row in zip(top["donor"], top["receiver"], top["transplanted"], strict=True):
        table.add_row(*(f"{p:6.1%}  {tokenizer.decode([token])!r}" for token, p in row))
    console.print(table)
    console.say(
        "KL to the transplanted distribution, in nats:"
        f" {divergences['receiver_to_transplanted']:.4f} from the receiver's own,"
        f" {divergences['donor_to_transplanted']:.4f} from the donor's (which is"
        f" {divergences['donor_to_receiver']:.4f} from the receiver's)"
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 done, 2 wrong arguments, 5 adapter unusable."
    for flag, text in (
        ("text_from", "the donor: its modulation is read"),
        ("text_to", "the receiver of the modulation"),
    ):
        parser.add_argument(f"--{flag}", required=True, metavar="TEXT", help=text)
    add_number(parser, "token_from", "token of the donor, from the end if negative", -1, int)
    add_number(parser, "token_to", "token of the receiver, likewise", -1, int)
    add_number(parser, "top", "next tokens shown", 8)
    add_student(parser)
