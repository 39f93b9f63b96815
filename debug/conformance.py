#!/usr/bin/env python
"""Test any guard: a run with a bad batch must equal, bit for bit, the run without that batch.

    python debug/conformance.py                            all shipped guards
    python debug/conformance.py --guard FILE.py:Class      yours
    python debug/conformance.py --guard npt.guard --only loss,norm,accumulation
    python debug/conformance.py --list                     faults, settings and guards

Yours is a class of some ten lines; debug/conformance_guards/adapters.py has its form:

    class MyGuard:
        def __init__(self, run): ...   # run.model, .optimizer, .scheduler, .ema, .scaler, .max_norm
        def step(self, window): ...    # forward, backward and update of a list of micro-batches

Each cell trains a tiny model with a fault, and without the bad micro-batch in the data. Compared
are weights, moments and step counts, learning-rate schedule, EMA, buffers, torch's random state
and the GradScaler's state. If all of a window is bad, or the fault only shows in the optimizer's
step, the run without it has no such window. Guards that are not installed are left out. The exit
status is 0 if the guard under test (default: npt.guard) is equal in every cell, else 1.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from rich.table import Table

from conformance_guards.faults import FAULTS, Fault
from conformance_guards.run import SETTINGS, Setting
from conformance_guards.trial import (
    GUARDS,
    Cell,
    GuardError,
    Processes,
    judged,
    load,
    missing,
    prepare,
)
from npt.console import make_console, put
from npt.files import to_json
from npt.parser import OneLineParser

UNDER_TEST = next(iter(GUARDS))


def main() -> int:
    parser = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--guard", metavar="GUARD", help="one guard: FILE.py:Class, or a name")
    parser.add_argument("--only", metavar="LIST", help="comma-separated faults and settings")
    parser.add_argument("--list", action="store_true", help="list faults, settings and guards")
    parser.add_argument("--json", action="store_true", help="print every cell as JSON")
    args = parser.parse_args()
    if args.list:
        list_all()
        return 0
    only = args.only.split(",") if args.only else []
    unknown = next((name for name in only if name not in {*FAULTS, *SETTINGS}), None)
    if unknown is not None:
        every = ", ".join([*FAULTS, *SETTINGS])
        parser.error(f"there is no fault or setting {unknown!r}; choose from {every}")
    under_test = args.guard or UNDER_TEST
    try:
        load(under_test)
    except GuardError as error:
        parser.error(str(error))
    if (package := missing(under_test)) is not None:
        parser.error(f"--guard {under_test} needs {package}, which is not installed")
    prepare()
    faults, settings = chosen(only)
    cells: list[Cell] = []
    left_out: dict[str, str] = {}
    for guard in GUARDS if args.guard is None else [args.guard]:
        if (package := missing(guard)) is not None:
            left_out[guard] = f"{package} is not installed"
            continue
        try:
            cells += judged_cells(guard, faults, settings)
        except GuardError as error:
            if guard == under_test:
                parser.error(str(error))
            left_out[guard] = str(error)
    figures = summary(cells, left_out)
    if args.json:
        put(to_json(figures, indent=2))
    else:
        show(figures)
    tested = figures["guards"].get(under_test, {"equal": 0, "total": 0})
    return 0 if tested["equal"] == tested["total"] else 1


def chosen(only: Sequence[str]) -> tuple[list[Fault], list[Setting]]:
    """Return the faults and the settings that are named; all of a kind if none of it is."""
    faults = [FAULTS[name] for name in only if name in FAULTS]
    settings = [SETTINGS[name] for name in only if name in SETTINGS]
    return faults or [*FAULTS.values()], settings or [*SETTINGS.values()]


def judged_cells(
    guard: str, faults: Sequence[Fault], settings: Sequence[Setting]
) -> Iterator[Cell]:
    """Judge a guard in every cell; print progress on a terminal."""
    progress = make_console(stderr=True)
    with Processes(guard) as processes:
        for fault, setting in product(faults, settings):
            cell = judged(guard, fault, setting, processes)
            if progress.is_terminal and cell.verdict in ("equal", "lost"):
                progress.print(f"{guard}: {fault.name}, {setting.name}: {cell.verdict}")
            yield cell


def summary(cells: Sequence[Cell], left_out: dict[str, str]) -> dict[str, Any]:
    """Return the counts by guard and fault, and what happened in each cell that makes sense."""
    guards: dict[str, Any] = {}
    for name in dict.fromkeys(cell.guard for cell in cells):
        own = [cell for cell in cells if cell.guard == name]
        guards[name] = {**counted(own), "faults": {}}
        for fault in dict.fromkeys(cell.fault for cell in own):
            of_fault = [cell for cell in own if cell.fault == fault]
            happened = {cell.setting: told(cell) for cell in of_fault if told(cell) != "n/a"}
            guards[name]["faults"][fault] = {**counted(of_fault), "settings": happened}
    return {"torch": torch.__version__, "guards": guards, "left_out": left_out}


def told(cell: Cell) -> str:
    """Return what happened in a cell: its verdict, or what was lost."""
    lost = "; ".join(cell.lost)
    if cell.verdict == "lost":
        return lost
    return f"{cell.verdict}: {lost}" if lost else cell.verdict


def counted(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return how many cells are equal, of how many that were run, and what was lost how often."""
    run = [cell for cell in cells if cell.verdict in ("equal", "lost")]
    claimed = not any(cell.verdict == "not claimed" for cell in cells)
    lost = Counter(word for cell in run for word in cell.lost)
    equal = sum(cell.verdict == "equal" for cell in run)
    return {"equal": equal, "total": len(run), "claimed": claimed, "lost": dict(lost.most_common())}


def show(figures: dict[str, Any]) -> None:
    """Print a table of faults by guard, and for each guard what it lost."""
    console = make_console()
    table = Table(title="cells in which the run equals the one without the bad batch")
    guards = figures["guards"]
    table.add_column("fault")
    for name in guards:
        table.add_column(name, overflow="fold")
    for fault in dict.fromkeys(f for figure in guards.values() for f in figure["faults"]):
        table.add_row(fault, *(words(guards[name]["faults"][fault]) for name in guards))
    console.print(table)
    for name, figure in guards.items():
        lost = ", ".join(f"{word} {times}" for word, times in figure["lost"].items())
        line = f"{name}: {figure['equal']} of {figure['total']} equal"
        console.print(f"{line}; lost: {lost}" if lost else line, soft_wrap=True)
        if len(guards) > 1:
            continue
        for fault, of_fault in figure["faults"].items():
            if of_fault["lost"]:
                each = ", ".join(f"{word} {times}" for word, times in of_fault["lost"].items())
                console.print(f"  {fault}: {each}", soft_wrap=True)
    for name, reason in figures["left_out"].items():
        console.print(f"left out: {name} ({reason})", soft_wrap=True)


def words(of_fault: dict[str, Any]) -> str:
    """Return a cell of the table: `equal`, how many settings are, or why none was run."""
    if not of_fault["claimed"]:
        return "not claimed"
    if not of_fault["total"]:
        return "n/a"
    if of_fault["equal"] == of_fault["total"]:
        return "equal"
    return f"{of_fault['equal']} of {of_fault['total']}"


def list_all() -> None:
    """Print faults, settings and guards."""
    console = make_console()
    for fault in FAULTS.values():
        console.print(f"{fault.name:20} {fault.about}", soft_wrap=True)
    console.print(f"{'settings':20} {', '.join(SETTINGS)}", soft_wrap=True)
    console.print(f"{'guards':20} {', '.join(GUARDS)}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
