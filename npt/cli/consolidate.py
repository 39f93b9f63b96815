"""`npt consolidate`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from npt.cli.arguments import (
    Task,
    add_number,
    add_student,
    add_switch,
    begin,
    limit,
    natural,
    read_text,
    tell,
)
from npt.config import BaseConfig, DataConfig, flags_of
from npt.errors import ConfigError, DataError, first_line
from npt.files import check_folder

MAX_KL = 0.01
"""Nats per token."""

CONTEXT_PROBES = 16
"""Continuations of a context that is written without texts."""


def consolidate(flags: dict[str, Any]) -> int:
    """Write texts or a context permanently into a student.

    Find an update of the weights with which the student behaves as if it had read them; report its
    effects. Or list earlier updates, or take them out.
    """
    _check(flags)
    if flags["list"]:
        return _list(flags)
    undoes = flags["undo"] is not None
    task = begin(flags, reads_data=not undoes)
    output = _output(task)
    return _undo(task, output) if undoes else _write(task, output)


def _check(flags: Mapping[str, Any]) -> None:
    """Refuse flags that do not fit together."""
    writes = any(flags[name] for name in ("text", "facts", "context"))
    if sum((writes, flags["list"], flags["undo"] is not None)) != 1:
        raise ConfigError(
            "pass what to write (--text, --facts or --context), or --list, or --undo, and only one"
            " of these three"
        )
    if flags["text"] and flags["facts"]:
        raise ConfigError("--text and --facts exclude each other: add the texts to the file")
    if not writes:
        task = "list" if flags["list"] else "undo"
        unread = {"probes", "max_kl", "eval_samples", *flags_of(DataConfig)}
        if flags["list"]:
            unread |= {"output", "any_base", *flags_of(BaseConfig)}
        for name in sorted(unread & flags.keys()):
            if flags[name] not in (None, False):
                raise ConfigError(f"--{name} has no effect with --{task}: remove it")
    if not flags["list"] and not flags["output"]:
        raise ConfigError("--output is missing: name a folder for the adapter and its updates")


def _output(task: Task) -> Path:
    """Return the folder to write to, after checking that it can be written."""
    from npt.adapters.files.adapter_files import WEIGHTS_NAME, check_replaceable

    output = Path(task.flags["output"])
    size = (task.flags["adapter"].folder / WEIGHTS_NAME).stat().st_size
    check_folder(output, "--output", size=size)
    check_replaceable(output)
    return output


def _list(flags: dict[str, Any]) -> int:
    """Print the updates of an adapter, without loading its base."""
    from npt.adapters.files.adapter_files import find_adapter
    from npt.adapters.files.consolidated_files import read_records

    records = read_records(find_adapter(flags["adapter"]).folder)
    lines = [f"{number}: {_describe(record)}" for number, record in enumerate(records)]
    tell(flags, records, *(lines or ["no updates"]))
    return 0


def _describe(record: Mapping[str, Any]) -> str:
    """Return what an update wrote, in one line."""
    texts = record.get("texts") or [record.get("context", "")]
    first = " ".join(texts[0].split())
    shown = first if len(first) <= 60 else first[:57] + "..."
    others = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    effects = []
    if "gain" in record:
        effects.append(f"{record['gain']:+.2f} nats")
    if "kl" in record:
        effects.append(f"KL {record['kl']:.4f}")
    return f"{shown!r}{others}{': ' if effects else ''}{', '.join(effects)}"


def _undo(task: Task, output: Path) -> int:
    """Take updates out of a student."""
    import npt

    student = task.load()
    undo = task.flags["undo"]
    taken = npt.unconsolidate(student.model, None if undo == "all" else undo)
    _save(student, output)
    left = len(npt.consolidated(student.model))
    figures = {"undone": [update.record for update in taken], "updates": left}
    lines = [f"undone: {_describe(update.record)}" for update in taken] or ["there was no update"]
    tell(task.flags, figures, *lines, f"wrote the other {left} to {output}")
    return 0


def _write(task: Task, output: Path) -> int:
    """Find an update, measure it on text that nothing was chosen on, and save it."""
    import npt
    from npt.adapters.consolidate import applied
    from npt.adapters.files.adapter_files import adapter_hash
    from npt.adapters.fit import format_layers
    from npt.data.continuation import prompt_tokens
    from npt.tools.editing.edit_metrics import Baseline, print_retention
    from npt.tools.editing.probes import answer_probe
    from npt.tools.editing.write import (
        as_facts,
        find_update,
        general_text,
        judged_probes,
        layers_to_patch,
        write_update,
    )

    flags = task.flags
    facts = list(read_facts(flags["facts"])) if flags["facts"] else as_facts(flags["text"] or [])
    context = read_text(flags["context"], "--context").strip() if flags["context"] else ""
    # a fact says what to learn; of a context the model's own continuations do
    count = flags["probes"]
    if count is None:
        count = 0 if facts else CONTEXT_PROBES
    student = task.load()
    model = student.model
    tokenizer = student.tokenizer
    heldout = task.heldout(model, tokenizer)
    # one half chooses the penalty, the other half measures
    chosen_on = heldout.samples[::2]
    reported_on = heldout.samples[1::2]
    if not reported_on:
        raise DataError(
            f"{len(heldout.samples)} held-out sample is too few to choose the update on one half"
            " and measure it on the other: raise --eval_samples or add data"
        )
    seed = task.look.training.seed
    # nothing is chosen by these two: they judge
    paraphrases = [
        answer_probe(tokenizer, fact, prompt, context or fact.text)
        for fact in facts
        for prompt in fact.paraphrases
    ]
    neighbours = [prompt_tokens(tokenizer, text) for fact in facts for text in fact.neighbours]
    with task.console.status("reading general text"):
        layers = layers_to_patch(model, None)
        general = general_text(model, tokenizer, _training_text(task, tokenizer), layers, chosen_on)
    # before the update is in the model
    with task.console.status("measuring"):
        judged = judged_probes(model, tokenizer, facts, context, seed)
        baseline = Baseline(model, reported_on, judged, paraphrases, neighbours, layers)
    with task.console.status("searching"):
        update = find_update(
            model,
            tokenizer,
            facts,
            general,
            max_kl=MAX_KL if flags["max_kl"] is None else flags["max_kl"],
            context=context,
            probes=count,
            seed=seed,
        )
    # of the adapter that the update was found for: earlier updates are part of it
    written_to = adapter_hash(model)
    with applied(model, update):
        retention = baseline.against(model)
    record = write_update(
        model,
        update,
        gain=retention["recall"]["student"]["gain"],
        kl=retention["forgetting"]["student"]["kl"],
        adapter_hash=written_to,
        **student.other,
    ).record
    _save(student, output)
    if not flags["json"]:
        print_retention(retention, task.console, str(heldout))
    number = len(npt.consolidated(model))
    tell(
        flags,
        {
            **record,
            **retention,
            "updates": number,
            "heldout": heldout.held_out,
            "data": heldout.data,
            "output": flags["output"],
        },
        f"layers {format_layers(layers)}, penalty {record['penalty']:.3g}; wrote update"
        f" {number - 1} to {output}",
    )
    return 0


def _training_text(task: Task, tokenizer: Any) -> Iterator[Any]:
    """Yield the samples of the student's data that are not held out."""
    from npt.data.samples import cut
    from npt.data.source import open_source

    samples = cut(open_source(task.data), tokenizer, task.data)
    return (sample for sample in samples if not sample.heldout)


def _save(student: Any, output: Path) -> None:
    from safetensors import SafetensorError

    import npt

    try:
        npt.save_adapter(student.model, output, base=student.identity)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(
            f"--output {output} cannot be written: {why}; free disk space or choose another place"
        ) from error


def read_facts(path: str) -> Iterator[Any]:
    """Yield the facts of a JSON Lines file; raise DataError for one without a prompt and answer."""
    from npt.data.source import records_from
    from npt.tools.editing.probes import Fact

    if Path(path).is_file() and not Path(path).read_text(encoding="utf-8").strip():
        raise DataError(f"--facts {path} has no fact")
    for number, record in enumerate(records_from(path, DataConfig(), "--facts"), 1):
        prompt = record.get("prompt")
        answer = record.get("answer")
        lists = [record.get(name) or [] for name in ("paraphrases", "neighbours")]
        texts = [prompt, answer]
        for each in lists:
            texts += each if isinstance(each, list) else [None]
        # records of a file may hold anything, also numbers and null
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(
                f"--facts {path}: record {number} needs a prompt and an answer, and lists of texts"
                " as paraphrases and neighbours"
            )
        yield Fact(prompt, answer, *map(tuple, lists))


def undo_of(text: str) -> int | str:
    return text if text == "all" else int(text)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", nargs="+", metavar="FACT", help="facts to write into the model")
    text = "JSON Lines of facts: prompt, answer; and to judge by: paraphrases, neighbours"
    add("--facts", metavar="FILE", help=text)
    text = "text to read before the facts, by default each fact itself; written alone without facts"
    add("--context", metavar="FILE", help=text)
    text = (
        "continuations for the model to write after each context, to learn from (default: 0 for"
        f" facts, {CONTEXT_PROBES} for a context alone)"
    )
    add_number(parser, "probes", text, None, natural)
    text = (
        "weaken the update until held-out KL is at most this, in nats per token (inf: any; default:"
        f" {MAX_KL})"
    )
    add_number(parser, "max_kl", text, None, limit)
    add_switch(parser, "list", "list the adapter's updates")
    text = "take out an update, by its number in --list, or all"
    add("--undo", type=undo_of, metavar="INT|all", help=text)
    text = "folder to write the adapter and its updates to"
    add("--output", metavar="FOLDER", help=text)
    add_number(parser, "eval_samples", "held-out samples (default: as many as the run)")
    add_student(parser, data=True, leave_out=("context_column",))
