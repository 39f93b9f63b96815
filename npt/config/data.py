"""Settings of the text, and of the samples that it is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from npt.config.field import Bound, Need, SettingsGroup, at_least, setting
from npt.errors import ConfigError

REPLAY_RATIO = 0.2
_data = partial(setting, group="data")
_PAIR = Need(lambda c: c.prompt_column is not None, "--prompt_column")
_REPLAYED = Need(lambda c: c.replay_dataset is not None, "--replay_dataset")


@dataclass(frozen=True, kw_only=True)
class DataConfig(SettingsGroup):
    """The text, and how it is cut into samples."""

    dataset_name: str = _data(
        "builtin",
        "'builtin' (Python), 'builtin-prose' (English), a file, folder or glob (.txt .jsonl .json"
        " .csv .parquet), or a hub dataset's name",
    )
    dataset_config: str | None = _data(None, "configuration of a hub dataset")
    dataset_split: str = _data("train", "split to train on")
    text_column: str = _data("text", "field that holds the text")
    prompt_column: str | None = _data(
        None, "field that holds the prompt, a text or a list of messages"
    )
    completion_column: str | None = _data(
        None, "field that holds the completion, of messages the last one", need=_PAIR
    )
    streaming: bool = _data(False, "read as it comes, keeping nothing")
    num_samples: int | None = _data(
        None, "use at most this many samples, counted before packing", bound=at_least(1)
    )
    max_length: int = _data(256, "tokens of a sample", bound=at_least(2))
    packing: bool = _data(
        False, "put short documents side by side into rows, attention kept inside each"
    )
    replay_dataset: str | None = _data(None, "second data set, mixed in against forgetting")
    replay_ratio: float | None = _data(
        None,
        f"share of samples from the replay data set ({REPLAY_RATIO} if one is given)",
        bound=Bound(lambda value: 0 < value < 1, "it must be above 0 and below 1"),
        need=_REPLAYED,
    )

    def check(self) -> None:
        """Refuse a pair of columns that are one."""
        if self.prompt_column is not None and self.prompt_column == self.completion_column:
            raise ConfigError(
                f"--prompt_column and --completion_column are both {self.prompt_column!r}; they are"
                " two fields"
            )

    @property
    def replay_share(self) -> float:
        """Share of the samples that are replayed, if there is something to replay."""
        return REPLAY_RATIO if self.replay_ratio is None else self.replay_ratio
