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
from npt.distill.losses import kl_sum
from npt.fidelity.divergence import nmse_per_token
from npt.quant.linear import stacked_product


@dataclass(frozen=True)
class MicroBatch:
    """Sums over the valid tokens of one micro-batch; device tensors without graph, read by nobody before the window ends.

    loss: scalar, what was differentiated. nmse: scalar, mean over converted layers. reg: scalar, unweighted, likewise.
    kl: scalar, zero where no logits were computed. layer_nmse: [number of converted layers]. tokens: their count N.
    """

    loss: Tensor
    nmse: Tensor
    reg: Tensor
    kl: Tensor
    layer_nmse: Tensor
    tokens: int


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
    losses: list[Tensor] = []
    nmses: list[Tensor] = []
    regs: list[Tensor] = []
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        hidden = stream.hidden
        for layer in decoder_layers(model)[: last + 1]:
            if not isinstance(layer, NPTLayer):
                hidden = stream.clean(layer(hidden, **stream.context))
                continue
            attention = stream.rows(attention_output(layer, hidden, **stream.context))
            with torch.enable_grad():
                teacher, student, terms = stacked_outputs(layer, stream.rows(hidden), attention)
                nmse = nmse_per_token(student, teacher).sum()
                reg = _energy_sum(terms, nmse)
                loss = (nmse + config.regularization_lambda * reg) / len(converted)
                loss.backward()
            losses.append(loss.detach())
            nmses.append(nmse.detach())
            regs.append(reg.detach())
            hidden = stream.scatter(teacher)
    return _micro_batch(losses, nmses, regs, None, batch)


def end_to_end(model: LlamaForCausalLM, batch: Batch, config: TrainConfig) -> MicroBatch:
    """The student runs on its own stream, gradients flow through all of it; NMSE per converted layer, optional logit KL.

    Up to the first converted layer teacher and student are the same and run once. Without the KL nothing is computed after
    the last converted layer.
    """
    converted = npt_layers(model)
    first, last = converted[0][0], converted[-1][0]
    layers = decoder_layers(model)
    depth = len(layers) if config.logit_kl_weight else last + 1
    with torch.no_grad(), adapters_disabled(model):
        stream = open_stream(model, batch)
        shared = _run(stream, layers, stream.hidden, 0, first)
        teacher_hidden, targets = shared, {}
        for index in range(first, depth):
            teacher_hidden = _run(stream, layers, teacher_hidden, index, index + 1)
            if isinstance(layers[index], NPTLayer):
                targets[index] = teacher_hidden
    nmses: list[Tensor] = []
    regs: list[Tensor] = []
    hidden = shared
    with adapter_mode(model, "student"):
        for index in range(first, depth):
            layer = layers[index]
            if not isinstance(layer, NPTLayer):
                hidden = stream.clean(layer(hidden, **stream.context))
                continue
            attention = attention_output(layer, hidden, **stream.context)
            student, terms = student_output(layer, stream.rows(hidden), stream.rows(attention))
            nmse = nmse_per_token(student, stream.rows(targets.pop(index))).sum()
            nmses.append(nmse)
            regs.append(_energy_sum(terms, nmse))
            hidden = stream.scatter(student)
        kl = None
        if config.logit_kl_weight:
            norm = model.model.norm
            kl = kl_sum(norm(stream.rows(hidden)), norm(stream.rows(teacher_hidden)), model.lm_head, model.config.vocab_size)
        loss = torch.stack([n + config.regularization_lambda * r for n, r in zip(nmses, regs, strict=True)]).sum() / len(converted)
        if kl is not None:
            loss = loss + config.logit_kl_weight * kl
        loss.backward()
    return _micro_batch([loss.detach()], [n.detach() for n in nmses], [r.detach() for r in regs], kl, batch)


def _run(stream: Stream, layers: nn.ModuleList, hidden: Tensor, start: int, stop: int) -> Tensor:
    for layer in layers[start:stop]:
        hidden = stream.clean(layer(hidden, **stream.context))
    return hidden


def _energy_sum(terms: Terms, like: Tensor) -> Tensor:
    energy = modulation_energy(terms)
    return torch.zeros_like(like) if energy is None else energy.sum()


def _micro_batch(losses: list[Tensor], nmses: list[Tensor], regs: list[Tensor], kl: Tensor | None, batch: Batch) -> MicroBatch:
    home = losses[-1].device  # the layers of a model spread over several devices report from each of them
    layer_nmse = torch.stack([n.to(home) for n in nmses])
    return MicroBatch(
        loss=torch.stack([part.to(home) for part in losses]).sum(),
        nmse=layer_nmse.mean(),
        reg=torch.stack([r.to(home) for r in regs]).mean(),
        kl=torch.zeros_like(layer_nmse[0]) if kl is None else kl.detach().to(home),
        layer_nmse=layer_nmse,
        tokens=batch.tokens,
    )


STRATEGIES: dict[str, Strategy] = {"local": local, "end_to_end": end_to_end}
