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

NUMBERS = 16
"""Active numbers on a page."""

TOKENS = 8192
"""Tokens of data to search for the passages of each number."""

BEFORE = 12
"""Tokens of a passage."""


def generate(flags: dict[str, Any]) -> int:
    """Continue a prompt with the student, its teacher, or both."""
    from npt.adapters.converted import adapter_mode
    from npt.evaluation.generate import Written, first_difference, prompt_ids, write

    page = None if flags["html"] is None else Path(flags["html"])
    if page is not None:
        check_file(page, "--html")
    prompt = flags["prompt"]
    limit = flags["max_new_tokens"]
    compare = flags["compare"]
    task = begin(flags, stderr=True)  # stdout holds only the text or the JSON
    student = task.load()
    tokenizer = student.tokenizer
    ids = prompt_ids(tokenizer, prompt, chat=not flags["raw"])
    modes: Any = MODES[:2] if compare else (flags["mode"],)
    texts: dict[str, Written] = {}
    for mode in modes:
        with adapter_mode(student.model, mode):
            texts[mode] = write(student.model, tokenizer, ids, limit)
    figures: dict[str, Any] = {mode: text.as_dict() for mode, text in texts.items()}
    if compare:
        position = first_difference(texts["teacher"].ids, texts["student"].ids)
        figures["parts_at"] = position
        if position is not None:
            # the shorter of two texts may end there
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
        put(prompt + texts[mode].text)
    for mode, text in texts.items():
        # a clock may not tick in so short a time
        speed = len(text.ids) / max(text.seconds, 1e-9)
        ending = "reached its end" if text.ended else "stopped at --max_new_tokens"
        task.console.say(f"{mode}: {len(text.ids)} tokens, {speed:.1f} tokens/s, {ending}")
    if page is not None:
        _write_page(page, task, student, ids, figures)
        task.console.say(f"wrote {page}")
    return 0


def _parting_line(figures: dict[str, Any]) -> str:
    if figures["parts_at"] is None:
        return "teacher and student write the same text"
    tokens = [figures["teacher_token"], figures["student_token"]]
    teacher, student = ("nothing" if token is None else repr(token) for token in tokens)
    return (
        f"the texts differ after {figures['parts_at']} tokens: the teacher writes {teacher}, the"
        f" student {student}"
    )


def _write_page(
    page: Path, task: Task, student: Student, ids: list[int], figures: dict[str, Any]
) -> None:
    from npt.evaluation.modulation_map import modulation_map
    from npt.figures import FIGURES
    from npt.report.generated import page as generated_page

    texts = {mode: figures[mode] for mode in MODES if mode in figures}
    both = len(texts) > 1
    start = len(ids)
    facts = [("tokens in the prompt", f"{start:,}")]
    passages = []
    for mode, text in texts.items():
        measured = modulation_map(student.model, [*ids, *text["ids"]])
        # without the prompt, which neither model wrote
        mean = float(measured.kl[start:].mean()) if text["ids"] else math.nan
        facts.append((f"tokens by the {mode}", f"{text['tokens']:,}"))
        facts.append((f"KL on the {mode}'s text, nats", FIGURES["kl"].write(mean)))
        passage = {**measured.as_dict(student.tokenizer), "start": start}
        if (parts := figures.get("parts_at")) is not None:
            passage["parts"] = start + parts
        passages.append((f"The {mode}'s text" if both else "", passage))
    recipe = [
        ("adapter", str(task.flags["adapter"])),
        ("base", task.look.base.model_name),
        ("tokens", f"{task.flags['max_new_tokens']:,} at most"),
        ("layers", ", ".join(map(str, measured.layers))),
        ("targets", ", ".join(measured.targets)),
    ]
    line = _parting_line(figures) if both else f"the {mode} continued the prompt"
    line = line[0].upper() + line[1:]
    numbers = _numbers(task, student, measured)
    write_text(page, generated_page(line, facts, recipe, passages, numbers))


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
    model = student.model
    tokenizer = student.tokenizer
    try:
        samples = read_samples(
            cut(open_source(task.data), tokenizer, task.data),
            tokenizer,
            task.data.max_length,
            TOKENS,
            model.config.vocab_size,
        )
    except (NPTError, OSError) as error:  # the page is worth having without them
        task.console.say(f"no passages of the adapter's data on the page: {error}")
        return []
    # from the data it was trained on: there its numbers got their meaning
    found = passages_of(model, samples, [number for number, *_ in strongest])
    texts = measured.texts(tokenizer)
    rows = []
    for number, at, value in strongest:
        passages = []
        for size, ids in found[number]:
            tokens = token_texts(tokenizer, ids[-BEFORE:])
            passages.append(f"{passage(*tokens)} {size:+.2g}")
        about = [str(number.layer), f"#{number.row}", f"{value:+.2g}"]
        rows.append([*about, visible(texts[at]), " | ".join(passages)])
    return rows


def add_flags(parser: argparse.ArgumentParser) -> None:
    text = "text to continue, or the user's message to a chat model"
    parser.add_argument("--prompt", required=True, metavar="TEXT", help=text)
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--mode", choices=MODES, default="student", help="model that writes (default: student)"
    )
    add_switch(who, "compare", "show the teacher's and the student's text, and where they differ")
    add_number(parser, "max_new_tokens", "maximum number of tokens to write", 64)
    page = "also write a page that colours each token by each layer's modulation"
    parser.add_argument("--html", metavar="FILE", help=page)
    add_switch(parser, "raw", "do not apply the tokenizer's chat template")
    add_student(parser)
