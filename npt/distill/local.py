"""The strategy `local`: each converted layer learns from the teacher's input, by itself.

A strategy is a function of (model, batch, config, teacher) that runs forward and backward, adds the
gradient of the *summed* loss to the adapters' `.grad` and returns the sums. It divides by nothing
and steps nothing. The teacher is the student's own base with its adapters off, or a model that is
not quantised, which runs on a stream of its own: its masks and rotary positions are those of its
own configuration.

The loss of a layer is computed here, in `layer_sums`, from its output o and the teacher's t;
`stacked_outputs` and `trained_output` (npt/adapters/trained.py) compute these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer, attention_output, device_of, whole
from npt.adapters.stream import Stream, open_stream
from npt.adapters.trained import Workspace, stacked_outputs, trained_output
from npt.base.hooks import call_around, may_change
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.hidden_losses import hidden_loss, nmse_per_token

REPORTED = ("loss", "nmse", "reg", "logit", "scored")
"""The sums that a report begins with."""


@dataclass(frozen=True)
class BatchSums:
    """Sums over the valid tokens of one micro-batch: device tensors without graph.

    Attributes:
        loss: scalar, what was differentiated.
        nmse: scalar, mean over converted layers, whatever the loss is; 0 if hidden states are not
            compared.
        reg: scalar, unweighted, likewise a mean.
        logit: scalar, the loss on the logits over the `scored` positions S, unweighted; zero if
            there is none.
        layer_nmse: [number of converted layers].
        tokens: their count N.
        scored: S.
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
    """Sums over the valid tokens of one converted layer: scalars.

    Attributes:
        loss: the layer's share of the loss, with its graph.
        nmse: without graph.
        reg: the unweighted energy, without graph.
    """

    loss: Tensor
    nmse: Tensor
    reg: Tensor


def local(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> BatchSums:
    """Feed each converted layer the teacher's h; backpropagate its loss at once and free its graph.

    One pass over the layers up to the last converted one, no lm_head. Attention is computed once
    per layer and shared: the teacher's output needs it, the student's modulation is made of it.
    Padding never enters an MLP: valid rows are gathered before it and scattered after it. With a
    `teacher` of its own the student's base shares nothing but h.
    """
    layers, converted = decoder_layers(model), npt_layers(model)
    regularised, space = config.regularization_lambda > 0, Workspace()
    sums: list[LayerSums] = []
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        guide = stream if teacher is None else open_stream(teacher, batch)
        hidden = guide.hidden
        taught_layers = layers if teacher is None else decoder_layers(teacher)
        for index, layer in enumerate(layers[: converted[-1][0] + 1]):
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
                        outputs = stacked_outputs(layer, h, attention, regularised, space)
                        target, student, energy = outputs
                    else:
                        target = here.rows(taught.to(h.device))
                        student, energy = student_rows(
                            layer, here, hidden, regularised, space, graph=False
                        )
                    of_layer = layer_sums(config, len(converted), student, target, h, energy)
                    sums.append(backpropagated(of_layer))
            hidden = taught if taught is not None else here.scatter(target)
    return batch_sums(config, batch, sums)


def student_rows(
    layer: NPTLayer,
    here: Stream,
    hidden: Tensor,
    regularised: bool,
    space: Workspace | None = None,
    *,
    graph: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's student output [N, D] and the energy of its modulation [N].

    Args:
        layer: a converted layer.
        here: the student's stream, on the layer's device.
        hidden: [B, T, D], the student's h.
        regularised: the energy is differentiated.
        space: as of `stacked_outputs`.
        graph: gradients go through the attention into h; else no further than the adapter.
    """

    def student(hidden: Tensor, **context: Any) -> tuple[Tensor, Tensor | None]:
        with torch.set_grad_enabled(graph):
            attention = attention_output(layer, hidden, **context)
        return trained_output(layer, here.rows(hidden), here.rows(attention), regularised, space)

    context, energies = here.context_of(layer), []
    if not may_change(layer):
        return student(hidden, **context)

    def scattered(hidden: Tensor, **context: Any) -> Tensor:
        rows, energy = student(hidden, **context)
        energies.append(energy)
        return here.scatter(rows)

    name = f"layer {layer.self_attn.layer_idx}"
    return here.rows(call_around(layer, name, scattered, hidden, **context)), energies[0]


def layer_sums(
    config: TrainConfig,
    count: int,
    student: Tensor,
    target: Tensor | None,
    hidden: Tensor | None,
    energy: Tensor | None,
) -> LayerSums:
    """Return the sums of one of `count` converted layers.

    Args:
        config: names the loss and its weights.
        count: converted layers share the loss evenly.
        student: o, [N, D].
        target: t, [N, D]; None if hidden states have no weight.
        hidden: [N, D], the teacher's h, for the loss that needs it.
        energy: [N], of the modulation; None if nothing is modulated.
    """
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
    loss = (config.hidden_weight * distance + config.regularization_lambda * reg) / count
    return LayerSums(loss, nmse, reg.detach())


def backpropagated(sums: LayerSums) -> LayerSums:
    """Run a layer's backward; return its sums without graph."""
    sums.loss.backward()
    return sums._replace(loss=sums.loss.detach())


def batch_sums(
    config: TrainConfig, batch: Batch, layers: list[LayerSums], logit: Tensor | None = None
) -> BatchSums:
    """Return the sums of a micro-batch from those of its converted layers, in their order, and the
    unweighted loss on the logits.
    """
    # the layers of a model spread over several devices report from each of them
    home = layers[-1].loss.device
    losses, nmses, regs = (
        torch.stack([part.detach().to(home) for part in parts])
        for parts in zip(*layers, strict=True)
    )
    loss, scored = losses.sum(), 0
    if logit is None:
        logit = torch.zeros_like(losses[0])
    else:
        logit, scored = logit.detach().to(home), batch.scored
        loss = loss + config.logit_kl_weight * logit
    return BatchSums(loss, nmses.mean(), regs.mean(), logit, nmses, batch.tokens, scored)


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
