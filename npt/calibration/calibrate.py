"""`calibrate`: compute the closed-form start of attached adapters from text.

One pass over the text, forward and backward through the base, measures each layer. The adapters are
set only once all values are known and finite.

Several processes share the work, since a pass only keeps sums: each takes its share of the batches,
then of the layers. They fail together or start again together.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, set_adapters
from npt.adapters.converted import (
    adapter_parameters,
    adapter_tensors,
    attached,
    attached_config,
    evaluating,
    is_sharded,
    npt_layers,
)
from npt.adapters.fit import format_layers
from npt.base.attention import set_deterministic
from npt.batch import Batch, Sample, batches
from npt.calibration.cut import SOLVED, Cut, spend
from npt.calibration.refit import refit
from npt.calibration.report import Calibration, LayerCalibration
from npt.calibration.samples import read_samples, tokens_of
from npt.calibration.sensitivity import Sensitivity, measure
from npt.calibration.threshold import set_apart, set_threshold
from npt.calibration.together import on_device_or_host, together
from npt.config import STREAM, NPTConfig
from npt.console import say, silent_console
from npt.data.source import Given
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, DataError, NotSupportedError
from npt.random_state import kept_random_state

T = TypeVar("T")

TOKENS_PER_RANK = 4
"""Fewest tokens per rank; with fewer, the start would fit noise."""


@torch.inference_mode(False)  # it takes gradients of the teacher
@kept_random_state()
def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Given | Iterable[Sample],
    tokens: int = 65536,
    *,
    max_length: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    console: Console | None = None,
    processes: ProcessGroup | None = None,
) -> Calibration:
    """Set the attached adapters to the closed-form start (npt/calibration/cut.py).

    The target `stream` gets attention cut to the directions that the predictions read most, after
    the token part, if the form has one (npt/calibration/token_part.py). All other B, and all M, are
    0. If anything fails, the adapters of all processes are unchanged. fp32 products use `highest`
    precision, whatever torch's setting.

    Args:
        model: with adapters attached, quantised or not. Only the adapters change. Unless the
            configuration has `ranks`, the total rank is redistributed to the layers where it is
            worth most.
        tokenizer: of the base.
        data: records, the path of a file of them, or samples. Use training data, never data for
            evaluation.
        tokens: most tokens to use. They are drawn from the first 8 * tokens of the data. Memory
            grows by only about 300 bytes per token, for text read ahead.
        max_length: tokens of a sample, if `data` are records.
        batch_size: samples at a time. One graph through the whole teacher is held for them.
        seed: of the choice of tokens and of the draws from the teacher's predictions.
        console: for progress; default none.
        processes: those that share the work (npt/distributed/join.py); default this one. Call it
            with the same arguments in each; all get the same adapters.

    Returns:
        Figures per layer.

    Raises:
        ConfigError: a setting is invalid or differs between processes.
        DataError: there is no text, or too little for the rank.
        ModelError: no adapters are attached.
        NotSupportedError: the adapters lack the target `stream`, keep the attention residual or do
            not start at m = 1.
        NumericalError: an activation is non-finite; the message names the layer.
        ProcessError: another process failed or was lost.
        torch.OutOfMemoryError: out of memory on any process; try a smaller `batch_size`.
    """
    started = time.perf_counter()
    processes = processes or ProcessGroup()
    console = console or silent_console()

    def read() -> tuple[list[Sample], list[Sample]]:
        config = attached_config(model)
        check_form(config)
        if tokens < 1:
            raise ConfigError(f"--calibration_tokens is {tokens}; it must be at least 1")
        samples = read_samples(data, tokenizer, max_length, tokens, model.config.vocab_size, seed)
        end = len(samples)
        if config.active:
            end -= set_apart(samples)
        count = tokens_of(samples[:end])
        rank = max(config.ranks_of(len(npt_layers(model))))
        if count < TOKENS_PER_RANK * rank:
            raise DataError(
                f"calibration has {count} tokens, but rank {rank} needs {TOKENS_PER_RANK * rank}:"
                " raise --calibration_tokens, add data, lower --adapter_rank, or pass --init random"
            )
        return samples[:end], samples[end:]

    fitted, of_threshold = together(processes, read)
    config = attached_config(model)
    layers = [index for index, _ in npt_layers(model)]
    # sums over different texts, or with different draws, would mix silently
    ids = repr([sample.input_ids for sample in fitted + of_threshold]).encode()
    own = {
        "calibration samples of hash": hashlib.sha256(ids).hexdigest()[:16],
        "seed": seed,
        "batch_size": batch_size,
    }
    processes.agree({**asdict(config), **own})
    count = tokens_of(fitted)
    say(console, f"calibrating layers {format_layers(tuple(layers))} on {count:,} tokens")
    device = model.device
    parts = share(list(batches(fitted, batch_size)), processes, is_sharded(model))

    def measured(matrices_on: torch.device) -> dict[int, Sensitivity]:
        shown = track(
            parts, "calibrating", console=console, transient=True, disable=not console.is_terminal
        )
        width = model.config.hidden_size

        def zeros() -> dict[int, Sensitivity]:
            return {index: Sensitivity(width, config, matrices_on) for index in layers}

        # before the pass: during it, processes that share a base could not start again
        sums = together(processes, zeros)
        with evaluating(model):
            together(processes, lambda: measure(model, shown, seed, sums), model)
        return sums

    def solved() -> dict[int, Cut]:
        cuts = {}
        for index in layers[processes.index :: processes.size]:
            layer = sums.pop(index)  # frees its matrices at the next layer
            cuts[index] = on_device_or_host(layer.cut, device, console)
        return cuts

    attention = model.config._attn_implementation
    set_deterministic(model, True)
    try:
        sums = on_device_or_host(measured, device, console)
        # every process needs the sums of all to average, but solves only its own layers
        for number, index in enumerate(layers):
            sums[index].average(processes, count)
            if number % processes.size != processes.index:
                del sums[index]
        # on the host: they are needed again only after the cuts
        sensitivity = {i: s.to_attention.cpu() for i, s in sums.items() if config.token_part}
        cuts = together(processes, solved)
    finally:
        model.config._attn_implementation = attention
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # memory of the graph through the teacher
    if config.ranks is None:
        worth = of_all(processes, {index: cut.worth for index, cut in cuts.items()})
        ranks = spend(config.rank * len(layers), worth)
        config = replace(config, ranks=tuple(ranks.values()))
    ranks = dict(zip(layers, config.ranks_of(len(layers)), strict=True))
    tensors = together(processes, lambda: start_tensors(model, config, cuts, ranks))
    figures = {}
    for index, cut in cuts.items():
        rank = ranks[index]
        figures[index] = LayerCalibration(rank, cut.lost[rank], cut.cost(rank), cut.known)
    figures = of_all(processes, figures)
    # a sum distributes the layers: each is zero on all processes but one
    for name, tensor in tensors.items():
        if name.partition(".npt.")[2] in SOLVED:
            processes.sum_(tensor)
    before = {name: tensor.clone() for name, tensor in adapter_tensors(model).items()}
    form = attached_config(model)
    at_random = attached(model).random_start
    set_adapters(model, config, tensors)
    if config.token_part:
        find = partial(set_threshold, model, of_threshold, config.active, batch_size)
        try:
            if config.active:
                together(processes, find, model)
            refit(model, parts, sensitivity, processes, console)
            if config.active:
                # the refit changed the codes, and each process found tau from its own rounding
                log_tau = together(processes, find, model)
                _, shallowest = npt_layers(model)[0]
                shallowest.npt.log_tau.data.fill_(processes.first(lambda: log_tau))
        except BaseException:
            set_adapters(model, form, before)
            attached(model).random_start = at_random
            raise
    return Calibration(figures, count, time.perf_counter() - started)


def share(
    parts: Sequence[Batch], processes: ProcessGroup, in_step: bool
) -> list[tuple[int | None, Batch]]:
    """Return this process's batches with their numbers among all. With `in_step` all processes have
    equally many: an extra batch, number None, is computed and discarded.
    """
    numbered: list[tuple[int | None, Batch]] = list(enumerate(parts))
    mine = numbered[processes.index :: processes.size]
    if in_step and len(mine) * processes.size < len(parts):
        mine.append((None, parts[0]))
    return mine


def of_all(processes: ProcessGroup, own: Mapping[int, T]) -> dict[int, T]:
    """Return the values of all processes by layer, in order of depth."""
    return dict(sorted(item for theirs in processes.gather(own) for item in theirs.items()))


def check_form(config: NPTConfig) -> None:
    """Raise NotSupportedError for a form of adapters that cannot represent the start."""
    if STREAM not in config.targets:
        raise NotSupportedError(
            f"--init calibrated needs the target stream, but --targets is"
            f" {','.join(config.targets)}: add stream or pass --init random"
        )
    if config.residual == "keep":
        raise NotSupportedError(
            "--init calibrated has no effect with --residual keep, where adapters start equal to"
            " their base: pass --init random"
        )
    if config.mult_form == "half_sigmoid":
        raise NotSupportedError(
            "--init calibrated starts from multipliers of 1, but --mult_form half_sigmoid has 0.75"
            " at M = 0: pass another --mult_form or --init random"
        )


def start_tensors(
    model: PreTrainedModel, config: NPTConfig, cuts: dict[int, Cut], ranks: dict[int, int]
) -> dict[str, Tensor]:
    """Return the start by parameter name from each layer's cut and rank; zeros without a cut."""
    device = next(iter(adapter_parameters(model).values())).device
    shapes = adapter_shapes(model, config)
    tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    for index, cut in cuts.items():
        for name, tensor in cut.tensors(index, ranks[index], config).items():
            # copied, so that all processes sum the same memory layout
            tensors[f"model.layers.{index}.npt.{name}"].copy_(tensor)
    return tensors
