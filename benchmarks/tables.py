"""The tables of README and docs/, as Markdown, from the JSON in benchmarks/results/.

A table is its columns: by heading the format of a cell (`{kl:.4f}`), or a function of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from npt.evaluation.formatting import FIGURES

Json = Mapping[str, Any]
Cell = str | Callable[[Any], str]

MIB = 1 << 20


def table(columns: Mapping[str, Cell], rows: Iterable[Json], words: int | None = None) -> str:
    """Return a table. Headings lose spaces at their ends, by which two may be the same.

    words: leading columns that are not aligned as numbers; default all.
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
    """Return a cell of a value that some rows lack."""
    return lambda row: missing if row.get(name) is None else format(row[name], form)


def figure(name: str, figures: Json) -> str:
    """Return a figure of an evaluation with its standard error; that of a perplexity says how much
    texts differ, and is left out.
    """
    value = figures[name]
    error = None if name == "perplexity" else figures[f"{name}_se"]
    return FIGURES[name].write(*(math.nan if x is None else x for x in (value, error)))


def agreement(figures: Json, models: Mapping[str, Json], names: Sequence[str]) -> str:
    """Return what models agree in with the teacher. models: their figures by what they are."""
    first = f"held-out text, {figures['teacher']['tokens']:,} tokens"
    cells = {FIGURES[name].short: partial(figure, name) for name in names}
    return table({first: "{model}", **cells}, ({"model": m, **f} for m, f in models.items()))


def fidelity(figures: Json) -> str:
    """Return a run's fidelity.json."""
    models = {
        "floor": "floor: attention dropped from these layers",
        "initial": "student at its start",
        "student": "student after training",
        "teacher": "teacher: the base",
    }
    measured = {words: figures[key] for key, words in models.items() if figures.get(key)}
    names = ("perplexity", "perplexity_ratio", "kl", "top1", "acceptance")
    return agreement(figures, measured, names)


def repaired(figures: Json) -> str:
    """Return how far base and student of a run are from the unquantised teacher."""
    parts = figures["attribution"]
    models = {
        "the 4-bit base": parts["unquantized_to_4bit"],
        "repaired": parts["unquantized_to_npt"],
    }
    return agreement(figures, models, ("perplexity_ratio", "kl", "top1"))


def embedded(figures: Json) -> str:
    """Return what the embedded model's build.json says of it."""
    rows = (
        ("gzip -9, file by file", "gzip_bits_per_byte"),
        ("the embedded model", "bits_per_byte"),
    )
    columns = {"": "{name}", "bits per byte": "{bits:.3f}"}
    return table(columns, ({"name": name, "bits": figures[key]} for name, key in rows))


def guards(npt_step: Json, lora: Json) -> str:
    """Return what `guards.py --json` prints, and `guards.py --lora --json`."""
    columns = {
        "step": "{step}",
        "guarded over plain": "{ratio:.3f}",
        "quartiles": "{ratio_quartiles[0]:.2f} to {ratio_quartiles[1]:.2f}",
        "waits of the host added": "{added_synchronisations}",
    }
    rows = [
        {**npt_step, "step": "NPT on the embedded model"},
        {**lora, "step": "`npt.guard` around a LoRA step", "added_synchronisations": "–"},
    ]
    return table(columns, rows)


def tracer(figures: Json) -> str:
    """Return what `debug_nan.py --demo --json` prints."""
    columns = {
        "planted": "{total}",
        "named exactly": "{passed}",
        "alarms on the clean model": "{false_alarms}",
    }
    return table(columns, [figures])


def kernels(figures: Json) -> str:
    """Return what `compile_kernels.py` prints: registers, and spilled bytes if there are any."""

    def cell(architecture: str, row: Json) -> str:
        same = ("kernel", "rank")
        for found in figures["kernels"]:
            if found["architecture"] == int(architecture) and all(found[k] == row[k] for k in same):
                spilled = found["spilled"]
                return f"{found['registers']}" + (f" ({spilled} bytes)" if spilled else "")
        return "–"

    columns: dict[str, Cell] = {
        "kernel": "{kernel}",
        "M z and B z": lambda row: f"rank to {row['rank']}" if row["rank"] else "by torch",
    }
    columns |= {
        f"sm_{architecture} ({card})": partial(cell, architecture)
        for architecture, card in figures["cards"].items()
    }
    rows = {(row["kernel"], row["rank"]): row for row in figures["kernels"]}
    return f"{table(columns, rows.values(), words=2)}\nTriton {figures['triton']}.\n"


def campaign(figures: Json) -> str:
    """Return what `inject_fault.py --all --json` prints: a line, and the cases by verdict."""
    rows = []
    for verdict in dict.fromkeys(case["verdict"] for case in figures["cases"]):
        cases = [case for case in figures["cases"] if case["verdict"] == verdict]
        counts = {key: sum(case[key] for case in cases) for key in ("located", "passed")}
        rows.append({"verdict": verdict, "cases": len(cases), **counts})
    columns = {name: f"{{{name}}}" for name in ("verdict", "cases", "located", "passed")}
    return f"{totals(figures)}\n\n{table(columns, rows)}"


def totals(figures: Json) -> str:
    """Return how many cases passed."""
    return (
        f"{figures['passed']} of {figures['total']} cases passed, {figures['false_alarms']} false"
        " alarms."
    )


TRAINERS = ("loop", "accelerate", "hf", "trl", "grpo", "fsdp", "fsdp_sharded")
"""Trainers of `inject_fault.py --trainer`, in the order of their columns."""


def trainers(*campaigns: Json) -> str:
    """Return what `inject_fault.py --trainer T --all --json` prints for each of TRAINERS. A trainer
    without a case has an empty cell.
    """
    rows: dict[str, dict[str, Any]] = {}
    for trainer, figures in zip(TRAINERS, campaigns, strict=True):
        for case in figures["cases"]:
            row = rows.setdefault(case["name"], {"planted": case["name"], "fates": {}})
            row[trainer] = "equal" if case["passed"] else case["verdict"]
            row["fates"][case["unguarded"]] = None
    columns: dict[str, Cell] = {"planted": "{planted}"}
    columns |= {f"guarded, {name}": optional(name, "", missing="") for name in TRAINERS}
    columns["unguarded"] = lambda row: ", ".join(row["fates"])
    passed = [f"{name}: {totals(f)}" for name, f in zip(TRAINERS, campaigns, strict=True)]
    return f"{' '.join(passed)}\n\n{table(columns, rows.values())}"


def machine(figures: Json) -> str:
    """Return what was measured on."""
    machine = figures["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"


def versions(figures: Json) -> str:
    """Return what was measured with."""
    return "torch {torch}, transformers {transformers}, Python {python}".format_map(
        figures["machine"]
    )


def left_out(reasons: Mapping[str, str]) -> str:
    """Return a line for each row that could not be measured."""
    return "".join(f"\nLeft out: `{name}` ({reason}).\n" for name, reason in reasons.items())


def real(figures: Json) -> str:
    """Return machine, text and rows of `real.py`."""
    sizes, text = figures["sizes"], figures["text"]
    unit = next((row["figures"]["kl"] for row in figures["rows"] if row["name"] == "nf4"), None)

    def ratio(row: Json) -> str:
        value, error = (row["figures"][f"perplexity_ratio{end}"] for end in ("", "_se"))
        # of a floor
        return f"{value:,.0f} ± {error:,.0f}" if value >= 100 else of("perplexity_ratio")(row)

    def of(name: str) -> Callable[[Json], str]:
        return lambda row: figure(name, row["figures"])

    columns: dict[str, Cell] = {
        "row": "{name}",
        "what it is": "{about}",
        "parameters": optional("parameters", ","),
        "minutes": optional("minutes", ".1f"),
        "start, x": optional("start_passes", ".1f"),
        "all, x": optional("forward_passes", ".1f"),
        "KL, nats": of("kl"),
        "of NF4's": lambda row: f"{row['figures']['kl'] / unit:.2f}" if unit else "–",
        "ratio": ratio,
        "top-1": of("top1"),
    }
    codes = {row["code"] for row in figures["rows"]}
    mixed = "\nThe rows were made by more than one version of the code.\n"
    return (
        f"Machine: {machine(figures)}, computing on {figures['machine']['device']};"
        f" {versions(figures)}.\n\n"
        f"{figures['model']}, {figures['quantization']} base, against its own base on"
        f" {text['heldout_tokens']:,} held-out tokens of {text['heldout_documents']} documents"
        f" ({text['name']}); ± is the standard error over documents. {sizes['layers']} layers, D"
        f" {sizes['hidden']}, F {sizes['ffn']}, V {sizes['vocab']:,}; samples of {text['length']}"
        f" tokens at most, {text['fitted_tokens']:,} tokens may be fitted. Times are in minutes,"
        " and in passes (x): forward passes of the whole base over the tokens that the row's start"
        " is fitted to, or over as many if a rival has no such start, timed in the same process."
        f"\n\n{table(columns, figures['rows'], words=2)}{left_out(figures.get('failed', {}))}"
        f"{mixed if len(codes) > 1 else ''}"
    )


def speed(figures: Json) -> str:
    """Return machine, setting and tables of `speed.py`."""
    shape, setting, roofline = (figures[key] for key in ("sizes", "setting", "roofline"))
    device = figures["machine"]["device"]
    count, in_bf16 = setting["batch_size"], setting.get("compute_dtype") == "bf16"

    def ratio(run: Json) -> str:
        if "speed_ratio" not in run:
            return "-"
        return "{median:.2f} ({low:.2f} to {high:.2f})".format_map(run["speed_ratio"])

    columns: dict[str, Cell] = {
        "run": "`{name}`",
        "tokens/s (lowest to highest)": "{tokens_per_second:,.0f}"
        " ({tokens_per_second_range[0]:,.0f} to {tokens_per_second_range[1]:,.0f})",
        "x two_model": ratio,
        "peak MiB": lambda run: f"{run['peak_bytes'] / MIB:,.0f}",
        "of which held": lambda run: f"{run['held_bytes'] / MIB:,.0f}",
        "x two_model ": optional("memory_ratio", ".2f", missing="-"),
        "MFLOP/token": lambda run: f"{run['flops_per_token'] / 1e6:,.0f}",
        "of roofline": lambda run: f"{100 * run['roofline_share']:.0f}%",
        "trained": "{trainable_parameters:,}",
    }
    where = machine(figures) if device == "cpu" else f"{device}; {machine(figures)}"
    return (
        f"Machine: {where}; {versions(figures)}; fp32 products at"
        f" `{figures['machine']['matmul_precision']}`. Square products (side {roofline['size']})"
        f" reach {roofline['flops_per_second'] / 1e9:,.0f} GFLOP/s.\n\n"
        f"Shape `{figures['shape']}`: D {shape['hidden']}, F {shape['ffn']}, {shape['layers']}"
        f" layers, {shape['heads']} heads, {shape['kv_heads']} of keys and values, V"
        f" {shape['vocab']:,}; {setting['quantization'] or 'fp32'} base,"
        f"{' its products and the square ones in bf16,' if in_bf16 else ''} layers"
        f" `{setting['layers']}` converted, rank {setting['rank']}."
        f" {count} row{'' if count == 1 else 's'} of {setting['length']:,} tokens a step,"
        f" {setting['rounds']} rounds.\n\n"
        f"{table(columns, figures['runs'], words=1)}{left_out(figures['missing'])}"
    )


def step_cost(steps: Sequence[Json]) -> str:
    """Return what a step asks of a GPU, by the steps of the work on it."""
    columns: dict[str, Cell] = {"after": "{name}"}
    for strategy in ("local", "end_to_end"):
        for heading, form in (
            (f"`{strategy}`: launches", "launches]:,"),
            ("GB moved", "gigabytes]:.0f"),
            ("TFLOP", "teraflops]:.1f"),
            ("ms", "milliseconds]:.0f"),
            ("of roofline", "roofline_share]:.0%"),
        ):
            columns[heading + " " * len(columns)] = f"{{{strategy}[{form}}}"
    return table(columns, steps, words=1)


def gpu_check(figures: Json) -> str:
    """Return the results of `gpu_check.py`."""
    card, sections = figures["machine"], figures["sections"]
    libraries = ", ".join(
        f"{name} {card[name]}"
        for name in ("torch", "cuda", "transformers", "bitsandbytes")
        if card.get(name)
    )
    columns: dict[str, Cell] = {
        "section": "{number} {name}",
        "verdict": "{verdict}",
        "result": lambda section: section["text"].replace("|", "\\|"),
        "seconds": "{seconds:.1f}",
    }
    date = max((section["ended"][:10] for section in sections), default="")
    program = figures.get("program", "gpu_check")
    flag = " --small" if figures["small"] else ""
    return (
        f"### {card['device']}, {date}\n\n`benchmarks/{program}.py{flag}`, {libraries}.\n\n"
        f"{table(columns, sections)}"
    ) + "".join(f"\n{each}\n" for section in sections for each in section["tables"])
