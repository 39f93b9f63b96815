"""Refit of the closed-form start, layer by layer, on the student's own states.

The first fit feeds every layer the teacher's state. In use, a layer is fed the student's h, with
the errors of the layers below. So in order of depth the layers are fitted again, to what is then
missing: with h, x1 and a of the student so far, a layer is to add

    y = (h + a of the teacher) - h

L, b, A and B are solved as at the start, with y in the place of a, but A reads a - l: so the
covariance of y - l and a - l takes the place of one factor C (`Cut.of`). It takes one forward of
each layer of teacher and student, and no backward. It lowers KL by 4 to 15%.

QEP (Arai and Ichikawa, "Quantization error propagation", 2025) does so with quantised weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import (
    adapter_tensors,
    adapters_disabled,
    decoder_layers,
    evaluating,
    npt_layers,
)
from npt.adapters.layer import NPTLayer, attention_output, student_output
from npt.adapters.stream import Stream, open_stream
from npt.batch import Batch
from npt.calibration.cut import SOLVED, Cut
from npt.calibration.sensitivity import bounded, product
from npt.calibration.together import on_device_or_host, together
from npt.calibration.token_part import TokenPart, read_by, read_width
from npt.distributed.processes import ProcessGroup
from npt.errors import NumericalError
from npt.hooks import within


@dataclass
class Walk:
    """A batch on its way through the layers.

    Attributes:
        stream: of the student.
        taught: the teacher's h, [B, T, D].
        counts: whether its tokens count; a batch may only keep processes in step.
        attention: the student's a of the current layer, [B, T, D].
    """

    stream: Stream
    taught: Tensor
    counts: bool
    attention: Tensor


@torch.no_grad()
def refit(
    model: PreTrainedModel,
    numbered: Iterable[tuple[int | None, Batch]],
    sensitivity: Mapping[int, Tensor],
    processes: ProcessGroup,
    console: Console,
) -> None:
    """Refit the adapters of every converted layer in place. Memory: 3 D values per token.

    Args:
        model: a student at the closed-form start, with a token part.
        numbered: as for `sensitivity.measure`.
        sensitivity: S, [D, D] fp64, of the converted layers that this process solves.
        processes: those that share the batches.
        console: for progress.
    """
    layers = decoder_layers(model)
    converted = dict(npt_layers(model))
    first = min(converted)
    device = model.device
    with evaluating(model), adapters_disabled(model):
        open_walks = partial(_opened, model, numbered, layers[:first])
        walks = together(processes, open_walks, model)
        shown = track(
            range(first, max(converted) + 1),
            "fitting again",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        for index in shown:
            layer: Any = layers[index]
            if index not in converted:
                pass_through = partial(_through, layer, walks)
                together(processes, pass_through, model)
                continue
            measure = partial(_moments, layer, walks)
            total = together(processes, measure, model)
            total = processes.sum_(total)
            solve = partial(_solved, layer, total, sensitivity.get(index))
            solve_where_it_fits = partial(on_device_or_host, solve, device, console)
            solved = together(processes, solve_where_it_fits)
            tensors = adapter_tensors(model)
            # one process solved the layer, the others hold zeros
            for name, tensor in solved.items():
                tensors[f"model.layers.{index}.npt.{name}"].copy_(processes.sum_(tensor))
            # only now: the layers above are fitted to the errors that remain here
            step = partial(_steps, layer, walks)
            together(processes, step, model)


def _opened(
    model: PreTrainedModel, numbered: Iterable[tuple[int | None, Batch]], below: Any
) -> list[Walk]:
    """Return the batches, taken through the layers below the first converted one."""
    walks = []
    for number, batch in numbered:
        stream = open_stream(model, batch.to(model.device))
        stream = within(model.model, partial(stream.through, below))
        walks.append(Walk(stream, stream.hidden, number is not None, stream.hidden))
    return walks


def _through(layer: Any, walks: list[Walk]) -> None:
    """Take both streams through a layer that is not converted."""
    for walk in walks:
        walk.taught = walk.stream.after(layer, walk.taught)
        walk.stream = walk.stream.through([layer])


def _moments(layer: NPTLayer, walks: list[Walk]) -> Tensor:
    """Take the teacher's stream through the layer. Return the sums over tokens that `_solved`
    reads, of what the layer is to add and what it can read.
    """
    adapter = layer.npt
    width = len(adapter.b)
    read = read_width(width, adapter.config.token_rank)
    rows = 2 * width + read
    columns = width + read
    total = torch.zeros(rows, columns, dtype=torch.float64, device=adapter.b.device)
    for walk in walks:
        look = partial(_look, layer, walk)
        part = within(layer, look)
        if walk.counts:
            total += part
    return total


def _look(layer: NPTLayer, walk: Walk) -> Tensor:
    """Note the student's a, and take the teacher's stream on. Return the sums over tokens of y, a
    and x times a and x, over r^2: [2 D + n, D + n].
    """
    stream = walk.stream
    context = stream.context_of(layer)
    read = walk.taught + attention_output(layer, walk.taught, **context)
    walk.attention = attention_output(layer, stream.hidden, **context)
    x2 = layer.post_attention_layernorm(read)
    walk.taught = stream.clean(read + layer.mlp(x2))
    h = stream.rows(stream.hidden)
    size = layer.npt.size_of(h.to(torch.float32))
    size = bounded(size)
    # without its hooks, which have seen it in attention
    x1 = layer.input_layernorm.forward(h)
    x = read_by(x1, size, layer.npt.config.token_rank)
    y = stream.rows(read - stream.hidden) / size
    a = stream.rows(walk.attention) / size
    columns = torch.cat([a, x], dim=-1)
    rows = torch.cat([y, columns], dim=-1)
    return product(rows, columns)


def _steps(layer: NPTLayer, walks: list[Walk]) -> None:
    """Take the student's stream through a converted layer."""
    layer.npt.mode = "student"
    try:
        for walk in walks:
            within(layer, partial(_step, layer, walk))
    finally:
        layer.npt.mode = "teacher"


def _step(layer: NPTLayer, walk: Walk) -> None:
    output, _ = student_output(layer, walk.stream.hidden, walk.attention)
    walk.stream = replace(walk.stream, hidden=walk.stream.clean(output))


def _solved(
    layer: NPTLayer, total: Tensor, sensitivity: Tensor | None, device: torch.device
) -> dict[str, Tensor]:
    """Return the layer's tensors by name, solved on a device; zeros if another process solves it.

    Raises:
        NumericalError: the student's states are not finite.
    """
    index = layer.self_attn.layer_idx
    if not torch.isfinite(total).all():
        raise NumericalError(
            f"calibration: the student's states at layer {index} are not finite; find the cause"
            " with npt trace. The adapters are unchanged"
        )
    form = layer.npt.config
    width = len(layer.npt.b)
    read = read_width(width, form.token_rank)
    tensors = layer.npt.state_dict().items()
    solved = {name: torch.zeros_like(tensor) for name, tensor in tensors if name in SOLVED}
    if sensitivity is None:
        return solved
    # sums serve as well as means: a factor of C changes neither L nor A nor B
    total = total.to(device)
    sensitivity = sensitivity.to(total)
    # rows of y, a and x against columns of a and x, as `_look` has them
    with_a, with_x = total.split([width, read], dim=1)
    ya, aa, _ = with_a.split([width, width, read])
    yx, ax, xx = with_x.split([width, width, read])
    own = TokenPart.of(yx, xx, sensitivity, form.token_rank)
    missing = own.left(ya, yx, ax, xx)
    unread = own.left(aa, ax, ax, xx)
    cut = replace(Cut.of(unread, sensitivity, missing), token_part=own)
    for name, tensor in cut.tensors(index, form.rank, form).items():
        solved[name].copy_(tensor)
    return solved
