"""`npt transplant`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import add_number, add_student, begin, print_json, print_table


def transplant(flags: dict[str, Any]) -> int:
    """Apply one token's modulation to another; show the effect."""
    task = begin(flags)
    import npt
    from npt.data.continuation import prompt_tokens
    from npt.figures import FIGURES

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
        f"next token after receiver token {result.token_to} ({word_to!r}), with the modulation of"
        f" donor token {result.token_from} ({word_from!r})"
    )
    columns = ("donor", "receiver", "transplanted")
    rows = [
        [f"{p:6.1%}  {tokenizer.decode([token])!r}" for token, p in row]
        for row in zip(*(top[name] for name in columns), strict=True)
    ]
    headings = ("donor", "receiver", "receiver, transplanted")
    print_table(task.console, headings, rows)
    pairs = [f"{pair.replace('_', ' ')} {FIGURES['kl'].write(nats)}" for pair, nats in kl.items()]
    task.console.say(f"KL, nats: {', '.join(pairs)}")
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        ("text_from", "donor text, whose modulation is copied"),
        ("text_to", "receiver text, which gets the modulation"),
    ):
        parser.add_argument(f"--{flag}", required=True, metavar="TEXT", help=text)
    add_number(
        parser, "token_from", "position of the donor token; negative counts from the end", -1, int
    )
    add_number(
        parser, "token_to", "position of the receiver token; negative counts from the end", -1, int
    )
    add_number(parser, "top", "number of next tokens to show", 8)
    add_student(parser)
