"""`calibrate`: the closed-form start of attached adapters, from text and nothing else.

Two walks over the calibration tokens. The first measures what the teacher's predictions are
sensitive to (`sensitivity`) and, where a budget is to be spent, what a rank is worth in each layer.
The second goes up layer by layer: the state in front of a layer is on disk for every token, so each
layer's attention is computed once, and solving it (`solve`) reads its rows as often as it likes.

The adapters are written when all layers are solved and every number is finite; until then nothing
is changed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import (
    adapter_shapes,
    adapters_disabled,
    attached_config,
    decoder_layers,
    is_sharded,
    npt_layers,
    set_adapters,
)
from npt.adapters.consolidate import consolidated
from npt.adapters.fit import format_layers
from npt.adapters.layer import NPTLayer, attention_output
from npt.adapters.stream import Stream, open_stream
from npt.calibration.placement import HOST, Placement, free_bytes, or_on_host, release
from npt.calibration.plan import Display, Plan, plan
from npt.calibration.precision import full_precision
from npt.calibration.ranks import check_budget, spend
from npt.calibration.report import Calibration, LayerCalibration
from npt.calibration.rows import Rows
from npt.calibration.sensitivity import measure
from npt.calibration.solve import CHUNK, METRIC_FLOOR, Problem, Solution, solve, worth
from npt.calibration.tail import Parameters, Tail, check_layer_readable
from npt.config import CALIBRATION_INPUTS, DataConfig, NPTConfig
from npt.console import silent_console
from npt.data.batch import Batch, Sample, batches, pad_id_of
from npt.data.samples import cut, within
from npt.data.source import Record
from npt.errors import ConfigError, NotSupportedError, NumericalError, TooLittleTextError
from npt.random_state import kept_random_state

HELDOUT_ONE_IN = 8
"""Batches that choose ridge and steps instead of being fitted."""

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
    rounds: int = 3,
    rank_budget: int | None = None,
    max_length: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    console: Console | None = None,
) -> Calibration:
    """Solve the attached adapters for what their layers lack without attention in the stream. No
    optimizer is involved.

    All or nothing: whatever is refused, the adapters stay as they are. fp32 products are computed
    at `highest` precision, whatever torch is set to.

    Args:
        model: with adapters attached, quantised or not; only the adapters change, and with
            `rank_budget` their ranks.
        tokenizer: of the base model.
        data: records, or samples already cut; training data, never what the student is to be
            measured on. One batch in eight is not fitted, but chooses ridge and steps.
        tokens: to use at most, from the data's beginning. Each takes three fp32 rows of D, in a
            GPU's free memory or in a temporary file; other memory grows by 1 GiB at most.
        inputs: what a layer reads, the `teacher`'s state or what the calibrated layers below it
            give (`propagated`). The target is the teacher's own state either way.
        rounds: of Gauss-Newton per layer, up to twice as many while they gain much; 0 leaves the
            linear solution, in which M is 0.
        rank_budget: ranks of all layers together, spent where they are worth most, in place of the
            configuration's.
        max_length: tokens of a sample, when `data` are records.
        batch_size: samples at a time, of which one graph through the whole teacher is held.
        seed: of the draws from the teacher's predictions.
        console: where to say what it will take and how far it is; default nowhere.

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
    config = attached_config(model)
    check_base(model)
    layers = tuple(index for index, _ in npt_layers(model))
    _check(config, len(layers), model.config.hidden_size, tokens, inputs, rounds, rank_budget)
    started = time.perf_counter()
    samples = _samples(data, tokenizer, max_length, tokens, model.config.vocab_size)
    parts = _split(list(batches(samples, batch_size, pad_id_of(tokenizer))))
    ranks = (
        config.ranks_of(len(layers))
        if rank_budget is None
        else (-(-rank_budget // len(layers)),) * len(layers)
    )
    fitted = parts.tokens - parts.heldout
    if fitted < TOKENS_PER_RANK * max(ranks):
        raise TooLittleTextError(
            f"calibration has {fitted} tokens to fit, and rank {max(ranks)} needs"
            f" {TOKENS_PER_RANK * max(ranks)}; give it more data or tokens (--calibration_tokens),"
            " or lower --adapter_rank"
        )
    device = next(model.parameters()).device
    work = plan(
        config,
        model.config,
        layers,
        ranks,
        parts.tokens,
        rounds,
        inputs=inputs,
        rank_budget=rank_budget,
        batch=max(((len(b.input_ids), b.input_ids.shape[1]) for b in parts.batches), key=math.prod),
    )
    free = free_bytes(device) if device.type == "cuda" else 0
    placement = work.place(device, free)
    display = Display(
        console if console is not None else silent_console(), _steps(parts, len(layers), rounds)
    )
    with full_precision():
        display.say(_announced(work, device, placement, free, layers, parts.tokens))
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with closing(display):
            task = _Task(model, parts, layers, inputs, rounds, seed, display)
            solutions, config = _solutions(task, config, ranks, rank_budget, work, placement, free)
    finally:
        for module in training:
            module.training = True
        release(device)
    set_adapters(model, config, _tensors(model, config, solutions))
    figures = {index: _figures(solution) for index, solution in solutions.items()}
    return Calibration(figures, parts.tokens, parts.heldout, inputs, time.perf_counter() - started)


def check_base(model: PreTrainedModel) -> None:
    """Refuse bases that no start is solved on.

    Raises:
        ConfigError: a fact was consolidated into it: the rows beside its products are not part of
            what is solved.
        ModelError: something was put around, or hooked to, the MLP of a converted layer, and is not
            part of it either.
        NotSupportedError: no one device has all of it.
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
    """Refuse settings of a calibrated start that cannot work, before anything is loaded.

    Args:
        config: of the adapters.
        rank_budget: as asked for.
        layers, hidden_size: converted layers and D, where known.

    Raises:
        ConfigError, NotSupportedError.
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
                f"--rank_budget is {rank_budget} beside --ranks {','.join(map(str, config.ranks))};"
                " drop one of the two"
            )
        if layers is not None and hidden_size is not None:
            check_budget(rank_budget, layers, hidden_size)


@dataclass(frozen=True)
class _Parts:
    """Batches, those that are not fitted last, and their tokens."""

    batches: list[Batch]
    tokens: int
    heldout: int


@dataclass(frozen=True)
class _Task:
    """A calibration that was found sound. layers: converted ones."""

    model: PreTrainedModel
    parts: _Parts
    layers: tuple[int, ...]
    inputs: str
    rounds: int
    seed: int
    display: Display


def _solutions(
    task: _Task,
    config: NPTConfig,
    ranks: tuple[int, ...],
    rank_budget: int | None,
    work: Plan,
    placement: Placement,
    free: int,
) -> tuple[dict[int, Solution], NPTConfig]:
    """Solve every layer, on the host where a device has no memory for it.

    Returns:
        Solutions by layer, and the configuration with the ranks that a budget was spent on.
    """
    device, say = next(task.model.parameters()).device, task.display.say
    found, placement = or_on_host(
        lambda where: _prepared(task, None if rank_budget is not None else ranks, where),
        placement,
        say,
    )
    if rank_budget is not None:
        spent = spend(rank_budget, {index: layer.worth for index, layer in found.items()})
        config = replace(config, ranks=tuple(spent.values()))
    ranks = config.ranks_of(len(task.layers))
    walk = _Walk(task, found, dict(zip(task.layers, ranks, strict=True)))
    solutions, _ = or_on_host(
        lambda where: walk.run(where, work.keep(device, where, free)), placement, say
    )
    return solutions, config


@dataclass(frozen=True)
class _Prepared:
    """What the first walk found of a layer. worth: of each direction. directions: the code's, as
    rows, those that may be taken, fp32. metric: G with its floor, [D, D] fp32."""

    worth: list[float]
    directions: Tensor
    metric: Tensor

    def on_host(self) -> _Prepared:
        return replace(self, directions=self.directions.to(HOST), metric=self.metric.to(HOST))


def _prepared(
    task: _Task, ranks: tuple[int, ...] | None, placement: Placement
) -> dict[int, _Prepared]:
    """Measure the teacher's sensitivity and reduce it, layer by layer, to what solving needs.

    Args:
        task: the calibration.
        ranks: of the layers, None if they are still to be chosen.
        placement: of the matrices.
    """
    display = task.display
    display.stage("teacher's sensitivity", 0)
    sensitivities = measure(
        task.model,
        task.parts.batches,
        task.seed,
        lambda batch: display.tick(_chunks(batch.tokens)),
        placement.sums,
    )
    prepared = {}
    for number, index in enumerate(task.layers):
        found = sensitivities.pop(index)  # its matrices are freed when the next layer's turn comes
        values, directions = worth(
            found.covariance.to(placement.factors), found.to_attention.to(placement.factors)
        )
        kept = directions if ranks is None else directions[: ranks[number]]
        metric = found.to_output
        metric.diagonal().add_(METRIC_FLOOR * metric.diagonal().mean())
        prepared[index] = _Prepared(
            values.tolist(), kept.to(placement.sums, torch.float32), metric.to(torch.float32)
        )
    return prepared


class _Walk:
    """The second walk: up through the layers, all tokens at once."""

    def __init__(self, task: _Task, prepared: dict[int, _Prepared], ranks: dict[int, int]):
        self.model, self.parts, self.display = task.model, task.parts, task.display
        self.rounds, self.propagated = task.rounds, task.inputs == "propagated"
        self.prepared, self.ranks = prepared, ranks
        self.device = next(task.model.parameters()).device
        self.placement, self.keep = Placement(), 0
        self.solutions: dict[int, Solution] = {}

    def run(self, placement: Placement, keep: int) -> dict[int, Solution]:
        """Return each converted layer's solution. Begun again, it solves those that are left.

        Args:
            placement: of the rows and of what is factorised.
            keep: bytes of linearisations that may be held.
        """
        self.placement, self.keep = placement, keep
        if placement.all_on_host:  # also what an earlier attempt left on the device
            self.prepared = {index: layer.on_host() for index, layer in self.prepared.items()}
        model, count, width = self.model, self.parts.tokens, self.model.config.hidden_size
        layers = decoder_layers(model)
        converted = [index for index, _ in npt_layers(model)]
        teacher, attention, target = (Rows(count, width, placement.rows) for _ in range(3))
        student: Rows | None = None  # until the first converted layer there is one stream
        solutions = self.solutions
        with torch.no_grad(), adapters_disabled(model):
            self._open(teacher, layers[: converted[0]])
            for index in range(converted[0], converted[-1] + 1):
                layer = layers[index]
                if not isinstance(layer, NPTLayer):
                    self._pass(layer, teacher)
                    if student is not None:
                        self._pass(layer, student)
                    continue
                self.display.stage(
                    f"layer {index}", _steps(self.parts, converted.index(index), self.rounds)
                )
                own = teacher if student is None else student
                self._attend(index, layer, teacher, attention, target)
                if student is not None:
                    self._attend(index, layer, student, attention, None)
                tail = Tail(layer)
                if index not in solutions:
                    solutions[index] = self._solve(index, tail, own, attention, target)
                    self._say_solved(index, solutions[index])
                if self.propagated and index != converted[-1]:
                    student = student if student is not None else Rows(count, width, placement.rows)
                    self._move(tail, solutions[index].parameters, own, attention, student)
                teacher, target = target, teacher
        return solutions

    def _say_solved(self, index: int, solution: Solution) -> None:
        if not self.display.console.is_terminal:
            floor, linear, final = solution.floor, solution.linear, solution.final
            self.display.say(
                f"layer {index}: NMSE {floor.nmse:.5f}, linear {linear.nmse:.5f}, now"
                f" {final.nmse:.5f}"
            )

    def _streams(self) -> Iterable[tuple[int, Stream]]:
        """Each batch's context, and where its rows begin."""
        start = 0
        for batch in self.parts.batches:
            yield start, open_stream(self.model, batch.to(self.device))
            start += batch.tokens

    def _open(self, states: Rows, layers: Iterable[Any]) -> None:
        """The state behind the first `layers`."""
        layers = list(layers)
        for start, stream in self._streams():
            hidden = stream.hidden
            for layer in layers:
                hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
            states.write(start, stream.rows(hidden))

    def _pass(self, layer: Any, states: Rows) -> None:
        """One layer of the base, in place."""
        for start, stream in self._streams():
            hidden = stream.scatter(self._hidden(states, start, stream))
            states.write(start, stream.rows(layer(hidden, **stream.context_of(layer))))

    def _attend(
        self, index: int, layer: NPTLayer, states: Rows, attention: Rows, target: Rows | None
    ) -> None:
        """a of a converted layer, and t if asked for, from the states in front of it."""
        for start, stream in self._streams():
            h = self._hidden(states, start, stream)
            a = stream.rows(attention_output(layer, stream.scatter(h), **stream.context_of(layer)))
            attention.write(start, _finite(index, "attention output", a))
            if target is not None:
                behind = h + a
                t = behind + layer.mlp(layer.post_attention_layernorm(behind))
                target.write(start, _finite(index, "output", t))

    def _hidden(self, states: Rows, start: int, stream: Stream) -> Tensor:
        return states.read(start, start + stream.batch.tokens, self.device).to(stream.hidden.dtype)

    def _solve(self, index: int, tail: Tail, h: Rows, a: Rows, t: Rows) -> Solution:
        found, rank = self.prepared[index], self.ranks[index]
        problem = Problem(
            tail,
            h,
            a,
            t,
            self.parts.heldout,
            found.metric.to(self.device),
            self.display.tick,
            factors=self.placement.factors,
            keep=self.keep,
        )
        with full_precision():
            code = found.directions[:rank].to(self.device)
            solution = solve(problem, code, tail.form(rank), self.rounds)
        for name, value in solution.parameters.items():
            if not bool(torch.isfinite(value).all()):
                raise NumericalError(
                    f"calibration: {name} of layer {index} came out non-finite; nothing was"
                    " changed, start with --init random"
                )
        return solution

    def _move(self, tail: Tail, p: Parameters, h: Rows, a: Rows, to: Rows) -> None:
        """The calibrated student's state behind the layer."""
        for start in range(0, len(h), CHUNK):
            stop = min(len(h), start + CHUNK)
            rows = h.read(start, stop, self.device)
            with full_precision():
                output = tail.at(p, rows, a.read(start, stop, self.device)).output
            to.write(start, rows + output)


def _check(
    config: NPTConfig,
    layers: int,
    width: int,
    tokens: int,
    inputs: str,
    rounds: int,
    rank_budget: int | None,
) -> None:
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
    if rank_budget is not None:
        check_budget(rank_budget, layers, width)


def _check_residual(config: NPTConfig) -> None:
    if config.residual == "keep":
        raise NotSupportedError(
            "adapters with --residual keep start equal to their base, which is what calibration"
            " solves for; use --init random"
        )


def _samples(
    data: Iterable[Record] | Iterable[Sample],
    tokenizer: Any,
    max_length: int,
    tokens: int,
    vocab_size: int,
) -> list[Sample]:
    """Samples of `tokens` tokens in all, the last one cut; those with ids outside the vocabulary,
    which training refuses, are left out.
    """
    items = iter(data)
    first = next(items, None)
    rest: Iterable[Any] = [] if first is None else itertools.chain([first], items)
    found, left = [], tokens
    for sample in within(
        (
            rest
            if isinstance(first, Sample)
            else cut(rest, tokenizer, DataConfig(max_length=max_length))
        ),
        vocab_size,
    ):
        sample = _shortened(sample, left)
        found.append(sample)
        left -= len(sample.input_ids)
        if left < 2:
            break
    if len(found) < 2:
        raise TooLittleTextError(
            "calibration needs two samples of text, one to fit and one to check, and the data gave"
            f" {len(found)}; give it more"
        )
    return found


def _shortened(sample: Sample, length: int) -> Sample:
    if len(sample.input_ids) <= length:
        return sample
    labels = None if sample.labels is None else sample.labels[:length]
    lengths, kept = [], length
    for document in sample.lengths or ():
        lengths.append(min(document, kept))
        kept -= lengths[-1]
    documents = None if sample.lengths is None else tuple(size for size in lengths if size)
    return replace(sample, input_ids=sample.input_ids[:length], labels=labels, lengths=documents)


def _split(found: list[Batch]) -> _Parts:
    """Every eighth batch is held out and stands last."""
    if len(found) == 1:
        raise TooLittleTextError(
            "calibration fills one batch only, and needs one to fit and one to check; give it more"
            " data, or lower --batch_size"
        )
    heldout = found[HELDOUT_ONE_IN - 1 :: HELDOUT_ONE_IN] or found[-1:]
    chosen = {id(batch) for batch in heldout}
    fitted = [batch for batch in found if id(batch) not in chosen]
    return _Parts([*fitted, *heldout], sum(b.tokens for b in found), sum(b.tokens for b in heldout))


def _steps(parts: _Parts, layers: int, rounds: int) -> int:
    """Chunks of tokens that are gone through, about: what the bar counts."""
    return _chunks(parts.tokens) * (1 + layers * (12 + 14 * rounds))


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)


def _finite(index: int, name: str, rows: Tensor) -> Tensor:
    if not bool(torch.isfinite(rows).all()):
        raise NumericalError(
            f"calibration: the {name} of layer {index} is not finite; find its cause with npt"
            " trace, nothing was changed"
        )
    return rows


def _tensors(
    model: PreTrainedModel, config: NPTConfig, solutions: dict[int, Solution]
) -> dict[str, Tensor]:
    """The solutions by the names of the adapters' parameters; B is divided by alpha, which the
    forward multiplies it with.
    """
    found: dict[str, Tensor] = {}
    for index, solution in solutions.items():
        divided = {
            name: x / config.additive_scale if name.startswith("B.") else x
            for name, x in solution.parameters.items()
        }
        found |= {
            f"model.layers.{index}.npt.{name}": value for name, value in balanced(divided).items()
        }
    assert found.keys() == adapter_shapes(model, config).keys()
    return found


def balanced(parameters: Parameters) -> Parameters:
    """The same adapter in numbers that training can change evenly.

    A row of A times c and the columns of B and M that read it over c give the same student for any
    c. Solved for a code of unit variance, entries of A are a few hundredths and those of B a few
    units, while AdamW moves every entry by the learning rate: A is thrown away before B has begun.
    So c makes the root mean squares of both equal; it is a power of two, by which fp32 multiplies
    exactly.

    Args:
        parameters: of one layer, `A` [R, D], `B.*` and `M.*` [O, R].
    """
    behind = torch.cat([value for name, value in parameters.items() if name != "A"])
    sizes = behind.square().mean(dim=0).sqrt() / parameters["A"].square().mean(dim=1).sqrt()
    factor = torch.exp2(torch.round(torch.log2(sizes) / 2))
    # a row that nothing reads, or that reads nothing
    factor = torch.where(torch.isfinite(factor) & (factor > 0), factor, 1.0)
    return {
        name: value * factor.unsqueeze(1) if name == "A" else value / factor
        for name, value in parameters.items()
    }


def _figures(solution: Solution) -> LayerCalibration:
    floor, linear, final = solution.floor, solution.linear, solution.final
    return LayerCalibration(
        rank=len(solution.parameters["A"]),
        ridge=solution.ridge,
        rounds=solution.rounds,
        nmse_before=floor.nmse,
        nmse_linear=linear.nmse,
        nmse_after=final.nmse,
        update_before=floor.update,
        update_linear=linear.update,
        update_after=final.update,
        kl_before=floor.cost,
        kl_linear=linear.cost,
        kl_after=final.cost,
    )


def _announced(
    work: Plan,
    device: torch.device,
    placement: Placement,
    free: int,
    layers: tuple[int, ...],
    tokens: int,
) -> str:
    """One line: what is about to be done, what it takes, and where."""
    seconds = work.seconds(device, placement)
    parts = [
        f"calibrating layers {format_layers(layers)} on {tokens:,} tokens: about"
        f" {_duration(seconds.total)}"
    ]
    if seconds.factorisations >= 0.1 * seconds.total:
        parts.append(f"{_duration(seconds.factorisations)} of it eigendecompositions")
    if device != HOST:
        needed = work.peak(device, placement) + work.keep(device, placement, free)
        parts.append(f"{needed >> 20:,} of {free >> 20:,} MiB free on {device}")
    parts.append(f"{work.ram(device, placement) >> 20:,} MiB of memory beside the base")
    parts.append(f"{work.disk(placement) >> 20:,} MiB of temporary disk")
    return ", ".join(parts) + ("" if device == HOST else f"; {placement}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
