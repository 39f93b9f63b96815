"""Figures of runs, of `masking.py`, `calibration.py` and the fault campaigns, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from npt.evaluation.formatting import FIGURES

Json = Mapping[str, Any]

MODELS = {
    "floor": "floor: attention dropped from these layers",
    "initial": "student before training",
    "student": "student after training",
    "teacher": "teacher: the base",
}
"""Rows of a run's fidelity, by their key in fidelity.json."""

_SHOWN = ("perplexity", "perplexity_ratio", "kl", "top1", "acceptance")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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


def masking(figures: Json) -> str:
    """Return what `masking.py --json` prints as a table."""
    rows = []
    for case in figures["cases"]:
        arms = [
            f"{figure(case[arm], 'perplexity_ratio')}, {figure(case[arm], 'kl')}"
            for arm in ("masked", "ignored")
        ]
        rows.append([case["left_out"], case["loss"].replace("_", "-"), str(case["steps"]), *arms])
    heads = ("what the mask leaves out", "loss", "steps", "masked: ratio, KL", "ignored: ratio, KL")
    samples, size = figures["samples"], figures["batch_size"]
    said = (
        f"± is over {samples} held-out samples; {size} samples a step; each arm was trained once.\n"
    )
    return f"{table(heads, rows)}\n{said}"


def calibration(figures: Json) -> str:
    """Return what `calibration.py --json` prints as a table."""

    def cells(found: Json | None) -> str:
        names = ("perplexity_ratio", "kl", "top1")
        return "–" if found is None else ", ".join(figure(found, name) for name in names)

    rows = [["NF4 against fp32, for scale", "", cells(figures["quantisation"]), "–", "", ""]]
    for case in figures["cases"]:
        minutes = [case["seconds"], case.get("seconds_in_all", case["seconds"])]
        rows.append(
            [
                case["name"],
                str(case["rounds"]),
                cells(case["calibrated"]),
                cells(case.get("trained")),
                str(case["steps"]) if "trained" in case else "–",
                ", ".join(f"{seconds / 60:.1f}" for seconds in minutes),
            ]
        )
    heads = (
        "converted, rank",
        "passes",
        "solved: ratio, KL, top-1",
        "trained: ratio, KL, top-1",
        "steps",
        "minutes: solved, all",
    )
    tokens, heldout = figures["tokens"], figures["quantisation"]["tokens"]
    said = (
        f"Solved on {tokens:,} tokens, measured on {heldout:,} held-out ones;"
        f" {figures['threads']} threads.\n"
    )
    return f"{table(heads, rows)}\n{said}"


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
    heads = {"name": "planted", "ours": "here"}
    columns = [key for key in rows[0] if key != "id"]
    return table(
        [heads.get(column, column.replace("_", " ")) for column in columns],
        ([row[column] for column in columns] for row in rows),
    )


def trainers(*campaigns: Json) -> str:
    """Return what `inject_fault.py --trainer T --all --json` prints for several T as one table."""
    rows = []
    for cases in zip(*(figures["cases"] for figures in campaigns), strict=True):
        fates = dict.fromkeys(case["unguarded"] for case in cases)
        passed = ["equal" if case["passed"] else case["verdict"] for case in cases]
        rows.append([cases[0]["name"], *passed, ", ".join(fates)])
    heads = ("planted", *(f"guarded, {name}" for name in TRAINERS), "unguarded")
    said = [f"{name}: {totals(f)}" for name, f in zip(TRAINERS, campaigns, strict=True)]
    return f"{' '.join(said)}\n\n{table(heads, rows)}"


TRAINERS = ("loop", "accelerate", "hf")
"""Trainers of `inject_fault.py --trainer`, in the order of their columns."""
