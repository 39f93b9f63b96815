"""The sources that a run reads, as settings name them. `npt doctor --data` checks them without what
training needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from npt.config import DataConfig
from npt.data.source import READERS, Record, check_source, is_local, open_source, own_heldout

FIRST = "data"
REPLAY = "replay data"
"""Names of the sources in messages."""


@dataclass(frozen=True)
class Source:
    """A dataset of a run.

    Attributes:
        share: probability that a sample comes from this source.
        passed: the records were passed in Python, not named.
        records: empty until the source is opened.
        held_out: the source's own held-out records, if it has any.
    """

    label: str
    share: float
    config: DataConfig
    records: Iterable[Record] = ()
    held_out: Iterable[Record] | None = None
    passed: bool = False

    @property
    def dataset(self) -> str | None:
        """The name of the dataset; None for records that were passed."""
        return None if self.passed else self.config.dataset_name


def sources_of(config: DataConfig) -> tuple[Source, ...]:
    """Return the sources that settings name, unopened."""
    plain = replace(config, replay_dataset=None, replay_ratio=None)
    other = config.replay_dataset
    if other is None:
        return (Source(FIRST, 1.0, plain),)
    here = other in READERS or is_local(other)
    split = "train" if here else config.dataset_split
    second = replace(
        plain, dataset_name=other, dataset_config=None, dataset_split=split, num_samples=None
    )
    first = Source(FIRST, 1 - config.replay_share, plain)
    return first, Source(REPLAY, config.replay_share, second)


def check_sources(config: DataConfig) -> None:
    """Check every source as `check_source` does."""
    for source in sources_of(config):
        check_source(source.config)


def open_sources(config: DataConfig, data: Iterable[Record] | None) -> list[Source]:
    """Open the sources of a run and set the columns of each; `data` replaces the first one."""
    first, *others = sources_of(config)
    if data is None:
        records = open_source(first.config)
        opened = [replace(first, records=records, held_out=own_heldout(first.config))]
    else:
        # a generator can be read only once
        kept = data if iter(data) is not data or config.streaming else list(data)
        opened = [replace(first, records=kept, passed=True)]
    for other in others:
        records = open_source(other.config)
        columns = fitting_columns(other.config, records)
        opened.append(replace(other, records=records, config=columns))
    return opened


def fitting_columns(config: DataConfig, records: Iterable[Record]) -> DataConfig:
    """Return the settings without columns that the first record of a source lacks."""
    from npt.data.encoding import filled  # which loads torch

    default = DataConfig.text_column
    if (config.prompt_column, config.context_column, config.text_column) == (None, None, default):
        return config
    first = next(iter(records), None)
    if not isinstance(first, Mapping):
        return config
    first = filled(first)
    if config.prompt_column not in first:
        config = replace(config, prompt_column=None, completion_column=None)
    if config.context_column not in first:
        config = replace(config, context_column=None)
    if config.text_column not in first and default in first:
        config = replace(config, text_column=default)
    return config
