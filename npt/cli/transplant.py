"""`npt transplant`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npt.cli.arguments import (
    Student,
    Task,
    add_number,
    add_student,
    begin,
    print_json,
    print_table,
    read_text,
)
from npt.errors import ConfigError, DataError
from npt.files import check_file

if TYPE_CHECKING:
    from npt.tools.editing.context_code import ContextCode

SOURCES = ("text_from", "from_context", "code")
"""Flags that say what is transplanted: one of them is given."""

ONLY_WITH = {
    "token_from": ("text_from",),
    "queries": ("from_context",),
    "scale": ("from_context", "code"),
    "output": ("from_context", "code"),
}
"""Flags that have an effect with some sources only."""

HEADINGS = {
    "donor": "donor",
    "receiver": "receiver",
    "transplanted": "receiver, transplanted",
    "in_context": "receiver in context",
    "moved": "receiver, code added",
}
"""Columns of the table, by the names of the distributions in --json."""


def transplant(flags: dict[str, Any]) -> int:
    """Give one text's modulation, or the code of a context, to another text; show the effect.

    With --text_from, the modulation of one token replaces that of another. With --from_context,
    what a context (such as five examples of a task) changes in the code of the last token after it
    is added to the receiver's code. With --code, codes that --output saved are added.
    """
    check_flags(flags)
    if flags["text_from"] is None:
        return _add_code(flags)
    task = begin(flags)
    import npt
    from npt.data.continuation import prompt_tokens

    student = task.load()
    tokenizer = student.tokenizer
    donor = prompt_tokens(tokenizer, flags["text_from"])
    receiver = prompt_tokens(tokenizer, flags["text_to"])
    token_from = -1 if flags["token_from"] is None else flags["token_from"]
    result = npt.transplant(student.model, donor, receiver, token_from, flags["token_to"])
    word_from = tokenizer.decode([donor[result.token_from]])
    word_to = tokenizer.decode([receiver[result.token_to]])
    _show(
        task,
        student,
        result.top(flags["top"]),
        result.divergences(),
        {
            "token_from": result.token_from,
            "token_to": result.token_to,
            "from": word_from,
            "to": word_to,
        },
        f"next token after receiver token {result.token_to} ({word_to!r}), with the modulation of"
        f" donor token {result.token_from} ({word_from!r})",
    )
    return 0


def check_flags(flags: Mapping[str, Any]) -> None:
    """Refuse flags that have no effect together, before anything is loaded."""
    given = [name for name in SOURCES if flags[name] is not None]
    if not given:
        raise ConfigError(
            "nothing to transplant: add --text_from TEXT, --from_context FILE or --code FILE"
        )
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} exclude each other: remove one of them")
    for name, sources in ONLY_WITH.items():
        if flags[name] is not None and given[0] not in sources:
            remedy = " or ".join(f"--{source}" for source in sources)
            raise ConfigError(
                f"--{name} {flags[name]} has no effect with --{given[0]}: use {remedy}, or remove"
                f" --{name}"
            )
    if flags["output"] is not None:
        check_file(Path(flags["output"]), "--output")


def _add_code(flags: dict[str, Any]) -> int:
    """Run the verb with --from_context or --code."""
    context = queries = None
    if flags["from_context"] is not None:
        context = read_text(flags["from_context"], "--from_context")
        # the receiver is the query, unless others are given
        queries = [flags["text_to"]]
    if flags["queries"] is not None:
        lines = read_text(flags["queries"], "--queries").splitlines()
        queries = [line for line in lines if line.strip()]
    task = begin(flags)
    from npt.adapters.token_modulation import as_row, token_index
    from npt.data.continuation import prompt_tokens
    from npt.tools.editing.context_code import context_code
    from npt.tools.editing.transplant import divergences, next_token, top_tokens, transplanted

    student = task.load()
    model = student.model
    tokenizer = student.tokenizer
    row = as_row(model, prompt_tokens(tokenizer, flags["text_to"]))
    position = token_index(row, flags["token_to"])
    log_p = {"receiver": next_token(model, row)}
    if context is None:
        code = _saved_codes(flags["code"], student)
        source = ", ".join(flags["code"])
    else:
        assert queries is not None

        def ids(text: str) -> Sequence[int]:
            return prompt_tokens(tokenizer, text)

        # what the context adds to the code of a query is the difference of the two
        pairs = ((ids(context + query), ids(query)) for query in queries)
        code = context_code(model, pairs, record={"context": flags["from_context"]})
        source = flags["from_context"]
        in_context = as_row(model, ids(context + flags["text_to"]))
        log_p["in_context"] = next_token(model, in_context)
    if flags["scale"] is not None:
        code = code.scaled(flags["scale"])
    with transplanted(model, code, position, add=True):
        log_p["moved"] = next_token(model, row)
    if flags["output"] is not None:
        code.save(flags["output"])
    # how far the code moves the receiver, and how near to where the context itself takes it
    between = [("receiver", "moved")]
    if "in_context" in log_p:
        between += [("in_context", "moved"), ("in_context", "receiver")]
    numbers = code.numbers()
    count = sum(numbers.values())
    word = tokenizer.decode([int(row[0, position])])
    _show(
        task,
        student,
        top_tokens(log_p, flags["top"]),
        divergences(log_p, between),
        {
            "token_to": position,
            "to": word,
            "numbers": count,
            "numbers_by_layer": numbers,
            "record": code.record,
            "output": flags["output"],
        },
        f"next token after receiver token {position} ({word!r}), with the code of {source} added",
        f"the code has {count:,} numbers that are not 0, {count / len(numbers):.1f} in each of"
        f" {len(numbers)} layers{'' if flags['output'] is None else '; wrote ' + flags['output']}",
    )
    return 0


def _saved_codes(names: Sequence[str], student: Student) -> ContextCode:
    """Return the sum of saved codes; refuse those of another adapter."""
    from npt.adapters.files.adapter_files import adapter_hash
    from npt.tools.editing.context_code import ContextCode

    codes = [ContextCode.load(name) for name in names]
    here = adapter_hash(student.model)
    for name, code in zip(names, codes, strict=True):
        if code.record.get("adapter_hash", here) != here:
            raise DataError(
                f"--code {name} was computed with another adapter, whose numbers mean different"
                " things: pass that --adapter, or compute the code with this one"
            )
    return reduce(add, codes)


def _show(
    task: Task,
    student: Student,
    top: Mapping[str, Sequence[tuple[int, float]]],
    kl: Mapping[str, float],
    about: Mapping[str, Any],
    title: str,
    *notes: str,
) -> None:
    """Print the most probable next tokens and the KLs.

    Args:
        top, kl: by name of the distribution, or of two.
        about: more for --json.
        title, notes: lines above and below the table.
    """
    from npt.figures import FIGURES

    decode = student.tokenizer.decode
    if task.flags["json"]:
        listed: dict[str, Any] = {}
        for name, tokens in top.items():
            listed[name] = [
                {"id": token, "token": decode([token]), "probability": p} for token, p in tokens
            ]
        print_json({**about, "top": listed, "kl": kl, **student.other})
        return
    task.console.say(title)
    rows = []
    for place in zip(*top.values(), strict=True):
        rows.append([f"{p:6.1%}  {decode([token])!r}" for token, p in place])
    print_table(task.console, [HEADINGS[name] for name in top], rows)
    pairs = [f"{pair.replace('_', ' ')} {FIGURES['kl'].write(nats)}" for pair, nats in kl.items()]
    task.console.say(f"KL, nats: {', '.join(pairs)}", *notes)


def add_flags(parser: argparse.ArgumentParser) -> None:
    def text(flag: str, metavar: str, help: str, **how: Any) -> None:
        parser.add_argument(f"--{flag}", metavar=metavar, help=help, **how)

    text("text_to", "TEXT", "receiver text, which gets the modulation or the code", required=True)
    text("text_from", "TEXT", "donor text, whose modulation is copied")
    text("from_context", "FILE", "text file with a context; its code is added to the receiver's")
    text(
        "queries",
        "FILE",
        "text file with one query per line; the code is the mean over them, each placed directly"
        " after the context (default: --text_to)",
    )
    text("code", "FILE", "codes that --output saved; several are added up", nargs="+")
    add_number(parser, "scale", "multiply the code by this (default: 1)", None, float)
    text("output", "FILE.safetensors", "file to save the code to, scaled")
    add_number(
        parser,
        "token_from",
        "position of the donor token; negative counts from the end (default: -1)",
        None,
        int,
    )
    add_number(
        parser, "token_to", "position of the receiver token; negative counts from the end", -1, int
    )
    add_number(parser, "top", "number of next tokens to show", 8)
    add_student(parser)
