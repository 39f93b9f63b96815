"""What the modulations add to the cut: every form of the adapter at several ranks, trained for the
same minutes.

    python benchmarks/forms.py [--model tiny] [--text builtin] [--minutes 2] [--seeds 0,1,2]
        [--divisors 32,16,8,4,2] [--forms NAME,...] [--rates 5e-4,...] --out FILE [--plot FILE]

One walk through the teacher makes the starts of all ranks, and is not in the minutes. Each training
is on KL with the teacher, by AdamW at the rate of three that was nearest in short trials, which are
in the minutes; the nearest of five students on the way is kept. Rates and students are chosen
on documents of their own, all figures are of held-out ones, and ± is over documents. A seed is
where in the text a training begins, and the random start of forms that have one. The rows:

    cut             the closed-form start: attention cut to R directions. Nothing is trained
    trained         A and B of the stream, from there
    M, B, M and B   besides, those of gate, up and down
    no stream       gate, up and down with M and B, from a random start
    original        gate alone, half sigmoid, alpha 0.1, from a random start

Started again with the same --out, it makes the rows that the file lacks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import npt
from fidelity_plot import COLOURS, MARKERS, own_file, short_count
from npt.adapters.attach import set_adapters
from npt.adapters.converted import adapter_parameters
from npt.adapters.fit import resolve_layers
from npt.base.quantization_error import fp32_products
from npt.calibration.calibrate import start_tensors
from npt.calibration.cut import Cut, spend
from npt.calibration.sensitivity import measure
from npt.config import NPTConfig
from npt.config.adapter import PRODUCTS, STREAM
from npt.console import silent_console
from npt.data.batch import batches
from npt.errors import ConfigError, NPTError
from npt.files import write_json, write_text
from npt.report import charts
from real_rows import QUANTIZATION, STARTED_AT_ONCE, Bench
from real_text import Text, read_text
from real_training import Training, npt_learner
from this_machine import code_hash, machine


def _started(*products: str, **form: Any) -> dict[str, Any]:
    return {"init": "calibrated", "targets": (STREAM, *products), **form}


FORMS: dict[str, dict[str, Any]] = {
    "cut": _started(),
    "trained": _started(),
    "M": _started(*PRODUCTS, modulation="multiplicative"),
    "B": _started(*PRODUCTS, modulation="additive"),
    "M and B": _started(*PRODUCTS),
    "no stream": {"targets": tuple(PRODUCTS)},
    "original": {"targets": ("gate",), "mult_form": "half_sigmoid", "additive_scale": 0.1},
}
"""What is not the default in each form. All are trained but `cut`."""


WIDTH, HEIGHT = 830, 330
"""Of the plot."""


def rates_of(config: NPTConfig, divisor: int) -> tuple[float, ...]:
    """Return the rates that a form tries. The nearer the start, the less a rate may move it."""
    if config.init == "random":
        return 3e-3, 1e-2, 3e-2
    return (1e-5, 3e-5, 1e-4) if divisor <= 4 else (3e-4, 1e-3, 3e-3)


class Forms:
    """All forms on one base: it is walked through once, and left as it was after every row."""

    def __init__(self, bench: Bench, layers: str, tokens: int):
        self.bench, self.model = bench, bench.model
        self.layers = layers
        self.count = len(resolve_layers(layers, self.model.config.num_hidden_layers))
        samples = bench.fitted(tokens)
        self.walked = len(samples)
        npt.attach(self.model, NPTConfig(rank=1, layers=layers))
        try:
            with fp32_products("highest"):
                sums = measure(
                    self.model, batches(samples, STARTED_AT_ONCE), bench.seed, lambda batch: None
                )
                self.cuts = {i: Cut.of(s.covariance, s.to_attention) for i, s in sums.items()}
        finally:
            npt.detach(self.model)

    def config(self, form: str, rank: int) -> NPTConfig:
        """Return a form at a rank: of every layer, or on average where the start spends ranks."""
        settings = {"additive_scale": 1.0, **FORMS[form]}
        config = NPTConfig(rank=rank, layers=self.layers, **settings)
        if config.init == "calibrated":
            worth = {index: cut.worth for index, cut in self.cuts.items()}
            ranks = spend(rank * self.count, worth)
            config = replace(config, ranks=tuple(ranks.values()))
        return config

    def make(
        self, form: str, divisor: int, seed: int, rates: tuple[float, ...] | None = None
    ) -> dict[str, Any]:
        """Return a row's figures. rates: to try in place of those of `rates_of`."""
        config = self.config(form, self.model.config.hidden_size // divisor)
        npt.attach(self.model, config, seed=seed)
        try:
            if config.init == "calibrated":
                ranks = dict(zip(self.cuts, config.ranks_of(self.count), strict=True))
                tensors = start_tensors(self.model, config, self.cuts, ranks)
                set_adapters(self.model, config, tensors)
            found: dict[str, Any] = {
                "parameters": sum(p.numel() for p in adapter_parameters(self.model).values())
            }
            if form != "cut":
                training = Training(rates or rates_of(config, divisor))
                learner, seconds = npt_learner(self.model, training), 60 * self.bench.minutes
                found["trained"] = self.bench.train(learner, training, self.walked, seconds, seed)
            return found | {"figures": self.bench.measure()["figures"]}
        finally:
            npt.detach(self.model)


def means(rows: Sequence[Mapping[str, Any]], form: str, divisor: int) -> dict[str, float] | None:
    """Return the means over seeds of a form at a rank, with the KL's error over documents and its
    range over seeds; None if there is no row.
    """
    here = [row for row in rows if (row["form"], row["divisor"]) == (form, divisor)]
    if not here:
        return None
    figures = [row["figures"] for row in here]
    kls = [each["kl"] for each in figures]
    return {
        **{name: statistics.fmean(f[name] for f in figures) for name in ("kl", "kl_se", "top1")},
        "spread": max(kls) - min(kls),
        "seeds": len(here),
        "parameters": here[0]["parameters"],
    }


def divisors_of(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return those of all rows, of the smallest rank first."""
    return sorted({row["divisor"] for row in rows}, reverse=True)


def plot(found: Mapping[str, Any]) -> str:
    """Return KL by rank and by parameters, an SVG file."""
    rows = found["rows"]
    divisors = divisors_of(rows)
    names = [name for name in FORMS if any(row["form"] == name for row in rows)]
    label = (
        f"KL(teacher, student) of {len(names)} forms on {found['model']}, by rank and parameters"
    )
    with charts.picture(HEIGHT, label, WIDTH) as made:
        sides = [made.axes(30, HEIGHT - 80, left, WIDTH - left - 290) for left in (50, 400)]
        lines = {
            name: [(d, m) for d in divisors if (m := means(rows, name, d)) is not None]
            for name in names
        }
        kls = [m["kl"] for drawn in lines.values() for _, m in drawn]
        sizes = [m["parameters"] for drawn in lines.values() for _, m in drawn]
        for axes, x in zip(sides, ([found["hidden"] // d for d in divisors], sizes), strict=True):
            charts.scale(axes, "x", x, log=True)
            charts.scale(axes, "y", kls, log=True)
        for place, (name, drawn) in enumerate(lines.items()):
            style: dict[str, Any] = {
                "color": COLOURS[place % len(COLOURS)],
                "marker": MARKERS[place % len(MARKERS)],
                "linestyle": "-" if place < len(COLOURS) else "--",
                "markersize": 5,
                "label": name,
            }
            y = [m["kl"] for _, m in drawn]
            sides[0].plot([found["hidden"] // d for d, _ in drawn], y, **style)
            sides[1].plot([m["parameters"] for _, m in drawn], y, **style)
        sides[0].set_xticks([found["hidden"] // d for d in divisors], [f"D/{d}" for d in divisors])
        sides[0].minorticks_off()
        sides[0].set_xlabel("rank")
        sides[1].xaxis.set_major_formatter(lambda value, _: short_count(value))
        sides[1].set_xlabel("trainable parameters")
        sides[0].set_title("KL(teacher, student), nats", color=charts.SOFT, loc="left")
        sides[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return own_file(made.svg, HEIGHT, WIDTH)


def numbers(kind: Callable[[str], float]) -> Callable[[str], list[Any]]:
    """Return the reading of numbers above 0, or of whole ones from 0, with commas between them."""

    def read(given: str) -> list[Any]:
        found = [kind(part) for part in given.split(",")]
        if min(found) < 0 or (kind is float and not min(found) > 0):
            raise ValueError
        return found

    read.__name__ = "list of numbers"  # as argparse says it
    return read


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--model", default="tiny", help="folder, GGUF file or hub id")
    parser.add_argument("--text", default="builtin", help="as of real.py")
    parser.add_argument("--layers", default="upper_half")
    parser.add_argument("--tokens", type=int, default=49152, help="that the starts are fitted to")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each training")
    parser.add_argument(
        "--rates", type=numbers(float), help="to try; default three by rank and start"
    )
    parser.add_argument(
        "--divisors", type=numbers(int), default="32,16,8,4,2", help="the ranks are D over these"
    )
    parser.add_argument("--forms", default=",".join(FORMS), help="default all")
    parser.add_argument("--seeds", type=numbers(int), default="0")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all rows")
    parser.add_argument("--plot", type=Path, help="SVG file")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        run(args)
    except (NPTError, OSError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_status", 2)
    return 0


def run(args: argparse.Namespace) -> None:
    """Make what is missing, and write the file after every row.

    Raises:
        ConfigError: an unknown form, a rank that cannot be, or --out is of something else.
    """
    names = args.forms.split(",")
    if unknown := [name for name in names if name not in FORMS]:
        raise ConfigError(f"--forms names {unknown[0]!r}; choose from {', '.join(FORMS)}")
    rates = None if args.rates is None else tuple(args.rates)
    model, tokenizer = npt.load_base(args.model, quantization=QUANTIZATION)
    text: Text = read_text(args.text, tokenizer, model.config.vocab_size)
    bench = Bench(args.model, model, tokenizer, text, args.minutes, silent_console())
    hidden = model.config.hidden_size
    if not all(1 <= divisor <= hidden for divisor in args.divisors):
        raise ConfigError(
            f"--divisors are {args.divisors}; the model's D is {hidden}: each lies from 1 to it"
        )
    about = {
        "model": Path(args.model).name,
        "hidden": hidden,
        "text": Path(args.text).name,
        "heldout_tokens": sum(len(sample.input_ids) - 1 for sample in text.heldout),
        "layers": args.layers,
        "tokens": args.tokens,
        "minutes": args.minutes,
    }
    found: dict[str, Any] = {**about, "rows": []}
    if args.out.exists():
        try:
            known = dict(json.loads(args.out.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--out {args.out} is not a file of this benchmark") from error
        if any(known.get(name) != value for name, value in about.items()):
            raise ConfigError(
                f"--out {args.out} has rows of other settings; remove it, or name another"
            )
        found["rows"] = known["rows"]
    made = {(row["form"], row["divisor"], row["seed"]) for row in found["rows"]}
    wanted = dict.fromkeys(
        (form, divisor, seed if form != "cut" else 0)  # nothing of the cut depends on a seed
        for seed in args.seeds
        for divisor in args.divisors
        for form in names
    )
    forms = Forms(bench, args.layers, args.tokens)
    for form, divisor, seed in wanted:
        if (form, divisor, seed) in made:
            continue
        row = {"form": form, "divisor": divisor, "seed": seed}
        row |= forms.make(form, divisor, seed, rates)
        found["rows"].append(row)
        write_json(args.out, {**found, "machine": machine(bench.device), "code": code_hash()})
        figures = row["figures"]
        print(
            f"D/{divisor} {form}, seed {seed}: {row['parameters']:,} parameters, KL"
            f" {figures['kl']:.5f} ± {figures['kl_se']:.5f}, top-1 {figures['top1']:.1%},"
            f" {row.get('trained') or 'not trained'}",
            flush=True,
        )
    if args.plot is not None:
        write_text(args.plot, plot(found))


if __name__ == "__main__":
    sys.exit(main())
