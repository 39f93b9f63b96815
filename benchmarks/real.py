"""Convert a real language model; measure how close each student is to its base, and its cost.

    python benchmarks/real.py [--model FOLDER_OR_FILE.gguf] [--text builtin-prose | FILE]
        [--rows NAME,...] [--steps 300] [--products fp32] [--out FILE] [--json]

All rows use the same NF4 base and the same held-out samples, one of each document, so errors are
over documents. No row is fitted to these samples. A training keeps the best of four students on
documents of their own (`real_text.py`).

    numbers             numbers of a code that are not 0, mean over held-out tokens and layers
    parameters          trainable parameters
    minutes             start and training, without evaluation
    start_passes        time of the closed-form start over that of a forward pass of the base over
                        the same tokens
    forward_passes      the same for all the row's minutes, training included
    rounded             of the row `bits`, for each step that codes are rounded to: bits of a code
                        (`real_bits.py`), mean over held-out tokens and layers, and by layer; the
                        bound; and the figures
    figures             KL(teacher, student), perplexity ratio, top-1 agreement, ..., with errors
    kl_share_of_nf4     this KL over the KL that NF4 adds to the 16-bit model (row nf4)

Each row is written to --out at once; other rows of the file are kept, so --rows adds to it. A name
K/R/Q in --rows, as in 16/4/4, is a closed-form start with D/K active numbers of D/R, and a token
part of rank D/Q (0: all numbers, no token part). Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import npt
from fetch_model import fetched
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.adapters.fit import format_layers
from npt.base.load import load_teacher
from npt.base.source import read_config
from npt.batch import Sample
from npt.console import complain, make_console, put, silent_console
from npt.device import wait_for
from npt.errors import ConfigError, NPTError
from npt.evaluation.evaluate import Fidelity, reference_outputs
from npt.files import finite_or_null, to_json, write_json
from real_bits import count_bits, rounded_codes
from real_text import Text, read_text
from tables import real as markdown
from this_machine import code_hash, machine

QUANTIZATION = "nf4"
BATCH = 4
"""Samples of an evaluation batch."""
HISTOGRAM_SAMPLES = 32
"""Samples that histograms of rounded codes are taken from."""


@dataclass(frozen=True)
class Row:
    """A student of the table.

    Attributes:
        about: its description.
        layers: layers to convert; `{last}` is the number of the last one.
        divisor: the rank is D / divisor.
        active: D / active numbers of a code are active; 0: all.
        token: the rank of the token part is D / token; 0: there is none.
        form: settings of the adapter besides rank and layers.
        training: settings of the training with `max_steps`, or None.
        steps: the student is measured again with its codes rounded to each of these steps.
    """

    about: str
    layers: str = "upper_half"
    divisor: int = 4
    active: int = 0
    token: int = 0
    form: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None
    steps: tuple[float, ...] = ()

    def config(self, base: Any) -> npt.NPTConfig:
        """Return the adapter's settings on a base of this configuration."""
        rank = max(1, base.hidden_size // self.divisor)
        layers = self.layers.format(last=base.num_hidden_layers - 1)
        active, token_rank = (
            max(1, base.hidden_size // divisor) if divisor else 0
            for divisor in (self.active, self.token)
        )
        sizes = {"rank": rank, "active": active, "token_rank": token_rank}
        return npt.NPTConfig(layers=layers, **sizes, **{"additive_scale": 1.0, **self.form})


STREAM = {"init": "calibrated", "targets": ("stream",)}
LOGITS = {"strategy": "end_to_end", "hidden_weight": 0.0, "logit_kl_weight": 1.0, "batch_size": 1}
ORIGINAL = {"targets": ("gate",), "mult_form": "half_sigmoid", "additive_scale": 0.1}
NEAR = {**LOGITS, "learning_rate": 5e-5, "max_steps": 300}
SMALL: dict[str, Any] = {"divisor": 4, "active": 16, "token": 4, "form": STREAM}
LARGE: dict[str, Any] = {"divisor": 2, "active": 4, "token": 4, "form": STREAM}
CAREFUL = {**NEAR, "learning_rate": 3e-5}

ROWS = {
    "nf4": Row("NF4 against the 16-bit model"),
    "floor": Row("upper half without attention"),
    "start": Row("closed-form start, D/4", form=STREAM),
    "best": Row("closed-form start, D/4, trained", form=STREAM, training=NEAR),
    "best-small": Row(
        "closed-form start, D/16, trained",
        divisor=16,
        form=STREAM,
        training={**NEAR, "learning_rate": 3e-4},
    ),
    "start-small": Row("closed-form start, D/16", divisor=16, form=STREAM),
    "code-small": Row("D/16 active numbers of D/4, token part D/4: start", **SMALL),
    "code-small-trained": Row("`code-small`, trained", training=CAREFUL, **SMALL),
    "code": Row("D/4 active numbers of D/2, token part D/4: start", **LARGE),
    "code-trained": Row("`code`, trained", training=CAREFUL, **LARGE),
    "code-small-deep": Row(
        "all layers but the first: `code-small`, trained",
        layers="1-{last}",
        training=CAREFUL,
        **SMALL,
    ),
    "code-deep": Row("all layers but the first: `code`, start", layers="1-{last}", **LARGE),
    "bits": Row(
        "all D numbers, token part D: start",
        divisor=1,
        token=1,
        form=STREAM,
        steps=(0.01, 0.015, 0.03),
    ),
    "all-but-first": Row(
        "all layers but the first, D/4, trained", layers="1-{last}", form=STREAM, training=NEAR
    ),
    "original": Row(
        "first version: gate alone, random start, trained",
        divisor=2,
        form=ORIGINAL,
        training={"learning_rate": 5e-5, "max_steps": 600, "batch_size": 2},
    ),
}
"""Rows by name, in the order of the table."""


def named(name: str) -> Row:
    """Return a row by its name in ROWS, or by its sizes K/R/Q.

    Raises:
        ConfigError: the name is neither.
    """
    if name in ROWS:
        return ROWS[name]
    sizes = re.fullmatch(r"(\d+)/([1-9]\d*)/(\d+)", name)
    if sizes is None:
        raise ConfigError(
            f"--rows has no row {name!r}: choose from {', '.join(ROWS)}, or name sizes as in 16/4/4"
        )
    active, rank, token = map(int, sizes.groups())
    about = f"D/{active} of D/{rank}" if active else f"D/{rank}"
    about += f", token part D/{token}" if token else ", no token part"
    about = about.replace("D/1,", "D,")
    return Row(f"{about}: start", divisor=rank, active=active, token=token, form=STREAM)


@dataclass
class Bench:
    """The base and the text of all rows.

    Attributes:
        name: name of the base.
        tokens: tokens that a start is fitted to.
    """

    name: str
    model: Any
    tokenizer: Any
    text: Text
    tokens: int
    console: Console
    seed: int = 0

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.seconds_per_token = self._seconds_per_token(self.text.fitted[:8])

    @torch.no_grad()
    def _seconds_per_token(self, samples: list[Sample]) -> float:
        """Return the time per token of a forward pass of the base, logits included."""
        wait_for(self.device)
        started = time.perf_counter()
        for sample in samples:
            self.model(torch.tensor([sample.input_ids], device=self.device), use_cache=False)
        wait_for(self.device)
        return (time.perf_counter() - started) / sum(len(s.input_ids) for s in samples)

    def make(self, row: Row, name: str = "") -> dict[str, Any]:
        """Return a row's figures; the base stays unchanged."""
        config = row.config(self.model.config)
        npt.attach(self.model, config, seed=self.seed)
        try:
            if name == "nf4":
                return {"parameters": 0, "minutes": 0.0, "figures": self._cost_of_nf4()}
            layers = format_layers(tuple(index for index, _ in npt_layers(self.model)))
            if name == "floor":
                made = {"layers": layers, "rank": None, "parameters": 0, "minutes": 0.0}
                return {**made, "figures": self._evaluate().floor.as_dict()}
            cost = self._start(config) if row.training is None else self._train(row)
            found = self._evaluate()
            numbers = [layer.get("active", config.rank) for layer in found.layers.values()]
            return {
                "layers": layers,
                "rank": config.rank,
                "numbers": sum(numbers) / len(numbers),
                "parameters": sum(p.numel() for p in adapter_parameters(self.model).values()),
                **cost,
                **({"rounded": [self._rounded(step) for step in row.steps]} if row.steps else {}),
                "figures": found.student.as_dict(),
            }
        finally:
            npt.detach(self.model)

    def _rounded(self, step: float) -> dict[str, Any]:
        other = self.text.fitted[:HISTOGRAM_SAMPLES]
        bits = count_bits(self.model, other, self.text.heldout, step)
        with rounded_codes(self.model, step):
            return {**bits, "figures": self._evaluate().student.as_dict()}

    def _evaluate(self, **settings: Any) -> Fidelity:
        return npt.evaluate(
            self.model, self.tokenizer, self.text.heldout, batch_size=BATCH, **settings
        )

    def _cost_of_nf4(self) -> dict[str, Any]:
        stored = getattr(read_config(self.name), "dtype", None)
        # an fp16 checkpoint would lose bits in bf16
        precision = "bf16" if stored == torch.bfloat16 else "fp32"
        full = load_teacher(self.name, precision, device=self.device)
        reference = reference_outputs(full, self.text.heldout, batch_size=BATCH)
        del full
        attribution = self._evaluate(unquantized=reference).attribution
        return attribution["unquantized_to_4bit"].as_dict()

    def _start(self, config: npt.NPTConfig) -> dict[str, Any]:
        """Compute the closed-form start, if the row has one."""
        if config.init != "calibrated":
            return self._cost(0.0, 0.0)
        report = npt.calibrate(
            self.model,
            self.tokenizer,
            self.text.fitted,
            self.tokens,
            batch_size=2,
            seed=self.seed,
            console=self.console,
        )
        return self._cost(report.seconds, 0.0)

    def _train(self, row: Row) -> dict[str, Any]:
        """Start, train, and load the best adapters of the run."""
        assert row.training is not None
        steps = row.training["max_steps"]
        with tempfile.TemporaryDirectory() as folder:
            settings = npt.TrainConfig(
                **row.training,
                warmup_steps=steps // 20,
                calibration_tokens=self.tokens,
                eval_steps=max(1, steps // 4),
                eval_samples=len(self.text.choosing),
                log_steps=steps,
                seed=self.seed,
                smoke_test=False,
                output_dir=f"{folder}/run",
            )
            trainer = npt.Trainer(
                self.model,
                self.tokenizer,
                records(self.text.fitted),
                settings,
                data_config=npt.DataConfig(max_length=self.text.length),
                eval_data=records(self.text.choosing),
                console=self.console,
                report=False,
            )
            result = trainer.train()
            npt.load_adapter(self.model, f"{folder}/run/best/adapter")
            best = json.loads(Path(folder, "run", "best", "fidelity.json").read_text("utf-8"))
        start = 0.0 if trainer.calibration is None else trainer.calibration.seconds
        trained = {
            "rate": settings.learning_rate,
            "steps": result.steps,
            "tokens": result.tokens,
            "choosing_kl": best["student"]["kl"],
        }
        return {"trained": trained, **self._cost(start, result.seconds)}

    def _cost(self, start: float, training: float) -> dict[str, Any]:
        """Convert the seconds of start and training to minutes and forward passes."""
        forward = self.seconds_per_token * self.tokens
        figures = {
            "tokens": self.tokens,
            "minutes": (start + training) / 60,
            "forward_passes": (start + training) / forward,
        }
        return figures | ({"start_passes": start / forward} if start else {})


def records(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return samples as training records."""
    return [{"id": sample.id, "input_ids": list(sample.input_ids)} for sample in samples]


def open_bench(args: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """Return the bench, and the settings that all rows share.

    Raises:
        NPTError: the model does not exist, or there is too little text.
    """
    name = args.model if args.model is not None else str(fetched())
    model, tokenizer = npt.load_base(name, quantization=QUANTIZATION, compute_dtype=args.products)
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
    about = {
        "model": Path(name).name,
        "quantization": QUANTIZATION,
        "products": args.products,
        "sizes": {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "ffn": config.intermediate_size,
            "vocab": config.vocab_size,
        },
        "text": {"name": Path(args.text).name, **text.sizes()},
        "machine": machine(next(model.parameters()).device),
    }
    console = silent_console() if args.json else make_console(stderr=True)
    return Bench(name, model, tokenizer, text, args.tokens, console, args.seed), about


def rows_in(path: Path, about: Mapping[str, Any], script: str) -> list[dict[str, Any]]:
    """Return the rows that a benchmark wrote to a file, none if there is no file.

    Raises:
        ConfigError: the file is not of this script or has other settings.
    """
    if not path.exists():
        return []
    try:
        figures = dict(json.loads(path.read_text("utf-8")))
        rows = list(figures["rows"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--out {path} is not a file of {script}: name another file") from error
    if any(figures.get(name) != value for name, value in about.items()):
        raise ConfigError(
            f"--out {path} has rows of other settings: remove it or name another file"
        )
    return rows


def write(path: Path, about: Mapping[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Write all rows in the order of the table; return the content."""
    unit = rows["nf4"]["figures"]["kl"] if "nf4" in rows else None
    for row in rows.values():
        row["kl_share_of_nf4"] = row["figures"]["kl"] / unit if unit else None
    order = [*ROWS, *(name for name in rows if name not in ROWS)]
    figures = finite_or_null({**about, "rows": [rows[name] for name in order if name in rows]})
    write_json(path, figures)
    return figures


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument(
        "--model", help="folder, GGUF file or Hub id (default: the model of fetch_model.py)"
    )
    parser.add_argument(
        "--text",
        default="builtin-prose",
        help="file, folder or glob, or a name for --dataset_name (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        default=",".join(ROWS),
        help="comma-separated rows, or sizes K/R/Q (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, help="training steps of each row")
    parser.add_argument(
        "--tokens", type=int, default=49152, help="tokens for the closed-form start"
    )
    parser.add_argument("--length", type=int, default=512, help="maximum tokens per sample")
    parser.add_argument(
        "--heldout_tokens", type=int, default=8192, help="held-out tokens to evaluate on"
    )
    parser.add_argument(
        "--choosing_tokens",
        type=int,
        default=4096,
        help="tokens to select the best of four students on",
    )
    parser.add_argument(
        "--products",
        default="fp32",
        choices=["fp32", "bf16"],
        help="dtype of 4-bit products, as in --compute_dtype",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/real.json"))
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        names = args.rows.split(",")
        chosen = {name: named(name) for name in names}
        bench, about = open_bench(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        same = {key: about[key] for key in ("model", "products", "sizes", "text")}
        rows = {row["name"]: row for row in rows_in(args.out, same, "real.py")}
        for name, row in chosen.items():
            if args.steps is not None and row.training is not None:
                row = Row(**{**vars(row), "training": {**row.training, "max_steps": args.steps}})
            complain(f"{name}: {row.about}")
            made = {"name": name, "about": row.about, "code": code_hash()}
            figures = bench.make(row, name)
            ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            rows[name] = {**made, "ended": ended, **figures}
            figures = write(args.out, about, rows)
    except (NPTError, OSError) as error:
        complain(str(error))
        return getattr(error, "exit_status", 2)
    put(to_json(figures) if args.json else markdown(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
