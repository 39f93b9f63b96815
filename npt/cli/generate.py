"""`npt generate`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npt.cli.arguments import Student, Task, add_number, add_student, add_switch, begin, print_json
from npt.console import make_console, put
from npt.errors import NPTError
from npt.files import check_file, write_text

if TYPE_CHECKING:
    from npt.evaluation.modulation_map import ModulationMap

MODES = ("teacher", "student", "floor")
"""Models that can write a text, in the order in which a page shows them."""

NUMBERS, TOKENS, BEFORE = 16, 8192, 12
"""Active numbers on a page, tokens of data to search for their passages, tokens of a passage."""


def generate(flags: dict[str, Any]) -> int:
    """Continue a prompt with the student, its teacher, or both."""
    from npt.adapters.converted import adapter_mode
    from npt.evaluation.generate import Written, first_difference, prompt_ids, write

    page = None if flags["html"] is None else Path(flags["html"])
    if page is not None:
        check_file(page, "--html")
    prompt, limit, compare = flags["prompt"], flags["max_new_tokens"], flags["compare"]
    task = begin(flags, stderr=True)  # stdout holds only the text or the JSON
    notes, student = task.console, task.load()
    model, tokenizer = student.model, student.tokenizer
    ids = prompt_ids(tokenizer, prompt, chat=not flags["raw"])
    modes: Any = MODES[:2] if compare else (flags["mode"] or "student",)
    texts: dict[str, Written] = {}
    for mode in modes:
        with adapter_mode(model, mode):
            texts[mode] = write(model, tokenizer, ids, limit)
    figures: dict[str, Any] = {mode: text.as_dict() for mode, text in texts.items()}
    if compare:
        position = first_difference(texts["teacher"].ids, texts["student"].ids)
        figures["parts_at"] = position
        if position is not None:
            for mode, text in texts.items():
                token = text.ids[position : position + 1]
                figures[f"{mode}_token"] = tokenizer.decode(list(token)) if token else None
    if flags["json"]:
        about = {"prompt": prompt, "prompt_tokens": len(ids), "max_new_tokens": limit}
        print_json({**about, **figures, **student.other})
    elif compare:
        from rich.panel import Panel

        console = make_console()
        for mode, text in texts.items():
            console.print(Panel(prompt + text.text, title=mode, title_align="left"))
        console.say(_parting_line(figures))
    else:
        put(prompt + texts[modes[0]].text)
    for mode, text in texts.items():
        speed = len(text.ids) / max(text.seconds, 1e-9)
        ending = "reached its end" if text.ended else "stopped at --max_new_tokens"
        notes.say(f"{mode}: {len(text.ids)} tokens, {speed:.1f} tokens/s, {ending}")
    if page is not None:
        recipe = {"adapter": str(task.flags["adapter"]), "base": task.look.base.model_name}
        _write_page(page, task, student, ids, figures, {**recipe, "tokens": f"{limit:,} at most"})
        notes.say(f"wrote {page}")
    return 0


def _parting_line(figures: dict[str, Any]) -> str:
    if figures["parts_at"] is None:
        return "teacher and student write the same text"
    tokens = (figures[f"{mode}_token"] for mode in MODES[:2])
    teacher, student = ("nothing" if token is None else repr(token) for token in tokens)
    return (
        f"the texts differ after {figures['parts_at']} tokens: the teacher writes {teacher}, the"
        f" student {student}"
    )


def _write_page(
    page: Path,
    task: Task,
    student: Student,
    ids: list[int],
    figures: dict[str, Any],
    recipe: dict[str, str],
) -> None:
    from npt.evaluation.modulation_map import modulation_map
    from npt.figures import FIGURES
    from npt.report.generated import page as generated_page

    texts = {mode: figures[mode] for mode in MODES if mode in figures}
    both, start, parts = len(texts) > 1, len(ids), figures.get("parts_at")
    facts, passages = [("tokens in the prompt", f"{start:,}")], []
    for mode, text in texts.items():
        measured = modulation_map(student.model, [*ids, *text["ids"]])
        mean = float(measured.kl[start:].mean()) if text["ids"] else math.nan
        facts.append((f"tokens by the {mode}", f"{text['tokens']:,}"))
        facts.append((f"KL on the {mode}'s text, nats", FIGURES["kl"].write(mean)))
        passage = {**measured.as_dict(student.tokenizer), "start": start}
        passage |= {} if parts is None else {"parts": start + parts}
        passages.append((f"The {mode}'s text" if both else "", passage))
    layers = ", ".join(str(index) for index in measured.layers)
    rows = [*recipe.items(), ("layers", layers), ("targets", ", ".join(measured.targets))]
    line = _parting_line(figures) if both else f"the {next(iter(texts))} continued the prompt"
    numbers = _numbers(task, student, measured)
    write_text(page, generated_page(line[0].upper() + line[1:], facts, rows, passages, numbers))


def _numbers(task: Task, student: Student, measured: ModulationMap) -> list[list[str]]:
    """Return the largest active numbers of a text, with passages of the adapter's data in which
    they are largest; a note says why there are none.
    """
    from npt.calibration.samples import read_samples
    from npt.data.samples import cut
    from npt.data.source import open_source
    from npt.evaluation.contexts import passages_of
    from npt.evaluation.modulation_map import token_texts
    from npt.report.generated import passage, visible

    strongest = measured.strongest(NUMBERS)
    if not strongest:
        return []
    model, tokenizer = student.model, student.tokenizer
    try:
        samples = read_samples(
            cut(open_source(task.data), tokenizer, task.data),
            tokenizer,
            task.data.max_length,
            TOKENS,
            model.config.vocab_size,
        )
    except (NPTError, OSError) as error:
        task.console.say(f"no passages of the adapter's data on the page: {error}")
        return []
    found = passages_of(model, samples, [number for number, *_ in strongest])
    texts, rows = measured.texts(tokenizer), []
    for number, at, value in strongest:
        passages = " | ".join(
            f"{passage(*token_texts(tokenizer, ids[-BEFORE:]))} {size:+.2g}"
            for size, ids in found[number]
        )
        about = [str(number.layer), f"#{number.row}", f"{value:+.2g}"]
        rows.append([*about, visible(texts[at]), passages])
    return rows


def add_flags(parser: argparse.ArgumentParser) -> None:
    text = "text to continue, or the user's message to a chat model"
    parser.add_argument("--prompt", required=True, metavar="TEXT", help=text)
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--mode", choices=MODES, help="model that writes (default: student)")
    add_switch(who, "compare", "show the teacher's and the student's text, and where they differ")
    add_number(parser, "max_new_tokens", "maximum number of tokens to write", 64)
    page = "also write a page that colours each token by each layer's modulation"
    parser.add_argument("--html", metavar="FILE", help=page)
    add_switch(parser, "raw", "do not apply the tokenizer's chat template")
    add_student(parser)
