"""The behaviour of teacher and student for a terminal."""

from __future__ import annotations

import math
import re

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from npt.errors import printable
from npt.evaluation.behaviour.agreement import Agreement
from npt.evaluation.behaviour.answers import Answer, Answers, Choice
from npt.evaluation.behaviour.measure import Behaviour
from npt.evaluation.behaviour.needles import Needles
from npt.evaluation.behaviour.positions import Positions
from npt.evaluation.formatting import NO_ERROR, percent
from npt.evaluation.table import divergence_line

SHOWN = 320
"""Letters that are shown of a part of an answer; `--json` has all."""


def print_behaviour(behaviour: Behaviour, console: Console | None = None) -> None:
    """Print the parts that were measured, and notes on the others."""
    console = console if console is not None else Console()
    if behaviour.answers is not None:
        _print_answers(behaviour.answers, console)
    if behaviour.agreement is not None:
        _print_agreement(behaviour.agreement, console)
    if behaviour.positions is not None:
        _print_positions(behaviour.positions, behaviour.text, console)
    if behaviour.needles is not None:
        _print_needles(behaviour.needles, behaviour.text, console)
    for note in behaviour.notes:
        console.print(Text(f"note: {note}"))


def _print_answers(answers: Answers, console: Console) -> None:
    console.print(
        Text(
            f"Greedy answers to {len(answers.answers)} prompts"
            f"{', through the chat template' if answers.chat else ' as plain text'}, up to"
            f" {answers.max_new_tokens} tokens: {answers.same} are the same. KL along the teacher's"
            f" answers {plus_minus(answers.kl, answers.kl_se, 4)} nats per token.",
            "bold",
        )
    )
    for answer in answers.answers:
        console.print(_answer(answer))


def _answer(answer: Answer) -> Text:
    """Return the prompt, what both write, and where each goes another way."""
    found = Text.assemble((f"\n{answer.kind}: {answer.prompt}\n", "italic"))
    found.append(f"  KL {answer.kl:.4f} nats per token; ")
    parting = answer.parting
    if parting is None:
        found.append(f"the same for {answer.teacher_tokens} tokens\n")
        return found.append(f"  both     {_short(answer.shared)}")
    found.append(
        f"they part after {parting.position} tokens (KL there {parting.kl:.2f}): the teacher writes"
        f" {_choice(parting.teacher)}, the student {_choice(parting.student)}\n"
    )
    found.append(f"  both     {_short(answer.shared)}\n")
    found.append(f"  teacher  {_short(answer.teacher)}\n", "cyan")
    return found.append(f"  student  {_short(answer.student)}", "yellow")


def _choice(choice: Choice) -> str:
    """Return a token with its probability by either model, teacher first."""
    teacher, student = choice.teacher_probability, choice.student_probability
    return f"{choice.token!r} (teacher {percent(teacher)}, student {percent(student)})"


def _short(text: str) -> str:
    """Return a text on one line, its line ends shown, cut to SHOWN letters."""
    shown = re.sub(r"\n{3,}", lambda found: f"⏎×{len(found[0])} ", printable(text))
    shown = shown.replace("\n", "⏎")
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 1]}…"


def _print_agreement(agreement: Agreement, console: Console) -> None:
    said = "Greedy texts that are still the same after so many tokens:"
    for equal in agreement.equal:
        said += f" {equal.tokens}: {percent_and_error(equal.share, equal.share_se)},"
    console.print(Text(said.rstrip(",")))
    console.print(Text(divergence_line(agreement.divergence)))


def _print_positions(positions: Positions, text: str, console: Console) -> None:
    title = (
        f"By position, nats per token: {positions.rows} rows of held-out {text}, {positions.whole}"
        " of them of one document (± standard error over rows)"
    )
    console.print(Text(f"\n{title}", "bold"))
    table = _table("position", "teacher", "student", "excess", "KL")
    for o in positions.octaves:
        table.add_row(
            f"{o.first:,}–{o.last:,}",
            plus_minus(o.teacher, o.teacher_se, 2),
            plus_minus(o.student, o.student_se, 2),
            plus_minus(o.excess, o.excess_se, 3),
            plus_minus(o.kl, o.kl_se, 3),
        )
    console.print(table)


def _print_needles(needles: Needles, text: str, console: Console) -> None:
    title = (
        f"Codes found again in held-out {text}: log-probability (a guess has {needles.chance:.1f}),"
        " and share retrieved"
    )
    heads = ("tokens back", "needles", "teacher", "student", "by teacher", "by student")
    console.print(Text(title, "bold"))
    table = _table(*heads)
    for found in (*needles.by_depth, needles.total):
        table.add_row(
            "all" if found.depth is None else f"{found.back:,.0f}",
            str(found.needles),
            plus_minus(found.teacher_log_prob, found.teacher_log_prob_se, 2),
            plus_minus(found.student_log_prob, found.student_log_prob_se, 2),
            percent_and_error(found.teacher_retrieved, found.teacher_retrieved_se),
            percent_and_error(found.student_retrieved, found.student_retrieved_se),
        )
    console.print(table)


def _table(*heads: str) -> Table:
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False)


def plus_minus(value: float, error: float, digits: int) -> str:
    """Return a figure with its standard error, unless it has none."""
    if not math.isfinite(value):
        return "not finite"
    shown = math.isfinite(error) and error >= NO_ERROR
    tail = f" ± {error:.{digits}f}" if shown else ""
    return f"{value:.{digits}f}{tail}".replace("-", "−")


def percent_and_error(share: float, error: float) -> str:
    """Return a share in per cent with its standard error, unless it has none."""
    shown = math.isfinite(error) and error >= NO_ERROR
    tail = f" ± {100 * error:.0f}" if shown else ""
    return f"{100 * share:.0f}{tail}%"
