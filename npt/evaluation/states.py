"""The states that tokens are predicted from, of one batch: what every comparison of two models
begins with.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.stream import model_inputs
from npt.data.batch import IGNORE_INDEX, Batch


def predicting(batch: Batch) -> Tensor:
    """[B, T - 1] bool: a valid token, followed by one to predict."""
    return (batch.labels[:, 1:] != IGNORE_INDEX) & batch.attention_mask[:, :-1].bool()


def final_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The last hidden states, after the final norm, from which a token is predicted: [P, D], row by
    row.

    The model's own forward is used, in the mode that its adapters are in: what a user gets is what
    is measured.

    Args:
        model: with adapters or without.
        batch: on the model's device.
    """
    # Padding is filled with a real token of its row: a broken embedding of the pad token is
    # nobody's business here.
    first = batch.attention_mask.argmax(dim=-1, keepdim=True)
    filled = torch.where(
        batch.attention_mask.bool(), batch.input_ids, batch.input_ids.gather(1, first)
    )
    inputs = model_inputs(model, replace(batch, input_ids=filled))
    states = model.model(**inputs, use_cache=False).last_hidden_state
    return states[:, :-1][predicting(batch).to(states.device)]
