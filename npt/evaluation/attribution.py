"""What an evaluation keeps of the unquantised base, which need not be in memory at the same time as
the other models: it runs first, its final states stay on the host, and of the model only its head
is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, evaluating
from npt.data.batch import Sample, batches
from npt.evaluation.metrics import checked_batches, final_states, predicting
from npt.random_state import kept_random_state


@dataclass(frozen=True)
class Reference:
    """Outputs of an unquantised base.

    Attributes:
        states: of each sample the states that its tokens are predicted from, [P, D], on the host.
        head: lm_head.
    """

    states: tuple[Tensor, ...]
    head: nn.Module


@torch.no_grad()
@kept_random_state()
def reference_outputs(
    model: PreTrainedModel, samples: Sequence[Sample], *, batch_size: int = 8
) -> Reference:
    """Run the unquantised base on the samples and keep the outputs to compare the others with.

    Of a model with adapters, the teacher runs. Memory: P * D values on the host for P predicted
    tokens (1 GiB for 64 Ki tokens of D 4096 in fp32), and the head, V * D values, for as long as
    the reference lives. The rest of the model can be deleted.

    Raises:
        DataError: token ids outside the vocabulary.
    """
    states: list[Tensor] = []
    with evaluating(model), adapters_disabled(model):
        for batch in checked_batches(model, batches(samples, batch_size), "evaluation data"):
            predicted = predicting(batch).sum(dim=-1).tolist()
            states += final_states(model, batch).cpu().split(predicted)
    return Reference(tuple(states), model.lm_head)
