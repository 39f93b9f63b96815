"""The strategies `propagated` and `end_to_end`: the student runs on its own stream.

Under `propagated` gradients stay within each converted layer; under `end_to_end` they flow through
the whole student, from hidden states and, optionally, from the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, adapters_disabled, decoder_layers, is_sharded
from npt.adapters.layer import NPTLayer
from npt.adapters.recompute import recomputed
from npt.adapters.stream import Stream, open_stream
from npt.adapters.trained import Work, Workspace
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.hidden_losses import READS_INPUT
from npt.distill.local import (
    LayerSums,
    MicroBatch,
    Sums,
    run_layers,
    stream_at,
    student_rows,
    work_of,
)
from npt.distill.logit_losses import row_loss, through_head
from npt.errors import NotSupportedError

T = TypeVar("T")


def propagated(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> MicroBatch:
    """Feed each converted layer the student's own h, and teach it the teacher's output there.

    So a layer learns to make good what the converted layers below it got wrong, at the memory of
    one layer's graph. Up to the first converted layer teacher and student are the same and run
    once, unless the `teacher` is a model of its own.

    Raises:
        NotSupportedError: the base is sharded.
    """
    layers = decoder_layers(model)
    sums, work = Sums(model, config, batch), work_of(config, Workspace())
    with torch.no_grad(), adapters_disabled(model):
        (stream, hidden), (guide, taught), first = _begin(model, teacher, batch, layers, sums.first)
        taught_layers = layers if teacher is None else decoder_layers(teacher)
        for index, layer in enumerate(layers[first : sums.last + 1], first):
            before = taught
            taught = run_layers(guide, taught_layers, taught, index, index + 1)
            if not isinstance(layer, NPTLayer):
                hidden = run_layers(stream, layers, hidden, index, index + 1)
                continue
            here, hidden = stream_at(stream, layer, hidden)
            target = here.rows(taught.to(hidden.device))
            was = here.rows(before.to(hidden.device)) if config.loss in READS_INPUT else None
            with torch.enable_grad():
                student, energy = student_rows(layer, here, hidden, work, graph=False)
                sums.take(sums.of_layer(index, here.batch, student, target, was, energy)).backward()
            hidden = here.scatter(student.detach())
    return sums.micro_batch()


def end_to_end(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> MicroBatch:
    """Run the student on its own stream; a loss per converted layer, optionally on the logits.

    Up to the first converted layer teacher and student are the same and run once, unless the
    `teacher` is a model of its own. Without a loss on the logits nothing is computed after the last
    converted layer; without one on hidden states none of the teacher's is kept, and if the text is
    the only target the teacher is not run. The loss on the logits is summed over the S scored
    positions and divided, as the rest is, by the valid tokens. With `config.gradient_checkpointing`
    the graph keeps of each layer its input and the teacher's output, and the rest is computed again
    in backward: to the same bits.

    Raises:
        NotSupportedError: the base is sharded.
    """
    layers = decoder_layers(model)
    sums, work = Sums(model, config, batch), work_of(config)
    depth = len(layers) if config.logit_kl_weight else sums.last + 1
    taught_depth = sums.last + 1 if config.hidden_weight else 0
    if _teacher_has_logits(config):
        taught_depth = depth
    with torch.no_grad(), adapters_disabled(model):
        (stream, hidden), (guide, taught), first = _begin(model, teacher, batch, layers, sums.first)
        taught_layers = layers if teacher is None else decoder_layers(teacher)
        inputs, targets = {}, {}
        for index in range(first, taught_depth):
            if isinstance(layers[index], NPTLayer) and config.loss in READS_INPUT:
                inputs[index] = taught
            taught = run_layers(guide, taught_layers, taught, index, index + 1)
            if isinstance(layers[index], NPTLayer) and config.hidden_weight:
                targets[index] = taught
    parts: list[Tensor] = []
    compute = recomputed if config.gradient_checkpointing else _computed
    with adapter_mode(model, "student"):
        for index, layer in enumerate(layers[first:depth], first):
            here, hidden = stream_at(stream, layer, hidden)
            if not isinstance(layer, NPTLayer):
                plain = partial(run_layers, stream, layers, start=index, stop=index + 1)
                hidden = compute(plain, hidden)
                continue
            before = inputs.pop(index).to(hidden.device) if inputs else None
            target = targets.pop(index).to(hidden.device) if targets else None
            student_layer = partial(_student_layer, layer, here, work, sums, index)
            hidden, found = compute(student_layer, hidden, target, before)
            parts.append(sums.take(found))
        loss = torch.stack([part.to(hidden.device) for part in parts]).sum()
        if config.logit_kl_weight:
            guide_model = model if teacher is None else teacher
            sums.logit = _logit_loss(config, (model, hidden), (guide_model, taught), stream)
            loss = loss + config.logit_kl_weight * sums.logit.to(loss.device)
        loss.backward()
    return sums.micro_batch()


def _begin(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batch: Batch,
    layers: nn.ModuleList,
    first: int,
) -> tuple[tuple[Stream, Tensor], tuple[Stream, Tensor], int]:
    """Return stream and h of student and of teacher before the first layer at which they part.

    The third value is that layer's index.
    """
    if is_sharded(model):
        raise NotSupportedError(
            "a sharded base has one whole layer at a time, which only --strategy local can do with;"
            " use it"
        )
    stream = open_stream(model, batch)
    if teacher is not None:
        guide = open_stream(teacher, batch)
        return (stream, stream.hidden), (guide, guide.hidden), 0
    shared = stream, run_layers(stream, layers, stream.hidden, 0, first)
    return shared, shared, first


def _student_layer(
    layer: NPTLayer,
    here: Stream,
    work: Work,
    sums: Sums,
    index: int,
    hidden: Tensor,
    target: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, LayerSums]:
    """Return the student's states after a converted layer and the layer's sums; change nothing.

    hidden, target, before: [B, T, D], the student's h, the teacher's output, and for the loss that
    needs it the teacher's h; without a loss on hidden states there is no target.
    """
    student, energy = student_rows(layer, here, hidden, work)
    guide, h = (None if states is None else here.rows(states) for states in (target, before))
    return here.scatter(student), sums.of_layer(index, here.batch, student, guide, h, energy)


def _computed(function: Callable[..., T], *arguments: object) -> T:
    return function(*arguments)


def _logit_loss(
    config: TrainConfig,
    student: tuple[PreTrainedModel, Tensor],
    teacher: tuple[PreTrainedModel, Tensor],
    stream: Stream,
) -> Tensor:
    """Return the loss on the logits, summed over the scored positions, on the device of lm_head.

    Of each side a model and its last layer's [B, T, D] states are given; the teacher's are read
    only if `_teacher_has_logits`.
    """
    rows = _scored_states(*student, stream)
    batch = stream.at(rows.device).batch
    taught = _scored_states(*teacher, stream) if _teacher_has_logits(config) else None
    if taught is None:
        taught = batch.labels.flatten().index_select(0, batch.scored_index + 1)
    head, vocab_size = student[0].lm_head, student[0].config.vocab_size
    guide = teacher[0].lm_head
    return through_head(head, row_loss(config), rows, taught, vocab_size, teacher_head=guide)


def _scored_states(model: PreTrainedModel, states: Tensor, stream: Stream) -> Tensor:
    """Return lm_head's input at the scored positions, on its device: [S, D] of [B, T, D] states."""
    norm = model.model.norm
    rows = states.flatten(0, 1).index_select(0, stream.at(states.device).batch.scored_index)
    return norm(rows.to(norm.weight.device)).to(model.lm_head.weight.device)


def _teacher_has_logits(config: TrainConfig) -> bool:
    """Return whether the loss on the logits, if there is one, reads the teacher's last states."""
    return config.logit_kl_weight > 0 and config.logit_loss != "cross_entropy"
