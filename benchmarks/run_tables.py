"""Figures of runs, of smaller benchmarks and of the fault campaigns, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from npt.evaluation.formatting import FIGURES

Json = Mapping[str, Any]

MODELS = {
    "floor": "floor: attention dropped from these layers",
    "initial": "student at its start",
    "student": "student after training",
    "teacher": "teacher: the base",
}
"""Rows of a run's fidelity, by their key in fidelity.json."""

_SHOWN = ("perplexity", "perplexity_ratio", "kl", "top1", "acceptance")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    head, *lines = [f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in (heads, *rows)]
    return f"{head}|{'---|' * len(heads)}\n{''.join(lines)}"


def figure(figures: Json, name: str) -> str:
    """Return a figure of an evaluation with its standard error; that of a perplexity says how much
    texts differ, and is left out.
    """
    if name == "perplexity":
        return FIGURES[name].write(figures[name])
    return FIGURES[name].write(figures[name], figures[f"{name}_se"])


def fidelity(figures: Json) -> str:
    """Return a run's fidelity.json as a table."""
    tokens = figures["teacher"]["tokens"]
    heads = [f"held-out text, {tokens:,} tokens", *(FIGURES[name].short for name in _SHOWN)]
    models = {key: words for key, words in MODELS.items() if figures.get(key)}
    return table(
        heads,
        (
            [words, *(figure(figures[key], name) for name in _SHOWN)]
            for key, words in models.items()
        ),
    )


def repaired(figures: Json) -> str:
    """Return how far base and student of a run are from the unquantised teacher."""
    names = ("perplexity_ratio", "kl", "top1")
    rows = {"unquantized_to_4bit": "the 4-bit base", "unquantized_to_npt": "repaired"}
    heads = [f"held-out text, {figures['teacher']['tokens']:,} tokens"]
    return table(
        [*heads, *(FIGURES[name].short for name in names)],
        (
            [words, *(figure(figures["attribution"][key], name) for name in names)]
            for key, words in rows.items()
        ),
    )


def embedded(figures: Json) -> str:
    """Return what the embedded model's build.json says of it."""
    rows = {
        "gzip -9, file by file": figures["gzip_bits_per_byte"],
        "the embedded model": figures["bits_per_byte"],
    }
    return table(("", "bits per byte"), ([name, f"{bits:.3f}"] for name, bits in rows.items()))


LOSSES = {"nmse": "NMSE, `local`", "kl": "KL, logits", "cross_entropy": "cross-entropy"}
"""Losses of `masking.py`, by the names of its functions."""


def masking(figures: Json) -> str:
    """Return what `masking.py --json` prints as a table."""
    rows = []
    for case in figures["cases"]:
        arms = [
            f"{figure(case[arm], 'perplexity_ratio')}, {figure(case[arm], 'kl')}"
            for arm in ("masked", "ignored")
        ]
        rows.append([case["left_out"], LOSSES[case["loss"]], str(case["steps"]), *arms])
    heads = ("what the mask leaves out", "loss", "steps", "masked: ratio, KL", "ignored: ratio, KL")
    samples, size = figures["samples"], figures["batch_size"]
    said = (
        f"± is over {samples} held-out samples; {size} samples a step; each arm was trained once.\n"
    )
    return f"{table(heads, rows)}\n{said}"


def forms(figures: Json) -> str:
    """Return what `forms.py` wrote as a table: KL, top-1 and parameters by form and rank."""
    from forms import FORMS, divisors_of, means  # imports torch

    divisors, rows = divisors_of(figures["rows"]), []
    for name in FORMS:
        found = [means(figures["rows"], name, divisor) for divisor in divisors]
        if not any(found):
            continue
        cells = []
        for each in found:
            if each is None:
                cells.append("–")
                continue
            seeds = f" (of {each['seeds']} seeds, {each['spread']:.1g} apart)"
            cells.append(
                f"{each['kl']:.3g} ± {each['kl_se']:.1g}{seeds if each['seeds'] > 1 else ''},"
                f" {100 * each['top1']:.1f}%, {each['parameters'] / 1e6:.2g} M"
            )
        rows.append([name, *cells])
    heads = ("form", *(f"D/{divisor}" for divisor in divisors))
    said = (
        f"{figures['model']}, {figures['layers']}: KL in nats, top-1, trainable parameters."
        f" {figures['minutes']:g} minutes of training; starts from {figures['tokens']:,} tokens;"
        f" measured on {figures['heldout_tokens']:,} tokens of {figures['text']}.\n"
    )
    return f"{table(heads, rows)}\n{said}"


PARTS = {
    "limit": "random start, alpha 0.1",
    "limit, alpha 1": "random start, alpha 1",
    "limit, calibrated": "closed-form start",
}
"""Parts of the study of `widths.py` that seek a limit."""


def widths(rows: Sequence[Json]) -> str:
    """Return the largest rates that train, from the table of `widths.py`."""
    from widths import exponent  # imports what a study needs

    sizes = list(dict.fromkeys(row["arms"] for row in rows))
    lines = []
    for part, words in PARTS.items():
        found = {row["arms"]: row for row in rows if row["parts"] == part}
        cells, logs = [], []
        for size in sizes:
            if size not in found:
                cells.append("")
                continue
            low, high = (float(found[size][key]) for key in ("limit_low", "limit_high"))
            digits = 3 if low >= 0.01 else 4
            cells.append(f"{low:.{digits}f}, {high:.{digits}f}")
            logs.append((float(size.removeprefix("D ")), low))
        lines.append([words, *cells, f"D^{exponent(logs):.2f}"])
    return table(["trains up to, not at", *sizes, "goes as"], lines)


def guards(own: Json, lora: Json) -> str:
    """Return what `guards.py --json` and `guard_lora.py --json` print as a table."""
    rows = {
        "NPT on the embedded model": (own, own["ratio_quartiles"], own["added_synchronisations"]),
        "`npt.guard` around a LoRA step": (lora, lora["quartiles"], "–"),
    }
    heads = ("step", "guarded over plain", "quartiles", "waits of the host added")
    return table(
        heads,
        (
            [name, f"{found['ratio']:.3f}", f"{low:.2f} to {high:.2f}", str(waits)]
            for name, (found, (low, high), waits) in rows.items()
        ),
    )


def counts(heads: Mapping[str, str]) -> Callable[[Json], str]:
    """Return a renderer of one line of counts, from their keys and headings."""
    return lambda figures: table(
        list(heads.values()), [[f"{_count(figures[key]):,}" for key in heads]]
    )


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else value


crash = counts(
    {
        "kills": "kills",
        "resumed": "resumed",
        "bit_equal": "equal to the uninterrupted run, bit for bit",
        "lost": "lost",
        "bit_flips": "bits flipped",
        "bit_flips_found": "found",
    }
)
fuzz = counts(
    {"inputs": "inputs", "read": "read", "refused": "refused in one line", "failures": "failures"}
)
tracer = counts(
    {"total": "planted", "passed": "named exactly", "false_alarms": "alarms on the clean model"}
)


def campaign(figures: Json) -> str:
    """Return what `inject_fault.py --all --json` prints: a line, and a table by verdict."""
    cases = figures["cases"]
    rows = []
    for verdict in dict.fromkeys(case["verdict"] for case in cases):
        named = [case for case in cases if case["verdict"] == verdict]
        counts = [sum(case[key] for case in named) for key in ("located", "passed")]
        rows.append([verdict, str(len(named)), *map(str, counts)])
    return f"{totals(figures)}\n\n{table(('verdict', 'cases', 'located', 'passed'), rows)}"


def totals(figures: Json) -> str:
    """Return how many cases passed."""
    return (
        f"{figures['passed']} of {figures['total']} cases passed, {figures['false_alarms']} false"
        " alarms."
    )


def compared(rows: Sequence[Json]) -> str:
    """Return what `inject_fault.py --compare --json` prints as a table."""
    heads = {"name": "planted", "ours": "NPT"}
    columns = [key for key in rows[0] if key != "id"]
    return table(
        [heads.get(column, column.replace("_", " ")) for column in columns],
        ([row[column] for column in columns] for row in rows),
    )


def trainers(*campaigns: Json) -> str:
    """Return what `inject_fault.py --trainer T --all --json` prints for several T as one table. A
    trainer without a case has an empty cell.
    """
    by_name = [{case["name"]: case for case in figures["cases"]} for figures in campaigns]
    rows = []
    for name in dict.fromkeys(name for cases in by_name for name in cases):
        found = [cases.get(name) for cases in by_name]
        fates = dict.fromkeys(case["unguarded"] for case in found if case)
        passed = ["" if c is None else "equal" if c["passed"] else c["verdict"] for c in found]
        rows.append([name, *passed, ", ".join(fates)])
    heads = ("planted", *(f"guarded, {name}" for name in TRAINERS), "unguarded")
    said = [f"{name}: {totals(f)}" for name, f in zip(TRAINERS, campaigns, strict=True)]
    return f"{' '.join(said)}\n\n{table(heads, rows)}"


TRAINERS = ("loop", "accelerate", "hf", "trl")
"""Trainers of `inject_fault.py --trainer`, in the order of their columns."""
