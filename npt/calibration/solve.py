"""Solving one layer: a linear start in closed form, then passes over the tokens on all of A, B and
M at once.

The cost is the mean over tokens of e'G e / r^2, e = t - o, r the root mean square of t, with G the
mean of g g' r^2 over tokens and g the gradient, at t, of the teacher's log-likelihood of a token
drawn from its own prediction. Half of it is, to second order, what the error costs in KL(teacher,
student): an error that the layers above do not read costs nothing. Every sum below is of rows in
units of r (see `Sensitivity`).

1. Directions. s is the same gradient with respect to the attention output a, S = E s s' r^2,
   C = E a a' / r^2. A loses least in KL, to second order, if its rows span C^(-1/2) times the top
   eigenvectors of C^(1/2) S C^(1/2): one code for gate, up and down together. An eigenvalue is
   the worth of its direction, comparable between layers. z / r, z = A a, has unit covariance then.
2. Linear start. B.gate and B.up by ridge regression of gate(x_t) - gate(x), up(x_t) - up(x) on z,
   x_t being the input of the teacher's MLP; B.down of what the output still lacks after these two.
   The ridge is the one with the least error on held-out tokens, which sums of theirs tell without
   reading them again. M stays 0.
3. Descent. Adam on the cost, some hundred rows at a time, in coordinates in which a unit change of
   any parameter changes the cost about equally. Rows of one text resemble each other, so each batch
   is drawn from all of them. The result is kept if it costs less on held-out tokens.

Gauss-Newton rounds by conjugate gradients did no better and took longer (SmolLM2-135M, rank 144,
14,336 tokens, held-out cost): on layer 29 four rounds of twelve steps reached 0.00326 in 240 s,
eight passes of the descent the same in 33 s; on layer 22 the rounds took 0.00302 to 0.00300 in
three rounds, the passes to 0.00249.

All sums run over chunks of tokens, so memory does not grow with their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from npt.calibration.placement import HOST
from npt.calibration.rows import Rows
from npt.calibration.sensitivity import token_size
from npt.calibration.tail import Linearised, Parameters, Tail
from npt.distill.hidden_losses import nmse_per_token
from npt.step.schedule import learning_rate_scale

CHUNK = 2048
"""Tokens at a time."""

RIDGES = (1e-6, 1e-4, 1e-2, 1e-1)
"""Ridges that are tried, relative to the mean variance of the code."""

BATCH, LEAST_BATCH, STEPS_OF_A_PASS = 512, 64, 28
"""Rows of a step of the descent: as many as give a pass this many steps, within the two sizes."""

RATES = {"A": 0.32, "B": 0.056, "M": 0.04}
"""Learning rates, as shares of sqrt(cost / parameters): the change of every scaled parameter that
would make up the whole cost. Measured on SmolLM2-135M, rank 144, 14,336 tokens, 8 passes, held-out
cost: layer 29 from 0.00583 (linear) to 0.00326, with one rate of 0.08 to 0.00351; layer 22 from
0.00302 to 0.00249, 0.00248. Half and double of all rates cost up to 4% and 10% more."""

RETRIES = 2
"""Descents tried anew, each with a quarter of the rate, if the held-out cost did not fall."""

WARM_UP = 0.05
MOMENTUM, SECOND_MOMENT = 0.9, 0.99

SCALE_FLOOR = 1e-3
"""Curvatures below this share of the mean of their parameter are taken for it: a channel that is
all but dead must not be moved without bound."""

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

    metric: G, [D, D] fp32, on the device. factors: device of fp64 sums and factorisations.
    """

    tail: Tail
    h: Rows
    a: Rows
    t: Rows
    heldout: int
    metric: Tensor
    tick: Callable[[], None] = lambda: None
    factors: torch.device = HOST

    @property
    def fitted(self) -> int:
        return len(self.h) - self.heldout

    @cached_property
    def code_coordinates(self) -> Tensor:
        """C^(-1/2) of a on all fitted tokens, [D, D] fp32: the coordinates of A's rows, the same in
        every pass.
        """
        width = self.metric.shape[0]
        gram, count = _zeros(width, width, self.factors), 0
        for a, t in self.fit_of(self.a, self.t):
            a = a / token_size(t)
            gram += (a.T @ a).to(gram.device)
            count += len(a)
        return roots(gram / count)[1].to(self.metric)

    def chunks(self, start: int, stop: int, *rows: Rows) -> Iterator[tuple[Tensor, ...]]:
        """Yield `rows` from `start` up to `stop` on the metric's device, a chunk at a time."""
        for first in range(start, stop, CHUNK):
            last = min(stop, first + CHUNK)
            self.tick()
            yield tuple(part.read(first, last, self.metric.device) for part in rows)

    def fit_of(self, *rows: Rows) -> Iterator[tuple[Tensor, ...]]:
        """Yield `rows` of the fitted tokens."""
        return self.chunks(0, self.fitted, *rows)

    def check(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield (h, a, t) of the held-out tokens."""
        return self.chunks(self.fitted, len(self.h), self.h, self.a, self.t)

    def take(self, index: Tensor) -> tuple[Tensor, ...]:
        """Return (h, a, t) of the tokens at `index` [n]."""
        return tuple(rows.take(index, self.metric.device) for rows in (self.h, self.a, self.t))


@dataclass(frozen=True)
class Errors:
    """Means over the held-out tokens: `cost` e'G e / 2, about nats; `nmse` ||e||^2 / ||t||^2;
    `update` ||e||^2 / ||t - h||^2."""

    cost: float
    nmse: float
    update: float


@dataclass(frozen=True)
class Solution:
    """A solved layer. ridge: of the first regression. rounds: passes that its parameters took.
    floor: errors without modulation. linear: of the start in closed form. final: at the end.
    """

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
        parts = (
            0.5 * _cost((t - o) / token_size(t), problem.metric),
            nmse_per_token(o, t),
            nmse_per_token(o, t, h),
        )
        sums += torch.stack([part.sum(dtype=torch.float64) for part in parts])
    return Errors(*(sums / problem.heldout).tolist())


def solve(problem: Problem, code: Tensor, form: Parameters, rounds: int, seed: int = 0) -> Solution:
    """Solve for A, B and M of one layer.

    code: A to begin with, [R, D] fp32, such that z / r has about unit variance. form: zeros of
    every other parameter. rounds: passes over the tokens after the linear start. seed: of their
    order.
    """
    zero = {**form, "A": code}
    floor = errors(problem, zero)
    start, ridge = linear_start(problem, zero)
    linear = errors(problem, start)
    if not linear.cost < floor.cost:  # text unlike the fitted one, or numbers out of range
        start, linear = zero, floor
    rate = math.sqrt(linear.cost / sum(value.numel() for value in start.values()))
    for _ in range(1 + RETRIES if rounds and 0.0 < rate < math.inf else 0):
        p = descend(problem, start, rounds, rate, seed)
        final = errors(problem, p)
        if final.cost < linear.cost:
            return Solution(p, ridge, rounds, floor, linear, final)
        rate /= 4
    return Solution(start, ridge, 0, floor, linear, linear)


@dataclass
class Moments:
    """Sums of a regression on the code, fp64: gram Z'Z [R, R], and by target Z'Y [R, O]."""

    gram: Tensor
    moment: dict[str, Tensor]

    @classmethod
    def of(cls, zero: Parameters, targets: tuple[str, ...], device: torch.device) -> Moments:
        rank = len(zero["A"])
        widths = {target: len(zero[f"B.{target}"]) for target in targets}
        moment = {target: _zeros(rank, width, device) for target, width in widths.items()}
        return cls(_zeros(rank, rank, device), moment)

    def add(self, z: Tensor, lacking: Mapping[str, Tensor]) -> None:
        """Add rows of the code [N, R], and of what is lacking at each target, [N, O]."""
        self.gram += (z.T @ z).to(self.gram)
        for target, y in lacking.items():
            self.moment[target] += (z.T @ y).to(self.gram)

    def solved(self, ridge: float) -> dict[str, Tensor]:
        """Return B of each target, (Z'Z + ridge mean diag)^-1 Z'Y, transposed, [O, R] fp64."""
        one = torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        ridged = self.gram + ridge * self.gram.diagonal().mean() * one
        return {name: torch.linalg.solve(ridged, y).T for name, y in self.moment.items()}

    def excess(self, b: Mapping[str, Tensor]) -> float:
        """Return the squared error of B on the tokens of these sums, less that of B = 0."""
        return sum(
            float(((b[name] @ self.gram) * b[name]).sum() - 2.0 * (b[name].T * y).sum())
            for name, y in self.moment.items()
        )


def linear_start(problem: Problem, zero: Parameters) -> tuple[Parameters, float]:
    """Return `zero`, whose B and M are zero, with B by ridge regression on its code, and the ridge
    of the first regression, relative to the mean variance of the code.
    """
    tail, p, ridges = problem.tail, dict(zero), []
    inner = tuple(target for target in ("gate", "up") if f"B.{target}" in p)

    def changes(h: Tensor, a: Tensor, t: Tensor) -> dict[str, Tensor]:
        pairs = zip(tail.products(h + a), tail.products(h), strict=True)
        found = dict(zip(("gate", "up"), pairs, strict=True))
        return {target: found[target][0] - found[target][1] for target in inner}

    def missing(h: Tensor, a: Tensor, t: Tensor) -> dict[str, Tensor]:
        return {"down": t - h - tail.at(p, h, a).output}

    for targets, lacking in ((inner, changes), (("down",) if "B.down" in p else (), missing)):
        if targets:
            found, ridge = regression(problem, zero, targets, lacking)
            p |= {f"B.{target}": b.to(p["A"]) for target, b in found.items()}
            ridges.append(ridge)
    return p, ridges[0] if ridges else 0.0


def regression(
    problem: Problem,
    zero: Parameters,
    targets: tuple[str, ...],
    lacking: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]],
) -> tuple[dict[str, Tensor], float]:
    """Return B of the targets, [O, R] fp64, by ridge regression of what is `lacking` of (h, a, t),
    [N, O] by target, on the code, and the ridge: the one with the least error on held-out tokens.
    """
    fitted, checked = (Moments.of(zero, targets, problem.factors) for _ in range(2))
    fit, check = problem.fit_of(problem.h, problem.a, problem.t), problem.check()
    for moments, rows in ((fitted, fit), (checked, check)):
        for h, a, t in rows:
            size = token_size(t)
            wanted = {target: y / size for target, y in lacking(h, a, t).items()}
            moments.add(a @ zero["A"].T / size, wanted)
    ridge, best = RIDGES[0], fitted.solved(RIDGES[0])
    least = checked.excess(best)
    for other in RIDGES[1:]:  # one at a time: in fp64 each is larger than the layer
        solved = fitted.solved(other)
        if (excess := checked.excess(solved)) < least:
            least, ridge, best = excess, other, solved
    return best, ridge


def descend(problem: Problem, start: Parameters, passes: int, rate: float, seed: int) -> Parameters:
    """Return parameters after some passes of Adam over the fitted tokens.

    The second moment is one number for each row of a parameter (Adafactor's and Adam-mini's
    observation that a row needs no more): with it the same passes cost 3% less on held-out tokens.

    rate: that `RATES` are multiples of, at first; it falls to 0 along a cosine.
    """
    tail, metric, coordinates = problem.tail, problem.metric, problem.code_coordinates
    p = {name: value.clone() for name, value in start.items()}
    first = {name: torch.zeros_like(value) for name, value in p.items()}
    second = {name: value.new_zeros(len(value), 1) for name, value in p.items()}
    size = max(LEAST_BATCH, min(BATCH, problem.fitted // STEPS_OF_A_PASS))
    steps = max(1, problem.fitted // size)
    total = passes * steps
    warm_up = int(WARM_UP * total)
    order = torch.Generator().manual_seed(seed)
    number = 0
    for _ in range(passes):
        scale = parameter_scale(problem, p)
        # to the rows once a pass, not at every step
        shuffled = torch.randperm(problem.fitted, generator=order).to(problem.h.device)
        for index in shuffled[: steps * size].split(size) if steps > 1 else (shuffled,):
            number += 1
            h, a, t = problem.take(index)
            at = tail.at(p, h, a)
            lacking = (t - h - at.output) / token_size(t).square()
            downhill = tail.pulled(p, lacking @ metric, at)
            downhill["A"] = downhill["A"] @ coordinates
            length = rate * learning_rate_scale(number - 1, "cosine", warm_up, total)
            for name, g in downhill.items():
                first[name].lerp_(g, 1 - MOMENTUM)
                second[name].lerp_(g.square().mean(dim=1, keepdim=True), 1 - SECOND_MOMENT)
                mean = first[name] / (1 - MOMENTUM**number)
                deviation = (second[name] / (1 - SECOND_MOMENT**number)).sqrt()
                # a row without gradient keeps still
                step = mean * torch.where(
                    deviation > 0, RATES[name[0]] * length * scale[name] / deviation, 0.0
                )
                p[name] += step @ coordinates if name == "A" else step
            if number * size // CHUNK > (number - 1) * size // CHUNK:
                problem.tick()
    return p


def parameter_scale(problem: Problem, p: Parameters) -> Parameters:
    """Return, for every row of every parameter, the change that costs 1 to second order, [O, 1];
    for A in the code's coordinates. Measured on a chunk of
    tokens from all over them.
    """
    count = min(CHUNK, problem.fitted)
    # spread over all texts
    index = torch.linspace(0, problem.fitted - 1, count, dtype=torch.float64).long()
    h, a, _ = problem.take(index)
    curvature = _curvature(problem, problem.tail.at(p, h, a), p)
    scale = {}
    for name, value in curvature.items():
        least = max(float(value.mean()) * SCALE_FLOOR, 1e-30)
        scale[name] = value.clamp_min(least).rsqrt().unsqueeze(-1)
    scale["A"] = _code_scale(p, curvature)
    return scale


def _curvature(problem: Problem, at: Linearised, p: Parameters) -> dict[str, Tensor]:
    """Return the mean curvature of each channel of B and M for a code of unit variance, [O]."""
    tail, metric = problem.tail, problem.metric
    inner = ((tail.down.T @ metric) * tail.down.T).sum(dim=-1)
    down_m = 1.0 if at.down_m is None else at.down_m.square().mean(dim=-1, keepdim=True)
    found = {}
    for name in p:
        if name == "A":
            continue
        kind, target = name.split(".")
        if target == "down":
            factor, weight = torch.ones_like(at.output), metric.diagonal()
        else:
            factor, weight = at.into[target].square() * down_m, inner
        if kind == "M":
            factor = factor * at.slope[target].square()
        found[name] = factor.mean(dim=0) * weight
    return found


def _code_scale(p: Parameters, curvature: Mapping[str, Tensor]) -> Tensor:
    """Return 1 / sqrt of the curvature of each code, through all that reads it: [R, 1]. Codes that
    nothing reads yet count as the mean; if nothing reads any, none moves.
    """
    total = sum(
        (value.unsqueeze(-1) * p[name].square()).sum(dim=0) for name, value in curvature.items()
    )
    assert isinstance(total, Tensor)
    floor = float(total.mean()) * SCALE_FLOOR
    scale = total.clamp_min(max(floor, 1e-30)).rsqrt() if floor > 0 else torch.zeros_like(total)
    return scale.unsqueeze(-1)


def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.float64, device=device)


def _cost(e: Tensor, metric: Tensor) -> Tensor:
    return ((e @ metric) * e).sum(dim=-1)
