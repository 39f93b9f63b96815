"""The sources of a run: one data set, or one with another mixed in against forgetting.

The end of the first source is an epoch's end; the others are repeated. Which source a sample is of
is drawn from the seed and the sample's number (npt/data/samples.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from npt.config import DataConfig
from npt.data.encoding import filled
from npt.data.source import READERS, Record, check_source, is_local, open_source, own_heldout

FIRST, REPLAY = "data", "replay data"
"""The sources of a run, as messages name them."""


@dataclass(frozen=True)
class Source:
    """A data set of a run.

    Attributes:
        label: in messages.
        share: of all samples.
        config: how it is read.
        records: empty until it is opened.
        held_out: records of its own that nobody trains on.
    """

    label: str
    share: float
    config: DataConfig
    records: Iterable[Record] = ()
    held_out: Iterable[Record] | None = None


def sources_of(config: DataConfig) -> tuple[Source, ...]:
    """Return the sources that settings name, unopened."""
    plain, other = replace(config, replay_dataset=None, replay_ratio=None), config.replay_dataset
    if other is None:
        return (Source(FIRST, 1.0, plain),)
    here = other in READERS or is_local(other)
    split = "train" if here else config.dataset_split
    second = replace(
        plain, dataset_name=other, dataset_config=None, dataset_split=split, num_samples=None
    )
    share = config.replay_share
    return Source(FIRST, 1 - share, plain), Source(REPLAY, share, second)


def check_sources(config: DataConfig) -> None:
    """Check every source as `check_source` does."""
    for source in sources_of(config):
        check_source(source.config)


def open_sources(
    config: DataConfig,
    data: Iterable[Record] | None = None,
    replay_data: Iterable[Record] | None = None,
) -> list[Source]:
    """Open the sources of a run, each with columns that it has; `data` and `replay_data` are
    records to take instead.
    """
    if replay_data is not None and config.replay_dataset is None:
        config = replace(config, replay_dataset=REPLAY)  # a label only: it is not opened
    passed, opened = {FIRST: data, REPLAY: replay_data}, []
    for source in sources_of(config):
        first, records, held_out = source.label == FIRST, passed[source.label], None
        if records is None:
            records = open_source(source.config)
            held_out = own_heldout(source.config) if first else None
        elif iter(records) is records and not (first and config.streaming):
            records = list(records)  # a generator can be read once only
        columns = source.config if first else fitting_columns(source.config, records)
        opened.append(replace(source, config=columns, records=records, held_out=held_out))
    return opened


def fitting_columns(config: DataConfig, records: Iterable[Record]) -> DataConfig:
    """Return a run's settings without columns that the first record of a source lacks."""
    usual = DataConfig.text_column
    if config.prompt_column is None and config.text_column == usual:
        return config
    first = next(iter(records), None)
    if not isinstance(first, Mapping):
        return config
    first = filled(first)
    if config.prompt_column is not None and config.prompt_column not in first:
        config = replace(config, prompt_column=None, completion_column=None)
    if config.text_column not in first and usual in first:
        config = replace(config, text_column=usual)
    return config
