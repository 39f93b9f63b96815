"""An edit's least squares, one layer after another.

All rows go through the layers together: each layer's patch is solved on the stream that the patches
of earlier layers have changed already, and changes the stream of later ones. Layers below the first
to be patched give the same states in every attempt, so these are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.consolidate import patched_module, summed
from npt.adapters.converted import decoder_layers
from npt.adapters.layer import NPTLayer
from npt.adapters.stream import Stream, open_stream
from npt.adapters.token_modulation import observed
from npt.base.linear import Patch, patch_term
from npt.batch import IGNORE_INDEX, Sample, batches
from npt.errors import NumericalError
from npt.evaluation.metrics import checked_batches
from npt.evaluation.reading import reading
from npt.tools.editing.probes import BATCH, Probe

DAMPING = 1e-4
"""Share of the mean of C's diagonal that is added to it."""

LEAST_SCALE = 0.1
"""|m| below which the missing output is not divided by it."""


@dataclass(frozen=True)
class Rows:
    """Everything that an edit is found on.

    Attributes:
        probes: texts to be changed.
        contrasts: texts that must stay.
        earlier: texts that earlier updates changed, which must stay too.
    """

    probes: list[Probe]
    contrasts: list[Probe]
    earlier: list[Sample]

    def alone(self) -> list[Sample]:
        """Return all texts without their contexts."""
        return [probe.alone() for probe in (*self.probes, *self.contrasts)] + self.earlier


class Seen(NamedTuple):
    """What one layer computes.

    Attributes:
        product: p, the MLP's inner product, [B, T, F].
        scale: m of the target down, [B, T, D]; 1 if the layer has none.
        output: o, [B, T, D].
    """

    product: Tensor
    scale: Tensor
    output: Tensor


def opened(
    model: PreTrainedModel, samples: Iterable[Sample], first: int, data: str = "the probes"
) -> Iterator[Stream]:
    """Yield the samples' streams before layer `first`, in batches.

    data: where the samples are from, to name in errors.
    """
    below = decoder_layers(model)[:first]
    for batch in checked_batches(model, batches(samples, BATCH), data):
        with reading(model):
            stream = open_stream(model, batch).through(below)
        yield stream


def _span(model: PreTrainedModel, layers: Iterable[int]) -> list[tuple[int, Any]]:
    """Return (index, layer) from the first of some layers to the last."""
    return list(enumerate(decoder_layers(model)))[min(layers) : max(layers) + 1]


def seen_by(layer: Any, stream: Stream) -> Seen:
    """Return what a layer computes on a stream."""
    kept: dict[str, Tensor] = {}

    def keep_product(_module: Any, args: tuple[Tensor]) -> None:
        kept["product"] = args[0]

    def keep_scale(stages: dict[str, Tensor | None]) -> None:
        scale = stages.get("m_down")
        if scale is not None:
            kept["scale"] = scale

    observers = [(layer.npt, keep_scale)] if isinstance(layer, NPTLayer) else []
    hook = patched_module(layer).register_forward_pre_hook(keep_product)
    try:
        with observed(observers):
            output = stream.after(layer, stream.hidden)
    finally:
        hook.remove()
    none = output.new_ones(()).expand_as(output)
    return Seen(kept["product"], kept.get("scale", none), output)


def moment_factors(
    model: PreTrainedModel, samples: Sequence[Sample], layers: Sequence[int]
) -> dict[int, Tensor]:
    """Return the Cholesky factor of C = E[p p'] by layer, [F, F] each, over the tokens of samples.

    A layer is solved for several penalties, all with this factor.
    """
    sums: dict[int, Tensor] = {}
    tokens = 0
    for stream in opened(model, samples, min(layers), "general text"):
        tokens += stream.batch.tokens
        valid = stream.batch.attention_mask.bool()
        with reading(model):
            for index, layer in _span(model, layers):
                seen = seen_by(layer, stream)
                # nothing is patched yet: the next layer reads what this one gives
                stream = replace(stream, hidden=seen.output)
                if index in layers:
                    rows = seen.product[valid].to(torch.float32)
                    sums[index] = rows.t() @ rows + sums.get(index, 0.0)
    for index, total in sums.items():
        if not torch.isfinite(total).all():
            raise NumericalError(
                f"layer {index}: a product on general text is not finite; find the cause with npt"
                " trace"
            )
        total /= tokens
        # some inner products are 0 in all of the text, so that C alone has no factor
        total.diagonal().add_(DAMPING * total.diagonal().mean())
        sums[index] = cholesky(total)
    return sums


def wanted_outputs(
    model: PreTrainedModel,
    rows: Rows,
    streams: Iterable[Stream],
    layers: Sequence[int],
    *,
    common: float,
) -> dict[int, Tensor]:
    """Return what o should be at the tokens of all rows, by layer: [n, D].

    Args:
        model: the model to edit.
        rows: what the edit is found on.
        streams: `rows.alone()`, opened at the first of the layers.
        layers: those to patch.
        common: share of the mean change over the probes' tokens that is left out: 0 for one text,
            whose own change the mean is, and near 1 for many.
    """
    wanted = outputs(model, streams, layers)
    for index, read in outputs_with_context(model, rows.probes, layers).items():
        changed = wanted[index][: len(read)]
        change = read - changed
        changed += change - common * change.mean(dim=0)
    return wanted


def outputs_with_context(
    model: PreTrainedModel, probes: Sequence[Probe], layers: Sequence[int]
) -> dict[int, Tensor]:
    """Return o at the probes' n tokens after their contexts, by layer: [n, D]."""
    read = [probe.read() for probe in probes]
    return outputs(model, opened(model, read, min(layers)), layers)


def outputs(
    model: PreTrainedModel, streams: Iterable[Stream], layers: Sequence[int]
) -> dict[int, Tensor]:
    """Return o at the n target tokens of streams, by layer: [n, D]; raise NumericalError if a
    number is not finite.

    streams: opened at the first of the layers.
    """
    parts: dict[int, list[Tensor]] = {index: [] for index in layers}
    for stream in streams:
        tails = stream.batch.labels != IGNORE_INDEX
        with reading(model):
            for index, layer in _span(model, layers):
                stream = stream.through([layer])
                if index in parts:
                    states = stream.hidden[tails]
                    parts[index].append(states.to(torch.float32))
    found = {}
    for index, of_batches in parts.items():
        states = torch.cat(of_batches)
        if not torch.isfinite(states).all():
            raise NumericalError(
                f"layer {index}: a state of the probes is not finite; find the cause with npt trace"
            )
        found[index] = states
    return found


def solve(
    model: PreTrainedModel,
    streams: Sequence[Stream],
    wanted: dict[int, Tensor],
    factors: dict[int, Tensor],
    penalty: float,
) -> dict[int, Patch]:
    """Return the patches of all layers.

    Args:
        model: the model to edit, which does not change.
        streams: the rows without their contexts, opened at the first layer to be patched.
        wanted: `wanted_outputs`, [n, D] by layer.
        factors: `moment_factors`, [F, F] by layer.
        penalty: tokens of general text that weigh as much as one token of a row.
    """
    patches: dict[int, Patch] = {}
    tails = [stream.batch.labels != IGNORE_INDEX for stream in streams]
    for index, layer in _span(model, wanted):
        with reading(model):
            seen = [seen_by(layer, stream) for stream in streams]
        states = [each.output for each in seen]
        if index in wanted:
            outer, inner = _patch(seen, tails, wanted[index], factors[index], penalty)
            states = [_patched(each, (outer, inner)) for each in seen]
            patches[index] = outer.cpu(), inner.cpu()
        # later layers see what this one's patch has changed
        pairs = zip(streams, states, strict=True)
        streams = [replace(stream, hidden=state) for stream, state in pairs]
    return patches


def _patch(
    seen: Sequence[Seen], tails: Sequence[Tensor], wanted: Tensor, factor: Tensor, penalty: float
) -> Patch:
    """Return the patch of one layer. tails: the rows' own tokens in each batch, [B, T] bool."""
    pairs = list(zip(seen, tails, strict=True))
    p = torch.cat([each.product[tail] for each, tail in pairs]).to(torch.float32)
    m = torch.cat([each.scale[tail] for each, tail in pairs]).to(torch.float32)
    now = torch.cat([each.output[tail] for each, tail in pairs]).to(torch.float32)
    missing = wanted.to(now.device) - now
    # m multiplies the patch too; some forms of m reach 0, where nothing can be made up for
    missing = missing * m / m.square().clamp_min(LEAST_SCALE**2)
    return least_squares(p, missing, factor, penalty)


def _patched(seen: Seen, patch: Patch) -> Tensor:
    """Return o [B, T, D] with a patch added."""
    added = patch_term(patch, seen.product) * seen.scale
    return seen.output + added.to(seen.output.dtype)


def least_squares(p: Tensor, y: Tensor, factor: Tensor, penalty: float) -> Patch:
    """Return W = Y' P (P'P + penalty C)^-1 as a patch.

    If n < F, the same W is Y' (P C^-1 P' + penalty I)^-1 P C^-1, whose factors are the patch.

    Args:
        p: P, [n, F].
        y: Y, [n, D].
        factor: the Cholesky factor of C, [F, F].
        penalty: above 0.
    """
    if len(p) < p.shape[1]:
        inner = torch.cholesky_solve(p.t(), factor).t()
        gram = p @ inner.t()
        gram.diagonal().add_(penalty)
        outer = torch.linalg.solve(gram, y).t()
        return summed([(outer, inner)])
    moments = factor @ factor.t()
    damped = cholesky(p.t() @ p + penalty * moments)
    weight = torch.cholesky_solve(p.t() @ y, damped).t()
    return torch.eye(len(weight), device=weight.device), weight.contiguous()


def cholesky(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor of a symmetric matrix, damped further if rounding needs it."""
    damping = DAMPING * matrix.diagonal().mean()
    for _ in range(4):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            return factor
        matrix = matrix.clone()
        matrix.diagonal().add_(damping)
        damping = 10 * damping
    raise NumericalError("the second moments of general text have no Cholesky factor; add text")
