"""The two walks of a calibration over its tokens, up through the layers of the base.

The first measures what the teacher's predictions are sensitive to, batch by batch through the whole
teacher. The second takes all tokens through one layer after another: the state before a layer is on
disk for every token, so its attention is computed once, and solving it reads rows as often as
needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapters_disabled, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer, attention_output
from npt.adapters.stream import Stream, open_stream
from npt.base.quantization_error import fp32_products
from npt.calibration.placement import HOST, Placement
from npt.calibration.report import Display
from npt.calibration.rows import Rows
from npt.calibration.samples import Parts
from npt.calibration.sensitivity import check_finite, measure
from npt.calibration.solve import CHUNK, METRIC_FLOOR, Problem, Solution, solve, worth
from npt.calibration.tail import Parameters, Tail
from npt.errors import NumericalError


@dataclass(frozen=True)
class Prepared:
    """Findings of the first walk for a layer. worth: of each direction. directions: the code's, as
    rows, those that may be taken, fp32. metric: G with its floor, [D, D] fp32."""

    worth: list[float]
    directions: Tensor
    metric: Tensor


def steps(parts: Parts, layers: int, rounds: int) -> int:
    """Return about how many chunks of tokens are read: the bar counts them."""
    return _chunks(parts.tokens) * (1 + layers * (4 + rounds))


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)


class Walks:
    """Both walks of one calibration; what the first found and each solved layer are kept, so that a
    walk that ran out of memory is begun again with what it has.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parts: Parts,
        rounds: int,
        propagated: bool,
        display: Display,
        seed: int,
    ):
        self.model, self.parts, self.display, self.seed = model, parts, display, seed
        self.rounds, self.propagated = rounds, propagated
        self.converted = [index for index, _ in npt_layers(model)]
        self.device = next(model.parameters()).device
        self.prepared: dict[int, Prepared] = {}
        self.solutions: dict[int, Solution] = {}

    def measure(self, ranks: Sequence[int] | None, placement: Placement) -> None:
        """Measure the teacher's sensitivity and reduce it to what solving needs of each layer.
        ranks: None if they are still to be chosen.
        """
        self.display.stage("teacher's sensitivity", 0)
        sensitivities = measure(
            self.model,
            self.parts.batches,
            self.seed,
            lambda batch: self.display.tick(_chunks(batch.tokens)),
            placement.sums,
        )
        prepared = {}
        for number, index in enumerate(self.converted):
            found = sensitivities.pop(index)  # its matrices are freed at the next layer
            values, directions = worth(
                found.covariance.to(placement.factors), found.to_attention.to(placement.factors)
            )
            kept = directions if ranks is None else directions[: ranks[number]]
            metric = found.to_output
            metric.diagonal().add_(METRIC_FLOOR * metric.diagonal().mean())
            prepared[index] = Prepared(
                values.tolist(), kept.to(placement.sums, torch.float32), metric.to(torch.float32)
            )
        self.prepared = prepared

    def solve(self, ranks: Sequence[int], placement: Placement) -> None:
        """Solve the layers that are not solved yet."""
        if placement.all_on_host:  # also what an earlier attempt left on the device
            self.prepared = {
                index: replace(x, directions=x.directions.to(HOST), metric=x.metric.to(HOST))
                for index, x in self.prepared.items()
            }
        layers, first, last = decoder_layers(self.model), self.converted[0], self.converted[-1]
        teacher, attention, target = (self._rows(placement) for _ in range(3))
        student: Rows | None = None  # until the first converted layer there is one stream
        with torch.no_grad(), adapters_disabled(self.model):
            self._open(teacher, list(layers[:first]))
            for index in range(first, last + 1):
                layer = layers[index]
                if not isinstance(layer, NPTLayer):
                    for states in (teacher, student):
                        if states is not None:
                            self._pass(layer, states)
                    continue
                number = self.converted.index(index)
                self.display.stage(f"layer {index}", steps(self.parts, number, self.rounds))
                own = teacher if student is None else student
                self._attend(index, layer, teacher, attention, target)
                if student is not None:
                    self._attend(index, layer, student, attention, None)
                tail = Tail(layer)
                if index not in self.solutions:
                    problem = Problem(
                        tail,
                        own,
                        attention,
                        target,
                        self.parts.heldout,
                        self.prepared[index].metric.to(self.device),
                        self.display.tick,
                        factors=placement.factors,
                    )
                    self.solutions[index] = self._solved(index, problem, ranks[number])
                if self.propagated and index != last:
                    student = self._rows(placement) if student is None else student
                    self._move(tail, self.solutions[index].parameters, own, attention, student)
                teacher, target = target, teacher

    def _rows(self, placement: Placement) -> Rows:
        return Rows(self.parts.tokens, self.model.config.hidden_size, placement.rows)

    def _solved(self, index: int, problem: Problem, rank: int) -> Solution:
        with fp32_products("highest"):
            code = self.prepared[index].directions[:rank].to(self.device)
            solution = solve(problem, code, problem.tail.form(rank), self.rounds, self.seed)
        if not math.isfinite(solution.final.cost):
            raise NumericalError(
                f"calibration: the error of layer {index} is {solution.final.cost}; nothing was"
                " changed, start with --init random"
            )
        for name, value in solution.parameters.items():
            if not bool(torch.isfinite(value).all()):
                raise NumericalError(
                    f"calibration: {name} of layer {index} came out non-finite; nothing was"
                    " changed, start with --init random"
                )
        if not self.display.console.is_terminal:
            self.display.say(
                f"layer {index}: NMSE {solution.floor.nmse:.5f}, linear"
                f" {solution.linear.nmse:.5f}, now {solution.final.nmse:.5f}"
            )
        return solution

    def _streams(self) -> Iterator[tuple[int, Stream]]:
        """Yield each batch's context, and the number of its first row."""
        start = 0
        for batch in self.parts.batches:
            yield start, open_stream(self.model, batch.to(self.device))
            start += batch.tokens

    def _open(self, states: Rows, layers: list[Any]) -> None:
        """Write the state after the first `layers`."""
        for start, stream in self._streams():
            hidden = stream.hidden
            for layer in layers:
                hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
            states.write(start, stream.rows(hidden))

    def _pass(self, layer: Any, states: Rows) -> None:
        """Pass the states through one layer of the base, in place."""
        for start, stream in self._streams():
            hidden = stream.scatter(self._hidden(states, start, stream))
            states.write(start, stream.rows(layer(hidden, **stream.context_of(layer))))

    def _attend(
        self, index: int, layer: NPTLayer, states: Rows, attention: Rows, target: Rows | None
    ) -> None:
        """Write a of a converted layer, and t if asked for, from the states before it."""
        for start, stream in self._streams():
            h = self._hidden(states, start, stream)
            a = stream.rows(attention_output(layer, stream.scatter(h), **stream.context_of(layer)))
            attention.write(start, check_finite(index, "attention output", a))
            if target is not None:
                sums = h + a
                t = sums + layer.mlp(layer.post_attention_layernorm(sums))
                target.write(start, check_finite(index, "output", t))

    def _hidden(self, states: Rows, start: int, stream: Stream) -> Tensor:
        return states.read(start, start + stream.batch.tokens, self.device).to(stream.hidden.dtype)

    def _move(self, tail: Tail, p: Parameters, h: Rows, a: Rows, to: Rows) -> None:
        """Write the calibrated student's state after the layer."""
        for start in range(0, len(h), CHUNK):
            stop = min(len(h), start + CHUNK)
            rows = h.read(start, stop, self.device)
            with fp32_products("highest"):
                output = tail.at(p, rows, a.read(start, stop, self.device)).output
            to.write(start, rows + output)
