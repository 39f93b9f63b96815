"""`calibrate`: the closed-form start of attached adapters, from text and nothing else.

One walk over the text measures each layer, forward and once backward through the base; the adapters
are written when every number is known and finite, and until then nothing is changed.

What the walk keeps are sums, so several processes share it: each takes every so many batches, and
each solves its share of the layers. They fail together, or begin again together.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
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
from npt.base.attention import set_deterministic
from npt.calibration.cut import Cut, spend
from npt.calibration.report import Calibration, LayerCalibration
from npt.calibration.samples import read_samples
from npt.calibration.sensitivity import Sensitivity, measure
from npt.config import STREAM, NPTConfig
from npt.console import say, silent_console
from npt.data.batch import Batch, Sample, batches
from npt.data.source import Record
from npt.distill.step import free_memory
from npt.distributed.processes import ProcessGroup
from npt.errors import (
    ConfigError,
    DataError,
    NoMemoryError,
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

SOLVED = ("A", f"B.{STREAM}")
"""The parameters of a layer that the start solves; all others are 0."""


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
    processes: ProcessGroup | None = None,
) -> Calibration:
    """Give the attached adapters their start: attention cut to the directions that the predictions
    read most (npt/calibration/cut.py), in the target `stream`; all other B and all M at 0.

    All or nothing, on all processes alike: if anything is refused, the adapters stay as they are.
    fp32 products are computed at `highest` precision, whatever torch is set to.

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
        processes: that share the work, each of them called with the same arguments, and come to the
            same adapters (npt/distributed/join.py); default this one alone.

    Returns:
        Figures per layer.

    Raises:
        ConfigError: a setting that cannot work, or that the processes differ in.
        DataError: no text, or too little of it for the rank.
        ModelError: no adapters are attached.
        NotSupportedError: the adapters have no target `stream`, keep the attention residual or do
            not start at m = 1.
        NumericalError: a non-finite activation, by layer and name.
        ProcessError: another process failed or was lost.
        torch.OutOfMemoryError: on this process or another one; a smaller `batch_size` may do.
    """
    started = time.perf_counter()
    processes = processes or ProcessGroup()
    console = console or silent_console()

    def read() -> list[Sample]:
        config = attached_config(model)
        check_form(config)
        if tokens < 1:
            raise ConfigError(f"--calibration_tokens is {tokens}; it must be at least 1")
        samples = read_samples(data, tokenizer, max_length, tokens, model.config.vocab_size, seed)
        count, mean = tokens_of(samples), max(config.ranks_of(len(npt_layers(model))))
        if count < TOKENS_PER_RANK * mean:
            raise DataError(
                f"calibration has {count} tokens, and rank {mean} needs {TOKENS_PER_RANK * mean};"
                " give it more data or tokens (--calibration_tokens), lower --adapter_rank, or"
                " start at random (--init random)"
            )
        return samples

    samples = together(processes, read)
    config, layers = attached_config(model), [index for index, _ in npt_layers(model)]
    ids = hashlib.sha256(repr([sample.input_ids for sample in samples]).encode()).hexdigest()
    own = {"calibration samples of hash": ids[:16], "seed": seed, "batch_size": batch_size}
    processes.agree({**asdict(config), **own})
    count = tokens_of(samples)
    say(console, f"calibrating layers {format_layers(tuple(layers))} on {count:,} tokens")
    device = next(model.parameters()).device
    parts = share(list(batches(samples, batch_size)), processes, is_sharded(model))

    def measured(matrices_on: torch.device) -> dict[int, Sensitivity]:
        shown = track(
            parts, "calibrating", console=console, transient=True, disable=not console.is_terminal
        )
        width = model.config.hidden_size
        # before a pass, after which processes that share a base could not begin again on the host
        sums = together(processes, lambda: {i: Sensitivity(width, matrices_on) for i in layers})
        with evaluating(model):
            together(processes, lambda: measure(model, shown, seed, sums), model)
        return sums

    def solved() -> dict[int, Cut]:
        cuts = {}
        for index in layers[processes.index :: processes.size]:
            layer = sums.pop(index)  # its matrices are freed at the next layer
            cuts[index] = on_device_or_host(layer.cut, device, console)
        return cuts

    attention = model.config._attn_implementation
    set_deterministic(model, True)
    try:
        sums = on_device_or_host(measured, device, console)
        for number, index in enumerate(layers):
            sums[index].average(processes, count)
            if number % processes.size != processes.index:
                del sums[index]
        cuts = together(processes, solved)
    finally:
        model.config._attn_implementation = attention
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # of the graph through the teacher
    if config.ranks is None:
        worth = of_all(processes, {index: cut.worth for index, cut in cuts.items()})
        ranks = spend(config.rank * len(layers), worth)
        config = replace(config, ranks=tuple(ranks.values()))
    ranks = dict(zip(layers, config.ranks_of(len(layers)), strict=True))
    tensors = together(processes, lambda: start_tensors(model, config, cuts, ranks))
    figures = {
        index: LayerCalibration(ranks[index], cut.lost[ranks[index]], cut.cost(ranks[index]))
        for index, cut in cuts.items()
    }
    figures = of_all(processes, figures)
    for index in layers:
        for name in SOLVED:
            processes.sum_(tensors[f"model.layers.{index}.npt.{name}"])
    set_adapters(model, config, tensors)
    return Calibration(figures, count, time.perf_counter() - started)


def share(
    parts: Sequence[Batch], processes: ProcessGroup, in_step: bool
) -> list[tuple[int | None, Batch]]:
    """Return this process's batches by their numbers among all. Processes that are kept in step
    have equally many: one that would have fewer computes a batch, number None, for nothing.
    """
    mine: list[tuple[int | None, Batch]] = [
        (number, parts[number]) for number in range(processes.index, len(parts), processes.size)
    ]
    if in_step and len(mine) * processes.size < len(parts):
        mine.append((None, parts[0]))
    return mine


def together(
    processes: ProcessGroup, act: Callable[[], T], model: PreTrainedModel | None = None
) -> T:
    """Return what `act` gives here if it succeeds on every process; else raise on all of them.

    Args:
        processes: that act.
        act: exchanges nothing.
        model: that it computes. If its base is sharded, this exchanges layers, and an error between
            them is raised at once: the others cannot be met there.

    Raises:
        torch.OutOfMemoryError: of this process or another one, after which all may begin again.
        ProcessError: another process met another error.
    """
    if processes.size == 1:
        return act()
    failure: Exception | None = None
    try:
        with processes.exchanging():
            result = act()
    except Exception as error:
        sharded = model is not None and is_sharded(model)
        if sharded and is_out_of_memory(error):
            raise NoMemoryError(
                f"calibration: out of memory within a sharded base ({first_line(error)[:200]});"
                " lower --batch_size or --max_length, or convert fewer --layers"
            ) from error
        if sharded and not isinstance(error, NumericalError):
            raise
        failure = error
    lack = None if failure is None or not is_out_of_memory(failure) else first_line(failure)
    processes.raise_together(failure if lack is None else None)
    for process, line in enumerate(processes.gather(lack)):
        if line is not None:
            other = torch.OutOfMemoryError(f"process {process}: {line}")
            raise processes.everywhere(failure or other)
    return result


def tokens_of(samples: Iterable[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)


def of_all(processes: ProcessGroup, own: Mapping[int, T]) -> dict[int, T]:
    """Return what every process has by layer, in order of depth."""
    return dict(sorted(item for theirs in processes.gather(own) for item in theirs.items()))


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
    free_memory(device)  # not in the handler, in which the error keeps the tensors
    say(console, f"calibration: {reason}; computed again with its matrices on the host")
    return compute(HOST)


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
    is divided by alpha, which the forward multiplies it with. A layer without a cut is all zeros.
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
        for name, tensor in zip(SOLVED, (code, back), strict=True):
            # in the layout that all processes have, who sum them
            tensors[f"model.layers.{index}.npt.{name}"].copy_(tensor)
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
