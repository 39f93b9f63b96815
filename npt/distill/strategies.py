"""The strategies by name, and `end_to_end`: the student runs on its own stream, with gradients
through all its layers, from losses on hidden states and, optionally, on the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, adapters_disabled, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer
from npt.adapters.recompute import recomputed
from npt.adapters.stream import Stream
from npt.batch import Batch
from npt.config import STRATEGIES as STRATEGY_NAMES
from npt.config import TrainConfig
from npt.distill.hidden_losses import READS_INPUT
from npt.distill.local import (
    BatchSums,
    batch_sums,
    before_first,
    begin,
    layer_loss,
    local,
    propagated,
    through_frozen,
)
from npt.distill.logit_losses import row_loss, through_head

Strategy = Callable[[PreTrainedModel, Batch, TrainConfig], BatchSums]


def end_to_end(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> BatchSums:
    """Run the student on its own stream, with a loss per converted layer and optionally one on the
    logits.

    Without a loss on the logits, computation ends at the last converted layer. Without a loss on
    hidden states, the teacher's are not kept; with cross-entropy alone, the teacher does not run.
    The loss on the logits is summed over the S scored positions; like the rest, it is later divided
    by the valid tokens. A teacher that reads other rows (`batch.teacher`) allows no other loss.
    With `config.gradient_checkpointing` the graph keeps only each layer's input and the teacher's
    output, and backward recomputes the rest, to the same bits.
    """
    layers = decoder_layers(model)
    converted = npt_layers(model)
    guide_model = model if teacher is None else teacher
    guide_layers = decoder_layers(guide_model)
    above_last = converted[-1][0] + 1
    depth = len(layers) if config.logit_kl_weight else above_last
    taught_depth = above_last if config.hidden_weight else 0
    if _teacher_has_logits(config):
        taught_depth = depth
    inputs = {}
    targets = {}
    # of the teacher's states, [B, T, D] each, keep only those that the loss reads
    with torch.no_grad(), adapters_disabled(model):
        stream, guide, first = begin(model, teacher, batch)
        if config.hidden_weight:
            for index in range(first, taught_depth):
                is_converted = isinstance(layers[index], NPTLayer)
                if is_converted and config.loss in READS_INPUT:
                    inputs[index] = guide.hidden
                guide = guide.through([guide_layers[index]])
                if is_converted:
                    targets[index] = guide.hidden
        elif taught_depth:
            above = guide_layers[first:taught_depth]
            guide = through_frozen(guide, "last", above, partial(before_first, model))
    hidden = stream.hidden
    sums = []
    compute: Callable[..., Any] = recomputed if config.gradient_checkpointing else call
    with adapter_mode(model, "student"):
        for index, layer in enumerate(layers[first:depth], first):
            if not isinstance(layer, NPTLayer):
                hidden = compute(partial(stream.after, layer), hidden)
                continue
            of_converted = partial(layer_loss, layer, stream, config, len(converted))
            # popped, so that only the graph keeps the teacher's states from here on
            hidden, of_layer = compute(
                of_converted, hidden, targets.pop(index, None), inputs.pop(index, None)
            )
            sums.append(of_layer)
        # one backward through the whole graph: a layer's error reaches all adapters below it
        loss = torch.stack([part.loss for part in sums]).sum()
        logit = None
        if config.logit_kl_weight:
            stream = replace(stream, hidden=hidden)
            logit = _logit_loss(config, model, stream, guide_model, guide)
            loss = loss + config.logit_kl_weight * logit
        loss.backward()
    return batch_sums(config, batch, sums, logit)


STRATEGIES: dict[str, Callable[..., BatchSums]] = {
    "local": local,
    "propagated": propagated,
    "end_to_end": end_to_end,
}


def register_strategy(name: str, strategy: Callable[..., BatchSums]) -> None:
    """Register a strategy under a name that `--strategy` and `TrainConfig` then accept.

    It takes (model, batch, config, teacher), as `npt.distill.local.local`. ValueError: name taken.
    """
    if name in STRATEGIES:
        raise ValueError(f"the strategy {name!r} already exists: choose another name")
    STRATEGIES[name] = strategy
    STRATEGY_NAMES.append(name)


def drive(
    model: PreTrainedModel,
    batch: Batch,
    config: TrainConfig,
    teacher: PreTrainedModel | None = None,
) -> BatchSums:
    """Run the strategy that `config` names. The default teacher is the student's own base."""
    return STRATEGIES[config.strategy](model, batch, config, teacher)


def _logit_loss(
    config: TrainConfig,
    model: PreTrainedModel,
    stream: Stream,
    teacher: PreTrainedModel,
    guide: Stream,
) -> Tensor:
    """Return the loss on the logits, summed over the scored positions.

    Both streams are those after the last layer; `guide` is read only if `_teacher_has_logits`.
    """
    batch = stream.batch
    if _teacher_has_logits(config):
        taught = _scored_states(teacher, guide)
    else:
        taught = batch.labels.flatten().index_select(0, batch.scored_index + 1)
    return through_head(
        model.lm_head,
        row_loss(config),
        _scored_states(model, stream),
        taught,
        model.config.vocab_size,
        teacher_head=teacher.lm_head,
    )


def _scored_states(model: PreTrainedModel, stream: Stream) -> Tensor:
    """Return lm_head's input at the scored positions, [S, D]."""
    return model.model.norm(stream.hidden.flatten(0, 1).index_select(0, stream.batch.scored_index))


def _teacher_has_logits(config: TrainConfig) -> bool:
    """Return whether a loss on the logits is used and reads the teacher's last states."""
    return config.logit_kl_weight > 0 and config.logit_loss != "cross_entropy"
