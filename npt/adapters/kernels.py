"""Triton kernels of a converted layer's elementwise work, for npt/adapters/trained.py on a GPU.

The plain form there walks through memory some fifteen times forward and thirty backward. Here
modulation, SiLU, the product of gate and up, and the energy are one kernel, and their backward is
another: each tensor [N, F] is read once and written once.

At small ranks the kernels multiply M z and B z themselves where TF32 is allowed, tile by tile.
Otherwise torch does, in blocks of rows. Backward leaves the gradients of M z and B z of a block in
memory, for torch's products with z and with the weights. There are no atomics: equal inputs give
equal bits.

Shapes: N rows, F columns of the products (`width` in the kernels, for down D), R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from npt.adapters.trained import LowRank

SMALL = 32
"""The largest rank that the kernels multiply by: a tile of each weight is held in registers."""

ROWS = 256
"""Rows of a block at least. Four M z and B z of so many rows, [256, 4 F], are 59 MB at F = 14,336:
little of them leaves the L2 cache of a large card before it is read."""

TILES: dict[tuple[str, bool], dict[str, int]] = {
    ("forward", True): {"BM": 64, "BN": 64, "num_warps": 8},
    ("forward", False): {"BM": 1, "BN": 1024, "num_warps": 4},
    ("backward", True): {"BM": 32, "BN": 128, "num_warps": 8},
    ("backward", False): {"BM": 1, "BN": 1024, "num_warps": 4},
}
"""Rows and columns of a tile by kernel, and by whether it multiplies."""


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _low(term, code, at, within, columns, width, rank, RANK: tl.constexpr):
    """A tile of M z or B z: multiplied, `term` being the weight, or read where RANK is 0."""
    if RANK:
        ranks = tl.arange(0, RANK)
        known = (ranks < rank)[:, None] & (columns < width)[None, :]
        weight = tl.load(term + columns[None, :] * rank + ranks[:, None], mask=known, other=0.0)
        return tl.dot(code, weight, input_precision="tf32")
    else:
        return tl.load(term + at, mask=within, other=0.0)


@triton.jit
def _modulated(
    y, mult, add, code, at, within, columns, width, rank, alpha, slope, RANK: tl.constexpr
):
    """A tile of m y + s; c and s, 0 where the form has no such term."""
    c = tl.full(y.shape, 0.0, tl.float32)
    s = c
    moved = y
    if mult is not None:
        c = _sigmoid(_low(mult, code, at, within, columns, width, rank, RANK)) - 0.5
        moved = y + slope * c * y
    if add is not None:
        s = alpha * _low(add, code, at, within, columns, width, rank, RANK)
        moved = moved + s
    return moved, c, s


@triton.jit
def _forward(
    gate, up, out, taught, z, mult, add, up_mult, up_add, energy,
    count, width, low_width, rank, alpha, slope,
    RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out = silu(gate') * up', or gate' where up is None; energy: [count, tiles of columns].

    With `taught`, the teacher's up, `out` holds the teacher's gate before, and `taught` the
    teacher's product after.
    """
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    within = (rows < count)[:, None] & (columns < width)[None, :]
    at = rows[:, None] * width + columns[None, :]
    low_at = rows[:, None] * low_width + columns[None, :]
    code = z
    if RANK:
        ranks = tl.arange(0, RANK)
        known = (rows < count)[:, None] & (ranks < rank)[None, :]
        code = tl.load(z + rows[:, None] * rank + ranks[None, :], mask=known, other=0.0)
    y = tl.load(gate + at, mask=within, other=0.0)
    moved, c, s = _modulated(
        y, mult, add, code, low_at, within, columns, width, rank, alpha, slope, RANK
    )
    squares = slope * slope * c * c + s * s
    if up is not None:
        silu = moved * _sigmoid(moved)
        y = tl.load(up + at, mask=within, other=0.0)
        moved, c, s = _modulated(
            y, up_mult, up_add, code, low_at, within, columns, width, rank, alpha, slope, RANK
        )
        squares += slope * slope * c * c + s * s
        moved = silu * moved
    if taught is not None:
        y = tl.load(out + at, mask=within, other=0.0)
        of_up = tl.load(taught + at, mask=within, other=0.0)
        tl.store(taught + at, y * _sigmoid(y) * of_up, mask=within)
    tl.store(out + at, moved, mask=within)
    if energy is not None:
        total = tl.reduce(tl.where(within, squares, 0.0), 1, _plus)
        tiles = tl.num_programs(0)
        tl.store(energy + rows * tiles + tl.program_id(0), total, mask=rows < count)


@triton.jit
def _leave(
    grad, y, c, s, weight, of_y, of_mult, of_add, at, low_at, within, alpha, slope,
):  # fmt: skip
    """Write, from a tile of the gradient of m y + s, those of y, M z and B z that are wanted."""
    if of_y is not None:
        tl.store(of_y + at, grad + slope * c * grad, mask=within)
    if of_mult is not None:
        of_c = slope * (grad * y + weight * slope * c)
        tl.store(of_mult + low_at, of_c * (0.25 - c * c), mask=within)
    if of_add is not None:
        tl.store(of_add + low_at, alpha * (grad + weight * s), mask=within)


@triton.jit
def _backward(
    grad, gate, up, z, mult, add, up_mult, up_add, of_energy,
    of_gate, of_up, of_mult, of_add, of_up_mult, of_up_add,
    count, width, low_width, rank, alpha, slope,
    RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of gate, up, M z and B z, where wanted; the latter may overwrite those."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    within = (rows < count)[:, None] & (columns < width)[None, :]
    at = rows[:, None] * width + columns[None, :]
    low_at = rows[:, None] * low_width + columns[None, :]
    code = z
    if RANK:
        ranks = tl.arange(0, RANK)
        known = (rows < count)[:, None] & (ranks < rank)[None, :]
        code = tl.load(z + rows[:, None] * rank + ranks[None, :], mask=known, other=0.0)
    of_out = tl.load(grad + at, mask=within, other=0.0)
    weight = 0.0
    if of_energy is not None:
        weight = tl.load(of_energy + rows, mask=rows < count, other=0.0)[:, None] * (2.0 / width)
    y = tl.load(gate + at, mask=within, other=0.0)
    moved, c, s = _modulated(
        y, mult, add, code, low_at, within, columns, width, rank, alpha, slope, RANK
    )
    if up is not None:
        y_up = tl.load(up + at, mask=within, other=0.0)
        moved_up, c_up, s_up = _modulated(
            y_up, up_mult, up_add, code, low_at, within, columns, width, rank, alpha, slope, RANK
        )
        opened = _sigmoid(moved)
        _leave(
            of_out * moved * opened, y_up, c_up, s_up, weight, of_up, of_up_mult, of_up_add,
            at, low_at, within, alpha, slope,
        )  # fmt: skip
        of_out = of_out * moved_up * opened * (1.0 + moved * (1.0 - opened))
    _leave(
        of_out, y, c, s, weight, of_gate, of_mult, of_add, at, low_at, within, alpha, slope
    )



def forward(
    low: LowRank, gate: Tensor, up: Tensor | None, out: Tensor, taught: Tensor | None = None
) -> Tensor:
    """Write silu(gate') * up' to `out`, gate' without up: [N, F]; return the energy [N].

    With `taught`, the teacher's up [N, F], `out` holds the teacher's gate, and `taught` becomes
    silu of it times `taught`.
    """
    width, z, rank = gate.shape[-1], low.z.contiguous(), _multiplied(low)
    tile = TILES["forward", rank > 0]
    energy = gate.new_empty(len(gate), triton.cdiv(width, tile["BN"]))
    room = None if rank else _Room(low, gate)
    for rows in _blocks(gate, room):
        terms = low.weights if room is None else room.multiplied(z[rows])
        _launch(
            _forward,
            tile,
            *(gate[rows], None if up is None else up[rows], out[rows]),
            *(None if taught is None else taught[rows], z[rows], *_four(terms), energy[rows]),
            *_numbers(low, gate[rows], room),
            rank,
        )
    return energy.sum(dim=-1).div_(width)


def backward(
    low: LowRank,
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    grad_gate: Tensor | None = None,
    grad_up: Tensor | None = None,
) -> None:
    """Add the gradients of z, M and B to those of `low`, from that [N, F] of what `forward` writes;
    write gate's and up's if given.
    """
    z, rank, room, grad = low.z.contiguous(), _multiplied(low), _Room(low, gate), grad.contiguous()
    for rows in _blocks(gate, room):
        terms = low.weights if rank else room.multiplied(z[rows])
        _launch(
            _backward,
            TILES["backward", rank > 0],
            *(grad[rows], gate[rows], None if up is None else up[rows], z[rows], *_four(terms)),
            None if low.grad_energy is None else low.grad_energy[rows],
            *(None if y is None else y[rows] for y in (grad_gate, grad_up)),
            *_four(room.terms(len(z[rows]))),
            *_numbers(low, gate[rows], room),
            rank,
        )
        room.add_gradients(z[rows], low.grad_z[rows])
    room.give_gradients()


class _Room:
    """Room for a block's M z and B z, [n, F] next to each other, or for their gradients.

    Small weights are multiplied all at once, which saves launches; large ones are not copied.
    """

    def __init__(self, low: LowRank, like: Tensor):
        self.low, self.width = low, like.shape[-1]
        weights = [weight for weight in low.weights if weight is not None]
        self.joined = low.z.shape[-1] <= SMALL and len(weights) > 1
        self.weights = [torch.cat(weights)] if self.joined else weights
        rows, self.columns = max(ROWS, low.z.shape[-1]), len(weights) * self.width
        self.memory = like.new_empty(min(rows, len(like)), self.columns)
        self.sums: list[Tensor] = []

    def _parts(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        parts = self.memory[:count].split([len(weight) for weight in self.weights], dim=-1)
        return zip(self.weights, parts, strict=True)

    def terms(self, count: int) -> list[Tensor | None]:
        """Return the room of each term [count, F], None if the form has no such term."""
        parts = iter(self.memory[:count].split(self.width, dim=-1))
        return [None if weight is None else next(parts) for weight in self.low.weights]

    def multiplied(self, codes: Tensor) -> list[Tensor | None]:
        """Return the terms of z's rows."""
        for weight, part in self._parts(len(codes)):
            torch.mm(codes, weight.t(), out=part)
        return self.terms(len(codes))

    def add_gradients(self, codes: Tensor, grad_z: Tensor) -> None:
        """Add what a block's gradients of M z and B z give for z's rows and the weights."""
        if not self.sums:
            given = [into for into in self.low.grad_weights if into is not None]
            self.sums = [torch.zeros_like(self.weights[0])] if self.joined else given
        for (weight, part), into in zip(self._parts(len(codes)), self.sums, strict=True):
            grad_z.addmm_(part, weight)
            into.addmm_(part.t(), codes)

    def give_gradients(self) -> None:
        """Add the sums over blocks to the weights' gradients, if they are not there already."""
        if self.joined and self.sums:
            given = [into for into in self.low.grad_weights if into is not None]
            for into, part in zip(given, self.sums[0].split(self.width), strict=True):
                into.add_(part)


def _multiplied(low: LowRank) -> int:
    """Return the rank that kernels multiply by, padded as Triton wants it, 0 to let torch do it:
    large ranks, cards before Ampere, and fp32 products that may not be rounded to TF32.
    """
    rank, device = low.z.shape[-1], low.z.device
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    able = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    return max(16, triton.next_power_of_2(rank)) if rank <= SMALL and tf32 and able else 0


def _blocks(like: Tensor, room: _Room | None) -> Iterator[slice]:
    """Yield the rows of an [N, F] tensor in blocks: of the room's, else such as 32 bits index."""
    length = (1 << 30) // like.shape[-1] if room is None else max(1, len(room.memory))
    for start in range(0, len(like), length):
        yield slice(start, start + length)


def _four(terms: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*terms, None, None][:4]


def _numbers(low: LowRank, gate: Tensor, room: _Room | None) -> tuple[float, ...]:
    """Return rows, columns, columns of the room, rank, alpha and 2 beta."""
    columns = 0 if room is None else room.columns
    return (*gate.shape, columns, low.z.shape[-1], low.alpha, low.slope)


def _launch(kernel: Any, tile: dict[str, int], *arguments: Any) -> None:
    """Launch a kernel for all tiles; the last three arguments before the rank's are numbers."""
    *arguments, rank = arguments
    count, width = arguments[-6:-4]
    grid = (triton.cdiv(width, tile["BN"]), triton.cdiv(count, tile["BM"]))
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, RANK=rank, **tile)
