"""What the modulations add to the cut: every form of the adapter at several ranks, trained for the
same number of steps.

    python benchmarks/forms.py [--model tiny] [--text builtin] [--steps 200] [--seeds 0,1,2]
        [--divisors 32,16,8,4,2] [--forms NAME,...] [--rate 5e-4] --out FILE

Each training is on KL with the teacher, and the nearest student on the way is kept. Students
are chosen on documents of their own, all figures are of held-out ones, and ± is over documents. A
seed is the order of the text, and the random start of forms that have one. The rows:

    cut             the closed-form start: attention cut to R directions. Nothing is trained
    trained         A and B of the stream, from there
    M, B, M and B   besides, those of gate, up and down
    no stream       gate, up and down with M and B, from a random start
    original        gate alone, half sigmoid, alpha 0.1, from a random start

Started again with the same --out, it makes the rows that the file lacks.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

import npt
from npt.config.adapter import PRODUCTS, STREAM
from npt.console import silent_console
from npt.errors import ConfigError, NPTError
from npt.files import write_json
from real import LOGITS, ORIGINAL, QUANTIZATION, Bench, Row, rows_in
from real_text import read_text
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
    "original": ORIGINAL,
}
"""What is not the default in each form. All are trained but `cut`."""


def rate_of(form: str, divisor: int) -> float:
    """Return a form's rate. The nearer the start, the less a rate may move it."""
    if FORMS[form].get("init") != "calibrated":
        return 1e-2
    return 3e-5 if divisor <= 4 else 1e-3


def whole_numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 0:
        raise ValueError
    return numbers


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--model", default="tiny", help="folder, GGUF file or hub id")
    parser.add_argument("--text", default="builtin", help="as of real.py")
    parser.add_argument("--layers", default="upper_half")
    parser.add_argument("--tokens", type=int, default=49152, help="that the starts are fitted to")
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--rate", type=float, help="default by rank and start")
    parser.add_argument(
        "--divisors", type=whole_numbers, default="32,16,8,4,2", help="the ranks are D over these"
    )
    parser.add_argument("--forms", default=",".join(FORMS), help="default all")
    parser.add_argument("--seeds", type=whole_numbers, default="0")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all rows")
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
    model, tokenizer = npt.load_base(args.model, quantization=QUANTIZATION)
    hidden = model.config.hidden_size
    if not all(1 <= divisor <= hidden for divisor in args.divisors):
        raise ConfigError(
            f"--divisors are {args.divisors}; the model's D is {hidden}: each lies from 1 to it"
        )
    text = read_text(args.text, tokenizer, model.config.vocab_size)
    bench = Bench(args.model, model, tokenizer, text, args.tokens, silent_console())
    about = {
        "model": Path(args.model).name,
        "hidden": hidden,
        "text": Path(args.text).name,
        "heldout_tokens": sum(len(sample.input_ids) - 1 for sample in text.heldout),
        "layers": args.layers,
        "tokens": args.tokens,
        "steps": args.steps,
    }
    rows = rows_in(args.out, about)
    made = {(row["form"], row["divisor"], row["seed"]) for row in rows}
    for seed, divisor, form in product(args.seeds, args.divisors, names):
        seed = seed if form != "cut" else 0  # nothing of the cut depends on a seed
        if (form, divisor, seed) in made:
            continue
        made.add((form, divisor, seed))
        training = None
        if form != "cut":
            rate = args.rate or rate_of(form, divisor)
            training = {**LOGITS, "learning_rate": rate, "max_steps": args.steps}
        bench.seed = seed
        figures = bench.make(Row("", args.layers, divisor, FORMS[form], training))
        rows.append({"form": form, "divisor": divisor, "seed": seed, **figures})
        write_json(
            args.out, {**about, "rows": rows, "machine": machine(bench.device), "code": code_hash()}
        )
        kl, error, top1 = (figures["figures"][key] for key in ("kl", "kl_se", "top1"))
        print(
            f"D/{divisor} {form}, seed {seed}: {figures['parameters']:,} parameters, KL"
            f" {kl:.5f} ± {error:.5f}, top-1 {top1:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
