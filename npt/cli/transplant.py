"""`npt transplant`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, print_json, print_table


def transplant(flags: dict[str, Any]) -> int:
    """Put the modulation of one text's token in the place of another's, and show what
    comes next.
    """
    task = begin(flags)
    import npt
    from npt.data.continuation import prompt_tokens

    model, tokenizer, _, other = task.load()
    donor, receiver = (prompt_tokens(tokenizer, flags[f"text_{end}"]) for end in ("from", "to"))
    result = npt.transplant(model, donor, receiver, flags["token_from"], flags["token_to"])
    top, kl = result.top(flags["top"]), result.divergences()
    word_from = tokenizer.decode([donor[result.token_from]])
    word_to = tokenizer.decode([receiver[result.token_to]])
    if flags["json"]:
        listed = {
            name: [{"id": i, "token": tokenizer.decode([i]), "probability": p} for i, p in tokens]
            for name, tokens in top.items()
        }
        positions = {"token_from": result.token_from, "token_to": result.token_to}
        words = {"from": word_from, "to": word_to}
        print_json({**positions, **words, "top": listed, "kl": kl, **other})
        return 0
    task.console.say(
        f"next token: token {result.token_to} ({word_to!r}) modulated as token"
        f" {result.token_from} ({word_from!r}) of the donor"
    )
    columns = ("donor", "receiver", "transplanted")
    rows = [
        [f"{p:6.1%}  {tokenizer.decode([token])!r}" for token, p in row]
        for row in zip(*(top[name] for name in columns), strict=True)
    ]
    headings = ("donor's text", "receiver's text", "receiver's, transplanted")
    print_table(task.console, headings, rows)
    task.console.say(
        f"KL to the transplanted distribution, in nats: {kl['receiver_to_transplanted']:.4f} from"
        f" the receiver's own, {kl['donor_to_transplanted']:.4f} from the donor's (which is"
        f" {kl['donor_to_receiver']:.4f} from the receiver's)"
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        ("text_from", "the donor: its modulation is read"),
        ("text_to", "the receiver of the modulation"),
    ):
        parser.add_argument(f"--{flag}", required=True, metavar="TEXT", help=text)
    add_number(parser, "token_from", "token of the donor, from the end if negative", -1, int)
    add_number(parser, "token_to", "token of the receiver, likewise", -1, int)
    add_number(parser, "top", "next tokens shown", 8)
    add_student(parser)
