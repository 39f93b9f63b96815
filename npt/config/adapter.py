"""Settings of the adapters, and the table of targets."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from npt.config.field import POSITIVE, Condition, SettingsGroup, as_text, at_least, setting, words
from npt.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """A product, or the stream, that an adapter changes.

    Attributes:
        module: name of the submodule that computes it.
        width: its width, `ffn` or `hidden`.
        stage: name under which observers see it, modulated.
    """

    module: str
    width: str
    stage: str


PRODUCTS = {
    "gate": Target("mlp.gate_proj", "ffn", "gate"),
    "up": Target("mlp.up_proj", "ffn", "up"),
    "down": Target("mlp.down_proj", "hidden", "mlp"),
}
"""The products of the MLP, in the order in which a layer computes them."""
STREAM = "stream"
"""The residual stream that the MLP reads and adds to. The adapter's shift replaces the attention
output; the stream is never multiplied."""
TARGETS = {STREAM: Target("self_attn.o_proj", "hidden", STREAM), **PRODUCTS}
DEFAULT_TARGETS = (STREAM, "gate", "up", "down")
"""Named one by one: a target that is added changes no run that does not name it."""

MODULATIONS = ("both", "additive", "multiplicative")
RESIDUALS = ("modulate", "keep")
INITS = ("random", "calibrated")
SATURATED = 0.99
"""A multiplier is at its bound beyond this share of the way from the middle of its range."""
MULT_FORMS = ("sigmoid", "half_sigmoid", "one_plus_tanh", "unbounded")

_adapter = partial(setting, group="adapter")

_TOKEN_PART = Condition(
    lambda c: STREAM in c.targets and c.residual == "modulate",
    "the target stream and --residual modulate",
)


def _whole_numbers(value: Any) -> Any:
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    try:
        return tuple(map(int, value.split(",")))
    except ValueError:
        raise ConfigError(f"--ranks is {value!r}; write whole numbers like 8,16,32") from None


@dataclass(frozen=True, kw_only=True)
class NPTConfig(SettingsGroup):
    """Size, layers and form of the adapters, which let attention modulate a layer's MLP."""

    rank: int = _adapter(
        16,
        "rank of every adapter; with --init calibrated the average rank, since layers may differ",
        flag="adapter_rank",
        bound=at_least(1),
    )
    active: int = _adapter(
        0,
        "numbers of a token's code that are not 0, on average over tokens and layers, out of the"
        " rank; 0: all",
        bound=at_least(0),
        need=_TOKEN_PART,
    )
    token_rank: int = _adapter(
        0,
        "rank of the token part, which takes from a token's own state what needs no context, so"
        " that the code carries the rest; 0: a constant with --active, else none",
        bound=at_least(0),
        need=_TOKEN_PART,
    )
    layers: str = _adapter(
        "upper_half", "layers to convert: upper_half, all, 8-15, or 3,5,7", read=as_text
    )
    targets: tuple[str, ...] = _adapter(
        DEFAULT_TARGETS,
        "comma-separated list of what to modulate: stream, gate, up, down",
        choices=tuple(TARGETS),
        read=words,
        bound=Condition(
            lambda targets: targets and len(set(targets)) == len(targets),
            f"name each of {', '.join(TARGETS)} at most once, and at least one",
        ),
    )
    modulation: str = _adapter(
        "both",
        "how to change the targets gate, up and down: add, multiply or both; for stream always add",
        choices=MODULATIONS,
    )
    residual: str = _adapter(
        "modulate",
        "modulate: attention reaches the residual stream only through the adapter; keep: it is also"
        " added directly",
        choices=RESIDUALS,
    )
    init: str = _adapter(
        "random",
        "random: small random values; calibrated: closed-form start, computed from the data",
        choices=INITS,
    )
    additive_scale: float = _adapter(0.1, "alpha, the scale of additive terms", bound=POSITIVE)
    mult_bound: float = _adapter(
        0.5,
        "beta; multipliers lie within (1-beta, 1+beta)",
        # closer to 1, fp32 would round 1 - beta towards 0
        bound=Condition(lambda value: 0 < value <= 0.999, "it must be above 0 and at most 0.999"),
        need=Condition(lambda c: c.mult_form == "sigmoid", "--mult_form sigmoid"),
    )
    ranks: tuple[int, ...] | None = _adapter(
        None,
        "one rank per converted layer, lowest layer first, as in 8,16,32; replaces --adapter_rank",
        read=_whole_numbers,
        bound=Condition(
            lambda ranks: ranks and all(type(rank) is int and rank >= 1 for rank in ranks),
            "give each converted layer a whole number of at least 1, such as 8,16,32",
        ),
    )
    mult_form: str = _adapter(
        "sigmoid",
        "formula for the multipliers; all but sigmoid are for comparison only",
        choices=MULT_FORMS,
        need=Condition(lambda c: c.multiplicative, "--modulation both (or multiplicative)"),
    )

    def check(self) -> None:
        """Refuse a form whose start is not the base."""
        if self.residual == "keep" and self.mult_form == "half_sigmoid":
            raise ConfigError(
                "--residual keep needs multipliers that start at 1, but those of --mult_form"
                " half_sigmoid start at 0.75: remove one of them"
            )

    def ranks_of(self, count: int) -> tuple[int, ...]:
        """Return the rank of each of `count` converted layers, in order of depth.

        Raises:
            ConfigError: the number of `ranks` is not `count`.
        """
        ranks = self.ranks or (self.rank,) * count
        if len(ranks) != count:
            raise ConfigError(
                f"--ranks has {len(ranks)} ranks ({as_text(ranks)}), but {count} layers are"
                f" converted: give {count}"
            )
        return ranks

    @property
    def spends_ranks(self) -> bool:
        """Whether the closed-form start chooses the rank of each layer."""
        return self.init == "calibrated" and self.ranks is None

    @property
    def token_part(self) -> bool:
        """Whether a token part precedes the code, which is then in nats."""
        return self.active > 0 or self.token_rank > 0

    @property
    def shifted(self) -> tuple[str, ...]:
        """The targets that have B, in the order of `targets`."""
        return tuple(t for t in self.targets if self.additive or t == STREAM)

    @property
    def multiplied(self) -> tuple[str, ...]:
        """The targets that have M, in the order of `targets`."""
        return tuple(t for t in self.targets if self.multiplicative and t != STREAM)

    @property
    def multiplicative(self) -> bool:
        """Whether products have M, the multiplicative term."""
        return self.modulation in ("both", "multiplicative")

    @property
    def additive(self) -> bool:
        """Whether products have B, the additive term."""
        return self.modulation in ("both", "additive")

    @property
    def multiplier_spread(self) -> tuple[float, float]:
        """The middle of the multipliers' range, and half its width. fp32 can round to the ends."""
        return {
            "sigmoid": (1.0, self.mult_bound),
            "half_sigmoid": (0.75, 0.25),
            "one_plus_tanh": (1.0, 1.0),
            "unbounded": (1.0, math.inf),
        }[self.mult_form]
