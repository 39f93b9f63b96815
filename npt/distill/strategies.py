"""The strategies by name: how the student is run through one micro-batch, and where its gradients
flow.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from npt.config import STRATEGIES as STRATEGY_NAMES
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.local import BatchSums, local
from npt.distill.own_stream import end_to_end, propagated

Strategy = Callable[[PreTrainedModel, Batch, TrainConfig], BatchSums]

STRATEGIES: dict[str, Callable[..., BatchSums]] = {
    "local": local,
    "propagated": propagated,
    "end_to_end": end_to_end,
}


def register_strategy(name: str, strategy: Callable[..., BatchSums]) -> None:
    """Add a strategy, which `--strategy` and `TrainConfig` then accept.

    It takes (model, batch, config, teacher), as `npt.distill.local.local`.
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
) -> BatchSums:
    """Run the strategy that `config` names; without a `teacher` the student's own base teaches."""
    return STRATEGIES[config.strategy](model, batch, config, teacher)
