"""The threshold tau, one for all layers and tokens. A code's numbers below it become 0."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, decoder_layers, evaluating, npt_layers
from npt.adapters.stream import open_stream
from npt.adapters.token_modulation import observed
from npt.batch import Sample, batches
from npt.calibration.samples import tokens_of
from npt.hooks import within

TOKENS = 4096
"""Most tokens to take the threshold from, and at most an eighth of all. Nothing else is fitted to
them: on tokens that L was fitted to, codes are smaller than on others."""

SMALLEST = 1e-30
"""The least threshold: its logarithm is finite."""

ROUNDS = 4
"""Passes. The first one keeps all numbers. Each later one runs the student with the threshold of
the pass before it, since the student's own errors make its codes larger."""


def set_apart(samples: Sequence[Sample]) -> int:
    """Return how many of the last samples the threshold is taken from, at least one."""
    most = min(TOKENS, tokens_of(samples) // 8)
    totals = itertools.accumulate(len(sample.input_ids) for sample in reversed(samples))
    return max(1, sum(total <= most for total in totals))


@torch.no_grad()
def set_threshold(
    model: PreTrainedModel, samples: Sequence[Sample], active: int, batch_size: int
) -> float:
    """Set tau so that the student keeps `active` numbers of a code, on average over converted
    layers and the tokens of these samples. Return its logarithm.
    """
    layers = npt_layers(model)
    _, shallowest = layers[0]
    log_tau = shallowest.npt.log_tau
    log_tau.fill_(-100.0)
    for _ in range(ROUNDS):
        sizes, tokens = student_codes(model, samples, batch_size)
        codes = tokens * len(layers)
        wanted = active * codes
        known = len(sizes)
        kept = min(wanted, known)
        left_out = known - kept
        smallest, _ = torch.kthvalue(sizes, left_out + 1)
        tau = smallest.clamp_min(SMALLEST)
        log_tau.fill_(tau.log())
    return float(log_tau)


def student_codes(
    model: PreTrainedModel, samples: Sequence[Sample], batch_size: int
) -> tuple[Tensor, int]:
    """Return |u| of all converted layers and valid tokens in one row, on the host, and the number
    of tokens.
    """
    layers = npt_layers(model)
    last, _ = layers[-1]
    needed = decoder_layers(model)[: last + 1]
    parts: list[Tensor] = []
    tokens = 0
    with evaluating(model), adapter_mode(model, "student"):
        for batch in batches(samples, batch_size):
            stream = open_stream(model, batch.to(model.device))

            def keep(stages: dict[str, Tensor | None], stream=stream) -> None:
                u = stages.get("u")
                if u is not None:
                    sizes = stream.rows(u).abs()
                    parts.append(sizes.flatten().cpu())

            with observed([(layer.npt, keep) for _, layer in layers]):
                within(model.model, partial(stream.through, needed))
            tokens += batch.tokens
    return torch.cat(parts), tokens
