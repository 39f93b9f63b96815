"""`calibrate`: the closed-form start of attached adapters, from text and nothing else.

The adapters are written when all layers are solved and every number is finite; until then nothing
is changed.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_shapes, set_adapters
from npt.adapters.consolidate import consolidated
from npt.adapters.converted import attached_config, is_sharded, npt_layers
from npt.base.quantization_error import fp32_products
from npt.calibration.placement import free_bytes, or_on_host, release
from npt.calibration.plan import plan
from npt.calibration.report import Calibration, Display, LayerCalibration
from npt.calibration.samples import read_samples, split
from npt.calibration.solve import Solution
from npt.calibration.tail import Parameters, check_layer_readable
from npt.calibration.walks import Walks, steps
from npt.config import CALIBRATION_INPUTS, NPTConfig
from npt.console import silent_console
from npt.data.batch import Sample
from npt.data.source import Record
from npt.errors import ConfigError, NotSupportedError, TooLittleTextError
from npt.random_state import kept_random_state

TOKENS_PER_RANK = 4
"""Fitted tokens that a rank needs at least: each row of B is a regression on R codes."""


@torch.inference_mode(False)  # whatever the caller is in: it takes gradients of the teacher
@kept_random_state()
def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Iterable[Record] | Iterable[Sample],
    tokens: int = 65536,
    *,
    inputs: str = "teacher",
    rounds: int = 6,
    rank_budget: int | None = None,
    max_length: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    console: Console | None = None,
) -> Calibration:
    """Solve the attached adapters, layer by layer, for what the layers lack without attention in
    the stream.

    All or nothing: if anything is refused, the adapters stay as they are. fp32 products are
    computed at `highest` precision, whatever torch is set to.

    Args:
        model: with adapters attached, quantised or not; only the adapters change, and with
            `rank_budget` their ranks.
        tokenizer: of the base model.
        data: records, or samples already cut; training data, never what the student is to be
            measured on. An eighth, in whole documents if there are enough, is not fitted, but
            chooses the ridge and whether the passes are kept.
        tokens: to use at most, drawn from the beginning of the data, eight times as much of it.
            Each takes three fp32 rows of D, in a GPU's free memory or in a temporary file; of
            other memory only what is read ahead grows with them, some 300 bytes for each.
        inputs: what a layer reads, the `teacher`'s state or what the calibrated layers below it
            give (`propagated`). The target is the teacher's own state either way.
        rounds: passes over the tokens, per layer, that improve A, B and M together; 0 leaves the
            linear solution, in which M is 0.
        rank_budget: ranks of all layers together, spent on the layers that gain most, in place of
            the configuration's.
        max_length: tokens of a sample, when `data` are records.
        batch_size: samples at a time, of which one graph through the whole teacher is held.
        seed: of the tokens' choice and order, and of draws from the teacher's predictions.
        console: for the forecast and the progress; default nowhere.

    Returns:
        Figures per layer on the tokens that were not fitted.

    Raises:
        ConfigError: a setting that cannot work, or no room on disk.
        TooLittleTextError: no text, or too little of it for the rank.
        ModelError: no adapters are attached.
        NotSupportedError: the adapters keep the attention residual, or the base is sharded or
            spread over devices.
        NumericalError: a non-finite activation, by layer and name.
    """
    started = time.perf_counter()
    config = attached_config(model)
    check_base(model)
    layers = tuple(index for index, _ in npt_layers(model))
    _check_settings(config, tokens, inputs, rounds)
    if rank_budget is not None:
        check_budget(rank_budget, len(layers), model.config.hidden_size)
    samples = read_samples(data, tokenizer, max_length, tokens, model.config.vocab_size, seed)
    parts = split(samples, batch_size)
    ranks = config.ranks_of(len(layers))
    if rank_budget is not None:
        ranks = (-(-rank_budget // len(layers)),) * len(layers)
    fitted, needed = parts.tokens - parts.heldout, TOKENS_PER_RANK * max(ranks)
    if fitted < needed:
        raise TooLittleTextError(
            f"calibration has {fitted} tokens to fit, and rank {max(ranks)} needs {needed}; give it"
            " more data or tokens (--calibration_tokens), or lower --adapter_rank"
        )
    device = next(model.parameters()).device
    largest = max((batch.input_ids.shape for batch in parts.batches), key=math.prod)
    work = plan(
        config,
        model.config,
        layers,
        ranks,
        parts.tokens,
        rounds,
        inputs=inputs,
        rank_budget=rank_budget,
        batch=(largest[0], largest[1]),
    )
    free = free_bytes(device) if device.type == "cuda" else 0
    placement = work.place(device, free)
    display = Display(console or silent_console(), steps(parts, len(layers), rounds))
    with fp32_products("highest"):
        display.say(work.announcement(device, placement, free, layers, parts.tokens))
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with closing(display):
            walks = Walks(model, parts, rounds, inputs == "propagated", display, seed)
            known = ranks if rank_budget is None else None
            placement = or_on_host(lambda p: walks.measure(known, p), placement, display.say)
            if rank_budget is not None:
                worth = {index: found.worth for index, found in walks.prepared.items()}
                config = replace(config, ranks=tuple(spend(rank_budget, worth).values()))
                ranks = config.ranks_of(len(layers))
            or_on_host(lambda p: walks.solve(ranks, p), placement, display.say)
    finally:
        for module in training:
            module.training = True
        release(device)
    set_adapters(model, config, _tensors(model, config, walks.solutions))
    figures = {index: _figures(solution) for index, solution in walks.solutions.items()}
    return Calibration(figures, parts.tokens, parts.heldout, inputs, time.perf_counter() - started)


def check_base(model: PreTrainedModel) -> None:
    """Refuse bases that no start is solved on: with consolidated facts, with a wrapped or hooked
    MLP in a converted layer, or on more than one device.
    """
    if consolidated(model):
        raise ConfigError(
            "a base with consolidated updates cannot be calibrated on; call npt.unconsolidate first"
        )
    for index, layer in npt_layers(model):
        check_layer_readable(index, layer)
    devices = list(dict.fromkeys(str(parameter.device) for parameter in model.parameters()))
    if is_sharded(model) or len(devices) > 1:
        where = "sharded over processes" if is_sharded(model) else f"on {' and '.join(devices)}"
        raise NotSupportedError(
            f"the base is {where}, and calibration needs it on one device; use --init random"
        )


def check_calibration(
    config: NPTConfig,
    rank_budget: int | None,
    layers: int | None = None,
    hidden_size: int | None = None,
) -> None:
    """Refuse settings of a calibrated start that cannot work, before anything is loaded. layers,
    hidden_size: converted layers and D, if known.
    """
    if config.init != "calibrated":
        if rank_budget is not None:
            raise ConfigError(
                f"--rank_budget is {rank_budget}, which means nothing without --init calibrated;"
                " add it or drop the other"
            )
        return
    _check_residual(config)
    if rank_budget is not None:
        if config.ranks is not None:
            raise ConfigError(
                f"--rank_budget is {rank_budget} next to --ranks"
                f" {','.join(map(str, config.ranks))}; drop one of the two"
            )
        if layers is not None and hidden_size is not None:
            check_budget(rank_budget, layers, hidden_size)


def check_budget(budget: int, layers: int, hidden_size: int) -> None:
    """Refuse a budget that leaves a layer without a rank, or that cannot be spent."""
    if not layers <= budget <= layers * hidden_size:
        raise ConfigError(
            f"--rank_budget is {budget}; {layers} converted layers of a model of hidden size"
            f" {hidden_size} take {layers} to {layers * hidden_size} ranks in all"
        )


def spend(budget: int, worth: Mapping[int, Sequence[float]]) -> dict[int, int]:
    """Return ranks by layer: one each, then always one more for the layer whose next direction is
    worth most, the lowest of equal ones. worth: of each direction by layer, largest first.
    """
    ranks = dict.fromkeys(worth, 1)
    queue = [(-values[1], index) for index, values in worth.items() if len(values) > 1]
    heapq.heapify(queue)
    for _ in range(budget - len(ranks)):
        _, index = heapq.heappop(queue)
        ranks[index] += 1
        if ranks[index] < len(worth[index]):
            heapq.heappush(queue, (-worth[index][ranks[index]], index))
    return ranks


def _check_settings(config: NPTConfig, tokens: int, inputs: str, rounds: int) -> None:
    _check_residual(config)
    if config.mult_form != "sigmoid":
        raise NotSupportedError(
            f"calibration solves the sigmoid form, but --mult_form is {config.mult_form}; use"
            " --init random"
        )
    if inputs not in CALIBRATION_INPUTS:
        raise ConfigError(
            f"--calibration_inputs is {inputs!r}; choose from {', '.join(CALIBRATION_INPUTS)}"
        )
    for flag, value, low in (("calibration_tokens", tokens, 1), ("calibration_rounds", rounds, 0)):
        if value < low:
            raise ConfigError(f"--{flag} is {value}; it must be at least {low}")


def _check_residual(config: NPTConfig) -> None:
    if config.residual == "keep":
        raise NotSupportedError(
            "adapters with --residual keep start equal to their base, which is what calibration"
            " solves for; use --init random"
        )


def _tensors(
    model: PreTrainedModel, config: NPTConfig, solutions: dict[int, Solution]
) -> dict[str, Tensor]:
    """Return the solutions by the names of the adapters' parameters.

    B is divided by alpha, which the forward multiplies it with.
    """
    found: dict[str, Tensor] = {}
    for index, solution in solutions.items():
        divided = {
            name: x / config.additive_scale if name.startswith("B.") else x
            for name, x in solution.parameters.items()
        }
        for name, value in balanced(divided).items():
            found[f"model.layers.{index}.npt.{name}"] = value
    assert found.keys() == adapter_shapes(model, config).keys()
    return found


def balanced(parameters: Parameters) -> Parameters:
    """Return the same adapter in numbers that training can change evenly.

    A row of A times c and the columns of B and M that read it over c give the same student for any
    c. Solved for a code of unit variance, entries of A are a few hundredths and those of B a few
    units, while AdamW moves every entry by the learning rate: A is thrown away before B has begun.
    So c makes the root mean squares of both equal; it is a power of two, by which fp32 multiplies
    exactly.

    Args:
        parameters: of one layer, `A` [R, D], `B.*` and `M.*` [O, R].
    """
    readers = torch.cat([value for name, value in parameters.items() if name != "A"])
    sizes = readers.square().mean(dim=0).sqrt() / parameters["A"].square().mean(dim=1).sqrt()
    factor = torch.exp2(torch.round(torch.log2(sizes) / 2))
    # a row that nothing reads, or that reads nothing
    factor = torch.where(torch.isfinite(factor) & (factor > 0), factor, 1.0)
    return {
        name: value * factor.unsqueeze(1) if name == "A" else value / factor
        for name, value in parameters.items()
    }


def _figures(solution: Solution) -> LayerCalibration:
    stages = {"before": solution.floor, "linear": solution.linear, "after": solution.final}
    errors = {
        f"{kind}_{name}": getattr(found, attribute)
        for kind, attribute in (("nmse", "nmse"), ("update", "update"), ("kl", "cost"))
        for name, found in stages.items()
    }
    return LayerCalibration(
        rank=len(solution.parameters["A"]), ridge=solution.ridge, rounds=solution.rounds, **errors
    )
