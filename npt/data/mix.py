"""The sources of a run: one data set, one with another mixed in against forgetting, or a mixture by
weight.

The first source's end is an epoch's; the others are gone over again and again. Which source a
sample is of is drawn from the seed and the sample's number (npt/data/loader.py), so a mixture is
resumed by where each source stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from npt.config import DataConfig
from npt.data.sample import Sample
from npt.data.samples import Samples, evaluation_samples
from npt.data.source import (
    BUILTIN,
    Record,
    check_source,
    fitting_columns,
    is_local,
    open_source,
    own_heldout,
)
from npt.errors import ConfigError, DataError

FIRST, REPLAY = "data", "replay data"
"""What messages call the sources of a run that has no mixture."""

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
"""Data sets of the hub by short names: the settings that each stands for."""


@dataclass(frozen=True)
class Part:
    """A source by its settings. label: what messages call it. share: of all samples. config: how it
    is read.
    """

    label: str
    share: float
    config: DataConfig


@dataclass(frozen=True)
class Source:
    """An open one. own: held-out records of its own. evaluated: whether a run is evaluated on it."""

    label: str
    share: float
    config: DataConfig
    records: Iterable[Record]
    own: Iterable[Record] | None = None
    evaluated: bool = True


def named(name: str) -> dict[str, Any] | None:
    """The settings that a short name stands for; None of any other name, and where there is a file
    of that name.
    """
    return DATASETS[name] if name in DATASETS and not Path(name).exists() else None


def parts_of(config: DataConfig) -> tuple[Part, ...]:
    """The sources that settings name, the first one first."""
    if config.dataset_mix is not None:
        return tuple(
            Part(name, share, _of_mix(config, name, number))
            for number, (name, share) in enumerate(config.mix)
        )
    plain = replace(config, replay_dataset=None, replay_ratio=None)
    if config.replay_dataset is None:
        return (Part(FIRST, 1.0, plain),)
    replayed = _beside(plain, config.replay_dataset)
    return Part(FIRST, 1 - config.replay_share, plain), Part(REPLAY, config.replay_share, replayed)


def _of_mix(config: DataConfig, name: str, number: int) -> DataConfig:
    """How a source of a mixture is read. A name of the hub may have a configuration behind it."""
    one = replace(config, dataset_mix=None, num_samples=config.num_samples if number == 0 else None)
    short = named(name)
    if short is not None:
        return replace(
            one, **{**short, "streaming": one.streaming or short.get("streaming", False)}
        )
    if name == BUILTIN or is_local(name):
        return replace(one, dataset_name=name, dataset_split="train")
    hub, _, configuration = name.partition(":")
    return replace(one, dataset_name=hub, dataset_config=configuration or None)


def _beside(config: DataConfig, name: str) -> DataConfig:
    """The settings of a second data set, read as the first one is."""
    local = name == BUILTIN or is_local(name)
    split = "train" if local else config.dataset_split
    return replace(
        config, dataset_name=name, dataset_config=None, dataset_split=split, num_samples=None
    )


def check_sources(config: DataConfig) -> None:
    """Refuse what needs no reading to be refused, of every source.

    Raises:
        DataError, ConfigError: as `check_source`; a split that no source of a mixture has.
    """
    parts = parts_of(config)
    for part in parts:
        check_source(part.config)
    if config.dataset_split != "train" and all(
        part.config.dataset_split == "train" for part in parts
    ):
        raise DataError(
            f"--dataset_split {config.dataset_split} is for hub data sets, and there is none in"
            " --dataset_mix; drop it"
        )


def open_sources(
    config: DataConfig,
    data: Iterable[Record] | None = None,
    replay_data: Iterable[Record] | None = None,
) -> list[Source]:
    """The sources of a run, each with columns that it has.

    Args:
        config: names them, and how they are read.
        data, replay_data: records in the place of what `config` names.

    Raises:
        DataError, ConfigError: as `open_source`; records beside a mixture.
    """
    if config.dataset_mix is not None and (data is not None or replay_data is not None):
        raise ConfigError(
            f"--dataset_mix is {config.dataset_mix!r}, but records were given as well; drop one of"
            " the two"
        )
    if replay_data is not None and config.replay_dataset is None:
        config = replace(config, replay_dataset=REPLAY)  # which is not opened
    given = {FIRST: data, REPLAY: replay_data}
    found = []
    for part in parts_of(config):
        records, own = given.get(part.label), None
        if records is None:
            records = open_source(part.config)
            own = own_heldout(part.config) if part.label != REPLAY else None
        elif iter(records) is records and (part.label == REPLAY or not config.streaming):
            records = list(records)  # a generator could not be gone over again
        found.append(
            Source(part.label, part.share, part.config, records, own, part.label != REPLAY)
        )
    return _fitted(found, all_may_differ=config.dataset_mix is not None)


def fitting(part: Part) -> DataConfig:
    """How a source is read, with columns that it has as far as its first record can be read."""
    try:
        return fitting_columns(part.config, open_source(part.config))
    except DataError:  # a look at the data says where
        return part.config


def _fitted(sources: Sequence[Source], *, all_may_differ: bool) -> list[Source]:
    """Sources with columns that they have. A column that none has stays, to be named where the
    first record is refused.

    Args:
        sources: of a run.
        all_may_differ: the first one as well, as in a mixture; else the columns are those of the
            first.
    """
    found = [
        replace(s, config=fitting_columns(s.config, s.records)) if all_may_differ or n else s
        for n, s in enumerate(sources)
    ]
    asked = sources[0].config
    if asked.prompt_column is not None and all(
        source.config.prompt_column is None for source in found
    ):
        return list(sources)
    return found


def as_read(
    sources: Sequence[Source], tokenizer: Any, seed: int, held: Sequence[bool]
) -> list[Samples]:
    """The samples of every source, each in an order of its own.

    Args:
        sources: of a run.
        tokenizer: of the base model.
        seed: of the run.
        held: of each source, whether its held-out samples are left out.

    Raises:
        DataError: nothing comes of one, by its label.
    """
    found = []
    for number, (source, hold_out) in enumerate(zip(sources, held, strict=True)):
        try:
            found.append(
                Samples(
                    source.records, tokenizer, source.config, seed=seed + number, hold_out=hold_out
                )
            )
        except DataError as error:
            raise (
                error if source.label == FIRST else DataError(f"{source.label}: {error}")
            ) from error
    return found


def evaluated_on(
    sources: Sequence[Source], tokenizer: Any, count: int, vocab_size: int
) -> tuple[list[Sample], list[str], list[bool]]:
    """Samples of every source that a run is evaluated on, as many as its share is, one at least.

    Args:
        sources: of a run.
        tokenizer: of the base model.
        count: samples in all.
        vocab_size: V.

    Returns:
        The samples, of each the label of its source, and of each source whether they are held out;
        True of one that is not looked at.
    """
    samples: list[Sample] = []
    labels: list[str] = []
    held = []
    total = sum(source.share for source in sources if source.evaluated)
    passed = 0.0
    for source in sources:
        if not source.evaluated:
            held.append(True)
            continue
        wanted = max(
            1, round(count * (passed + source.share) / total) - round(count * passed / total)
        )
        passed += source.share
        found, heldout = evaluation_samples(
            source.records, tokenizer, source.config, wanted, vocab_size, source.own
        )
        samples += found
        labels += [source.label] * len(found)
        held.append(heldout)
    return samples, labels, held


def mixture_line(config: DataConfig) -> str:
    """What a mixture comes to, in words."""
    shares = ", ".join(f"{name} {share:.3g}" for name, share in config.mix)
    first = config.mix[0][0]
    return (
        f"--dataset_mix: shares of the samples {shares} (they sum to 1); an epoch ends with"
        f" {first}, the others begin again where they end"
    )


def per_source(labels: Iterable[str]) -> str:
    """How many samples are of which source, in words."""
    return ", ".join(f"{count} of {label}" for label, count in Counter(labels).items())
