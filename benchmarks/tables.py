"""Render the JSON in benchmarks/results/ as the Markdown tables of README and docs/.

A table maps each heading to a cell: a format (`{kl:.4f}`) or a function of the row.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from npt.figures import FIGURES

Json = Mapping[str, Any]
Cell = str | Callable[[Any], str]

MIB = 1 << 20


def table(columns: Mapping[str, Cell], rows: Iterable[Json], words: int | None = None) -> str:
    """Return a table. Headings are stripped, so trailing spaces tell two equal headings apart.

    words: how many leading columns hold text (default: all); the others are right-aligned.
    """
    words = len(columns) if words is None else words
    lines = [[heading.strip() for heading in columns]]
    lines += [
        [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        for row in rows
    ]
    head, *rest = [f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines]
    rule = "---|" * words + "---:|" * (len(columns) - words)
    return f"{head}|{rule}\n{''.join(rest)}"


def optional(name: str, form: str, missing: str = "–") -> Callable[[Json], str]:
    """Return a cell for a value that some rows do not have."""
    return lambda row: missing if row.get(name) is None else format(row[name], form)


def figure(name: str, figures: Json) -> str:
    """Return a figure of an evaluation with its standard error. A perplexity has none: its error
    would measure how much the texts differ.
    """
    value = figures[name]
    error = None if name == "perplexity" else figures[f"{name}_se"]
    return FIGURES[name].write(*(math.nan if x is None else x for x in (value, error)))


def agreement(figures: Json, models: Mapping[str, Json], names: Sequence[str]) -> str:
    """Return how closely models agree with the teacher. models: figures by row name."""
    first = f"{figures['teacher']['tokens']:,} held-out tokens"
    cells = {FIGURES[name].short: partial(figure, name) for name in names}
    return table({first: "{model}", **cells}, ({"model": m, **f} for m, f in models.items()))


def fidelity(figures: Json) -> str:
    """Return a run's fidelity.json."""
    models = {
        "floor": "floor (without context)",
        "initial": "student before training",
        "student": "student after training",
        "teacher": "teacher (the base)",
    }
    measured = {words: figures[key] for key, words in models.items() if figures.get(key)}
    names = ("perplexity", "perplexity_ratio", "kl", "top1", "acceptance")
    return agreement(figures, measured, names)


def repaired(figures: Json) -> str:
    """Return how far a run's 4-bit base and its student are from the unquantised teacher."""
    parts = figures["attribution"]
    models = {
        "4-bit base": parts["unquantized_to_4bit"],
        "4-bit base, repaired": parts["unquantized_to_npt"],
    }
    return agreement(figures, models, ("perplexity_ratio", "kl", "top1"))


def embedded(figures: Json) -> str:
    """Return the compression figures in the embedded model's build.json."""
    rows = (("gzip -9, each file alone", "gzip_bits_per_byte"), ("embedded model", "bits_per_byte"))
    columns = {"": "{name}", "bits per byte": "{bits:.3f}"}
    return table(columns, ({"name": name, "bits": figures[key]} for name, key in rows))


def guards(npt_step: Json, lora: Json, layers: Json) -> str:
    """Return the output of `guards.py --json`, with --lora, and with --layers."""
    columns: dict[str, Cell] = {
        "step": "{step}",
        "guarded / plain time": "{ratio:.3f}",
        "quartiles": "{ratio_quartiles[0]:.2f} to {ratio_quartiles[1]:.2f}",
        "extra host synchronisations": optional("added_synchronisations", ""),
        "CPU ms added": optional("added_ms", ".1f"),
        "Python calls (plain)": lambda row: (
            f"{row['calls']:,} ({row['plain_calls']:,})" if "calls" in row else "–"
        ),
    }
    rows = [
        {**npt_step, "step": "NPT"},
        {**lora, "step": "LoRA under `npt.guard`"},
        {**layers["small"], "step": "12 linear layers 256 wide, 64 rows"},
        {**layers["many"], "step": "448 matrices of 8 by 64"},
    ]
    return table(columns, rows)


def tracer(figures: Json) -> str:
    """Return the output of `debug_nan.py --demo --json`."""
    columns = {
        "faults planted": "{total}",
        "located exactly": "{passed}",
        "false alarms": "{false_alarms}",
    }
    return table(columns, [figures])


def tracers(figures: Json) -> str:
    """Return what each tool named of the faults of `debug_nan.py --demo --rivals --json`."""
    columns: dict[str, Cell] = {
        "tool": lambda row: _TRACERS.get(row["name"], row["name"]),
        "operation": "{operation} of {total}",
        "module": "{module} of {total}",
        "line": "{line} of {lines}",
        "phase": "{phase} of {total}",
        "no report": "{nothing}",
        "false alarms": "{false_alarms}",
    }
    return table(columns, figures["tools"], words=1)


_TRACERS = {
    "npt.trace": "`npt.trace`",
    "anomaly mode": "`torch.autograd.set_detect_anomaly`",
    "DebugUnderflowOverflow": "`DebugUnderflowOverflow` of transformers",
    "forward hooks": "forward hooks that check every output",
    "sherlorch": "sherlorch 0.1.0",
}
"""The tools' names on the page."""


def kernels(figures: Json) -> str:
    """Return the output of `compile_kernels.py`: registers, and spilled bytes if there are any."""

    def cell(architecture: str, row: Json) -> str:
        same = ("kernel", "rank")
        for found in figures["kernels"]:
            if found["architecture"] == int(architecture) and all(found[k] == row[k] for k in same):
                spilled = found["spilled"]
                return f"{found['registers']}" + (f" ({spilled} bytes)" if spilled else "")
        return "–"

    columns: dict[str, Cell] = {
        "kernel": "{kernel}",
        "low-rank products": lambda row: (
            f"fused, rank ≤ {row['rank']}" if row["rank"] else "in torch"
        ),
    }
    columns |= {
        card: partial(cell, architecture) for architecture, card in figures["cards"].items()
    }
    rows = {(row["kernel"], row["rank"]): row for row in figures["kernels"]}
    return f"{table(columns, rows.values(), words=2)}\nTriton {figures['triton']}.\n"


def campaign(figures: Json) -> str:
    """Return the output of `inject_fault.py --all --json`: a line, and the cases by verdict."""
    rows = []
    for verdict in dict.fromkeys(case["verdict"] for case in figures["cases"]):
        cases = [case for case in figures["cases"] if case["verdict"] == verdict]
        counts = {key: sum(case[key] for case in cases) for key in ("located", "passed")}
        rows.append({"verdict": verdict, "cases": len(cases), **counts})
    columns = {
        "verdict": "{verdict}",
        "cases": "{cases}",
        "fault located": "{located}",
        "passed": "{passed}",
    }
    return f"{totals(figures)}\n\n{table(columns, rows)}"


def totals(figures: Json) -> str:
    """Return how many cases passed."""
    return (
        f"{figures['passed']} of {figures['total']} cases passed, {figures['false_alarms']} false"
        " alarms."
    )


TRAINERS = ("loop", "accelerate", "hf", "trl", "grpo", "fsdp", "fsdp_sharded")
"""Trainers of `inject_fault.py --trainer`, in row order."""

UNGUARDED = ("changed", "ended", "equal", "not run")
"""Outcomes of a case without the guard."""


def trainers(*campaigns: Json) -> str:
    """Return a row for the output of `inject_fault.py --trainer T --all --json`, for each of
    TRAINERS, and a line for each case that failed.
    """
    rows, failures, alarms = [], "", 0
    for trainer, figures in zip(TRAINERS, campaigns, strict=True):
        ends = Counter(case["unguarded"].split(" by ")[0] for case in figures["cases"])
        rows.append({"trainer": trainer, **figures, **{end: ends[end] for end in UNGUARDED}})
        alarms += figures["false_alarms"]
        for case in figures["cases"]:
            if not case["passed"]:
                failures += f"\nFailed: {case['name']} in {trainer} ({case['verdict']}).\n"
    columns: dict[str, Cell] = {
        "`--trainer`": "`{trainer}`",
        "cases": "{total}",
        "with guard: equal": "{passed}",
        **{f"without: {end}": f"{{{end}}}" for end in UNGUARDED},
    }
    return f"{table(columns, rows, 1)}\n{alarms} false alarms.\n{failures}"


MOST = 6
"""How many losses of a guard `conformance` lists."""


def conformance(figures: Json) -> str:
    """Return the output of `conformance.py --json`: cells by fault and guard, what each guard
    lost, and the guards that were left out.
    """

    def cell(guard: str, row: Json) -> str:
        of_fault = figures["guards"][guard]["faults"][row["fault"]]
        if not of_fault["claimed"]:
            return "not claimed"
        if not of_fault["total"]:
            return "n/a"
        equal = of_fault["equal"] == of_fault["total"]
        return "equal" if equal else f"{of_fault['equal']} of {of_fault['total']}"

    guards = figures["guards"]
    faults = dict.fromkeys(fault for guard in guards.values() for fault in guard["faults"])
    by_fault: dict[str, Cell] = {"fault": "`{fault}`"}
    by_fault |= {name: partial(cell, name) for name in guards}
    rows = [
        {
            "guard": name,
            **guard,
            "words": ", ".join(f"{word} {n}" for word, n in [*guard["lost"].items()][:MOST]) or "–",
        }
        for name, guard in guards.items()
    ]
    by_guard: dict[str, Cell] = {
        "guard": "{guard}",
        "equal": "{equal} of {total}",
        "lost most often, in how many cells": "{words}",
    }
    missing = "".join(f"\nLeft out: {name} ({why}).\n" for name, why in figures["left_out"].items())
    return f"{table(by_fault, [{'fault': f} for f in faults])}\n{table(by_guard, rows)}{missing}"


def machine(figures: Json) -> str:
    """Return the machine of a measurement."""
    machine = figures["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"


def versions(figures: Json) -> str:
    """Return the library versions of a measurement."""
    return "torch {torch}, transformers {transformers}, Python {python}".format_map(
        figures["machine"]
    )


def left_out(reasons: Mapping[str, str]) -> str:
    """Return a line for each row that could not be measured."""
    return "".join(f"\nNot measured: `{name}` ({reason}).\n" for name, reason in reasons.items())


def real(figures: Json) -> str:
    """Return machine, text and rows of `real.py`."""
    sizes, text = figures["sizes"], figures["text"]
    unit = next((row["figures"]["kl"] for row in figures["rows"] if row["name"] == "nf4"), None)

    def ratio(row: Json) -> str:
        value, error = (row["figures"][f"perplexity_ratio{end}"] for end in ("", "_se"))
        # a floor needs no decimals
        return f"{value:,.0f} ± {error:,.0f}" if value >= 100 else of("perplexity_ratio")(row)

    def of(name: str) -> Callable[[Json], str]:
        return lambda row: figure(name, row["figures"])

    columns: dict[str, Cell] = {
        "row": "`{name}`",
        "student": "{about}",
        "numbers": optional("numbers", ".1f"),
        "parameters": optional("parameters", ","),
        "minutes": optional("minutes", ".1f"),
        "start cost": optional("start_passes", ".1f"),
        "total cost": optional("forward_passes", ".1f"),
        "KL, nats": of("kl"),
        "KL / KL of `nf4`": lambda row: f"{row['figures']['kl'] / unit:.2f}" if unit else "–",
        "perplexity ratio": ratio,
        "top-1": of("top1"),
    }
    codes = {row["code"] for row in figures["rows"]}
    mixed = "\nThe rows were measured with different versions of the code.\n"
    return (
        f"{figures['model']} with an {figures['quantization'].upper()} base:"
        f" {sizes['layers']} layers, hidden size {sizes['hidden']}, MLP width {sizes['ffn']:,},"
        f" vocabulary {sizes['vocab']:,}. Machine: {machine(figures)},"
        f" {figures['machine']['device']}; {versions(figures)}.\n\n"
        f"Figures are of {text['heldout_tokens']:,} held-out tokens from"
        f" {text['heldout_documents']} documents ({text['name']}; ±: standard error over"
        f" documents). The start and training use {text['fitted_tokens']:,} other tokens, in"
        f" samples of at most {text['length']}. The unit of cost is one forward pass of the base"
        " over the start's tokens.\n\n"
        f"{table(columns, figures['rows'], words=2)}{left_out(figures.get('failed', {}))}"
        f"{mixed if len(codes) > 1 else ''}"
    )


METHODS = {
    "none": "alone",
    "examples": "examples",
    "added": "code added",
    "replaced": "code replaced",
    "hidden_state": "hidden state",
    "function_vector": "function vector",
    "written": "written",
}
"""Columns of `move.py`'s table, by figure."""


def moved(figures: Json) -> str:
    """Return the rows of `move.py`: accuracies with their standard errors."""

    def accuracy(name: str, row: Json) -> str:
        if (share := row["figures"].get(name)) is None:
            return "–"
        error = math.sqrt(share * (1 - share) / figures["queries"])
        return f"{100 * share:.0f} ± {100 * error:.0f}%"

    def fewest(row: Json) -> str:
        least = row.get("fewest")
        return "–" if least is None else f"{least['numbers']:,} ({100 * least['accuracy']:.0f}%)"

    def numbers(row: Json) -> str:
        return f"{row['kept'][-1]['numbers']:,}" if "kept" in row else "–"

    columns: dict[str, Cell] = {
        "task": "{task}",
        "student": lambda row: (
            f"{row['active']} of {row['rank']}" if "rank" in row else row["student"]
        ),
    }
    columns |= {heading: partial(accuracy, name) for name, heading in METHODS.items()}
    columns |= {"numbers": numbers, "fewest": fewest}
    return table(columns, sorted(figures["rows"], key=lambda row: row["task"]), words=2)


def edited(figures: Json) -> str:
    """Return the rows of `edit.py`."""

    def nats(name: str) -> Callable[[Json], str]:
        def written(row: Json) -> str:
            if name not in row:
                return "–"
            share = row.get(f"{name}_share")
            return f"{row[name]:.1f}" + (f" ({100 * share:.0f}%)" if share else "")

        return written

    columns: dict[str, Cell] = {
        "row": "{name}",
        "answer": nats("answer"),
        "paraphrases": nats("paraphrases"),
        "neighbours": lambda row: f"{100 * row['neighbours']:.0f}%" if "neighbours" in row else "–",
        "KL": lambda row: f"{row['kl']:.4f} ± {row['kl_se']:.4f}" if "kl" in row else "–",
        "seconds a fact": optional("seconds", ".1f"),
    }
    rows = [
        {"name": f"`{name}`", **row} for name, row in figures["rows"].items() if "closed" not in row
    ]
    return table(columns, rows, words=1)


def edited_contexts(figures: Json) -> str:
    """Return the rows of `edit.py` that write contexts."""

    def share(name: str, kl: str) -> Callable[[Json], str]:
        return lambda row: f"{100 * row[name]:.0f}% ({row[kl]:.3f})"

    columns: dict[str, Cell] = {
        "row": "{name}",
        "KL without the context": "{before:.2f}",
        "closed": share("closed", "kl"),
        "by a bias": share("bias_closed", "bias_kl"),
        "one after another": share("in_turn", "in_turn_kl"),
        "the last one, others taken out": lambda row: f"{100 * row['last_alone']:.0f}%",
        "all taken out": lambda row: f"{100 * row['left']:.0f}%",
    }
    rows = [
        {"name": f"`{name}`", **row} for name, row in figures["rows"].items() if "closed" in row
    ]
    return table(columns, rows, words=1)


def rounded(figures: Json) -> str:
    """Return the row `bits` of `real.py`: its student with rounded codes."""
    row = next(row for row in figures["rows"] if row["name"] == "bits")
    columns: dict[str, Cell] = {
        "step": "{step}",
        "bits": "{bits:.0f}",
        "bound": "{bits_bound:.0f}",
        "bits / bound": lambda entry: f"{entry['bits'] / entry['bits_bound']:.2f}",
        "KL, nats": lambda entry: figure("kl", entry["figures"]),
        "top-1": lambda entry: figure("top1", entry["figures"]),
    }
    return table(columns, row["rounded"], words=1)


def speed(figures: Json) -> str:
    """Return machine, setting and table of `speed.py`."""
    roofline, device = figures["roofline"], figures["machine"]["device"]

    def ratio(run: Json) -> str:
        if "speed_ratio" not in run:
            return "-"
        return "{median:.2f} ({low:.2f} to {high:.2f})".format_map(run["speed_ratio"])

    columns: dict[str, Cell] = {
        "run": "`{name}`",
        "tokens/s": "{tokens_per_second:,.0f}",
        "speed vs `two_model`": ratio,
        "peak MiB": lambda run: f"{run['peak_bytes'] / MIB:,.0f}",
        "MiB between steps": lambda run: f"{run['held_bytes'] / MIB:,.0f}",
        "memory vs `two_model`": optional("memory_ratio", ".2f", missing="-"),
        "MFLOP/token": lambda run: f"{run['flops_per_token'] / 1e6:,.0f}",
        "roofline share": lambda run: f"{100 * run['roofline_share']:.0f}%",
        "trainable parameters": "{trainable_parameters:,}",
    }
    where = machine(figures) if device == "cpu" else f"{device}; {machine(figures)}"
    return (
        f"Machine: {where}; {versions(figures)}; fp32 products at precision"
        f" `{figures['machine']['matmul_precision']}`. Square products of side {roofline['size']}"
        f" set the roofline: {roofline['flops_per_second'] / 1e9:,.0f} GFLOP/s.\n\n"
        f"{shape_line(figures)}\n\n"
        f"{table(columns, figures['runs'], words=1)}{left_out(figures['missing'])}"
    )


def shape_line(figures: Json) -> str:
    """Return the model and the step that `speed.py` measured."""
    shape, setting = figures["sizes"], figures["setting"]
    base = (setting["quantization"] or "").upper() or "fp32"
    return (
        f"Model `{figures['shape']}`: hidden size {shape['hidden']:,}, MLP width {shape['ffn']:,},"
        f" {shape['layers']} layers, {shape['heads']} query and {shape['kv_heads']} key-value"
        f" heads, vocabulary {shape['vocab']:,}; {base} base."
        f" Rank {setting['rank']}, `--layers {setting['layers']}`, batch"
        f" {setting['batch_size']} x {setting['length']:,} tokens, {setting['rounds']} rounds."
    )


PRECISIONS = {"highest": "fp32", "high": "TF32", "bf16": "bf16"}
"""Precisions of products: torch's name (bf16: 4-bit products only) to a heading."""


def speeds(figures: Mapping[str, Json]) -> list[str]:
    """Return a table for each shape. figures: of `speed.py`, by "shape, precision"."""
    shapes = dict.fromkeys(key.partition(", ")[0] for key in figures)
    names = {s: {p: figures.get(f"{s}, {p}") for p in PRECISIONS} for s in shapes}
    return [_by_precision({p: f for p, f in of.items() if f}) for of in names.values()]


def _by_precision(measured: Mapping[str, Json]) -> str:
    runs: dict[str, dict[str, Json]] = {}
    for precision, figures in measured.items():
        for run in figures["runs"]:
            runs.setdefault(run["name"], {})[precision] = run

    def largest(key: str, row: Json) -> str:
        return f"{max(run[key] for run in row.values()) / MIB:,.0f}"

    def cell(key: str, form: str, precision: str, row: Json) -> str:
        return format(row[precision][key], form) if precision in row else "–"

    columns: dict[str, Cell] = {"run": lambda row: f"`{next(iter(row.values()))['name']}`"}
    columns |= {
        "peak MiB": partial(largest, "peak_bytes"),
        "MiB between steps": partial(largest, "held_bytes"),
    }
    for heading, key, form in (
        ("tokens/s", "tokens_per_second", ",.0f"),
        ("roofline", "roofline_share", ".0%"),
    ):
        columns |= {f"{heading}, {PRECISIONS[p]}": partial(cell, key, form, p) for p in measured}
    reached = ", ".join(
        f"{f['roofline']['flops_per_second'] / 1e12:,.0f} TFLOP/s ({PRECISIONS[p]})"
        for p, f in measured.items()
    )
    first = next(iter(measured.values()))
    missing = {n: why for f in measured.values() for n, why in f["missing"].items()}
    return (
        f"{shape_line(first)} Square products set the roofline: {reached}.\n\n"
        f"{table(columns, runs.values(), words=1)}{left_out(missing)}"
    )


def products(rows: Iterable[Json]) -> str:
    """Return TFLOP/s of 4-bit products by shape. rows: `products` of `gpu_check.py`'s figures."""
    cases: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = f"{row['out']}x{row['in']} | {row['rows']}"
        cases.setdefault(name, {"case": name})[row["precision"]] = row["teraflops"]
    columns: dict[str, Cell] = {"weight | rows": "{case}"}
    for precision, name in PRECISIONS.items():
        columns |= {
            f"{name} {who}": partial(lambda p, k, case: f"{case[p][k]:.3g}", precision, key)
            for who, key in (("bnb", "Linear4bit"), ("NPT", "product"))
        }
    return table(columns, cases.values()).replace("|---|", "|---|---|", 1)


def step_cost(steps: Sequence[Json]) -> str:
    """Return the cost of a step on a GPU after each optimisation."""
    columns: dict[str, Cell] = {"optimisations": "{name}"}
    for strategy in ("local", "end_to_end"):
        for heading, form in (
            (f"`{strategy}`: launches", "launches]:,"),
            ("ms", "milliseconds]:.0f"),
            ("roofline share", "roofline_share]:.0%"),
        ):
            columns[heading + " " * len(columns)] = f"{{{strategy}[{form}}}"
            if heading == "`local`: launches":
                columns["by the host"] = _by_host
    return table(columns, steps, words=1)


def _by_host(step: Json) -> str:
    """Return the launches by the host with `local`: all of them before there were graphs."""
    counts = step["local"]
    return f"{counts.get('launches_by_host', counts['launches']):,}"


def gpu_check(figures: Json) -> str:
    """Return the report of `gpu_check.py` or `h100_hour.py`."""
    card, sections = figures["machine"], figures["sections"]
    libraries = ", ".join(
        f"{name} {card[name]}"
        for name in ("torch", "cuda", "transformers", "bitsandbytes")
        if card.get(name)
    )
    columns: dict[str, Cell] = {
        "section": "{number} {name}",
        "verdict": "{verdict}",
        "checks passed": _findings,
    }
    date = max((section["ended"][:10] for section in sections), default="")
    program = figures.get("program", "gpu_check")
    flag = " --small" if figures["small"] else ""
    return (
        f"### {card['device']}, {date}\n\n`benchmarks/{program}.py{flag}`, {libraries}.\n\n"
        f"{table(columns, sections)}"
    ) + "".join(f"\n{each}\n" for section in sections for each in section["tables"])


def _findings(section: Json) -> str:
    """Return a section's text without the notes whose figures its tables have."""
    text = re.sub(r"^(\d+) of (\d+)", r"\1/\2", section["text"])
    for note in section["notes"] if section["tables"] else ():
        text = text.replace(f", {note}", "")
    return text.replace("|", "\\|")
