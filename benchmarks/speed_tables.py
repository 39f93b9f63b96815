"""The figures of `speed.py` as the tables of a page and as pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

MIB = 1 << 20
_OURS, _THEIRS, _LIGHT = "#2f6b8e", "#b0592a", "#a9b0b7"
_KINDS = {"local": _OURS, "two_model": _THEIRS}


def markdown(figures: dict[str, Any]) -> str:
    """The machine, the setting and the tables."""
    machine, setting, shape, roofline = (
        figures[key] for key in ("machine", "setting", "sizes", "roofline")
    )
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    if machine["device"] != "cpu":
        where = f"{machine['device']}; {where}"
    rows = f"{_rows(setting['batch_size'], setting['length'])} tokens a step"
    kinds = (
        f"{setting['quantization'] or 'fp32'} base, layers `{setting['layers']}` converted, rank"
        f" {setting['rank']}"
    )
    lines = [
        (
            f"Machine: {where}; torch {machine['torch']}, transformers {machine['transformers']},"
            f" Python {machine['python']}; fp32 products at `{machine['matmul_precision']}`. Square"
            f" products (side {roofline['size']}) reach {roofline['flops_per_second'] / 1e9:,.0f}"
            " GFLOP/s."
        ),
        "",
        (
            f"Shape `{figures['shape']}`: D {shape['hidden']}, F {shape['ffn']}, {shape['layers']}"
            f" layers, {shape['heads']} heads, {shape['kv_heads']} of keys and values, V"
            f" {shape['vocab']:,}; {kinds}. {rows}, {setting['rounds']} rounds."
        ),
        "",
        *_runs_table(figures["runs"]),
        *(f"\nLeft out: `{name}` ({reason})." for name, reason in figures["missing"].items()),
    ]
    if "sweep" in figures:
        lines += ["", *_sweep_table(figures["sweep"])]
    return "\n".join(lines) + "\n"


def place(shape: str) -> str:
    """Return the name of a shape's place in a text that holds its tables."""
    return f"speed.py --shape {shape}"


def _rows(count: int, length: int) -> str:
    return f"{count} row{'' if count == 1 else 's'} of {length:,}"


def _runs_table(runs: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (
            f"`{run['name']}`",
            (
                f"{run['tokens_per_second']:,.0f} ({run['tokens_per_second_range'][0]:,.0f} to"
                f" {run['tokens_per_second_range'][1]:,.0f})"
            ),
            _ratio(run.get("speed_ratio")),
            f"{run['peak_bytes'] / MIB:,.0f}",
            f"{run['held_bytes'] / MIB:,.0f}",
            f"{run['memory_ratio']:.2f}" if "memory_ratio" in run else "-",
            f"{run['flops_per_token'] / 1e6:,.0f}",
            (
                f"{run['flops_per_token'] / run['floor_flops_per_token']:.3f}"
                if "floor_flops_per_token" in run
                else "-"
            ),
            f"{100 * run['roofline_share']:.0f}%",
            f"{run['trainable_parameters']:,}",
        )
        for run in runs
    ]
    heads = (
        "run",
        "tokens/s (lowest to highest)",
        "x two_model",
        "peak MiB",
        "of which held",
        "x two_model",
        "MFLOP/token",
        "x floor",
        "of roofline",
        "trained",
    )
    return _table(heads, rows)


def _sweep_table(sweep: dict[str, Any]) -> list[str]:
    rows = [
        (
            p["converted"],
            p["batch_size"],
            p["length"],
            p["tokens"],
            f"{p['local_seconds']:.3g}",
            f"{p['two_model_seconds']:.3g}",
            f"{p['two_model_seconds'] / p['local_seconds']:.2f}",
        )
        for p in sweep["points"]
    ]
    lines = _table(
        ("converted layers", "rows", "length", "tokens", "local, s", "two_model, s", "ratio"), rows
    )
    for kind, line in sweep["linearity"].items():
        lines += [
            "",
            (
                f"`{kind}` against tokens: {1e3 * line['seconds_per_token']:.3g} ms a token and"
                f" {line['fixed_seconds']:.2g} s a step; points lie within"
                f" {100 * line['largest_deviation']:.0f}% of that line, and the upper part of the"
                f" curve is {line['slope_ratio']:.2f} times as steep as the lower one."
            ),
        ]
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in (heads, *rows)]
    return [lines[0], "|---" + "|---:" * (len(heads) - 1) + "|", *lines[1:]]


def _ratio(ratio: dict[str, float] | None) -> str:
    return (
        "-"
        if ratio is None
        else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    )


def draw_runs(figures: dict[str, Any]) -> bytes:
    """Bars of speed and of peak memory, as a PNG."""

    def draw(figure: Any) -> None:
        runs = figures["runs"][::-1]
        names = [run["name"] for run in runs]
        colours = [
            _OURS if run["name"] in ("local", "end_to_end", "end_to_end_kl") else _LIGHT
            for run in runs
        ]
        speed, memory = figure.subplots(1, 2, sharey=True)
        speeds = [run["tokens_per_second"] for run in runs]
        ends = [
            [abs(run["tokens_per_second_range"][i] - run["tokens_per_second"]) for run in runs]
            for i in (0, 1)
        ]
        speed.barh(
            names,
            speeds,
            color=colours,
            xerr=ends,
            error_kw={"ecolor": "#333333", "elinewidth": 1, "capsize": 2},
        )
        speed.set_xlabel("tokens/s, median with lowest and highest")
        held, peaks = ([run[key] / MIB for run in runs] for key in ("held_bytes", "peak_bytes"))
        memory.barh(names, peaks, color=colours)
        memory.barh(
            names,
            held,
            color="none",
            edgecolor="#333333",
            hatch="///",
            linewidth=0.8,
            label="held between steps",
        )
        memory.set_xlabel("peak memory, MiB")
        memory.legend(frameon=False, loc="upper right")
        for axes, values, ends_of in ((speed, speeds, ends[1]), (memory, peaks, [0.0] * len(runs))):
            for place, (value, end) in enumerate(zip(values, ends_of, strict=True)):
                axes.annotate(
                    f"{value:,.0f}",
                    (value + end, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            axes.margins(x=0.16)
        figure.suptitle(
            f"{figures['shape']}, {figures['setting']['tokens']:,} tokens a step (blue: this"
            " package)",
            fontsize=10,
        )

    return _png(draw, (10, 0.42 * len(figures["runs"]) + 1.2))


def draw_sweep(figures: dict[str, Any]) -> bytes:
    """Seconds of a step against tokens, milliseconds of a token against the length of its row,
    seconds against converted layers: a PNG.
    """

    def draw(figure: Any) -> None:
        sweep = figures["sweep"]
        panels = dict(zip(sweep["curves"], figure.subplots(1, len(sweep["curves"])), strict=True))
        for name, axes in panels.items():
            points = [sweep["points"][i] for i in sweep["curves"][name]]
            xs = [point["converted" if name == "layers" else name] for point in points]
            for kind, colour in _KINDS.items():
                per = [1e3 / point["tokens"] if name == "length" else 1.0 for point in points]
                axes.plot(
                    xs,
                    [p[f"{kind}_seconds"] * f for p, f in zip(points, per, strict=True)],
                    "o",
                    color=colour,
                    label=kind,
                )
                if name == "tokens":
                    line = sweep["linearity"][kind]
                    ends = [0, xs[-1]]
                    axes.plot(
                        ends,
                        [line["fixed_seconds"] + line["seconds_per_token"] * x for x in ends],
                        color=colour,
                        linewidth=1,
                    )
                else:
                    axes.lines[-1].set_linestyle("-")
                    axes.lines[-1].set_linewidth(1)
            if name == "length":
                axes.set_xscale("log", base=2)
            axes.set_xticks(xs, [f"{x:,}" for x in xs])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            if name != "length":
                axes.set_xlim(left=0)
            first = points[0]
            fixed = {
                "tokens": f"rows of {first['length']:,}",
                "length": f"{first['tokens']:,} tokens a step",
                "layers": _rows(first["batch_size"], first["length"]),
            }
            axes.set_xlabel(
                {
                    "tokens": "tokens of a step",
                    "length": "tokens of a row",
                    "layers": "converted layers, from the top",
                }[name]
            )
            axes.set_ylabel("ms per token" if name == "length" else "seconds per step")
            axes.set_title(fixed[name], fontsize=9)
        panels["tokens"].legend(frameon=False)

    return _png(draw, (12, 3.4))


def _png(draw: Callable[[Any], None], size: tuple[float, float]) -> bytes:
    import matplotlib
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"), matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        stream = io.BytesIO()
        figure.savefig(stream, format="png")
    return stream.getvalue()
