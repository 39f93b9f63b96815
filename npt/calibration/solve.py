"""Solving one layer: a linear start in closed form, then a few Gauss-Newton rounds on all of A, B
and M at once.

The cost is the mean over tokens of e'G e, e = t - o, with G the mean of g g' over tokens and g the
gradient, at t, of the teacher's log-likelihood of a token drawn from its own prediction. Half of it
is, to second order, what the error costs in KL(teacher, student): an error that the layers above do
not read costs nothing.

1. Directions. s is the same gradient with respect to the attention output a, S = E s s',
   C = E a a'. A loses least in KL, to second order, if its rows span C^(-1/2) times the top
   eigenvectors of C^(1/2) S C^(1/2): one code for gate, up and down together. An eigenvalue is
   the worth of its direction, comparable between layers. z = A a has unit covariance then.
2. Linear start. B.gate and B.up by ridge regression of gate(x_t) - gate(x), up(x_t) - up(x) on z,
   x_t being the input of the teacher's MLP; B.down of what the output still lacks after these two.
   The ridge is chosen on held-out tokens. M stays 0.
3. Gauss-Newton. The layer is linearised in all its parameters, and the least-squares problem solved
   by conjugate gradients in coordinates in which a unit change of any parameter moves the output
   about as much as of any other. A step is taken if it lowers the cost on held-out tokens; else it
   is shortened, and damped more in the next round.

All sums run over chunks of tokens, so memory does not grow with their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from npt.calibration.placement import HOST
from npt.calibration.rows import Rows
from npt.calibration.tail import Linearised, Parameters, Tail
from npt.distill.divergence import nmse_per_token

CHUNK = 2048
"""Tokens at a time."""

RIDGES = (1e-6, 1e-4, 1e-2, 1e-1)
"""Ridges that are tried, relative to the mean variance of the code."""

DAMPING = 1e-3
"""Levenberg damping at first; in the scaled coordinates each parameter's curvature is about 1."""

CG_STEPS = 12
STEP_SIZES = (1.0, 0.5, 0.25, 0.125)
ENOUGH = 0.005
"""A round that lowers the held-out cost by a smaller share than this is the last."""

STILL_WORTH_A_ROUND = 0.1
"""A layer that gained more than this share in its last round gets another, up to twice as many."""

METRIC_FLOOR = 1e-2
"""Share of G's mean eigenvalue that is added to all: other tokens may read other directions."""

SMALLEST = 1e-5
"""Eigenvalues of a covariance below this share of its largest one are taken for it. Attention
outputs all but vanish in some directions; a code that had unit variance there would be made of
rounding, and fitted to noise."""


@dataclass(frozen=True)
class Problem:
    """A layer's tokens: the student reads `h` and `a` and is to give `t`. The last `heldout` rows
    decide and are not fitted.

    metric: G, [D, D] fp32, on the device. factors: device of fp64 sums and factorisations. keep:
    bytes of linearisations that a round may hold instead of computing them again in each pass.
    """

    tail: Tail
    h: Rows
    a: Rows
    t: Rows
    heldout: int
    metric: Tensor
    tick: Callable[[], None] = lambda: None
    factors: torch.device = HOST
    keep: int = 0

    @property
    def fitted(self) -> int:
        return len(self.h) - self.heldout

    @cached_property
    def code_coordinates(self) -> Tensor:
        """C^(-1/2) of a on all fitted tokens, [D, D] fp32: the coordinates of A's rows, the same in
        every round.
        """
        width = self.metric.shape[0]
        gram, count = _zeros(width, width, self.factors), 0
        for (a,) in self.fit_of(self.a):
            gram += (a.T @ a).to(gram.device)
            count += len(a)
        return roots(gram / count)[1].to(self.metric)

    def chunks(self, start: int, stop: int, *rows: Rows) -> Iterator[tuple[Tensor, ...]]:
        """Yield `rows` from `start` up to `stop` on the metric's device, a chunk at a time."""
        for first in range(start, stop, CHUNK):
            last = min(stop, first + CHUNK)
            self.tick()
            yield tuple(part.read(first, last, self.metric.device) for part in rows)

    def fit_of(
        self, *rows: Rows, share: float = 1.0, start: int = 0
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the `rows` of a share of the fitted tokens, without those before `start`."""
        return self.chunks(start, max(1, round(share * self.fitted)), *rows)

    def fit(self, share: float = 1.0) -> Iterator[tuple[Tensor, ...]]:
        """Yield (h, a, t) of a share of the fitted tokens."""
        return self.fit_of(self.h, self.a, self.t, share=share)

    def check(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield (h, a, t) of the held-out tokens."""
        return self.chunks(self.fitted, len(self.h), self.h, self.a, self.t)


@dataclass(frozen=True)
class Errors:
    """Means over the held-out tokens: `cost` e'G e / 2, about nats; `nmse` ||e||^2 / ||t||^2;
    `update` ||e||^2 / ||t - h||^2."""

    cost: float
    nmse: float
    update: float


@dataclass(frozen=True)
class Solution:
    """A solved layer. floor: errors without modulation. linear: of the start in closed form. final:
    after the last round."""

    parameters: Parameters
    ridge: float
    rounds: int
    floor: Errors
    linear: Errors
    final: Errors


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return `torch.linalg.eigh` of [D, D] fp64, on the host if the matrix's own device fails:
    LAPACK and cuSOLVER give up on different matrices.
    """
    try:
        return torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        if matrix.device == HOST:
            raise
        values, vectors = torch.linalg.eigh(matrix.to(HOST))
        return values.to(matrix.device), vectors.to(matrix.device)


def roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^(1/2) and C^(-1/2) of a covariance [D, D] fp64."""
    values, vectors = eigh(covariance)
    values = values.clamp_min(SMALLEST * float(values[-1]))
    return (vectors * values.sqrt()) @ vectors.T, (vectors * values.rsqrt()) @ vectors.T


def worth(covariance: Tensor, sensitivity: Tensor) -> tuple[Tensor, Tensor]:
    """Return the worth of each direction of the attention output, largest first, [D], and as rows
    the code directions, [D, D]: eigenvalues of C^(1/2) S C^(1/2), and v' C^(-1/2).

    covariance, sensitivity: C = E a a' and S = E s s', [D, D] fp64.
    """
    root, inverse = roots(covariance)
    values, vectors = eigh(root @ sensitivity @ root)
    return values.flip(0).clamp_min(0.0), (inverse @ vectors).T.flip(0)


def errors(problem: Problem, p: Parameters) -> Errors:
    """Return the errors of the layer with these parameters on the held-out tokens."""
    sums = torch.zeros(3, dtype=torch.float64, device=problem.metric.device)
    for h, a, t in problem.check():
        o = h + problem.tail.at(p, h, a).output
        parts = (0.5 * _cost(t - o, problem.metric), nmse_per_token(o, t), nmse_per_token(o, t, h))
        sums += torch.stack([part.sum(dtype=torch.float64) for part in parts])
    return Errors(*(sums / problem.heldout).tolist())


def solve(problem: Problem, code: Tensor, form: Parameters, rounds: int) -> Solution:
    """Solve for A, B and M of one layer.

    code: A to begin with, [R, D] fp32, such that z has about unit variance. form: zeros of every
    other parameter. rounds: of Gauss-Newton; twice as many as long as they gain much.
    """
    zero = {**form, "A": code}
    floor = errors(problem, zero)
    first = code_sums(problem, zero)

    def start(ridge: float) -> tuple[Errors, Parameters, float]:
        p = linear_start(problem, zero, ridge, first)
        return errors(problem, p), p, ridge

    linear, p, ridge = min(
        map(start, RIDGES if any(name.startswith("B.") for name in form) else (0.0,)),
        key=lambda found: found[0].cost if math.isfinite(found[0].cost) else math.inf,
    )
    final, done, damping = linear, 0, DAMPING
    for number in range(2 * rounds):
        d = gauss_newton_step(problem, p, damping, share=round_share(number, rounds))
        better = None
        for size in STEP_SIZES:
            moved = {name: value + size * d[name] for name, value in p.items()}
            found = errors(problem, moved)
            if found.cost < final.cost:
                better = (found, moved)
                break
        gain = 0.0
        if better is None:
            damping *= 10.0
        else:
            gain = 1.0 - better[0].cost / final.cost
            (final, p), done = better, done + 1
        if (number and better is not None and gain < ENOUGH) or (
            number >= rounds - 1 and gain < STILL_WORTH_A_ROUND
        ):
            break
    return Solution(p, ridge, done, floor, linear, final)


def round_share(number: int, rounds: int) -> float:
    """Return the share of the tokens that round `number` (from 0) fits: all in the last, half as
    many in each before it, a quarter at least. Later rounds improve on the first ones anyway.
    """
    return min(1.0, max(0.25, 0.5 ** (rounds - 1 - number)))


CodeSums = tuple[Tensor, dict[str, Tensor]]
"""Sums over the fitted tokens for the regression of B.gate and B.up: Z'Z [R, R], and by target Z'Y
[R, F] with Y the change by attention, fp64."""


def code_sums(problem: Problem, zero: Parameters) -> CodeSums:
    """Sum the code of `zero` and the changes by attention at gate and up."""
    tail, rank, factors = problem.tail, len(zero["A"]), problem.factors
    moments = {
        target: _zeros(rank, len(zero[f"B.{target}"]), factors)
        for target in ("gate", "up")
        if f"B.{target}" in zero
    }
    gram = _zeros(rank, rank, factors)
    for h, a in problem.fit_of(problem.h, problem.a) if moments else ():
        z = a @ zero["A"].T
        gram += (z.T @ z).to(factors)
        with_attention, without = tail.products(h + a), tail.products(h)
        for target, moment in moments.items():
            k = ("gate", "up").index(target)
            moment += (z.T @ (with_attention[k] - without[k])).to(factors)
    return gram, moments


def linear_start(
    problem: Problem, zero: Parameters, ridge: float, first: CodeSums | None = None
) -> Parameters:
    """Return `zero`, whose B and M are zero, with B by ridge regression on its code.

    ridge: relative to the mean variance of the code. first: `code_sums(problem, zero)`, if known.
    """
    tail, p = problem.tail, dict(zero)
    gram, moments = first or code_sums(problem, zero)
    for target, moment in moments.items():
        p[f"B.{target}"] = _ridge(gram, moment, ridge).to(p["A"])
    rank, factors = len(p["A"]), problem.factors
    if "B.down" in p:
        gram, moment = _zeros(rank, rank, factors), _zeros(rank, len(p["B.down"]), factors)
        for h, a, t in problem.fit():
            at = tail.at(p, h, a)
            gram += (at.z.T @ at.z).to(factors)
            moment += (at.z.T @ (t - h - at.output)).to(factors)
        p["B.down"] = _ridge(gram, moment, ridge).to(p["A"])
    return p


def gauss_newton_step(
    problem: Problem, p: Parameters, damping: float, share: float = 1.0, steps: int = CG_STEPS
) -> Parameters:
    """Return the change of the parameters `p` that minimises the cost linearised there, by
    conjugate gradients on the normal equations.

    damping: added to the curvature, in the scaled coordinates. share: of the tokens that are
    fitted. steps: of conjugate gradients, each a pass over these tokens.
    """
    tail, metric = problem.tail, problem.metric
    count = 0
    gradient = {name: torch.zeros_like(value) for name, value in p.items()}
    curvature = {name: value.new_zeros(len(value)) for name, value in p.items()}
    inner = ((tail.down.T @ metric) * tail.down.T).sum(dim=-1)
    kept: list[Linearised] = []  # of the first chunks
    room = problem.keep
    for h, a, t in problem.fit(share):
        at = tail.at(p, h, a)
        room -= at.nbytes
        if room >= 0:
            kept.append(at)
        _add(gradient, tail.pulled(p, (t - h - at.output) @ metric, at))
        _add_curvature(curvature, at, p, inner, metric.diagonal())
        count += len(h)
    scale = {
        name: (value / count).clamp_min(1e-30).rsqrt().unsqueeze(-1)
        for name, value in curvature.items()
    }
    coordinates = problem.code_coordinates
    scale["A"] = _code_scale(p, curvature, count)

    def to_parameters(x: Parameters) -> Parameters:
        scaled = {name: scale[name] * value for name, value in x.items()}
        return {**scaled, "A": scaled["A"] @ coordinates}

    def from_gradient(g: Parameters) -> Parameters:
        g = {**g, "A": g["A"] @ coordinates}
        return {name: scale[name] * value / count for name, value in g.items()}

    residual = from_gradient(gradient)
    x = {name: torch.zeros_like(value) for name, value in residual.items()}
    direction, energy = dict(residual), _dot(residual, residual)
    for _ in range(steps):
        if not (energy > 0.0 and math.isfinite(energy)):
            break
        d = to_parameters(direction)
        product = {name: torch.zeros_like(value) for name, value in p.items()}
        for at in _linearised(problem, p, share, kept):
            _add(product, tail.pulled(p, tail.pushed(p, d, at) @ metric, at))
        curved = from_gradient(product)
        curved = {name: value + damping * direction[name] for name, value in curved.items()}
        length = energy / _dot(direction, curved)
        x = {name: value + length * direction[name] for name, value in x.items()}
        residual = {name: value - length * curved[name] for name, value in residual.items()}
        before, energy = energy, _dot(residual, residual)
        direction = {
            name: value + (energy / before) * direction[name] for name, value in residual.items()
        }
    return to_parameters(x)


def _linearised(
    problem: Problem, p: Parameters, share: float, kept: list[Linearised]
) -> Iterator[Linearised]:
    """Yield the layer linearised at `p`, chunk by chunk: first the `kept` ones."""
    for at in kept:
        problem.tick()
        yield at
    for h, a in problem.fit_of(problem.h, problem.a, share=share, start=len(kept) * CHUNK):
        yield problem.tail.at(p, h, a)


def _add_curvature(
    curvature: Parameters, at: Linearised, p: Parameters, inner: Tensor, outer: Tensor
) -> None:
    """Add the curvature of each channel of B and M for a code of unit variance, [O] by name."""
    down_m = 1.0 if at.down_m is None else at.down_m.square().mean(dim=-1, keepdim=True)
    for name in p:
        if name == "A":
            continue
        kind, target = name.split(".")
        weight = outer if target == "down" else inner
        if target == "down":
            factor = torch.ones_like(at.output)
        else:
            factor = at.into[target].square() * down_m
        if kind == "M":
            factor = factor * at.slope[target].square()
        curvature[name] += factor.sum(dim=0) * weight


def _code_scale(p: Parameters, curvature: Parameters, count: int) -> Tensor:
    """Return 1 / sqrt of the curvature of each code, through all that reads it: [R, 1]. Codes that
    nothing reads yet count as the mean.
    """
    total = sum(
        ((curvature[name] / count).unsqueeze(-1) * value.square()).sum(dim=0)
        for name, value in p.items()
        if name != "A"
    )
    assert isinstance(total, Tensor)
    floor = float(total.mean()) * 1e-3
    scale = total.clamp_min(max(floor, 1e-30)).rsqrt() if floor > 0 else torch.zeros_like(total)
    return scale.unsqueeze(-1)


def _ridge(gram: Tensor, moment: Tensor, ridge: float) -> Tensor:
    """Return (Z'Z + ridge mean diag)^-1 Z'Y, transposed: [O, R] fp64."""
    one = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + ridge * gram.diagonal().mean() * one, moment).T


def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.float64, device=device)


def _cost(e: Tensor, metric: Tensor) -> Tensor:
    return ((e @ metric) * e).sum(dim=-1)


def _add(total: Parameters, more: Parameters) -> None:
    for name, value in more.items():
        total[name] += value


def _dot(x: Parameters, y: Parameters) -> float:
    return sum(float((x[name] * y[name]).sum(dtype=torch.float64)) for name in x)
