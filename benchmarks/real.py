"""A real language model converted: how near the student is to its base, what that costs, and what
one would use instead.

    python benchmarks/real.py [--model FOLDER_OR_FILE.gguf] [--text builtin-prose | FILE]
        [--rows NAME,...] [--minutes 30] [--out FILE] [--json] [--fill FILE]

Every row is made in one process on the same NF4 base and measured on the same held-out documents,
which no row is fitted to and nothing is chosen on; errors are over documents. `real_rows.py` has
the rows and all their settings, `real_text.py` the documents.

    parameters          trainable ones
    minutes             of start and training, without measuring
    start_passes        the time of `npt.calibrate` over that of one forward pass of the whole base
                        over the same tokens, one half of which is timed before and one after it
    forward_passes      the same of all the row's minutes, training included
    figures             KL(teacher, student), perplexity ratio, top-1 agreement, ..., with errors
    kl_share_of_nf4     that KL over what NF4 itself costs against the 16-bit model (the row nf4)
    documents           the sums that the figures are made of, for paired comparisons

Each row is written to --out as soon as it is made, and the table next to it, as Markdown. Started
again with the same --out, rows that were made with the same settings are kept; remove the file to
make all of them anew, as after a change of the code.

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import npt
from fetch_model import fetched
from npt.console import make_console, silent_console
from npt.errors import ConfigError, NPTError
from npt.files import finite_or_null, to_json, write_json, write_text
from real_rows import QUANTIZATION, ROWS, Bench, Row
from real_tables import markdown, terminal, with_shares
from real_text import read_text
from results_file import check_place, filled
from this_machine import code_hash, machine

PLACE = "real.py"


class Results:
    """The file of all rows. A row is replaced by one that was made with other settings.

    Args:
        path: of the file.
        about: what holds for all rows.
        common: settings that all rows share.

    Raises:
        ConfigError: the file is of something else, or of rows that do not share these.
    """

    def __init__(self, path: Path, about: dict[str, Any], common: dict[str, Any]):
        self.path, self.about = path, about
        self.failed: dict[str, str] = {}
        try:
            self.rows = {row["name"]: row for row in json.loads(path.read_text("utf-8"))["rows"]}
        except FileNotFoundError:
            self.rows = {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--out {path} is not a file of this benchmark; name another one, or remove it"
            ) from error
        if any(not common.items() <= row["settings"].items() for row in self.rows.values()):
            raise ConfigError(
                f"--out {path} has rows of another model, text, sample length or seed; name another"
                " file, or remove it"
            )

    def has(self, name: str, settings: dict[str, Any]) -> bool:
        """Return whether a row is in the file, made with these settings."""
        return name in self.rows and self.rows[name]["settings"] == settings

    def add(self, row: dict[str, Any]) -> None:
        """Write the file and the table with one more row."""
        self.rows[row["name"]] = finite_or_null(row)
        self.write()

    def write(self) -> None:
        """Write the file, and the table next to it."""
        write_json(self.path, self.figures())
        write_text(self.path.with_suffix(".md"), markdown(self.figures()))

    def figures(self) -> dict[str, Any]:
        """Return everything, rows in the order of the table."""
        rows = [self.rows[name] for name in ROWS if name in self.rows]
        return {**self.about, "rows": with_shares(rows), "failed": self.failed}


def settings_of(row: Row, minutes: float, common: dict[str, Any]) -> dict[str, Any]:
    """Return all that a row's figures follow from, but for the code, as JSON reads it."""
    found = {**row.as_dict(), **common}
    if row.training is not None:
        found["minutes"] = minutes
    return json.loads(json.dumps(found))


def chosen(args: argparse.Namespace) -> list[Row]:
    """Return the rows that were asked for.

    Raises:
        ConfigError: an unknown row, or a number that cannot be.
    """
    names = list(ROWS) if args.rows is None else [name.strip() for name in args.rows.split(",")]
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise ConfigError(f"--rows names {unknown[0]!r}; choose from {', '.join(ROWS)}")
    for flag in ("length", "heldout_tokens", "choosing_tokens", "tokens"):
        value = getattr(args, flag)
        if value is not None and value < 2:
            raise ConfigError(f"--{flag} is {value}; it is 2 at least")
    if args.minutes <= 0:
        raise ConfigError(f"--minutes is {args.minutes}; it lies above 0")
    tokens = {} if args.tokens is None else {"tokens": args.tokens}
    return [replace(ROWS[name], **tokens) for name in ROWS if name in names]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument(
        "--model", help="folder, GGUF file or hub id; default what fetch_model.py fetched"
    )
    parser.add_argument(
        "--text",
        default="builtin-prose",
        help="file, folder or glob, or a name for --dataset_name; default builtin-prose",
    )
    parser.add_argument("--rows", help=f"comma-separated, of {', '.join(ROWS)}; default all")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of a row that trains, the start included"
    )
    parser.add_argument(
        "--tokens", type=int, help="that a start is fitted to, in place of each row's own"
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample at most")
    parser.add_argument("--heldout_tokens", type=int, default=8192, help="to measure on")
    parser.add_argument(
        "--choosing_tokens", type=int, default=4096, help="by which training keeps what is nearest"
    )
    parser.add_argument("--threads", type=int, help="of the CPU; default torch's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default a file in outputs/, by the model's name")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument(
        "--fill", type=Path, help="text that is given the table, such as docs/results/real-model.md"
    )
    return parser


def open_bench(args: argparse.Namespace) -> tuple[Bench, dict[str, Any], dict[str, Any]]:
    """Return the bench, what is said of it, and the settings that all rows share.

    Raises:
        NPTError: no such model, or too little text.
    """
    name = args.model if args.model is not None else str(fetched())
    model, tokenizer = npt.load_base(name, quantization=QUANTIZATION)
    config = model.config
    text = read_text(
        args.text,
        tokenizer,
        config.vocab_size,
        length=args.length,
        heldout_tokens=args.heldout_tokens,
        choosing_tokens=args.choosing_tokens,
        seed=args.seed,
    )
    console = silent_console() if args.json else make_console(stderr=True)
    about = {
        "model": Path(name).name,
        "quantization": QUANTIZATION,
        "sizes": {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "ffn": config.intermediate_size,
            "vocab": config.vocab_size,
        },
        "text": {
            "name": Path(args.text).name,
            "length": args.length,
            "heldout_documents": len({s.document for s in text.heldout}),
            **{
                f"{part}_tokens": sum(len(sample.input_ids) for sample in getattr(text, part))
                for part in ("fitted", "choosing", "heldout")
            },
        },
        "machine": machine(next(model.parameters()).device),
    }
    common = {"base": npt.base_hash(model), "text": text.fingerprint, "seed": args.seed}
    return Bench(name, model, tokenizer, text, args.minutes, console, args.seed), about, common


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        rows = chosen(args)
        if args.fill is not None:
            check_place(args.fill, PLACE)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        bench, about, common = open_bench(args)
        path = args.out if args.out is not None else Path("outputs", f"real-{about['model']}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        results = Results(path, about, common)
        results.write()  # what cannot be written is known before anything is measured
    except (NPTError, OSError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_status", 2)
    status = 0
    for row in rows:
        settings = settings_of(row, args.minutes, common)
        if results.has(row.name, settings):
            print(f"{row.name}: kept from {path}", file=sys.stderr)
            continue
        print(f"{row.name}: {row.about}", file=sys.stderr, flush=True)
        try:
            found = bench.make(row)
        except NPTError as error:
            print(f"{row.name} is left out: {error}", file=sys.stderr)
            results.failed[row.name] = str(error)
            status = error.exit_status
            continue
        said = {"name": row.name, "about": row.about, "settings": settings, "code": code_hash()}
        results.add({**said, "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **found})
    results.write()
    figures = results.figures()
    if args.json:
        print(to_json(figures))
    else:
        make_console().print(terminal(figures))
    if args.fill is not None:
        text = args.fill.read_text(encoding="utf-8")
        write_text(args.fill, filled(text, PLACE, markdown(figures)))
    return status


if __name__ == "__main__":
    sys.exit(main())
