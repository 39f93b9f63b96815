"""How near to its teacher a student is after the closed-form start, and after a short training from
it.

Every case converts the embedded model on an NF4 base. Its start is fitted to the built-in text's
training files, and the student is measured on its held-out files. For scale the same tokens are
measured between the unquantised model and its NF4 form: what 4-bit storage costs by itself.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import npt
from npt.adapters.fit import resolve_layers
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.console import make_console, silent_console
from npt.data.batch import IGNORE_INDEX, Sample, batches
from npt.data.samples import Samples
from npt.data.source import open_source, own_heldout
from npt.evaluation.heldout import evaluation_samples
from npt.evaluation.metrics import Figures, compare_tokens, figures, per_sample_sums


@dataclass(frozen=True)
class Case:
    """A conversion.

    rank: of a layer on average; D / 4 is 48 of the embedded model's 192.
    even: every layer has this rank, instead of the layers in which a rank is worth most.
    steps: of training after the start.
    """

    name: str
    layers: str
    rank: int
    even: bool = False
    steps: int = 0


CASES = (
    Case("upper half, D/4", "upper_half", 48, steps=200),
    Case("upper half, D/4 in every layer", "upper_half", 48, even=True),
    Case("upper half, D/8", "upper_half", 24, steps=200),
    Case("upper half, D/16", "upper_half", 12, steps=200),
    Case("upper half, D/16 in every layer", "upper_half", 12, even=True),
    Case("all but the first, D/4", "1-7", 48, steps=200),
    Case("all, D/4", "all", 48, steps=200),
    Case("all, D/8", "all", 24, steps=200),
)

TRAINING: dict[str, Any] = {
    "strategy": "end_to_end",
    "logit_kl_weight": 1.0,
    "learning_rate": 3e-5,
    "warmup_steps": 10,
    "batch_size": 4,
    "log_steps": 50,
    "eval_samples": 1,
}


class Bench:
    """The data of all cases, and the embedded model's own cost of 4 bit on it."""

    def __init__(self, tokens: int, samples: int, seed: int, loud: bool):
        self.tokens, self.seed = tokens, seed
        self.console = make_console() if loud else silent_console()
        self.data = DataConfig()
        self.model, self.tokenizer = npt.load_base("tiny", quantization="nf4")
        records = open_source(self.data)
        self.heldout = evaluation_samples(
            records,
            self.tokenizer,
            self.data,
            samples,
            self.model.config.vocab_size,
            own_heldout(self.data),
        )[0]

    def training_samples(self) -> Samples:
        return Samples(
            open_source(self.data), self.tokenizer, self.data, seed=self.seed, hold_out=False
        )

    def quantisation(self) -> dict[str, Any]:
        """The NF4 model as a student of the unquantised one."""
        full, _ = npt.load_base("tiny", quantization=None)
        parts = []
        with torch.no_grad():
            for host_batch in batches(self.heldout, 8):
                batch = host_batch.to(self.model.device)
                inputs = {
                    "input_ids": batch.input_ids,
                    "attention_mask": batch.attention_mask,
                    "use_cache": False,
                }
                ours, theirs = (
                    m.model(**inputs).last_hidden_state[:, :-1] for m in (self.model, full)
                )
                targets = batch.labels[:, 1:]
                valid = (targets != IGNORE_INDEX) & batch.attention_mask[:, :-1].bool()
                per_token = compare_tokens(
                    ours[valid],
                    theirs[valid],
                    targets[valid],
                    self.model.lm_head,
                    full.config.vocab_size,
                    full.lm_head,
                )
                parts.append(per_sample_sums(per_token, valid.nonzero()[:, 0], len(targets)))
        return figures(torch.cat(parts)).as_dict()

    def measure(self, case: Case) -> dict[str, Any]:
        """Figures of one case; the model is given back without adapters."""
        count = len(resolve_layers(case.layers, self.model.config.num_hidden_layers))
        config = NPTConfig(
            rank=case.rank,
            ranks=(case.rank,) * count if case.even else None,
            layers=case.layers,
            additive_scale=1.0,
            init="calibrated",
        )
        npt.attach(self.model, config)
        try:
            started = time.perf_counter()
            calibration = npt.calibrate(
                self.model,
                self.tokenizer,
                self.training_samples().epoch(0),
                self.tokens,
                seed=self.seed,
                console=self.console,
            )
            found: dict[str, Any] = {
                **asdict(case),
                "start": self._figures(),
                "seconds": time.perf_counter() - started,
            }
            found["calibration"] = calibration.as_dict()
            if case.steps:
                found["trained"] = self._trained(case)
                found["seconds_in_all"] = time.perf_counter() - started
            return found
        finally:
            npt.detach(self.model)

    def _figures(self) -> dict[str, Any]:
        return npt.evaluate(self.model, self.tokenizer, self.heldout).student.as_dict()

    def _trained(self, case: Case) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                **TRAINING,
                "max_steps": case.steps,
                "seed": self.seed + 1,
                "output_dir": str(Path(folder) / "run"),
            }
            heldout: list[Sample] = self.heldout[: TRAINING["eval_samples"]]
            trainer = npt.Trainer(
                self.model,
                self.tokenizer,
                open_source(self.data),
                TrainConfig(**settings),
                data_config=self.data,
                eval_data=[{"input_ids": list(sample.input_ids)} for sample in heldout],
                console=self.console,
            )
            trainer.train()
        return self._figures()


def shown(f: dict[str, Any]) -> str:
    numbers = Figures(**f)
    return (
        f"ratio {numbers.perplexity_ratio:.4f} ± {numbers.perplexity_ratio_se:.4f}, KL"
        f" {numbers.kl:.5f} ± {numbers.kl_se:.5f}, top-1 {100 * numbers.top1:.1f} ±"
        f" {100 * numbers.top1_se:.1f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--tokens", type=int, default=65536, help="that the start is fitted to")
    parser.add_argument(
        "--eval_samples", type=int, default=64, help="held-out samples of 256 tokens"
    )
    parser.add_argument(
        "--steps", type=int, help="of training, in place of each case's own; 0 for none"
    )
    parser.add_argument(
        "--cases", help="numbers of the cases, from 0, comma-separated; default all"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cases = (
        CASES if args.cases is None else [CASES[int(number)] for number in args.cases.split(",")]
    )
    bench = Bench(args.tokens, args.eval_samples, args.seed, loud=not args.json)
    quantisation = bench.quantisation()
    if not args.json:
        print(f"NF4 against fp32: {shown(quantisation)}", flush=True)
    results = []
    for case in cases:
        if args.steps is not None:
            case = replace(case, steps=args.steps)
        found = bench.measure(case)
        results.append(found)
        if not args.json:
            print(f"{case.name}: {shown(found['start'])}, {found['seconds']:.0f} s", flush=True)
            if "trained" in found:
                print(
                    f"  after {case.steps} steps: {shown(found['trained'])},"
                    f" {found['seconds_in_all']:.0f} s in all",
                    flush=True,
                )
    if args.json:
        print(
            json.dumps(
                {
                    "tokens": args.tokens,
                    "threads": torch.get_num_threads(),
                    "quantisation": quantisation,
                    "cases": results,
                }
            )
        )


if __name__ == "__main__":
    main()
