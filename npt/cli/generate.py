"""`npt generate`."""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from typing import Any

from npt.cli.arguments import (
    add_adapter,
    add_any_base,
    base_config,
    load,
    load_adapter,
    natural,
    positive,
    with_adapter,
)
from npt.config import BaseConfig
from npt.console import make_console
from npt.errors import ConfigError, DataError
from npt.flags import add_settings

SIDE_BY_SIDE = 100
"""Columns of a terminal from which on two texts stand beside one another."""

EMPTY_LINES = 2
"""So many in a row are shown; more are counted."""


def generate(given: dict[str, Any]) -> int:
    """Write behind a prompt with a saved adapter: the student, its teacher, both compared, or the
    teacher drafted by the student.
    """
    from npt.evaluation.generate import Decoding, prompt_ids
    from npt.files import to_json

    if given["compare"] and given["assisted"]:
        raise ConfigError(
            "--compare and --assisted exclude one another: assisted generation writes the teacher's"
            " text alone; drop one"
        )
    if (given["compare"] or given["assisted"]) and given["mode"] is not None:
        raise ConfigError(
            "--mode means nothing with --compare or --assisted, which use teacher and student both;"
            " drop it"
        )
    if given["draft_tokens"] is not None and not given["assisted"]:
        raise ConfigError("--draft_tokens means nothing without --assisted; add it, or drop it")
    decoding = Decoding(
        given["max_new_tokens"], given["temperature"], given["top_p"], given["seed"]
    )
    text, given = _prompt(given["prompt"]), with_adapter(given)
    base = base_config(given)  # this and what stands above before the base is loaded
    notes = make_console(stderr=True)  # so that what is on standard output is text, or JSON, alone
    model, tokenizer = load(base, notes)
    _, other = load_adapter(model, given, notes)
    ids = prompt_ids(tokenizer, text, chat=not given["raw"])
    if given["compare"]:
        found = _compare(model, tokenizer, text, ids, decoding, given["json"])
    elif given["assisted"]:
        found = _assisted(
            model, tokenizer, text, ids, decoding, given["draft_tokens"], given["json"], notes
        )
    else:
        found = _single(
            model, tokenizer, text, ids, decoding, given["mode"] or "student", given["json"], notes
        )
    if given["json"]:
        settings = {
            name: given[name] for name in ("max_new_tokens", "temperature", "top_p", "seed")
        }
        print(
            to_json(
                {"prompt": text, "prompt_tokens": len(ids), "settings": settings, **found, **other},
                indent=2,
            )
        )
    return 0


def _prompt(given: str | None) -> str:
    """The prompt of the flag, else what is piped in."""
    if given is not None:
        return given
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("there is no prompt; pass --prompt TEXT, or pipe the text in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the prompt on standard input is not UTF-8 ({error.reason} at byte {error.start});"
            " convert it"
        ) from error


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _single(
    model: Any,
    tokenizer: Any,
    text: str,
    ids: list[int],
    decoding: Any,
    mode: Any,
    json: bool,
    notes: Any,
) -> dict[str, Any]:
    from npt.evaluation.generate import write
    from npt.evaluation.view import mode_view

    if not json:
        _show(text)
    written = write(mode_view(model, mode), tokenizer, ids, decoding, show=None if json else _show)
    if not json:
        print()
        notes.print(_speed(mode, written))
    return {mode: written.as_dict()}


def _assisted(
    model: Any,
    tokenizer: Any,
    text: str,
    ids: list[int],
    decoding: Any,
    draft_tokens: int | None,
    json: bool,
    notes: Any,
) -> dict[str, Any]:
    from npt.evaluation.assisted import DRAFT_TOKENS, expected_acceptance, write_assisted
    from npt.evaluation.generate import write
    from npt.evaluation.view import student_view, teacher_view

    # what the first call of all costs is no part of either speed
    for view in (teacher_view, student_view):
        write(view(model), tokenizer, ids, replace(decoding, max_new_tokens=1))
    if not json:
        _show(text)
    show = None if json else _show
    written, drafts = write_assisted(
        model, tokenizer, ids, decoding, draft_tokens=draft_tokens or DRAFT_TOKENS, show=show
    )
    plain = write(teacher_view(model), tokenizer, ids, decoding)
    expected = expected_acceptance(model, ids, written.ids, decoding)
    same = written.ids == plain.ids
    if not json:
        print()
        figures = drafts.as_dict()
        error = (
            f" ± {figures['acceptance_se']:.1%}"
            if figures["acceptance_se"] == figures["acceptance_se"]
            else ""
        )
        kind = "top-1 agreement" if decoding.greedy else "sum of min(p, q)"
        notes.print(
            f"{drafts.accepted} of {drafts.judged} judged drafts accepted:"
            f" {drafts.acceptance:.1%}{error}, expected {expected:.1%} ({kind} on this text);"
            f" {len(drafts.passes)} passes of the teacher for {len(written.ids)} tokens",
            soft_wrap=True,
        )
        if decoding.greedy:
            notes.print(
                "the teacher's own text, token for token"
                if same
                else "NOT the teacher's own text: rounding decided a tie"
            )
        notes.print(
            f"{_speed('assisted', written)}; {_speed('teacher alone', plain)}", soft_wrap=True
        )
    figures = {
        **drafts.as_dict(),
        "expected_acceptance": expected,
        **({"same_as_teacher": same} if decoding.greedy else {}),
    }
    return {"assisted": {**written.as_dict(), **figures}, "teacher": plain.as_dict()}


def _compare(
    model: Any, tokenizer: Any, text: str, ids: list[int], decoding: Any, json: bool
) -> dict[str, Any]:
    from npt.evaluation.generate import first_difference, write
    from npt.evaluation.view import mode_view

    console = make_console()
    with make_console(stderr=True).status("writing"):
        written = {
            mode: write(mode_view(model, mode), tokenizer, ids, decoding)
            for mode in ("teacher", "student")
        }
    position = first_difference(written["teacher"].ids, written["student"].ids)
    parting: dict[str, Any] = {"parts_at": position}
    if position is not None:
        for mode, one in written.items():
            parting[f"{mode}_token"] = (
                tokenizer.decode([one.ids[position]]) if position < len(one.ids) else None
            )
    if not json:
        texts = {mode: _split(tokenizer, ids, one.ids, position) for mode, one in written.items()}
        _print_texts(console, text, texts)
        console.print(_parting_line(parting, decoding.max_new_tokens), soft_wrap=True)
        console.print("; ".join(_speed(mode, one) for mode, one in written.items()), soft_wrap=True)
    return {**{mode: one.as_dict() for mode, one in written.items()}, **parting}


def _split(
    tokenizer: Any, prompt: list[int], ids: tuple[int, ...], position: int | None
) -> tuple[str, str]:
    """The text up to where the two part, and from there on; the latter from the whole, since tokens
    may share a character.
    """
    from npt.data.continuation import continuation_text

    whole, common = (
        continuation_text(tokenizer, prompt, ids),
        continuation_text(tokenizer, prompt, ids[:position]).rstrip("�"),
    )
    return (common, whole[len(common) :]) if whole.startswith(common) else ("", whole)


def _print_texts(console: Any, prompt: str, texts: dict[str, tuple[str, str]]) -> None:
    """Beside one another where there is room, else one below the other; what differs is in bold."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    panels = {
        mode: _shortened(Text.assemble((prompt, "dim"), common, (rest, "bold")))
        for mode, (common, rest) in texts.items()
    }
    if console.width >= SIDE_BY_SIDE:
        table = Table(expand=True)
        for mode in panels:
            table.add_column(mode, ratio=1)
        table.add_row(*panels.values())
        console.print(table)
    else:
        for mode, shown in panels.items():
            console.print(Panel(shown, title=mode, title_align="left"))


def _shortened(text: Any) -> Any:
    """The same with empty lines in a row counted: a student that was hardly trained may write an
    end of line until the limit.
    """
    from rich.text import Text

    lines: list[Any] = []
    for empty, run in itertools.groupby(
        text.split("\n", allow_blank=True), key=lambda line: not line.plain.strip()
    ):
        found = list(run)
        lines += (
            [Text(f"[{len(found)} empty lines]", "dim")]
            if empty and len(found) > EMPTY_LINES
            else found
        )
    return Text("\n").join(lines)


def _parting_line(parting: dict[str, Any], limit: int) -> str:
    if parting["parts_at"] is None:
        return f"the two texts are the same, up to the limit of {limit} tokens or an end token"
    teacher, student = (
        repr(parting[f"{mode}_token"]) if parting[f"{mode}_token"] is not None else "nothing"
        for mode in ("teacher", "student")
    )
    return (
        f"they part behind {parting['parts_at']} tokens: the teacher writes {teacher}, the student"
        f" {student}"
    )


def _speed(name: str, written: Any) -> str:
    speed = (
        f"{len(written.ids) / written.seconds:.1f} tokens/s" if written.seconds > 0 else "no time"
    )
    return (
        f"{name}: {len(written.ids)} tokens, {speed},"
        f" {'ended' if written.ended else 'cut at the limit'}"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_adapter(parser)
    add_any_base(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="default: what is piped in")
    parser.add_argument(
        "--mode", choices=("student", "teacher", "floor"), help="who writes (default: student)"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="teacher and student, side by side, and where they part",
    )
    parser.add_argument(
        "--assisted",
        action="store_true",
        help="the teacher's text, drafted by the student; prints acceptance and speed",
    )
    parser.add_argument(
        "--draft_tokens", type=positive, metavar="INT", help="tokens of a draft (default: 5)"
    )
    parser.add_argument(
        "--max_new_tokens",
        type=positive,
        default=64,
        metavar="INT",
        help="tokens at most (default: 64)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="FLOAT",
        help="0: the most likely token (default)",
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="FLOAT",
        help="draw from this share of the probability (default: 1)",
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="INT", help="of the draws (default: 0)"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="leave the tokenizer's chat template, if it has one, aside",
    )
    parser.add_argument("--json", action="store_true", help="print texts and figures as JSON")
    add_settings(parser, BaseConfig, leave_out=("teacher_precision", "shard_base"))
