"""The strategies `local` and `propagated`, whose gradients stay inside each converted layer.

A strategy is a function of (model, batch, config, teacher). It runs forward and backward, adds the
gradient of the *summed* loss to the adapters' `.grad`, and returns the sums. It neither divides nor
steps. The teacher is the student's own base with its adapters disabled, or a separate model with
its own stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer, attention_output
from npt.adapters.stream import Stream, open_stream
from npt.adapters.trained import trained_output
from npt.batch import Batch
from npt.config import TrainConfig
from npt.distill.hidden_losses import HIDDEN_LOSSES, nmse_per_token
from npt.hooks import call_around, may_change, within

REPORTED = ("loss", "nmse", "reg", "logit", "scored")
"""The first sums of a report, in order."""


class BatchSums(NamedTuple):
    """Sums over the valid tokens of one micro-batch, as device tensors without a graph.

    Attributes:
        loss: scalar, the loss that was differentiated.
        nmse: scalar, mean over converted layers, whatever the loss; 0 without hidden states.
        reg: scalar, mean energy over converted layers, unweighted.
        logit: scalar, loss on the logits over the scored positions, unweighted; 0 if unused.
        layer_nmse: [number of converted layers], NMSE of each.
        tokens: N, number of valid tokens.
        scored: S, number of scored positions.
    """

    loss: Tensor
    nmse: Tensor
    reg: Tensor
    logit: Tensor
    layer_nmse: Tensor
    tokens: int
    scored: int

    @property
    def report(self) -> Tensor:
        """Return `REPORTED`, then `layer_nmse`: [5 + number of converted layers]."""
        sums = torch.stack([self.loss, self.nmse, self.reg, self.logit])
        return torch.cat([sums, sums.new_full((1,), self.scored), self.layer_nmse])


class LayerSums(NamedTuple):
    """Sums over the valid tokens of one converted layer.

    Attributes:
        loss: the layer's share of the loss, with its graph.
        nmse: NMSE, without a graph.
        reg: unweighted energy, without a graph.
    """

    loss: Tensor
    nmse: Tensor
    reg: Tensor

    def learned(self) -> LayerSums:
        """Run backward of the loss; return the sums without its graph."""
        self.loss.backward()
        return self._replace(loss=self.loss.detach())


def local(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
    *,
    own_stream: bool = False,
    graph: bool = True,
) -> BatchSums:
    """Feed each converted layer the teacher's h; backpropagate its loss at once and free its graph.

    One pass over the layers suffices, up to the last converted one, without lm_head. Teacher and
    student share each layer's attention; a separate `teacher` shares only h. An MLP only receives
    the rows of valid tokens. `own_stream`: see `propagated`. On a GPU a CUDA graph may compute it
    (npt/distill/graphed.py), unless `graph` is False.
    """
    assert batch.teacher is None  # DataConfig.check_objective
    if graph and teacher is None and not own_stream and takes_graphs(batch.input_ids):
        from npt.distill.graphed import graphed  # needed on a GPU alone

        return graphed(model, batch, config, partial(local, model, config=config, graph=False))
    layers = decoder_layers(model)
    guide_layers = layers if teacher is None else decoder_layers(teacher)
    converted = npt_layers(model)
    count = len(converted)
    above_last = converted[-1][0] + 1
    may_share = teacher is None and not own_stream
    sums = []
    # the streams carry no graph: only the student's part of a converted layer records one
    with torch.no_grad(), adapters_disabled(model):
        stream, guide, first = begin(model, teacher, batch)
        for index, layer in enumerate(layers[first:above_last], first):
            # another library's hook may make the embeddings require a gradient
            taught = guide.hidden.detach()
            if not own_stream:
                taught = taught.to(stream.hidden.dtype)
                stream = replace(stream, hidden=taught)
            # share attention, unless hooks may change a value: then the teacher needs a plain call
            if may_share and isinstance(layer, NPTLayer) and not may_change(layer):
                learn = partial(_learn_and_teach, layer, stream, config, count)
                of_layer, target = within(layer, learn)
                guide = replace(guide, hidden=stream.scatter(target))
                sums.append(of_layer)
                del taught, target  # free them before the next layer
                continue
            guide = guide.through([guide_layers[index]])
            if isinstance(layer, NPTLayer):
                stream, of_layer = _learn(layer, stream, config, count, guide.hidden, taught)
                sums.append(of_layer)
            elif own_stream:
                stream = stream.through([layer])
    return batch_sums(config, batch, sums)


def takes_graphs(ids: Tensor) -> bool:
    """Return whether these are on a GPU, with a torch that survives a failed capture. A user who
    looks for a fault (CUDA_LAUNCH_BLOCKING=1) wants each kernel's own error.
    """
    on_card = ids.is_cuda and type(ids) is Tensor and torch.version.hip is None
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
    return on_card and torch.__version__ >= "2.13" and not blocking


def _learn_and_teach(
    layer: NPTLayer, stream: Stream, config: TrainConfig, count: int
) -> tuple[LayerSums, Tensor]:
    """Run forward and backward of one of `count` converted layers on the teacher's stream; return
    its sums and the teacher's output [N, D].
    """
    attention = attention_output(layer, stream.hidden, **stream.context_of(layer))
    h = stream.rows(stream.hidden)
    attention = stream.rows(attention)
    with torch.enable_grad():
        output, energy, target = trained_output(layer, h, attention, teach=True)
        assert target is not None
        of_layer = layer_sums(config, count, output, target, h, energy)
        return of_layer.learned(), target


def _learn(
    layer: NPTLayer, stream: Stream, config: TrainConfig, count: int, target: Tensor, taught: Tensor
) -> tuple[Stream, LayerSums]:
    """Run forward and backward of one of `count` converted layers on the student's stream; return
    the stream after it and the layer's sums. `target` and `taught`: see `layer_loss`.
    """
    with torch.enable_grad():
        states, of_layer = layer_loss(
            layer, stream, config, count, stream.hidden, target, taught, graph=False
        )
        return replace(stream, hidden=states.detach()), of_layer.learned()


def propagated(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> BatchSums:
    """Feed each converted layer the student's own h, with the teacher's output as its target.

    A layer thus learns to correct the errors of the layers below. Memory holds one layer's graph.
    """
    return local(model, batch, config, teacher, own_stream=True)


def begin(
    model: PreTrainedModel, teacher: PreTrainedModel | None, batch: Batch
) -> tuple[Stream, Stream, int]:
    """Return the streams of student and teacher before the first layer at which they differ, and
    its index: the first converted one, or 0 with a separate `teacher`. The teacher's stream is that
    of `batch.taught`.
    """
    if teacher is not None:
        return open_stream(model, batch), open_stream(teacher, batch.taught), 0
    stream = before_first(model, batch)
    guide = stream if batch.teacher is None else before_first(model, batch.teacher)
    return stream, guide, npt_layers(model)[0][0]


def before_first(model: PreTrainedModel, batch: Batch) -> Stream:
    """Return the stream before the first converted layer."""
    below = decoder_layers(model)[: npt_layers(model)[0][0]]
    opened = partial(open_stream, model)
    return through_frozen(opened(batch), "below", below, opened)


def through_frozen(
    stream: Stream, name: str, layers: nn.ModuleList, opened: Callable[[Batch], Stream]
) -> Stream:
    """Return the stream after layers that no training changes, from the states that a run keeps
    under this name, if it does. `opened` returns a batch's stream before these layers.
    """
    kept = stream.batch.kept
    if kept is None or not layers:
        return stream.through(layers)
    compute = lambda batch: opened(batch).through(layers).hidden  # noqa: E731
    return replace(stream, hidden=kept.states(stream.batch, name, compute))


def student_states(
    layer: NPTLayer, stream: Stream, hidden: Tensor, *, graph: bool
) -> tuple[Tensor, Tensor]:
    """Return the student's states after a converted layer [B, T, D] and the energy [N].

    hidden: the student's h, [B, T, D]. graph: let gradients flow through attention into h; if False
    they end at the adapter.
    """
    context = stream.context_of(layer)
    if not graph:
        hidden = hidden.detach()

    def student(hidden: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(graph):
            attention = attention_output(layer, hidden, **context)
        output, energy, _ = trained_output(layer, stream.rows(hidden), stream.rows(attention))
        return output, energy

    if not may_change(layer):
        output, energy = within(layer, student, hidden)
        return stream.scatter(output), energy
    energies: list[Tensor] = []

    def called(hidden: Tensor, **_: Any) -> Tensor:
        output, energy = student(hidden)
        energies.append(energy)
        return stream.scatter(output)

    name = f"layer {layer.self_attn.layer_idx}"
    return call_around(layer, name, called, hidden, **context), energies[0]


def layer_loss(
    layer: NPTLayer,
    stream: Stream,
    config: TrainConfig,
    count: int,
    hidden: Tensor,
    target: Tensor | None,
    taught: Tensor | None,
    *,
    graph: bool = True,
) -> tuple[Tensor, LayerSums]:
    """Return the student's states after one of `count` converted layers, and the layer's sums.

    `hidden`, `target` and `taught` are the student's h, the teacher's output and the teacher's h,
    [B, T, D]; for `graph` see `student_states`.
    """
    states, energy = student_states(layer, stream, hidden, graph=graph)
    t = None if target is None else stream.rows(target)
    h = None if taught is None else stream.rows(taught)
    return states, layer_sums(config, count, stream.rows(states), t, h, energy)


def layer_sums(
    config: TrainConfig,
    count: int,
    student: Tensor,
    target: Tensor | None,
    hidden: Tensor | None,
    energy: Tensor,
) -> LayerSums:
    """Return the sums of one of `count` converted layers, which have equal shares in the loss.

    `student`, `target` and `hidden` are o, t and the teacher's h, [N, D]. Without a target, only
    the energy [N] enters the loss.
    """
    if target is None:
        distance = nmse = energy.new_zeros(())
    else:
        nmse = distance = HIDDEN_LOSSES[config.loss](student, target, hidden).sum()
        if config.loss != "nmse":
            nmse = nmse_per_token(student.detach(), target).sum()
    reg = energy.sum()
    loss = config.hidden_weight * distance
    if config.regularization_lambda:
        loss = loss + config.regularization_lambda * reg
    return LayerSums(loss / count, nmse.detach(), reg.detach())


def batch_sums(
    config: TrainConfig, batch: Batch, layers: list[LayerSums], logit: Tensor | None = None
) -> BatchSums:
    """Return the sums of a micro-batch from those of its layers and the loss on the logits."""
    losses, nmses, regs = map(torch.stack, zip(*layers, strict=True))
    loss = losses.detach().sum()
    scored = 0
    if logit is None:
        logit = torch.zeros_like(loss)
    else:
        logit = logit.detach()
        loss = loss + config.logit_kl_weight * logit
        scored = batch.scored
    return BatchSums(loss, nmses.mean(), regs.mean(), logit, nmses, batch.tokens, scored)
