"""Strategies: how the student is driven through one micro-batch, and where its gradients flow.

A strategy is a function of (model, batch, config) that runs forward and backward, leaves the
gradient of the *summed* loss in the adapters' `.grad` (added to what is there) and returns the
sums. It divides by nothing and steps nothing; what to do with the result is npt.step's
business. The teacher is the student's own base with its adapters off, or a model of its own that is
not quantised, so that the adapters can make good what quantisation has cost. Such a teacher runs on
a stream of its own: masks and rotary positions are what its own configuration says at that moment,
whatever the student's says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.attach import (
    adapter_mode,
    adapters_disabled,
    decoder_layers,
    is_sharded,
    npt_layers,
)
from npt.adapters.layer import NPTLayer, attention_output, device_of, whole
from npt.adapters.recompute import recomputed
from npt.adapters.stream import Stream, open_stream
from npt.adapters.trained import Work, Workspace, stacked_outputs, trained_output
from npt.base.hooks import call_around, may_change
from npt.config import STRATEGIES as STRATEGY_NAMES
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.divergence import nmse_per_token
from npt.distill.hidden_losses import READS_INPUT, hidden_loss
from npt.distill.logit_losses import row_loss, through_head
from npt.distill.loss_weights import disagreement_weights, layer_weights
from npt.errors import NotSupportedError


@dataclass(frozen=True)
class MicroBatch:
    """Sums over the valid tokens of one micro-batch; device tensors without graph, which are read
    as `report` alone, behind its window.

    loss: scalar, what was differentiated. nmse: scalar, mean over converted layers, whatever the
    loss is; 0 where hidden states have no weight and are not compared. reg: scalar, unweighted,
    likewise a mean. logit: scalar, the loss on the logits over the `scored` positions S,
    unweighted; zero where there is none. layer_nmse: [number of converted layers]. tokens: their
    count N.
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
        """All that is on the device: [4 + number of converted layers], what `REPORTED` names and
        then `layer_nmse`.
        """
        return torch.cat([torch.stack([getattr(self, name) for name in REPORTED]), self.layer_nmse])


REPORTED = ("loss", "nmse", "reg", "logit")
"""Sums in front of a report."""

Strategy = Callable[[PreTrainedModel, Batch, TrainConfig], MicroBatch]

LayerSums = tuple[Tensor, Tensor, Tensor]
"""Of a converted layer the loss, with its graph, and without one the NMSE and the unweighted
energy: scalars, summed over the tokens.
"""

T = TypeVar("T")


def local(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> MicroBatch:
    """Each converted layer is fed the teacher's h; its loss is backpropagated at once and its graph
    freed.

    One pass over the layers up to the last converted one, no lm_head. Attention is computed once
    per layer and shared: the teacher's output needs it, the student's modulation is made of it.
    Padding never enters an MLP: valid rows are gathered before it and scattered behind it. Of a
    `teacher` of its own the student's base shares h and nothing else.
    """
    layers = decoder_layers(model)
    sums, work = _Sums(model, config, batch), _work(config, Workspace())
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        taught = stream if teacher is None else open_stream(teacher, batch)
        hidden = taught.hidden
        for index, layer in enumerate(layers[: sums.last + 1]):
            behind = (
                None
                if teacher is None
                else _run(taught, decoder_layers(teacher), hidden, index, index + 1)
            )
            here, hidden = _at(stream, layer, hidden.to(stream.hidden.dtype))
            if not isinstance(layer, NPTLayer):
                hidden = (
                    behind if behind is not None else _run(stream, layers, hidden, index, index + 1)
                )
                continue
            # then the teacher, too, is the layer as it stands
            if behind is None and may_change(layer):
                behind = _run(stream, layers, hidden, index, index + 1)
            h = here.rows(hidden)
            with whole(layer):
                if behind is None:
                    attention = here.rows(attention_output(layer, hidden, **here.context_of(layer)))
                with torch.enable_grad():
                    if behind is None:
                        target, student, energy = stacked_outputs(layer, h, attention, work)
                    else:
                        target, (student, energy) = (
                            here.rows(behind.to(h.device)),
                            _student_rows(layer, here, hidden, work, graph=False),
                        )
                    sums.add(here.batch, student, target, h, energy).backward()
            hidden = behind if behind is not None else here.scatter(target)
    return sums.micro_batch()


def propagated(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> MicroBatch:
    """Each converted layer is fed the student's own h, and taught the teacher's output of that
    depth; gradients stay inside the layer.

    So a layer learns to make good what the converted layers below it got wrong, at the memory of
    one layer's graph. Up to the first converted layer teacher and student are the same and run
    once, unless the `teacher` is a model of its own.

    Raises:
        NotSupportedError: the base is sharded.
    """
    layers = decoder_layers(model)
    sums, work = _Sums(model, config, batch), _work(config, Workspace())
    with torch.no_grad(), adapters_disabled(model):
        (stream, hidden), (guide, taught), first = _begin(model, teacher, batch, layers, sums.first)
        taught_layers = layers if teacher is None else decoder_layers(teacher)
        for index, layer in enumerate(layers[first : sums.last + 1], first):
            before = taught
            taught = _run(guide, taught_layers, taught, index, index + 1)
            if not isinstance(layer, NPTLayer):
                hidden = _run(stream, layers, hidden, index, index + 1)
                continue
            here, hidden = _at(stream, layer, hidden)
            target = here.rows(taught.to(hidden.device))
            was = here.rows(before.to(hidden.device)) if config.loss in READS_INPUT else None
            with torch.enable_grad():
                student, energy = _student_rows(layer, here, hidden, work, graph=False)
                sums.add(here.batch, student, target, was, energy).backward()
            hidden = here.scatter(student.detach())
    return sums.micro_batch()


def end_to_end(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> MicroBatch:
    """The student runs on its own stream, gradients flow through all of it; a loss per converted
    layer, optionally on the logits.

    Up to the first converted layer teacher and student are the same and run once, unless the
    `teacher` is a model of its own. Without a loss on the logits nothing is computed after the last
    converted layer; without one on hidden states none of the teacher's is kept, and where the text
    is the only target the teacher is not run. The loss on the logits is summed over the S scored
    positions and divided, as the rest is, by the valid tokens. With `config.gradient_checkpointing`
    the graph keeps of each layer its input and the teacher's output, and the rest is computed again
    in backward: to the same bits.

    Raises:
        NotSupportedError: the base is sharded.
    """
    layers = decoder_layers(model)
    sums, work = _Sums(model, config, batch), _work(config)
    depth = len(layers) if config.logit_kl_weight else sums.last + 1
    taught_depth = (
        depth if _teacher_has_logits(config) else sums.last + 1 if config.hidden_weight else 0
    )
    with torch.no_grad(), adapters_disabled(model):
        (stream, hidden), (guide, taught), first = _begin(model, teacher, batch, layers, sums.first)
        taught_layers = layers if teacher is None else decoder_layers(teacher)
        inputs, targets = {}, {}
        for index in range(first, taught_depth):
            if isinstance(layers[index], NPTLayer) and config.loss in READS_INPUT:
                inputs[index] = taught
            taught = _run(guide, taught_layers, taught, index, index + 1)
            if isinstance(layers[index], NPTLayer) and config.hidden_weight:
                targets[index] = taught
    parts: list[Tensor] = []
    compute = recomputed if config.gradient_checkpointing else _computed
    with adapter_mode(model, "student"):
        for index, layer in enumerate(layers[first:depth], first):
            here, hidden = _at(stream, layer, hidden)
            if not isinstance(layer, NPTLayer):
                hidden = compute(partial(_run, stream, layers, start=index, stop=index + 1), hidden)
                continue
            before = inputs.pop(index).to(hidden.device) if inputs else None
            target = targets.pop(index).to(hidden.device) if targets else None
            student_layer = partial(_student_layer, layer, here, work, sums, len(parts))
            hidden, found = compute(student_layer, hidden, target, before)
            parts.append(sums.take(found))
        loss = torch.stack([part.to(hidden.device) for part in parts]).sum()
        if config.logit_kl_weight:
            sums.logit = _logit_loss(
                config, (model, hidden), (model if teacher is None else teacher, taught), stream
            )
            loss = loss + config.logit_kl_weight * sums.logit.to(loss.device)
        loss.backward()
    return sums.micro_batch()


def _student_layer(
    layer: NPTLayer,
    here: Stream,
    work: Work,
    sums: _Sums,
    number: int,
    hidden: Tensor,
    target: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, LayerSums]:
    """The student's states after a converted layer and what they come to, from those in front of
    it. It changes nothing.

    Args:
        number: of the layer, among the converted ones.
        hidden, target, before: [B, T, D], the student's h, the teacher's output, and for the loss
            that needs it the teacher's h; without a loss on hidden states there is no target.
    """
    student, energy = _student_rows(layer, here, hidden, work)
    guide, h = (None if states is None else here.rows(states) for states in (target, before))
    return here.scatter(student), sums.of_layer(number, here.batch, student, guide, h, energy)


def _student_rows(
    layer: NPTLayer, here: Stream, hidden: Tensor, work: Work, *, graph: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The student's output of a converted layer and the energy of its modulation, of the valid
    tokens: [N, D] and [N].

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


def _computed(function: Callable[..., T], *arguments: object) -> T:
    return function(*arguments)


class _Sums:
    """What the converted layers of one micro-batch come to, in their order.

    first, last: indices of the first and the last converted layer.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, batch: Batch):
        converted = npt_layers(model)
        self.first, self.last = converted[0][0], converted[-1][0]
        self.logit: Tensor | None = None
        self._config, self._batch, self._count = config, batch, len(converted)
        self._weights = [
            config.hidden_weight * weight for weight in layer_weights(config, len(converted))
        ]
        self._losses: list[Tensor] = []
        self._nmses: list[Tensor] = []
        self._regs: list[Tensor] = []

    def add(
        self,
        batch: Batch,
        student: Tensor,
        target: Tensor,
        hidden: Tensor | None,
        energy: Tensor | None,
    ) -> Tensor:
        """The next layer's share of the loss, with its graph; arguments as of `of_layer`."""
        return self.take(self.of_layer(len(self._losses), batch, student, target, hidden, energy))

    def of_layer(
        self,
        number: int,
        batch: Batch,
        student: Tensor,
        target: Tensor | None,
        hidden: Tensor | None,
        energy: Tensor | None,
    ) -> LayerSums:
        """What one layer comes to. It is counted only once it is taken.

        Args:
            number: of the layer, among the converted ones.
            batch: on the layer's device.
            student, target: [N, D]; no target where hidden states have no weight.
            hidden: [N, D], the teacher's h, for the loss that needs it.
            energy: [N], of the modulation; None where nothing is modulated.
        """
        if target is None:
            distance = nmse = student.new_zeros(
                (), dtype=torch.promote_types(student.dtype, torch.float32)
            )
        else:
            distance, nmse = _layer_loss(self._config, batch, student, target, hidden)
        reg = torch.zeros_like(distance) if energy is None else energy.sum()
        loss = (
            self._weights[number] * distance + self._config.regularization_lambda * reg
        ) / self._count
        return loss, nmse, reg.detach()

    def take(self, found: LayerSums) -> Tensor:
        """Count the next layer's sums; its share of the loss, with its graph."""
        loss, nmse, reg = found
        self._losses.append(loss.detach())
        self._nmses.append(nmse)
        self._regs.append(reg)
        return loss

    def micro_batch(self) -> MicroBatch:
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


def _begin(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batch: Batch,
    layers: nn.ModuleList,
    first: int,
) -> tuple[tuple[Stream, Tensor], tuple[Stream, Tensor], int]:
    """The stream's context and h of the student, and of the teacher, in front of the first layer at
    which they part; and its index.

    Raises:
        NotSupportedError: the base is sharded, and its layers are whole one at a time.
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
    shared = stream, _run(stream, layers, stream.hidden, 0, first)
    return shared, shared, first


def _layer_loss(
    config: TrainConfig, batch: Batch, student: Tensor, teacher: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The hidden-state loss of one layer's rows [N, D], summed, and their summed NMSE without
    graph.
    """
    weights = (
        disagreement_weights(student, teacher, batch.document_lengths)
        if config.token_weighting == "disagreement"
        else None
    )
    loss, _ = hidden_loss(config, student, teacher, hidden, weights)
    if config.loss == "nmse" and weights is None:
        return loss, loss.detach()
    return loss, nmse_per_token(student.detach(), teacher).sum()


def _logit_loss(
    config: TrainConfig,
    student: tuple[PreTrainedModel, Tensor],
    teacher: tuple[PreTrainedModel, Tensor],
    stream: Stream,
) -> Tensor:
    """The loss on the logits, summed over the scored positions, from each model and its last
    layer's [B, T, D] states, on the device of lm_head. Of the teacher the states are read only
    where `_teacher_has_logits`."""
    rows = _scored_states(*student, stream)
    batch = stream.at(rows.device).batch
    taught = _scored_states(*teacher, stream) if _teacher_has_logits(config) else None
    weights = None
    if config.token_weighting == "disagreement":
        assert taught is not None
        weights = disagreement_weights(rows, taught.to(rows.device), batch.scored_lengths)
    if config.logit_loss == "cross_entropy":
        other = batch.labels.flatten().index_select(0, batch.scored_index + 1)
    else:
        assert taught is not None
        other = taught
    model, guide = student[0], teacher[0]
    return through_head(
        model.lm_head,
        row_loss(config),
        rows,
        other,
        model.config.vocab_size,
        weights,
        teacher_head=guide.lm_head,
    )[0]


def _scored_states(model: PreTrainedModel, states: Tensor, stream: Stream) -> Tensor:
    """What lm_head is given at the scored positions, on its device: [S, D] of the last layer's [B,
    T, D].
    """
    norm = model.model.norm
    rows = states.flatten(0, 1).index_select(0, stream.at(states.device).batch.scored_index)
    return norm(rows.to(norm.weight.device)).to(model.lm_head.weight.device)


def _at(stream: Stream, layer: nn.Module, hidden: Tensor) -> tuple[Stream, Tensor]:
    """Stream and states on the device of a layer."""
    device = device_of(layer)
    return stream.at(device), hidden.to(device)


def _run(stream: Stream, layers: nn.ModuleList, hidden: Tensor, start: int, stop: int) -> Tensor:
    for layer in layers[start:stop]:
        here, hidden = _at(stream, layer, hidden)
        hidden = here.clean(layer(hidden, **here.context_of(layer)))
    return hidden


def _work(config: TrainConfig, space: Workspace | None = None) -> Work:
    return Work(regularised=config.regularization_lambda > 0, compiled=config.compile, space=space)


def _teacher_has_logits(config: TrainConfig) -> bool:
    """Whether the loss on the logits, if there is one, asks for more of the teacher than the text
    that it was given.
    """
    return config.logit_kl_weight > 0 and (
        config.logit_loss != "cross_entropy" or config.token_weighting == "disagreement"
    )


STRATEGIES: dict[str, Callable[..., MicroBatch]] = {
    "local": local,
    "propagated": propagated,
    "end_to_end": end_to_end,
}


def register_strategy(name: str, strategy: Callable[..., MicroBatch]) -> None:
    """Add a strategy, which `--strategy`, `--stages` and `TrainConfig` then accept.

    Args:
        name: of the strategy.
        strategy: of (model, batch, config, teacher), as the functions of this module.

    Raises:
        ValueError: there is a strategy of this name.
    """
    if name in STRATEGIES:
        raise ValueError(f"the strategy {name!r} exists; choose another name")
    STRATEGIES[name] = strategy
    STRATEGY_NAMES.append(name)


def drive(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> MicroBatch:
    """The strategy that `config` names.

    Args:
        model, batch, config: of the student.
        teacher: an unquantised model of the same shapes; None where the student's own base teaches.
    """
    return STRATEGIES[config.strategy](model, batch, config, teacher)
