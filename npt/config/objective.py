"""Settings of what the student learns: strategies and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from npt.config.field import Bound, Need, Settings, at_least, setting
from npt.errors import ConfigError

STRATEGIES = ["local", "propagated", "end_to_end"]
"""`register_strategy` adds to them."""
LOSSES = ["nmse", "nmse_update", "direction", "mse", "smooth_l1", "cosine"]
"""`register_loss` adds to them."""
LOGIT_LOSSES = ("kl", "reverse_kl", "jsd", "cross_entropy")
# beyond them fp32 has overflowing logits, or divergences that are all rounding
_TEMPERATURES = (1e-3, 1e3)

_objective = partial(setting, group="objective")
_HIDDEN = Need(lambda c: c.hidden_weight > 0, "a --hidden_weight above 0")


def _in_divergence(*losses: str) -> Callable[[Any], bool]:
    return lambda c: c.logit_kl_weight > 0 and c.logit_loss in losses


@dataclass(frozen=True, kw_only=True)
class Objective(Settings):
    """The strategy that drives the student, and the losses that it is compared by."""

    strategy: str = _objective("local", "how the student is driven", choices=STRATEGIES, often=True)
    loss: str = _objective(
        "nmse", "hidden-state loss per valid token", choices=LOSSES, need=_HIDDEN
    )
    hidden_weight: float = _objective(
        1.0,
        "weight of the loss on hidden states; 0, with a logit_kl_weight, trains on the logits"
        " alone",
        bound=at_least(0.0),
    )
    logit_kl_weight: float = _objective(
        0.0,
        "end_to_end only: weight of the loss on the logits, by default KL(teacher, student) in"
        " nats",
        often=True,
        bound=at_least(0.0),
    )
    logit_loss: str = _objective(
        "kl",
        "loss on the logits, if logit_kl_weight is above 0",
        choices=LOGIT_LOSSES,
        need=Need(lambda c: c.logit_kl_weight > 0, "a --logit_kl_weight above 0"),
    )
    logit_temperature: float = _objective(
        1.0,
        "temperature T of kl, reverse_kl and jsd, which are multiplied by T^2",
        bound=Bound(
            lambda value: _TEMPERATURES[0] <= value <= _TEMPERATURES[1],
            f"it must lie between {_TEMPERATURES[0]} and {_TEMPERATURES[1]}",
        ),
        need=Need(
            _in_divergence("kl", "reverse_kl", "jsd"),
            "a --logit_kl_weight above 0 and kl, reverse_kl or jsd as --logit_loss",
        ),
    )

    def check(self) -> None:
        """Refuse losses that the strategy does not compute, and nothing to train on."""
        whole = self.strategy == "end_to_end"
        if self.logit_kl_weight and not whole:
            raise ConfigError(
                f"--logit_kl_weight is {self.logit_kl_weight} with --strategy {self.strategy},"
                " which computes no logits; use --strategy end_to_end"
            )
        if not self.hidden_weight and not whole:
            raise ConfigError(
                f"--hidden_weight is 0, but --strategy {self.strategy} trains on hidden states"
                " alone; raise it, or use --strategy end_to_end with a --logit_kl_weight"
            )
        if not self.hidden_weight and not self.logit_kl_weight:
            raise ConfigError(
                "--hidden_weight and --logit_kl_weight are both 0, which leaves nothing to train"
                " on; raise one of the two"
            )

    @property
    def judged_by(self) -> str:
        """The held-out figure that is lower for a better student: `perplexity` of one that learns
        the data's own tokens, which its teacher may not know, else the `kl` to the teacher."""
        learns = self.logit_kl_weight > 0 and self.logit_loss == "cross_entropy"
        return "perplexity" if learns else "kl"
