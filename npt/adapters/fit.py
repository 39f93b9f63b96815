"""Resolve a configuration of adapters to layers and ranks of a model."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from transformers import PreTrainedConfig

from npt.config import NPTConfig
from npt.errors import ConfigError


def resolve_layers(spec: str, num_layers: int) -> tuple[int, ...]:
    """Return the layer indices of `upper_half`, `all`, a range `8-15` (both ends included), a list
    `3,5,7`, or a mix `0,4-7`.

    Raises:
        ConfigError: the form is invalid, or the model lacks a layer.
    """
    if spec.strip() == "all":
        return tuple(range(num_layers))
    if spec.strip() == "upper_half":
        return tuple(range(num_layers // 2, num_layers))
    chosen: set[int] = set()
    for part in spec.split(","):
        # at most nine digits: int() refuses some thousands
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if not match:
            raise ConfigError(
                f"--layers is {spec!r}; pass upper_half, all, a range like 8-15 or a list like"
                " 3,5,7"
            )
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ConfigError(f"--layers has the range {part.strip()}; write {last}-{first}")
        if last >= num_layers:
            raise ConfigError(
                f"--layers names layer {last}, but the model has layers 0 to {num_layers - 1}"
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def format_layers(layers: tuple[int, ...]) -> str:
    """Return indices as ranges, (4, 5, 6, 9) -> '4-6,9', which `resolve_layers` reads."""
    spans = []
    # consecutive indices differ from their places by the same number
    placed = enumerate(layers)
    runs = itertools.groupby(placed, key=lambda pair: pair[1] - pair[0])
    for _, run in runs:
        indices = [index for _, index in run]
        first = indices[0]
        last = indices[-1]
        span = str(first)
        if last != first:
            span += f"-{last}"
        spans.append(span)
    return ",".join(spans)


def check_fit(
    config: NPTConfig, model_config: PreTrainedConfig, max_length: int | None = None
) -> tuple[int, ...]:
    """Return the layers that `config` converts on a model of this configuration.

    Raises:
        ConfigError: layers are out of range, `max_length` exceeds the model's positions, a rank
            exceeds the hidden size, at which z = A a already holds all of a, or more numbers of a
            code are to be active than it has.
    """
    chosen = resolve_layers(config.layers, model_config.num_hidden_layers)
    hidden = model_config.hidden_size
    ranks = config.ranks_of(len(chosen))
    largest = max(ranks)
    mean = sum(ranks) / len(ranks)
    flag = "ranks"
    if config.ranks is None:
        flag = "adapter_rank"
    if largest > hidden:
        hint = " (by default it is four times --active)" if config.active else ""
        raise ConfigError(
            f"--{flag} is {largest}, larger than the model's hidden size {hidden}; lower it{hint}"
        )
    if config.active > mean:
        raise ConfigError(
            f"--active is {config.active}, but a code has only {mean:g} numbers (--{flag}); lower"
            " it, or pass 0 for all of them"
        )
    if config.token_rank > hidden:
        raise ConfigError(
            f"--token_rank is {config.token_rank}, larger than the model's hidden size"
            f" {hidden}; lower it"
        )
    check_length(max_length or 0, model_config)
    return chosen


def check_length(max_length: int, model_config: PreTrainedConfig) -> None:
    """Raise ConfigError if samples may be longer than the model's positions."""
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"--max_length is {max_length}, but the model has {positions} positions; lower it"
        )


def config_by_layer(config: NPTConfig, layers: tuple[int, ...]) -> dict[int, NPTConfig]:
    """Return each layer's configuration: `config` with the layer's own rank."""
    ranks = zip(layers, config.ranks_of(len(layers)), strict=True)
    return {index: replace(config, rank=rank, ranks=None) for index, rank in ranks}
