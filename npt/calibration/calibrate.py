"""`calibrate`: the closed-form start of attached adapters, from text and nothing else.

One walk over the text measures each layer, forward and once backward through the base; the adapters
are written when every number is known and finite, and until then nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, set_adapters
from npt.adapters.converted import (
    adapter_parameters,
    attached_config,
    evaluating,
    is_sharded,
    npt_layers,
)
from npt.adapters.fit import format_layers
from npt.calibration.cut import Cut, spend
from npt.calibration.report import Calibration, LayerCalibration
from npt.calibration.samples import read_samples
from npt.calibration.sensitivity import Sensitivity, measure
from npt.config import STREAM, NPTConfig
from npt.console import say, silent_console
from npt.data.batch import Sample, batches
from npt.data.source import Record
from npt.distill.step import free_memory
from npt.errors import (
    ConfigError,
    DataError,
    NotSupportedError,
    NumericalError,
    first_line,
    is_out_of_memory,
)
from npt.random_state import kept_random_state

T = TypeVar("T")

HOST = torch.device("cpu")

TOKENS_PER_RANK = 4
"""Tokens that a rank needs at least; fewer would be fitted to noise."""


@torch.inference_mode(False)  # whatever the caller is in: it takes gradients of the teacher
@kept_random_state()
def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Iterable[Record] | Iterable[Sample],
    tokens: int = 65536,
    *,
    max_length: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    console: Console | None = None,
) -> Calibration:
    """Give the attached adapters their start: attention cut to the directions that the predictions
    read most (npt/calibration/cut.py), in the target `stream`; all other B and all M at 0.

    All or nothing: if anything is refused, the adapters stay as they are. fp32 products are
    computed at `highest` precision, whatever torch is set to.

    Args:
        model: with adapters attached, quantised or not; only the adapters change, and unless the
            configuration has `ranks` their ranks: they are given to the layers that are worth
            most, as many in all as the configuration's rank gives.
        tokenizer: of the base model.
        data: records, or samples already cut; training data, never what the student is to be
            measured on.
        tokens: to use at most, drawn from the beginning of the data, eight times as much of it.
            Memory does not grow with them, but for some 300 bytes each of text read ahead.
        max_length: tokens of a sample, when `data` are records.
        batch_size: samples at a time, of which one graph through the whole teacher is held.
        seed: of the tokens' choice, and of draws from the teacher's predictions.
        console: for the progress; default nowhere.

    Returns:
        Figures per layer.

    Raises:
        ConfigError: a setting that cannot work.
        DataError: no text, or too little of it for the rank.
        ModelError: no adapters are attached.
        NotSupportedError: the adapters have no target `stream`, keep the attention residual or do
            not start at m = 1, or the base is sharded.
        NumericalError: a non-finite activation, by layer and name.
    """
    started = time.perf_counter()
    config = attached_config(model)
    check_base(model)
    layers = tuple(index for index, _ in npt_layers(model))
    check_form(config)
    if tokens < 1:
        raise ConfigError(f"--calibration_tokens is {tokens}; it must be at least 1")
    samples = read_samples(data, tokenizer, max_length, tokens, model.config.vocab_size, seed)
    read = sum(len(sample.input_ids) for sample in samples)
    mean = max(config.ranks_of(len(layers)))
    if read < TOKENS_PER_RANK * mean:
        raise DataError(
            f"calibration has {read} tokens, and rank {mean} needs {TOKENS_PER_RANK * mean}; give"
            " it more data or tokens (--calibration_tokens), lower --adapter_rank, or start at"
            " random (--init random)"
        )
    device = next(model.parameters()).device
    parts = list(batches(samples, batch_size))
    console = console or silent_console()
    say(console, f"calibrating layers {format_layers(layers)} on {read:,} tokens")

    def measured(matrices_on: torch.device) -> dict[int, Sensitivity]:
        shown = track(
            parts, "calibrating", console=console, transient=True, disable=not console.is_terminal
        )
        return measure(model, shown, seed, matrices_on)

    cuts: dict[int, Cut] = {}
    try:
        with evaluating(model):
            sums = on_device_or_host(measured, device, console)
        for index in layers:
            layer = sums.pop(index)  # its matrices are freed at the next layer
            cuts[index] = on_device_or_host(layer.cut, device, console)
    finally:
        free_memory()
    if config.ranks is None:
        worth = {index: cut.worth for index, cut in cuts.items()}
        ranks = spend(config.rank * len(layers), worth)
        config = replace(config, ranks=tuple(ranks.values()))
    ranks = dict(zip(layers, config.ranks_of(len(layers)), strict=True))
    set_adapters(model, config, start_tensors(model, config, cuts, ranks))
    figures = {
        index: LayerCalibration(ranks[index], cut.lost[ranks[index]], cut.cost(ranks[index]))
        for index, cut in cuts.items()
    }
    return Calibration(figures, read, time.perf_counter() - started)


def on_device_or_host(
    compute: Callable[[torch.device], T], device: torch.device, console: Console
) -> T:
    """Return what `compute` gives with its matrices on a device; if there is no memory for them, or
    they cannot be factorised there, say so in one line and compute with matrices on the host.
    """
    try:
        return compute(device)
    except (RuntimeError, MemoryError) as error:
        # LAPACK and cuSOLVER give up on different matrices
        failed = is_out_of_memory(error) or isinstance(error, torch.linalg.LinAlgError)
        if device == HOST or not failed:
            raise
        reason = first_line(error)[:160]
    free_memory()  # not in the handler, in which the error keeps the tensors
    say(console, f"calibration: {reason}; computed again with its matrices on the host")
    return compute(HOST)


def check_base(model: PreTrainedModel) -> None:
    """Refuse a sharded base."""
    if is_sharded(model):
        raise NotSupportedError(
            "the base is sharded over processes, and calibration needs it on one device; use --init"
            " random"
        )


def check_calibration(config: NPTConfig) -> None:
    """Refuse settings of a calibrated start that cannot work, before anything is loaded."""
    if config.init == "calibrated":
        check_form(config)


def check_form(config: NPTConfig) -> None:
    """Refuse forms that do not contain the start."""
    if STREAM not in config.targets:
        raise NotSupportedError(
            f"--init calibrated gives the target stream its start, but --targets is"
            f" {','.join(config.targets)}; add stream, or use --init random"
        )
    if config.residual == "keep":
        raise NotSupportedError(
            "adapters with --residual keep start equal to their base, which no calibration can"
            " improve; use --init random"
        )
    if config.mult_form == "half_sigmoid":
        raise NotSupportedError(
            "--init calibrated starts from multipliers of 1, and those of --mult_form half_sigmoid"
            " are 0.75 at M = 0; use another form, or --init random"
        )


def start_tensors(
    model: PreTrainedModel, config: NPTConfig, cuts: dict[int, Cut], ranks: dict[int, int]
) -> dict[str, Tensor]:
    """Return the start by the names of the adapters' parameters, from each layer's cut and rank; B
    is divided by alpha, which the forward multiplies it with.
    """
    device = next(iter(adapter_parameters(model).values())).device
    shapes = adapter_shapes(model, config)
    tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    for index, cut in cuts.items():
        code, back = cut.code[: ranks[index]], cut.back[:, : ranks[index]] / config.additive_scale
        if not bool(torch.isfinite(code).all() & torch.isfinite(back).all()):
            raise NumericalError(
                f"calibration: the directions of layer {index} came out non-finite; nothing was"
                " changed, start with --init random"
            )
        code, back = balanced(code, back)
        tensors[f"model.layers.{index}.npt.A"] = code.to(device)
        tensors[f"model.layers.{index}.npt.B.{STREAM}"] = back.to(device)
    return tensors


def balanced(code: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same adapter in numbers that training can change evenly.

    A row of A [R, D] times c and the column of B [D, R] that reads it over c give the same student
    for any c. For a code of unit variance, entries of A are a few hundredths and those of B a few
    units, while AdamW moves every entry by the learning rate: A is thrown away before B has begun.
    So c makes the root mean squares of both equal; it is a power of two, by which fp32 multiplies
    exactly.
    """
    sizes = back.square().mean(dim=0).sqrt() / code.square().mean(dim=1).sqrt()
    factor = torch.exp2(torch.round(torch.log2(sizes) / 2))
    # a row that nothing reads, or that reads nothing
    factor = torch.where(torch.isfinite(factor) & (factor > 0), factor, 1.0)
    return code * factor.unsqueeze(1), back / factor
