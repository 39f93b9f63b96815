#!/usr/bin/env python
"""Train multi-token prediction heads on a frozen 4-bit base, under npt.guard
(Gloeckle et al., "Better & faster large language models via multi-token prediction", 2024).

    python examples/multi_token_prediction.py [--heads 3] [--steps 20]

The base predicts the token at t + 1. Head k, from 0, reads the base's last hidden state at t and
predicts the token at t + 2 + k. It is a residual linear layer before the base's own lm_head. The
guard skips a micro-batch that is not finite. Targets that are padding, ignored, past the end of
their row or in another document do not count. The script prints each head's loss per predicted
token, in nats.

Shapes: B batch, T time, D hidden, V vocabulary, N predicted tokens, K heads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # works without installing

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import npt
from npt.adapters.stream import model_inputs
from npt.batch import Batch, collate, target_index
from npt.data.samples import Samples
from npt.data.source import open_source
from npt.distill.logit_losses import through_head, token_cross_entropy
from npt.guard import Guard, Seeded

BATCH_SIZE, WINDOW, LENGTH, RATE = 4, 2, 64, 3e-3


class Head(nn.Module):
    """A residual linear layer that starts as the identity, before a frozen lm_head."""

    def __init__(self, lm_head: nn.Module, width: int):
        super().__init__()
        self.residual = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.residual.weight)
        self._lm_head = (lm_head,)  # in a tuple: not a submodule, the base owns it

    def forward(self, hidden: Tensor) -> Tensor:
        return self._lm_head[0](hidden + self.residual(hidden))


def prediction_losses(
    hidden: Tensor, batch: Batch, heads: Sequence[nn.Module], vocab_size: int
) -> list[tuple[Tensor, int]]:
    """Return each head's cross-entropy with its target tokens, as (sum, count).

    Only positions that count are read, so a NaN elsewhere reaches neither loss nor gradient. Logits
    are computed in chunks.

    Args:
        hidden: [B, T, D].
        batch: labels, mask and positions, [B, T].
        heads: modules that map [N, D] to [N, V].
        vocab_size: V.
    """
    sums = []
    for k, head in enumerate(heads):
        ahead = k + 2
        index = target_index(batch.labels, batch.attention_mask, batch.position_ids, ahead=ahead)
        rows = hidden.flatten(0, 1).index_select(0, index)
        targets = batch.labels.flatten().index_select(0, index + ahead)
        loss = through_head(head, token_cross_entropy, rows, targets, vocab_size)
        sums.append((loss, len(rows)))
    return sums


def forward_backward(
    model: PreTrainedModel, heads: nn.ModuleList, batch: Batch
) -> tuple[Tensor, int, Tensor]:
    """Add the gradients of one micro-batch to `.grad`; return loss, token count and report."""
    with torch.no_grad():
        hidden = model.model(**model_inputs(model, batch), use_cache=False).last_hidden_state
    per_head = prediction_losses(hidden, batch, list(heads), model.config.vocab_size)
    loss = torch.stack([part for part, _ in per_head]).sum()
    loss.backward()
    counts = [count for _, count in per_head]
    report = torch.tensor([*(part.item() for part, _ in per_head), *counts])
    return loss, sum(counts), report


def text(tokenizer: object) -> Iterator[Batch]:
    """Yield batches of built-in text, cut to at most LENGTH tokens and padded."""
    data = npt.DataConfig(max_length=LENGTH)
    samples = Samples(open_source(data), tokenizer, data, seed=0)
    pieces = iter(samples.epoch(0))
    while group := list(islice(pieces, BATCH_SIZE)):
        yield collate(group)


def train(count: int, steps: int) -> list[list[float]]:
    """Train `count` heads; return each head's mean loss per predicted token, for every step."""
    torch.manual_seed(0)
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    heads = nn.ModuleList(Head(model.lm_head, model.config.hidden_size) for _ in range(count))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=RATE, fused=True)
    guard = Guard(heads, optimizer, max_grad_norm=1.0, rates=[RATE], draws=Seeded(0), late=False)
    batches, curve = text(tokenizer), []
    for _ in range(steps):
        for batch in islice(batches, WINDOW):
            with guard.micro_batch(ids=batch.sample_ids) as micro:
                micro.loss, micro.tokens, micro.report = forward_backward(model, heads, batch)
        (outcome,) = guard.step()
        for refusal in outcome.refused:
            print(f"refused: {refusal}")
        sums, counts = torch.tensor(outcome.reports).reshape(-1, 2, count).sum(dim=0)
        curve.append((sums / counts).tolist())
    return curve


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=3, metavar="INT", help="heads (default: 3)")
    parser.add_argument("--steps", type=int, default=20, metavar="INT", help="steps (default: 20)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # fastest at this size
    print("step  " + "  ".join(f"t + {k + 2}".rjust(7) for k in range(given.heads)))
    for step, losses in enumerate(train(given.heads, given.steps), start=1):
        print(f"{step:4}  " + "  ".join(f"{loss:7.4f}" for loss in losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
