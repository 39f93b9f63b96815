"""Settings of what the student learns: strategies and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    stages: str | None = _objective(
        None,
        "strategies one after the other with their shares of the steps: local:0.7,end_to_end:0.3",
    )
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
        """Refuse losses that no strategy computes, and nothing to train on."""
        if self.stages is not None and self.strategy != "local":
            raise ConfigError(
                f"--strategy is {self.strategy} and --stages is {self.stages}; the stages name the"
                " strategies, drop --strategy"
            )
        driven = [name for name, _ in self.stage_shares]
        if self.logit_kl_weight and "end_to_end" not in driven:
            raise ConfigError(
                f"--logit_kl_weight is {self.logit_kl_weight} with --strategy {','.join(driven)},"
                " which computes no logits; use --strategy end_to_end"
            )
        self._check_hidden_weight(driven)

    def _check_hidden_weight(self, driven: Sequence[str]) -> None:
        if self.hidden_weight:
            return
        other = next((name for name in driven if name != "end_to_end"), None)
        if other is not None:
            raise ConfigError(
                f"--hidden_weight is 0, but --strategy {other} trains on hidden states alone; raise"
                " it, or use --strategy end_to_end with a --logit_kl_weight"
            )
        if not self.logit_kl_weight:
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

    @property
    def stage_shares(self) -> tuple[tuple[str, float], ...]:
        """Strategies in their order, each with its share of the steps; without stages the one
        strategy with all of them.
        """
        if self.stages is None:
            return ((self.strategy, 1.0),)
        found = []
        for part in self.stages.split(","):
            name, _, share = part.partition(":")
            try:
                found.append((name.strip(), float(share)))
            except ValueError:
                raise ConfigError(
                    f"--stages is {self.stages!r}; write strategies with shares, like"
                    " local:0.7,end_to_end:0.3"
                ) from None
        for name, part_of_all in found:
            if name not in STRATEGIES:
                raise ConfigError(f"--stages names {name!r}; choose from {', '.join(STRATEGIES)}")
            if not 0 < part_of_all <= 1:
                raise ConfigError(
                    f"--stages gives {name} a share of {part_of_all}; shares lie above 0 and sum"
                    " to 1"
                )
        total = sum(part_of_all for _, part_of_all in found)
        if abs(total - 1) > 1e-6:
            raise ConfigError(
                f"--stages has shares that sum to {total:g}; they are shares of the steps and sum"
                " to 1"
            )
        return tuple(found)
