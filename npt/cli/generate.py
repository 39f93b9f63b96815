"""`npt generate`."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npt.cli.arguments import (
    add_number,
    add_student,
    add_switch,
    load_student,
    natural,
    print_json,
    with_base,
)
from npt.console import make_console, put
from npt.errors import ConfigError, DataError, printable
from npt.files import check_room

SIDE_BY_SIDE = 100
"""Columns of a terminal from which on two texts are printed side by side."""

_TEXTS = ("teacher", "student", "floor")
"""Who may have written a text, in the order in which a page shows them."""

EMPTY_LINES = 2
"""Empty lines in a row that are shown as they are; more are counted."""


def generate(given: dict[str, Any]) -> int:
    """Continue a prompt with a saved adapter: the student, its teacher, or both compared."""
    from npt.evaluation.generate import Decoding, prompt_ids

    if given["compare"] and given["mode"] is not None:
        raise ConfigError(
            "--mode has no effect with --compare, which uses teacher and student both; drop it"
        )
    page = None if given["html"] is None else _free(Path(given["html"]))
    settings = {name: given[name] for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    decoding = Decoding(**settings)
    text = _prompt(given["prompt"])
    given, base = with_base(given)
    notes = make_console(stderr=True)  # so that stdout is text, or JSON, alone
    model, tokenizer, _, other = load_student(base, given, notes)
    ids = prompt_ids(tokenizer, text, chat=not given["raw"])
    job = _Job(model, tokenizer, text, ids, decoding, given["json"], notes)
    found = job.compare() if given["compare"] else job.single(given["mode"] or "student")
    if given["json"]:
        said = {"prompt": text, "prompt_tokens": len(ids), "settings": settings}
        print_json({**said, **found, **other})
    if page is not None:
        names = {"adapter": str(given["adapter"]), "base": base.model_name}
        job.write_page(page, found, names | {"tokens": decoding.described()})
    return 0


def _free(page: Path) -> Path:
    """Return the page's path, before minutes are spent on its text; ConfigError if it has none."""
    if page.is_dir() or not page.parent.is_dir():
        raise ConfigError(
            f"--html {page} is no file in a folder that exists; name a file, such as page.html"
        )
    try:
        check_room(page, 0)
    except OSError as error:
        raise _unwritable(page, error) from error
    return page


def _unwritable(page: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--html {page} cannot be written: {error.strerror}; choose another file")


def _prompt(given: str | None) -> str:
    """Return the prompt of the flag, else what is piped in."""
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
    put(printable(text) if sys.stdout.isatty() else text, end="")


@dataclass(frozen=True)
class _Job:
    """A prompt to continue. Each method prints its text, unless `json`, and returns the entries
    for JSON.
    """

    model: Any
    tokenizer: Any
    text: str
    ids: list[int]
    decoding: Any
    json: bool
    notes: Any

    def single(self, mode: Any) -> dict[str, Any]:
        if self.json:
            return {mode: self._write(mode).as_dict()}
        _show(self.text)
        written = self._write(mode, _show)
        put("")
        self.notes.say(_speed(mode, written))
        return {mode: written.as_dict()}

    def compare(self) -> dict[str, Any]:
        from npt.evaluation.generate import first_difference, shared_text

        with self.notes.status("writing"):
            written = {mode: self._write(mode) for mode in ("teacher", "student")}
        position = first_difference(written["teacher"].ids, written["student"].ids)
        parting: dict[str, Any] = {"parts_at": position}
        if position is not None:
            for mode, one in written.items():
                token = one.ids[position : position + 1]
                parting[f"{mode}_token"] = self.tokenizer.decode(list(token)) if token else None
        if not self.json:
            console = make_console()
            texts = {
                mode: shared_text(self.tokenizer, self.ids, one.ids, position)
                for mode, one in written.items()
            }
            _print_texts(console, self.text, texts)
            console.say(
                _parting_line(parting, self.decoding.max_new_tokens),
                "; ".join(_speed(mode, one) for mode, one in written.items()),
            )
        return {**{mode: one.as_dict() for mode, one in written.items()}, **parting}

    def write_page(self, page: Path, found: Mapping[str, Any], named: dict[str, str]) -> None:
        """Write the page about the texts that a method returned.

        named: adapter, base and settings.
        """
        from npt.evaluation.modulation_map import modulation_map
        from npt.files import write_text
        from npt.report.generated import page as generated_page

        texts = {mode: found[mode] for mode in _TEXTS if mode in found}
        both, start = len(texts) > 1, len(self.ids)
        parts = found.get("parts_at")
        facts, passages = [("tokens of the prompt", f"{start:,}")], []
        with self.notes.status("reading the modulation"):
            for mode, text in texts.items():
                facts.append((f"tokens of the {mode}", f"{text['tokens']:,}"))
                measured = modulation_map(self.model, [*self.ids, *text["ids"]])
                mean = float(measured.kl[start:].mean()) if text["ids"] else math.nan
                facts.append((f"KL along the {mode}'s text, nats", f"{mean:.4f}"))
                shown = {**measured.as_dict(self.tokenizer), "start": start}
                shown |= {} if parts is None else {"parts": start + parts}
                passages.append((f"The {mode}'s text" if both else "", shown))
        layers = ", ".join(str(index) for index in measured.layers)
        recipe = [*named.items(), ("layers", layers), ("targets", ", ".join(measured.targets))]
        if both:
            said = _parting_line(dict(found), self.decoding.max_new_tokens)
        else:
            said = f"the {next(iter(texts))} continued the prompt"
        text_of_page = generated_page(said[0].upper() + said[1:], facts, recipe, passages)
        try:
            write_text(page, text_of_page)
        except OSError as error:
            raise _unwritable(page, error) from error
        self.notes.say(f"page {page}")

    def _write(self, mode: Any, show: Any = None) -> Any:
        from npt.evaluation.generate import write
        from npt.evaluation.view import mode_view

        view = mode_view(self.model, mode)
        return write(view, self.tokenizer, self.ids, self.decoding, show=show)


def _print_texts(console: Any, prompt: str, texts: dict[str, tuple[str, str]]) -> None:
    """Print texts side by side if there is room, else one below the other; differences in bold."""
    from rich.panel import Panel
    from rich.table import Column, Table
    from rich.text import Text

    panels = {
        mode: _shortened(
            Text.assemble((printable(prompt), "dim"), printable(common), (printable(rest), "bold"))
        )
        for mode, (common, rest) in texts.items()
    }
    if console.width >= SIDE_BY_SIDE:
        table = Table(*(Column(mode, ratio=1) for mode in panels), expand=True)
        table.add_row(*panels.values())
        console.print(table)
    else:
        for mode, shown in panels.items():
            console.print(Panel(shown, title=mode, title_align="left"))


def _shortened(text: Any) -> Any:
    """Return the text with empty lines in a row counted: a student that was hardly trained may
    write line ends until the limit.
    """
    from rich.text import Text

    lines: list[Any] = []
    for empty, run in itertools.groupby(
        text.split("\n", allow_blank=True), key=lambda line: not line.plain.strip()
    ):
        found = list(run)
        if empty and len(found) > EMPTY_LINES:
            found = [Text(f"[{len(found)} empty lines]", "dim")]
        lines += found
    return Text("\n").join(lines)


def _parting_line(parting: dict[str, Any], limit: int) -> str:
    if parting["parts_at"] is None:
        return f"the two texts are the same, up to the limit of {limit} tokens or an end token"
    teacher, student = (
        "nothing" if token is None else repr(token)
        for token in (parting["teacher_token"], parting["student_token"])
    )
    return (
        f"they part after {parting['parts_at']} tokens: the teacher writes {teacher}, the student"
        f" {student}"
    )


def _speed(name: str, written: Any) -> str:
    count = len(written.ids)
    speed = f"{count / written.seconds:.1f} tokens/s" if written.seconds > 0 else "no time"
    return f"{name}: {count} tokens, {speed}, {'ended' if written.ended else 'cut at the limit'}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="default: what is piped in")
    parser.add_argument(
        "--mode", choices=("student", "teacher", "floor"), help="who writes (default: student)"
    )
    add_switch(parser, "compare", "teacher and student, side by side, and where they part")
    add_number(parser, "max_new_tokens", "tokens at most", 64)
    add_number(parser, "temperature", "0 for the most likely token", 0.0, float)
    add_number(parser, "top_p", "draw from this share of the probability", 1.0, float)
    add_number(parser, "seed", "of the draws", 0, natural)
    parser.add_argument(
        "--html",
        metavar="FILE",
        help=(
            "write a page, one file, with the text token by token, coloured by the modulation in"
            " each converted layer"
        ),
    )
    add_switch(parser, "raw", "ignore the tokenizer's chat template, if it has one")
    add_student(parser)
