"""The sources of a run: one data set, one with another mixed in against forgetting, or a mixture.

The end of the first source is an epoch's end; the others are repeated. Which source a sample is of
is drawn from the seed and the sample's number (npt/data/loader.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npt.config import DataConfig
from npt.data.content import filled
from npt.data.source import READERS, Record, check_source, is_local, open_source, own_heldout
from npt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from npt.data.batch import Sample
    from npt.data.samples import Samples

FIRST, REPLAY = "data", "replay data"
"""The sources of a run without a mixture, as messages name them."""

DATASETS: dict[str, dict[str, Any]] = {
    "slimpajama": {"dataset_name": "cerebras/SlimPajama-627B", "streaming": True},
    "fineweb-edu": {
        "dataset_name": "HuggingFaceFW/fineweb-edu",
        "dataset_config": "sample-10BT",
        "streaming": True,
    },
    "wikitext": {"dataset_name": "Salesforce/wikitext", "dataset_config": "wikitext-103-raw-v1"},
    "alpaca": {"dataset_name": "tatsu-lab/alpaca"},
}
"""Data sets of the hub by short names, with the settings that each abbreviates."""


@dataclass(frozen=True)
class Source:
    """A data set of a run.

    Attributes:
        label: in messages.
        share: of all samples.
        config: how it is read.
        records: empty until it is opened.
        own: held-out records of its own.
        evaluated: the run is evaluated on it.
    """

    label: str
    share: float
    config: DataConfig
    records: Iterable[Record] = ()
    own: Iterable[Record] | None = None
    evaluated: bool = True


def named(name: str) -> dict[str, Any] | None:
    """Return the settings of a short name; None of any other, or if a file has that name."""
    return DATASETS[name] if name in DATASETS and not Path(name).exists() else None


def sources_of(config: DataConfig) -> tuple[Source, ...]:
    """Return the sources that settings name, unopened."""
    if config.dataset_mix is not None:
        return tuple(
            Source(name, share, _in_mixture(config, name, number))
            for number, (name, share) in enumerate(config.mix)
        )
    plain, other = replace(config, replay_dataset=None, replay_ratio=None), config.replay_dataset
    if other is None:
        return (Source(FIRST, 1.0, plain),)
    here = other in READERS or is_local(other)
    split = "train" if here else config.dataset_split
    second = replace(
        plain, dataset_name=other, dataset_config=None, dataset_split=split, num_samples=None
    )
    share = config.replay_share
    return Source(FIRST, 1 - share, plain), Source(REPLAY, share, second, evaluated=False)


def _in_mixture(config: DataConfig, name: str, number: int) -> DataConfig:
    """Return how a source of a mixture is read. A hub name may carry a configuration."""
    one = replace(config, dataset_mix=None, num_samples=config.num_samples if number == 0 else None)
    short = named(name)
    if short is not None:
        return replace(one, **{**short, "streaming": one.streaming or "streaming" in short})
    if name in READERS or is_local(name):
        return replace(one, dataset_name=name, dataset_split="train")
    hub, _, configuration = name.partition(":")
    return replace(one, dataset_name=hub, dataset_config=configuration or None)


def check_sources(config: DataConfig) -> None:
    """Check every source as `check_source` does, and that one of a mixture has the split."""
    configs = [source.config for source in sources_of(config)]
    for one in configs:
        check_source(one)
    if config.dataset_split != "train" and all(one.dataset_split == "train" for one in configs):
        raise DataError(
            f"--dataset_split {config.dataset_split} is for hub data sets, and there is none in"
            " --dataset_mix; drop it"
        )


def open_sources(
    config: DataConfig,
    data: Iterable[Record] | None = None,
    replay_data: Iterable[Record] | None = None,
) -> list[Source]:
    """Open the sources of a run, each with columns that it has; `data` and `replay_data` are
    records to take instead.
    """
    mixed = config.dataset_mix is not None
    if mixed and (data is not None or replay_data is not None):
        raise ConfigError(
            f"--dataset_mix is {config.dataset_mix!r}, but records were given as well; drop one of"
            " the two"
        )
    if replay_data is not None and config.replay_dataset is None:
        config = replace(config, replay_dataset=REPLAY)  # a label only: it is not opened
    given, opened, fitted = {FIRST: data, REPLAY: replay_data}, [], []
    for number, source in enumerate(sources_of(config)):
        records, own = given.get(source.label), None
        if records is None:
            records = open_source(source.config)
            own = own_heldout(source.config) if source.evaluated else None
        elif iter(records) is records and not (source.label == FIRST and config.streaming):
            records = list(records)  # a generator can be read once only
        opened.append(replace(source, records=records, own=own))
        columns = fitting_columns(source.config, records) if mixed or number else source.config
        fitted.append(replace(opened[-1], config=columns))
    # a column that no source has stays, and the first record is refused for it
    lost = all(source.config.prompt_column is None for source in fitted)
    return opened if lost and config.prompt_column is not None else fitted


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


def samples_of(
    sources: Sequence[Source], tokenizer: Any, seed: int, held: Sequence[bool]
) -> list[Samples]:
    """Return the samples of every source, each in an order of its own; where `held` is true its
    held-out samples are left out.
    """
    from npt.data.samples import Samples  # the command line reads this file without torch

    every = []
    for number, (source, hold_out) in enumerate(zip(sources, held, strict=True)):
        records, config = source.records, source.config
        try:
            every.append(Samples(records, tokenizer, config, seed=seed + number, hold_out=hold_out))
        except DataError as error:
            if source.label == FIRST:
                raise
            raise DataError(f"{source.label}: {error}") from error
    return every


def evaluation_of(
    sources: Sequence[Source], tokenizer: Any, count: int, vocab_size: int
) -> tuple[list[Sample], list[str], list[bool]]:
    """Return `count` evaluation samples of the sources by their shares, one of each at least; the
    label of each sample's source; and for each source if its samples are held out.
    """
    from npt.evaluation.heldout import evaluation_samples

    samples: list[Sample] = []
    labels: list[str] = []
    held = []
    total, passed = sum(source.share for source in sources if source.evaluated), 0.0
    for source in sources:
        if not source.evaluated:
            held.append(True)
            continue
        wanted = round(count * (passed + source.share) / total) - round(count * passed / total)
        passed += source.share
        some, heldout = evaluation_samples(
            source.records, tokenizer, source.config, max(1, wanted), vocab_size, source.own
        )
        samples += some
        labels += [source.label] * len(some)
        held.append(heldout)
    return samples, labels, held


def mixture_line(config: DataConfig) -> str:
    """Return a mixture in words."""
    shares = ", ".join(f"{name} {share:.3g}" for name, share in config.mix)
    return (
        f"--dataset_mix: shares of the samples {shares} (they sum to 1); an epoch ends with"
        f" {config.mix[0][0]}, the others begin again where they end"
    )


def per_source(labels: Iterable[str]) -> str:
    """Return how many samples are of which source, in words."""
    return ", ".join(f"{count} of {label}" for label, count in Counter(labels).items())
