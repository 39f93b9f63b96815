"""The strategy `local`: each converted layer learns from the teacher's input, by itself.

A strategy is a function of (model, batch, config, teacher) that runs forward and backward, adds the
gradient of the *summed* loss to the adapters' `.grad` and returns the sums. It divides by nothing
and steps nothing. The teacher is the student's own base with its adapters off, or a model that is
not quantised, which runs on a stream of its own: its masks and rotary positions are those of its
own configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer, attention_output, device_of, whole
from npt.adapters.stream import Stream, open_stream
from npt.adapters.trained import Work, Workspace, stacked_outputs, trained_output
from npt.base.hooks import call_around, may_change
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.hidden_losses import hidden_loss, nmse_per_token

REPORTED = ("loss", "nmse", "reg", "logit", "scored")
"""The sums that a report begins with."""


@dataclass(frozen=True)
class MicroBatch:
    """Sums over the valid tokens of one micro-batch: device tensors without graph.

    loss: scalar, what was differentiated. nmse: scalar, mean over converted layers, whatever the
    loss is; 0 if hidden states are not compared. reg: scalar, unweighted, likewise a mean. logit:
    scalar, the loss on the logits over the `scored` positions S, unweighted; zero if there is none.
    layer_nmse: [number of converted layers]. tokens: their count N.
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


LayerSums = tuple[Tensor, Tensor, Tensor]
"""Of a converted layer the loss, with its graph, and without one the NMSE and the unweighted
energy: scalars, summed over the tokens."""


def local(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> MicroBatch:
    """Feed each converted layer the teacher's h; backpropagate its loss at once and free its graph.

    One pass over the layers up to the last converted one, no lm_head. Attention is computed once
    per layer and shared: the teacher's output needs it, the student's modulation is made of it.
    Padding never enters an MLP: valid rows are gathered before it and scattered after it. With a
    `teacher` of its own the student's base shares nothing but h.
    """
    layers = decoder_layers(model)
    sums, work = Sums(model, config, batch), work_of(config, Workspace())
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        guide = stream if teacher is None else open_stream(teacher, batch)
        hidden = guide.hidden
        taught_layers = layers if teacher is None else decoder_layers(teacher)
        for index, layer in enumerate(layers[: sums.last + 1]):
            taught = None
            if teacher is not None:
                taught = run_layers(guide, taught_layers, hidden, index, index + 1)
            here, hidden = stream_at(stream, layer, hidden.to(stream.hidden.dtype))
            # A layer that hooks may change is run as it is for the teacher, too.
            if taught is None and (not isinstance(layer, NPTLayer) or may_change(layer)):
                taught = run_layers(stream, layers, hidden, index, index + 1)
            if not isinstance(layer, NPTLayer):
                assert taught is not None
                hidden = taught
                continue
            h = here.rows(hidden)
            with whole(layer):
                if taught is None:
                    attention = here.rows(attention_output(layer, hidden, **here.context_of(layer)))
                with torch.enable_grad():
                    if taught is None:
                        target, student, energy = stacked_outputs(layer, h, attention, work)
                    else:
                        target = here.rows(taught.to(h.device))
                        student, energy = student_rows(layer, here, hidden, work, graph=False)
                    sums.take(
                        sums.of_layer(index, here.batch, student, target, h, energy)
                    ).backward()
            hidden = taught if taught is not None else here.scatter(target)
    return sums.micro_batch()


def student_rows(
    layer: NPTLayer, here: Stream, hidden: Tensor, work: Work, *, graph: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's student output [N, D] and the energy of its modulation [N].

    Args:
        hidden: [B, T, D], the student's h.
        graph: gradients go through the attention into h; else no further than the adapter.
    """
    energies: list[Tensor | None] = []

    def student(hidden: Tensor, **context: Any) -> Tensor:
        with torch.set_grad_enabled(graph):
            attention = attention_output(layer, hidden, **context)
        rows, energy = trained_output(layer, here.rows(hidden), here.rows(attention), work)
        energies.append(energy)
        return rows

    if not may_change(layer):
        return student(hidden, **here.context_of(layer)), energies[0]
    name = f"layer {layer.self_attn.layer_idx}"
    output = call_around(
        layer,
        name,
        lambda *given, **context: here.scatter(student(*given, **context)),
        hidden,
        **here.context_of(layer),
    )
    return here.rows(output), energies[0]


class Sums:
    """The sums of one micro-batch's converted layers, in their order.

    first, last: indices of the first and the last converted layer.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, batch: Batch):
        converted = npt_layers(model)
        self.first, self.last = converted[0][0], converted[-1][0]
        self.logit: Tensor | None = None
        self._config, self._batch, self._count = config, batch, len(converted)
        self._losses: list[Tensor] = []
        self._nmses: list[Tensor] = []
        self._regs: list[Tensor] = []

    def of_layer(
        self,
        index: int,
        batch: Batch,
        student: Tensor,
        target: Tensor | None,
        hidden: Tensor | None,
        energy: Tensor | None,
    ) -> LayerSums:
        """Return the sums of one layer, not counted yet.

        Args:
            index: of the layer.
            batch: on the layer's device.
            student, target: [N, D]; no target if hidden states have no weight.
            hidden: [N, D], the teacher's h, for the loss that needs it.
            energy: [N], of the modulation; None if nothing is modulated.
        """
        config = self._config
        if target is None:
            dtype = torch.promote_types(student.dtype, torch.float32)
            distance = nmse = student.new_zeros((), dtype=dtype)
        else:
            distance = hidden_loss(config, student, target, hidden)
            if config.loss == "nmse":
                nmse = distance.detach()
            else:
                nmse = nmse_per_token(student.detach(), target).sum()
        reg = torch.zeros_like(distance) if energy is None else energy.sum()
        loss = (config.hidden_weight * distance + config.regularization_lambda * reg) / self._count
        return loss, nmse, reg.detach()

    def take(self, found: LayerSums) -> Tensor:
        """Count the next layer's sums; return its share of the loss, with its graph."""
        loss, nmse, reg = found
        self._losses.append(loss.detach())
        self._nmses.append(nmse)
        self._regs.append(reg)
        return loss

    def micro_batch(self) -> MicroBatch:
        """Return the sums over all layers."""
        # the layers of a model spread over several devices report from each of them
        home = self._losses[-1].device
        losses, nmses, regs = (
            torch.stack([part.to(home) for part in parts])
            for parts in (self._losses, self._nmses, self._regs)
        )
        loss, logit = losses.sum(), torch.zeros_like(losses[0])
        if self.logit is not None:
            logit = self.logit.detach().to(home)
            loss = loss + self._config.logit_kl_weight * logit
        scored = 0 if self.logit is None else self._batch.scored
        return MicroBatch(loss, nmses.mean(), regs.mean(), logit, nmses, self._batch.tokens, scored)


def stream_at(stream: Stream, layer: nn.Module, hidden: Tensor) -> tuple[Stream, Tensor]:
    """Return stream and states on the device of a layer."""
    device = device_of(layer)
    return stream.at(device), hidden.to(device)


def run_layers(
    stream: Stream, layers: nn.ModuleList, hidden: Tensor, start: int, stop: int
) -> Tensor:
    """Return the states [B, T, D] after the layers from `start` up to `stop`."""
    for layer in layers[start:stop]:
        here, hidden = stream_at(stream, layer, hidden)
        hidden = here.clean(layer(hidden, **here.context_of(layer)))
    return hidden


def work_of(config: TrainConfig, space: Workspace | None = None) -> Work:
    """Return how the adapters' products are computed."""
    return Work(regularised=config.regularization_lambda > 0, space=space)
