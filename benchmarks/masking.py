"""What it costs to count what a mask leaves out: the same data trained with their mask, and with
the mask ignored.

    python benchmarks/masking.py [--json]

Padding: texts of 16 to 64 tokens in rows of 256, trained layer by layer (`local`, NMSE) on their
tokens, and on the padding as if it were text. Prompts: 64 tokens of prompt and 32 of completion,
trained through the whole student on the logits of the completions, and of the prompts as well; by
KL against the teacher and by cross-entropy with the text, with prompts that are text like the
completions and with prompts of random tokens, as are keys, hashes and encoded files. Start, data,
order and steps are the same in each pair.

What is measured is the student on held-out data with the mask as it should be: of texts their
tokens, of prompts with completions the completions. Standard errors are over the held-out samples;
each arm is trained once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters
from npt.adapters.stream import model_inputs
from npt.data.batch import IGNORE_INDEX, Batch, Sample, batch_from_tensors, collate
from npt.data.samples import Samples
from npt.data.source import open_source
from npt.distill.logit_losses import forward_kl
from npt.distill.strategies import STRATEGIES
from tables import masking

ROW = 256
SHORT, LONG = 16, 64
PROMPT, COMPLETION = 64, 32
BATCH_SIZE = 8
RATE, CLIP = 1e-2, 0.5

Loss = Callable[[LlamaForCausalLM, Batch], int]
"""Leaves the gradient of a summed loss in the adapters and returns the count that it is to be
divided by.
"""


def nmse(model: LlamaForCausalLM, batch: Batch) -> int:
    """The `local` strategy, over the batch's valid tokens."""
    return STRATEGIES["local"](model, batch, npt.TrainConfig()).tokens


def predictions(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Student's and teacher's logits [N, V] at the N positions that have a target, and the
    targets.
    """
    targets = batch.labels[:, 1:]
    scored = (targets != IGNORE_INDEX) & batch.attention_mask[:, :-1].bool()
    inputs = model_inputs(model, batch)

    def logits() -> Tensor:
        states = model.model(**inputs, use_cache=False).last_hidden_state
        return model.lm_head(states[:, :-1][scored])

    with torch.no_grad(), adapter_mode(model, "teacher"):
        teacher = logits()
    return logits(), teacher, targets[scored]


def kl(model: LlamaForCausalLM, batch: Batch) -> int:
    """KL(teacher, student) over the labelled positions."""
    student, teacher, targets = predictions(model, batch)
    forward_kl(student, teacher).sum().backward()
    return len(targets)


def cross_entropy(model: LlamaForCausalLM, batch: Batch) -> int:
    """Cross-entropy with the text over the labelled positions."""
    student, _, targets = predictions(model, batch)
    F.cross_entropy(student, targets, reduction="sum").backward()
    return len(targets)


@dataclass(frozen=True)
class Case:
    """Data that a mask leaves out, and a loss that counts it. prompt: its kind, if there is one."""

    left_out: str
    loss: Loss
    steps: int
    side: str = "right"
    prompt: str | None = None


CASES = (
    Case("padding on the right", nmse, 30),
    Case("padding on the left", nmse, 30, side="left"),
    Case("prompts of text", kl, 20, prompt="text"),
    Case("prompts of random tokens", kl, 20, prompt="random"),
    Case("prompts of text", cross_entropy, 20, prompt="text"),
    Case("prompts of random tokens", cross_entropy, 20, prompt="random"),
)


class Bench:
    """The embedded model on a 4-bit base, trained anew in every arm."""

    def __init__(self, samples: int) -> None:
        self.model, self.tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
        self.samples = samples

    def texts(self, case: Case, split: str) -> Iterator[Sample]:
        """Samples of a case, drawn from the built-in text."""
        length = LONG if case.prompt is None else PROMPT + COMPLETION
        data = npt.DataConfig(dataset_split=split, max_length=length)
        drawn = random.Random(split)
        for sample in Samples(
            open_source(data), self.tokenizer, data, seed=1, hold_out=False
        ).epoch(0):
            ids = sample.input_ids
            if len(ids) < length:
                continue
            if case.prompt is None:
                yield replace(sample, input_ids=ids[: drawn.randint(SHORT, LONG)])
                continue
            if case.prompt == "random":
                ids = (*drawn.choices(range(self.model.config.vocab_size), k=PROMPT), *ids[PROMPT:])
            yield Sample(sample.id, ids, (*[IGNORE_INDEX] * PROMPT, *ids[PROMPT:]))

    def batch(self, case: Case, samples: Sequence[Sample], masked: bool) -> Batch:
        if case.prompt is not None:
            return collate(samples if masked else [replace(s, labels=None) for s in samples])
        batch = collate(samples, side=case.side, length=ROW)
        everything = torch.ones_like(batch.attention_mask)
        if masked:
            return batch
        return batch_from_tensors(batch.input_ids, everything, batch.sample_ids)

    def arm(self, case: Case, masked: bool) -> dict[str, Any]:
        """Train one arm and measure it, with the floor."""
        form = npt.NPTConfig(additive_scale=1.0, targets=("gate", "up", "down"))
        npt.attach(self.model, form, seed=0)
        parameters = adapter_parameters(self.model)
        optimizer = torch.optim.AdamW(parameters.values(), lr=RATE)
        training, counted = self.texts(case, "train"), 0
        for _ in range(case.steps):
            batch = self.batch(case, list(itertools.islice(training, BATCH_SIZE)), masked)
            count = case.loss(self.model, batch)
            for parameter in parameters.values():
                assert parameter.grad is not None
                parameter.grad /= count
            torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            counted += count
        heldout = list(itertools.islice(self.texts(case, "heldout"), self.samples))
        fidelity = npt.evaluate(self.model, self.tokenizer, heldout, batch_size=32)
        npt.detach(self.model)
        return {**fidelity.student.as_dict(), "counted": counted, "floor_kl": fidelity.floor.kl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--samples", type=int, default=96, help="held-out samples of each case")
    args = parser.parse_args()
    bench = Bench(args.samples)
    cases: list[dict[str, Any]] = []
    for case in CASES:
        # padding that is left out has no side
        masked = cases[0]["masked"] if case.side == "left" else bench.arm(case, masked=True)
        arms: dict[str, Any] = {"masked": masked, "ignored": bench.arm(case, masked=False)}
        cases.append(
            {"left_out": case.left_out, "loss": case.loss.__name__, "steps": case.steps, **arms}
        )
        print(f"{case.left_out}, {case.loss.__name__}: trained", file=sys.stderr, flush=True)
    figures = {"cases": cases, "batch_size": BATCH_SIZE, "samples": args.samples}
    print(json.dumps(figures) if args.json else masking(figures))


if __name__ == "__main__":
    main()
