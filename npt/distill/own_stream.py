"""The strategies `propagated` and `end_to_end`: the student runs on its own stream.

Under `propagated` gradients stay within each converted layer; under `end_to_end` they flow through
the whole student, from hidden states and, optionally, from the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import (
    adapter_mode,
    adapters_disabled,
    decoder_layers,
    is_sharded,
    npt_layers,
)
from npt.adapters.layer import NPTLayer
from npt.adapters.recompute import recomputed
from npt.adapters.stream import Stream, open_stream
from npt.adapters.trained import Workspace
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.hidden_losses import READS_INPUT
from npt.distill.local import (
    BatchSums,
    LayerSums,
    backpropagated,
    batch_sums,
    layer_sums,
    run_layers,
    stream_at,
    student_rows,
)
from npt.distill.logit_losses import row_loss, through_head
from npt.errors import NotSupportedError

T = TypeVar("T")


def propagated(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> BatchSums:
    """Feed each converted layer the student's own h, and teach it the teacher's output there.

    So a layer learns to make good what the converted layers below it got wrong, at the memory of
    one layer's graph. Up to the first converted layer teacher and student are the same and run
    once, unless the `teacher` is a model of its own.

    Raises:
        NotSupportedError: the base is sharded.
    """
    layers, converted = decoder_layers(model), npt_layers(model)
    regularised, space = config.regularization_lambda > 0, Workspace()
    sums: list[LayerSums] = []
    with torch.no_grad(), adapters_disabled(model):
        stream, guide, first = _begin(model, teacher, batch)
        hidden = guide.hidden if teacher is None else stream.hidden
        for index, layer in enumerate(layers[first : converted[-1][0] + 1], first):
            taught_input = guide.hidden
            guide = guide.after(index, index + 1)
            if not isinstance(layer, NPTLayer):
                hidden = run_layers(stream, layers, hidden, index, index + 1)
                continue
            here, hidden = stream_at(stream, layer, hidden)
            target = here.rows(guide.hidden.to(hidden.device))
            h = None
            if config.loss in READS_INPUT:
                h = here.rows(taught_input.to(hidden.device))
            with torch.enable_grad():
                student, energy = student_rows(layer, here, hidden, regularised, space, graph=False)
                of_layer = layer_sums(config, len(converted), student, target, h, energy)
                sums.append(backpropagated(of_layer))
            hidden = here.scatter(student.detach())
    return batch_sums(config, batch, sums)


def end_to_end(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> BatchSums:
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
    layers, converted = decoder_layers(model), npt_layers(model)
    above_last = converted[-1][0] + 1
    depth = len(layers) if config.logit_kl_weight else above_last
    taught_depth = above_last if config.hidden_weight else 0
    if _teacher_has_logits(config):
        taught_depth = depth
    with torch.no_grad(), adapters_disabled(model):
        stream, guide, first = _begin(model, teacher, batch)
        hidden = guide.hidden if teacher is None else stream.hidden
        inputs, targets = {}, {}
        for index in range(first, taught_depth):
            if isinstance(layers[index], NPTLayer) and config.loss in READS_INPUT:
                inputs[index] = guide.hidden
            guide = guide.after(index, index + 1)
            if isinstance(layers[index], NPTLayer) and config.hidden_weight:
                targets[index] = guide.hidden
    sums: list[LayerSums] = []
    compute = recomputed if config.gradient_checkpointing else _computed
    with adapter_mode(model, "student"):
        for index, layer in enumerate(layers[first:depth], first):
            here, hidden = stream_at(stream, layer, hidden)
            if not isinstance(layer, NPTLayer):
                plain = partial(run_layers, stream, layers, start=index, stop=index + 1)
                hidden = compute(plain, hidden)
                continue
            taught_input = inputs.pop(index).to(hidden.device) if inputs else None
            target = targets.pop(index).to(hidden.device) if targets else None
            student_layer = partial(_student_layer, layer, here, config, len(converted))
            hidden, of_layer = compute(student_layer, hidden, target, taught_input)
            sums.append(of_layer)
        loss = torch.stack([part.loss.to(hidden.device) for part in sums]).sum()
        logit = None
        if config.logit_kl_weight:
            logit = _logit_loss(config, _Side(model, stream, hidden), guide)
            loss = loss + config.logit_kl_weight * logit.to(loss.device)
        loss.backward()
    return batch_sums(config, batch, sums, logit)


@dataclass(frozen=True)
class _Side:
    """Student or teacher on its way through the layers.

    Attributes:
        model: its own, or the base that both share.
        stream: of that model.
        hidden: [B, T, D], its states now.
    """

    model: PreTrainedModel
    stream: Stream
    hidden: Tensor

    def after(self, start: int, stop: int) -> _Side:
        """Return the side after the layers from `start` up to `stop`."""
        layers = decoder_layers(self.model)
        return replace(self, hidden=run_layers(self.stream, layers, self.hidden, start, stop))


def _begin(
    model: PreTrainedModel, teacher: PreTrainedModel | None, batch: Batch
) -> tuple[Stream, _Side, int]:
    """Return the student's stream, and the teacher before the first layer at which they part, with
    its index. The student has the same h there, unless the teacher is a model of its own.
    """
    if is_sharded(model):
        raise NotSupportedError(
            "--strategy propagated and end_to_end do not support a sharded base; use --strategy"
            " local"
        )
    stream = open_stream(model, batch)
    if teacher is None:
        first = npt_layers(model)[0][0]
        return stream, _Side(model, stream, stream.hidden).after(0, first), first
    guide = open_stream(teacher, batch)
    return stream, _Side(teacher, guide, guide.hidden), 0


def _student_layer(
    layer: NPTLayer,
    here: Stream,
    config: TrainConfig,
    count: int,
    hidden: Tensor,
    target: Tensor | None,
    taught_input: Tensor | None,
) -> tuple[Tensor, LayerSums]:
    """Return the student's states [B, T, D] after one of `count` converted layers, and the layer's
    sums; change nothing.

    hidden, target, taught_input: [B, T, D], the student's h, the teacher's output, and its h for
    the loss that needs it; without a loss on hidden states there is no target.
    """
    student, energy = student_rows(layer, here, hidden, config.regularization_lambda > 0)
    t, h = (None if states is None else here.rows(states) for states in (target, taught_input))
    return here.scatter(student), layer_sums(config, count, student, t, h, energy)


def _computed(function: Callable[..., T], *arguments: object) -> T:
    return function(*arguments)


def _logit_loss(config: TrainConfig, student: _Side, teacher: _Side) -> Tensor:
    """Return the loss on the logits, summed over the scored positions, on the device of lm_head.

    The teacher's states, after its last layer, are read only if `_teacher_has_logits`.
    """
    rows = _scored_states(student.model, student.hidden, student.stream)
    batch = student.stream.at(rows.device).batch
    if _teacher_has_logits(config):
        taught = _scored_states(teacher.model, teacher.hidden, student.stream)
    else:
        taught = batch.labels.flatten().index_select(0, batch.scored_index + 1)
    head, vocab_size = student.model.lm_head, student.model.config.vocab_size
    guide = teacher.model.lm_head
    return through_head(head, row_loss(config), rows, taught, vocab_size, teacher_head=guide)


def _scored_states(model: PreTrainedModel, states: Tensor, stream: Stream) -> Tensor:
    """Return lm_head's input at the scored positions, on its device: [S, D] of [B, T, D] states."""
    norm = model.model.norm
    rows = states.flatten(0, 1).index_select(0, stream.at(states.device).batch.scored_index)
    return norm(rows.to(norm.weight.device)).to(model.lm_head.weight.device)


def _teacher_has_logits(config: TrainConfig) -> bool:
    """Return whether the loss on the logits, if there is one, reads the teacher's last states."""
    return config.logit_kl_weight > 0 and config.logit_loss != "cross_entropy"
