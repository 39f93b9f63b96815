"""Settings of the text, and of the samples that it is cut into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from npt.config.field import Bound, Settings, at_least, setting
from npt.errors import ConfigError

REPLAY_RATIO = 0.2
_LEAST_SHARE = 1e-6  # of a source in a mixture: a rarer one would be waited for for ever

_data = partial(setting, group="data")
_rows = partial(setting, group="rows")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """The text, and how it is cut into samples."""

    dataset_name: str = _data(
        "builtin",
        "'builtin' (Python source), 'builtin-prose' (English), a file, folder or glob (.txt .jsonl"
        " .json .csv .parquet), or a hub dataset's name",
        often=True,
    )
    dataset_mix: str | None = _data(
        None,
        "data sets with their weights in place of one: a.jsonl:0.7,slimpajama:0.3; the first one's"
        " end is an epoch's",
    )
    dataset_config: str | None = _data(None, "configuration of a hub dataset")
    dataset_split: str = _data("train", "split to train on")
    text_column: str = _data("text", "field that holds the text", often=True)
    prompt_column: str | None = _data(
        None, "field that holds the prompt, a text or a list of messages", often=True
    )
    completion_column: str | None = _data(
        None,
        "field that holds the completion; of a list of messages it is the last one",
        often=True,
    )
    streaming: bool = _data(False, "read as it comes, keeping nothing", often=True)
    num_samples: int | None = _rows(
        None,
        "use at most this many samples of max_length tokens, counted before packing",
        bound=at_least(1),
    )
    max_length: int = _rows(256, "tokens of a sample", often=True, bound=at_least(2))
    packing: bool = _rows(
        False,
        "put short documents side by side into rows of max_length, attention kept inside each",
    )
    replay_dataset: str | None = _data(None, "second data set, mixed in against forgetting")
    replay_ratio: float | None = _data(
        None,
        f"share of samples from the replay data set ({REPLAY_RATIO} if one is given)",
        bound=Bound(lambda value: 0 < value < 1, "it is a share, between 0 and 1"),
    )

    def check(self) -> None:
        """Refuse half a pair of columns, and what a mixture takes the place of."""
        if self.completion_column is not None and self.prompt_column is None:
            raise ConfigError(
                f"--completion_column is {self.completion_column!r} without --prompt_column; name"
                " both"
            )
        if self.prompt_column is not None and self.prompt_column == self.completion_column:
            raise ConfigError(
                f"--prompt_column and --completion_column are both {self.prompt_column!r}; they are"
                " two fields"
            )
        if self.dataset_mix is None:
            return
        for name, remedy in (
            ("dataset_name", "name the source in the mixture"),
            ("dataset_config", "write it after the source's name, as owner/name:config:0.5"),
            ("replay_dataset", "name it in the mixture with its weight"),
        ):
            value = getattr(self, name)
            if value != getattr(DataConfig, name):
                raise ConfigError(
                    f"--dataset_mix does not go with --{name} {value}; {remedy}, or drop one of"
                    " the two"
                )
        _ = self.mix  # refuses what is no mixture

    @property
    def mix(self) -> tuple[tuple[str, float], ...]:
        """The sources of `dataset_mix` with their shares, which sum to 1; empty without a mixture.
        A name may hold colons.
        """
        if self.dataset_mix is None:
            return ()
        weights: dict[str, float] = {}
        for part in (part.strip() for part in self.dataset_mix.split(",")):
            name, weight = _weighted(part)
            if name in weights:
                raise ConfigError(f"--dataset_mix names {name!r} twice; add its weights up")
            weights[name] = weight
        if len(weights) == 1:
            raise ConfigError(
                f"--dataset_mix names one source, {next(iter(weights))!r}; use --dataset_name, or"
                " add another"
            )
        scale = 1.0 if math.isfinite(sum(weights.values())) else max(weights.values())
        total = math.fsum(weight / scale for weight in weights.values())
        shares = {name: weight / scale / total for name, weight in weights.items()}
        rare = next((name for name, share in shares.items() if share < _LEAST_SHARE), None)
        if rare is not None:
            raise ConfigError(
                f"--dataset_mix gives {rare!r} a share of {shares[rare]:.3g}; {_LEAST_SHARE:g} is"
                " the least, leave it out"
            )
        return tuple(shares.items())

    @property
    def replay_share(self) -> float:
        """Share of the samples that are replayed, if there is something to replay."""
        return REPLAY_RATIO if self.replay_ratio is None else self.replay_ratio


def _weighted(part: str) -> tuple[str, float]:
    """Return the name and the weight of one source in a mixture."""
    form = "write sources with weights, like a.jsonl:0.7,b.jsonl:0.3"
    name, _, written = part.rpartition(":")
    if not name:
        raise ConfigError(f"--dataset_mix names {part!r} without a weight; {form}")
    try:
        weight = float(written)
    except ValueError:
        raise ConfigError(
            f"--dataset_mix gives {name!r} the weight {written!r}, which is no number; {form}"
        ) from None
    if not (weight > 0 and math.isfinite(weight)):
        raise ConfigError(
            f"--dataset_mix gives {name!r} the weight {written}; weights are finite numbers above 0"
        )
    return name, weight
