"""Start, train and measure a student of the 8B shape in one hour on one GPU.

    python benchmarks/h100_hour.py --output FOLDER [--minutes 60] [--model FOLDER] [--text FILE]
    python benchmarks/h100_hour.py --output FOLDER --small       the embedded model, on a CPU

The base, in NF4, is --model; without it, Llama-3.1-8B from the Hub's cache; without that, random
weights of this shape, whose speed and memory are right and whose fidelity means nothing. PLAN gives
each stage its minutes; --minutes scales them, the tokens of start and evaluations, and the steps.

FOLDER/h100_hour.json and h100_hour.md are rewritten after each stage, so an interrupted run keeps
its results. Exit statuses are those of gpu_check.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gpu_check
import guards
import npt
from gpu_sections.models import full_batch
from gpu_sections.runner import Bench, Findings, Section, UnavailableError
from npt.adapters.converted import adapter_parameters
from npt.base.precision import set_matmul_precision
from npt.base.source import load_tokenizer
from npt.console import silent_console
from npt.data.source import Repeatable
from npt.device import wait_for
from npt.doctor.measure import measure_window
from npt.doctor.plan import shown
from npt.doctor.shape import SHAPES, llama_config
from npt.errors import NPTError
from npt.files import write_text
from random_base import random_base
from real import LOGITS, STREAM, Row, records
from real_text import read_text, token_count
from tables import agreement

HUB = "meta-llama/Llama-3.1-8B"
PLAN = {"base": 4, "start": 6, "evaluation": 7, "training": 32, "trained": 7, "guard": 4}
"""Minutes of each stage in an hour."""

ROWS = {
    "floor": "floor (without context)",
    "cut": "cut (closed-form start)",
    "trained": "student after training",
    "teacher": "teacher (the base)",
}
"""Rows of the fidelity table, in order."""


Stage = Callable[[Bench, Findings], None]


class Hour:
    """The stages, and the state that each leaves for the next."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.share = args.minutes / sum(PLAN.values())
        self.until = time.monotonic() + 60 * args.minutes
        self.length = 64 if args.small else 512
        self.model: Any = None
        self.rows: dict[str, Any] = {}

    def sections(self) -> list[Section]:
        untrained = {"floor": "floor", "teacher": "teacher", "cut": "student"}
        before = partial(self.measure, rows=untrained)
        after = partial(self.measure, rows={"trained": "student"})
        stages: tuple[Stage, ...] = (self.load, self.start, before, self.train, after, self.guard)
        names = [f"{name}, {minutes * self.share:.1f} minutes" for name, minutes in PLAN.items()]
        return list(map(Section, range(1, 7), names, stages))

    def load(self, bench: Bench, findings: Findings) -> None:
        """Load the base, attach adapters without a start, and read the text."""
        with noted(bench, findings):
            name = "tiny" if bench.small else self.args.model
            try:
                model, self.tokenizer = npt.load_base(
                    name or HUB, quantization="nf4", device=bench.device
                )
            except NPTError as error:
                if name is not None:
                    raise
                findings.notes.append(f"random weights: {error}")
                config = llama_config(SHAPES["llama-3.1-8b"], self.length)
                model = random_base(config, device=bench.device)
                self.tokenizer = load_tokenizer("tiny")
            npt.attach(model, Row("", form=STREAM).config(model.config))
        text = self.args.text
        if bench.small:
            text = str(bench.folder / "pages.txt")
            pages = sorted(gpu_check.ROOT.glob("npt/guard/*.py"))
            write_text(Path(text), "\n\n".join(page.read_text("utf-8") for page in pages))
        self.text = read_text(
            text,
            self.tokenizer,
            model.config.vocab_size,
            length=self.length,
            heldout_tokens=max(4 * self.length, int(16384 * self.share)),
            choosing_tokens=4 * self.length,
        )
        findings.figures |= {"text": self.text.sizes()}
        self.model = model

    def start(self, bench: Bench, findings: Findings) -> None:
        """Compute the closed-form start."""
        model = self.base()
        tokens = max(8 * (model.config.hidden_size // 4), int(65536 * self.share))
        with noted(bench, findings) as counted:
            calibration = npt.calibrate(model, None, self.text.fitted, tokens, batch_size=2)
            counted["tokens"] = calibration.tokens
        worst = max(layer.nmse for layer in calibration.layers.values())
        findings.check("a part of attention is kept", 0 <= worst < 1, f"NMSE up to {worst:.3g}")

    def measure(self, bench: Bench, findings: Findings, rows: dict[str, str]) -> None:
        """Evaluate on held-out text. rows: the mode of each row of the table."""
        model = self.base()
        with noted(bench, findings, token_count(self.text.heldout)):
            fidelity = npt.evaluate(model, None, self.text.heldout, batch_size=4)
        self.rows |= {row: getattr(fidelity, mode).as_dict() for row, mode in rows.items()}
        findings.figures["rows"] = self.rows
        finite = all(math.isfinite(row["kl"]) for row in self.rows.values())
        findings.check("finite figures", finite)
        models = {words: self.rows[row] for row, words in ROWS.items() if row in self.rows}
        names = ("perplexity", "perplexity_ratio", "kl", "top1")
        findings.tables.append(agreement({"teacher": self.rows["teacher"]}, models, names))

    def train(self, bench: Bench, findings: Findings) -> None:
        """Train for as many steps as fit the stage, judged by the time of one."""
        model = self.base()
        settings: dict[str, Any] = {
            **LOGITS,
            "learning_rate": 5e-5,
            "gradient_accumulation_steps": 4,
        }
        config = npt.TrainConfig(**settings)
        kept = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
        _, seconds = measure_window(model, config, 1, self.length)
        with torch.no_grad():
            for name, parameter in adapter_parameters(model).items():
                parameter.copy_(kept[name])
        # two thirds of this stage's share of the time left; the run evaluates and saves in the
        # rest. When the time is over, the data end.
        later = sum(list(PLAN.values())[list(PLAN).index("training") :])
        planned = (self.until - time.monotonic()) * PLAN["training"] / later * 2 / 3
        steps, until = max(2, int(planned / seconds)), time.monotonic() + planned
        folder = self.args.output / datetime.now().strftime("run-%Y%m%d-%H%M%S")
        rows = itertools.cycle(records(self.text.fitted))
        config = replace(
            config,
            max_steps=steps,
            warmup_steps=steps // 20,
            eval_samples=len(self.text.choosing),
            output_dir=str(folder),
        )
        with noted(bench, findings) as counted:
            result = npt.Trainer(
                model,
                self.tokenizer,
                Repeatable(lambda: itertools.takewhile(lambda _: time.monotonic() < until, rows)),
                config,
                data_config=npt.DataConfig(max_length=self.length),
                eval_data=records(self.text.choosing),
                console=silent_console(),
                report=False,
            ).train()
            counted["tokens"] = result.tokens
        findings.check("trained", result.steps > 0)
        findings.notes.append(f"{result.steps} of {steps} steps")
        findings.check("nothing refused", result.refused == 0, f"{result.refused}")
        findings.figures |= {"steps": result.steps, "window_seconds": seconds}

    def guard(self, bench: Bench, findings: Findings) -> None:
        """Time a guarded `local` step against a plain one on random tokens."""
        model = self.base()
        vocab, length = model.config.vocab_size, 4 * self.length
        windows = [
            [full_batch(1, length, vocab, torch.device("cpu"), 2 * n + m) for m in range(2)]
            for n in range(4)
        ]
        with noted(bench, findings):
            pairs = max(4, int(60 * self.share))
            figures = guards.measure(guards.Bench(model, windows), pairs)
        findings.figures |= figures
        added, ratio = figures["added_synchronisations"], figures["ratio"]
        findings.check("no host wait added", added == 0, f"{added:g} a step")
        findings.notes.append(f"guarded / plain step {ratio:.4f}")

    def base(self) -> Any:
        """Return the base, with the precision of products that a run uses."""
        if self.model is None:
            raise UnavailableError("needs a base")
        set_matmul_precision("auto", self.model)
        return self.model


@contextmanager
def noted(bench: Bench, findings: Findings, tokens: int = 0) -> Iterator[dict[str, int]]:
    """Record the time, speed and memory of a stage. The caller may set the tokens later."""
    counted = {"tokens": tokens}
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats(bench.device)
    started = time.perf_counter()
    yield counted
    wait_for(bench.device)
    seconds = time.perf_counter() - started
    findings.figures |= {"stage_seconds": seconds, **counted}
    if counted["tokens"]:
        findings.notes.append(f"{counted['tokens']:,} tokens")
        findings.notes.append(f"{counted['tokens'] / seconds:,.0f} tokens/s")
    if bench.cuda:
        peak = torch.cuda.max_memory_allocated(bench.device)
        findings.figures["peak_bytes"] = peak
        findings.notes.append(shown(peak))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument(
        "--model", help="folder or GGUF file of the base (default: Llama-3.1-8B from the cache)"
    )
    parser.add_argument(
        "--text", default="builtin-prose", help="file, folder or glob (default: %(default)s)"
    )
    gpu_check.add_flags(parser, 60.0)
    args = parser.parse_args(argv)
    if args.small:
        args.minutes = min(args.minutes, 0.8)
    gpu_check.check_flags(parser, args)
    return gpu_check.run(args, Hour(args).sections(), "h100_hour")


if __name__ == "__main__":
    sys.exit(main())
