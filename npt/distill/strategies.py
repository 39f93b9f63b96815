"""Strategies: how the student is driven through one micro-batch, and where its gradients flow.

A strategy is a function of (model, batch, config) that runs forward and backward, leaves the gradient of the *summed* loss
in the adapters' `.grad` (added to what is there) and returns the sums. It divides by nothing and steps nothing; what to do
with the result is the transaction's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from npt.adapters.attach import adapter_mode, adapters_disabled, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer, Terms, attention_output, student_output, student_stream
from npt.adapters.modulation import modulation_energy
from npt.adapters.stream import Stream, open_stream
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.logit_losses import row_loss, through_head
from npt.distill.losses import hidden_loss
from npt.distill.weights import disagreement_weights, layer_weights
from npt.fidelity.divergence import nmse_per_token
from npt.quant.linear import stacked_product


@dataclass(frozen=True)
class MicroBatch:
    """Sums over the valid tokens of one micro-batch; device tensors without graph, read by nobody before the window ends.

    loss: scalar, what was differentiated. nmse: scalar, mean over converted layers, whatever the loss is. reg: scalar, unweighted,
    likewise. logit: scalar, the loss on the logits over the `scored` positions S, unweighted; zero where there is none.
    layer_nmse: [number of converted layers]. tokens: their count N.
    """

    loss: Tensor
    nmse: Tensor
    reg: Tensor
    logit: Tensor
    layer_nmse: Tensor
    tokens: int
    scored: int


Strategy = Callable[[LlamaForCausalLM, Batch, TrainConfig], MicroBatch]


def stacked_outputs(layer: NPTLayer, hidden: Tensor, attention: Tensor) -> tuple[Tensor, Tensor, Terms]:
    """Teacher's and student's output of one converted layer from the same h and a, through one MLP call.

    gate and up see inputs that no adapter has touched, so they need no backward; the gradient crosses one frozen product,
    down_proj.

    Args:
        layer: a converted layer; only frozen weights and `layer.npt` are used.
        hidden: h, [N, D], without graph.
        attention: a, [N, D], without graph.

    Returns:
        t [N, D] without graph, o [N, D], and the modulation terms.
    """
    adapter, mlp = layer.npt, layer.mlp
    n = len(hidden)
    with torch.no_grad():
        teacher_stream = hidden + attention
        stream = student_stream(layer, hidden, attention)
        x = layer.post_attention_layernorm(torch.cat([stream, teacher_stream]))
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        teacher_act = mlp.act_fn(gate[n:]) * up[n:]
    z = adapter.code(attention)
    student_gate, gate_m, gate_s = adapter.apply_to("gate", gate[:n], z)
    student_up, up_m, up_s = adapter.apply_to("up", up[:n], z)
    adapter.show(
        h=hidden, a=attention, stream=stream, z=z, m_gate=gate_m, s_gate=gate_s, gate=student_gate, m_up=up_m, s_up=up_s, up=student_up
    )
    activation = mlp.act_fn(student_gate)
    product = activation * student_up
    adapter.show(activation=activation, product=product)
    down, teacher_down = stacked_product(mlp.down_proj, product, teacher_act)
    student_down, down_m, down_s = adapter.apply_to("down", down, z)
    terms: Terms = [(gate_m, gate_s), (up_m, up_s), (down_m, down_s)]
    teacher, student = teacher_stream + teacher_down, stream + student_down
    adapter.show(m_down=down_m, s_down=down_s, mlp=student_down, o=student, t=teacher)
    return teacher, student, terms


def local(model: LlamaForCausalLM, batch: Batch, config: TrainConfig) -> MicroBatch:
    """Each converted layer is fed the teacher's h; its loss is backpropagated at once and its graph freed.

    One pass over the layers up to the last converted one, no lm_head. Attention is computed once per layer and shared: the
    teacher's output needs it, the student's modulation is made of it. Padding never enters an MLP: valid rows are gathered
    before it and scattered behind it.
    """
    converted = npt_layers(model)
    last = converted[-1][0]
    weights = iter(layer_weights(config, len(converted)))
    losses: list[Tensor] = []
    nmses: list[Tensor] = []
    regs: list[Tensor] = []
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        hidden = stream.hidden
        for layer in decoder_layers(model)[: last + 1]:
            if not isinstance(layer, NPTLayer):
                hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
                continue
            attention = stream.rows(attention_output(layer, hidden, **stream.context_of(layer)))
            with torch.enable_grad():
                h = stream.rows(hidden)
                teacher, student, terms = stacked_outputs(layer, h, attention)
                distance, nmse = _layer_loss(config, batch, student, teacher, h)
                reg = _energy_sum(terms, distance)
                loss = (next(weights) * distance + config.regularization_lambda * reg) / len(converted)
                loss.backward()
            losses.append(loss.detach())
            nmses.append(nmse)
            regs.append(reg.detach())
            hidden = stream.scatter(teacher)
    return _micro_batch(losses, nmses, regs, None, batch)


def end_to_end(model: LlamaForCausalLM, batch: Batch, config: TrainConfig) -> MicroBatch:
    """The student runs on its own stream, gradients flow through all of it; a loss per converted layer, optionally on the logits.

    Up to the first converted layer teacher and student are the same and run once. Without a loss on the logits nothing is
    computed after the last converted layer. That loss is summed over the S scored positions and divided, as the rest is, by the
    valid tokens.
    """
    converted = npt_layers(model)
    first, last = converted[0][0], converted[-1][0]
    layers = decoder_layers(model)
    depth = len(layers) if config.logit_kl_weight else last + 1
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        shared = _run(stream, layers, stream.hidden, 0, first)
        teacher_hidden, inputs, targets = shared, {}, {}
        for index in range(first, depth):
            if isinstance(layers[index], NPTLayer) and config.loss == "nmse_update":
                inputs[index] = teacher_hidden
            teacher_hidden = _run(stream, layers, teacher_hidden, index, index + 1)
            if isinstance(layers[index], NPTLayer):
                targets[index] = teacher_hidden
    weights = layer_weights(config, len(converted))
    distances: list[Tensor] = []
    nmses: list[Tensor] = []
    regs: list[Tensor] = []
    hidden = shared
    with adapter_mode(model, "student"):
        for index in range(first, depth):
            layer = layers[index]
            if not isinstance(layer, NPTLayer):
                hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
                continue
            attention = attention_output(layer, hidden, **stream.context_of(layer))
            student, terms = student_output(layer, stream.rows(hidden), stream.rows(attention))
            h = stream.rows(inputs.pop(index)) if inputs else None
            distance, nmse = _layer_loss(config, batch, student, stream.rows(targets.pop(index)), h)
            distances.append(distance)
            nmses.append(nmse)
            regs.append(_energy_sum(terms, distance))
            hidden = stream.scatter(student)
        parts = [w * d + config.regularization_lambda * r for w, d, r in zip(weights, distances, regs, strict=True)]
        loss = torch.stack(parts).sum() / len(converted)
        logit = None
        if config.logit_kl_weight:
            logit = _logit_loss(config, model, batch, hidden, teacher_hidden)
            loss = loss + config.logit_kl_weight * logit
        loss.backward()
    return _micro_batch([loss.detach()], nmses, [r.detach() for r in regs], logit, batch)


def _layer_loss(config: TrainConfig, batch: Batch, student: Tensor, teacher: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """The hidden-state loss of one layer's rows [N, D], summed, and their summed NMSE without graph."""
    weights = disagreement_weights(student, teacher, batch.document_lengths) if config.token_weighting == "disagreement" else None
    loss, _ = hidden_loss(config, student, teacher, hidden, weights)
    if config.loss == "nmse" and weights is None:
        return loss, loss.detach()
    return loss, nmse_per_token(student.detach(), teacher).sum()


def _logit_loss(config: TrainConfig, model: LlamaForCausalLM, batch: Batch, hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """The loss on the logits, summed over the scored positions, from the last layer's [B, T, D] states."""
    index = batch.scored_index
    student, teacher = (model.model.norm(states.flatten(0, 1).index_select(0, index)) for states in (hidden, teacher_hidden))
    weights = disagreement_weights(student, teacher, batch.scored_lengths) if config.token_weighting == "disagreement" else None
    other = batch.labels.flatten().index_select(0, index + 1) if config.logit_loss == "cross_entropy" else teacher
    return through_head(model.lm_head, row_loss(config), student, other, model.config.vocab_size, weights)[0]


def _run(stream: Stream, layers: nn.ModuleList, hidden: Tensor, start: int, stop: int) -> Tensor:
    for layer in layers[start:stop]:
        hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
    return hidden


def _energy_sum(terms: Terms, like: Tensor) -> Tensor:
    energy = modulation_energy(terms)
    return torch.zeros_like(like) if energy is None else energy.sum()


def _micro_batch(losses: list[Tensor], nmses: list[Tensor], regs: list[Tensor], logit: Tensor | None, batch: Batch) -> MicroBatch:
    home = losses[-1].device  # the layers of a model spread over several devices report from each of them
    layer_nmse = torch.stack([n.to(home) for n in nmses])
    return MicroBatch(
        loss=torch.stack([part.to(home) for part in losses]).sum(),
        nmse=layer_nmse.mean(),
        reg=torch.stack([r.to(home) for r in regs]).mean(),
        logit=torch.zeros_like(layer_nmse[0]) if logit is None else logit.detach().to(home),
        layer_nmse=layer_nmse,
        tokens=batch.tokens,
        scored=0 if logit is None else batch.scored,
    )


STRATEGIES: dict[str, Strategy] = {"local": local, "end_to_end": end_to_end}
