"""Triton kernels for a converted layer's elementwise work, for npt/adapters/trained.py on a GPU.

One kernel computes modulation, SiLU, the product of gate and up, and the energy; another computes
their backward. The plain form makes fifteen passes over memory forward and thirty backward.

At small ranks, and if TF32 is allowed, the kernels compute M z and B z themselves. Otherwise torch
does, in blocks of rows. Backward writes the gradients of a block's M z and B z to a buffer ("room")
for torch's products with z and the weights. There are no atomics: equal inputs give equal bits.

Shapes: N rows, F columns of the products (`width` in the kernels, for down D), R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from npt.adapters.products import Gradients, Modulation
from npt.base.precision import tf32_allowed

SMALL = 32
"""The largest rank that the kernels multiply by: they hold a tile of each weight in registers."""

ROOM = 1 << 26
"""Numbers in the buffer for a block's M z and B z: 256 MiB, 1,170 rows at F = 14,336. Blocks that
fit the L2 cache are not faster and need more launches. A block has at least R rows."""

TILES = {True: {"BM": 16, "BN": 128, "num_warps": 8}, False: {"BM": 1, "BN": 1024, "num_warps": 4}}
"""Rows and columns of a tile, by whether the kernels multiply: 8 numbers of each tensor per thread,
without spilled registers (benchmarks/compile_kernels.py)."""


@triton.jit
def _nothing():
    pass


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tile(z, count, width, low_width, rank, RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Return rows and mask of a program's tile, its offsets in the products and the room, and what
    `_low` reads there.
    """
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    row = rows[:, None]
    column = columns[None, :]
    within = (row < count) & (column < width)
    at = row * width + column
    # the room holds the terms side by side, so its rows are longer
    low_at = row * low_width + column
    code = z
    if RANK:
        # RANK is padded; zeros there add nothing to the product
        entry = tl.arange(0, RANK)[None, :]
        known = (row < count) & (entry < rank)
        code = tl.load(z + row * rank + entry, mask=known, other=0.0)
    return rows, within, at, low_at, (code, low_at, within, columns, width, rank)


@triton.jit
def _low(term, place, RANK: tl.constexpr):
    """Return a tile of M z or B z: the product with the weight `term`, or `term` at RANK 0."""
    code, at, within, columns, width, rank = place
    if RANK:
        # the weight [O, R] is read transposed, [RANK, BN]
        entry = tl.arange(0, RANK)[:, None]
        column = columns[None, :]
        known = (entry < rank) & (column < width)
        weight = tl.load(term + column * rank + entry, mask=known, other=0.0)
        return tl.dot(code, weight, input_precision="tf32")
    return tl.load(term + at, mask=within, other=0.0)


@triton.jit
def _modulated(y, mult, add, place, alpha, slope, RANK: tl.constexpr):
    """Return a tile of m y + s, and its c and s, 0 if the form lacks the term."""
    c = tl.full(y.shape, 0.0, tl.float32)
    s = c
    moved = y
    if mult is not None:
        c = _sigmoid(_low(mult, place, RANK)) - 0.5
        moved = y + slope * c * y
    if add is not None:
        s = alpha * _low(add, place, RANK)
        moved = moved + s
    return moved, c, s


@triton.jit
def _forward(
    gate, up, out, taught, energy, z, mult, add, up_mult, up_add,
    count, width, low_width, rank, alpha, slope,
    RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute `TritonModulation.forward` for a tile; energy: [count, tiles of columns]."""
    rows, within, at, _, place = _tile(z, count, width, low_width, rank, RANK, BM, BN)
    y = tl.load(gate + at, mask=within, other=0.0)
    moved, c, s = _modulated(y, mult, add, place, alpha, slope, RANK)
    squares = slope * slope * c * c + s * s
    if up is not None:
        silu = moved * _sigmoid(moved)
        y = tl.load(up + at, mask=within, other=0.0)
        moved, c, s = _modulated(y, up_mult, up_add, place, alpha, slope, RANK)
        squares += slope * slope * c * c + s * s
        moved = silu * moved
    if taught is not None:
        # before `out` is overwritten: it still holds the teacher's gate
        y = tl.load(out + at, mask=within, other=0.0)
        of_up = tl.load(taught + at, mask=within, other=0.0)
        tl.store(taught + at, y * _sigmoid(y) * of_up, mask=within)
    tl.store(out + at, moved, mask=within)
    # one sum per tile and row instead of an atomic, whose order would change from run to run
    total = tl.reduce(tl.where(within, squares, 0.0), 1, _plus)
    tl.store(energy + rows * tl.num_programs(0) + tl.program_id(0), total, mask=rows < count)


@triton.jit
def _leave(
    grad, y, c, s, weight, of_y, of_mult, of_add, at, low_at, within, alpha, slope,
):  # fmt: skip
    """Write the requested gradients of y, M z and B z from a tile of the gradient of m y + s."""
    if of_y is not None:
        tl.store(of_y + at, grad + slope * c * grad, mask=within)
    if of_mult is not None:
        of_c = slope * (grad * y + weight * slope * c)
        tl.store(of_mult + low_at, of_c * (0.25 - c * c), mask=within)
    if of_add is not None:
        tl.store(of_add + low_at, alpha * (grad + weight * s), mask=within)


@triton.jit
def _backward(
    grad, gate, up, of_energy, of_gate, of_up, z, mult, add, up_mult, up_add,
    of_mult, of_add, of_up_mult, of_up_add,
    count, width, low_width, rank, alpha, slope,
    RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the requested gradients of a tile. Those of M z and B z may overwrite them."""
    rows, within, at, low_at, place = _tile(z, count, width, low_width, rank, RANK, BM, BN)
    of_out = tl.load(grad + at, mask=within, other=0.0)
    weight = 0.0  # the gradient of the energy, a mean of squares, times 2 / F
    if of_energy is not None:
        weight = tl.load(of_energy + rows, mask=rows < count, other=0.0)[:, None] * (2.0 / width)
    y = tl.load(gate + at, mask=within, other=0.0)
    moved, c, s = _modulated(y, mult, add, place, alpha, slope, RANK)
    if up is not None:
        y_up = tl.load(up + at, mask=within, other=0.0)
        moved_up, c_up, s_up = _modulated(y_up, up_mult, up_add, place, alpha, slope, RANK)
        # silu(x) = x sigmoid(x), and its derivative is sigmoid(x) (1 + x (1 - sigmoid(x)))
        opened = _sigmoid(moved)
        _leave(
            of_out * moved * opened, y_up, c_up, s_up, weight, of_up, of_up_mult, of_up_add,
            at, low_at, within, alpha, slope,
        )  # fmt: skip
        of_out = of_out * moved_up * opened * (1.0 + moved * (1.0 - opened))
    _leave(of_out, y, c, s, weight, of_gate, of_mult, of_add, at, low_at, within, alpha, slope)


def try_out(device: int) -> None:
    """Build and launch a kernel on a CUDA device; raise whatever Triton raises."""
    with torch.cuda.device(device):
        _nothing[(1,)]()


class TritonModulation(Modulation):
    """Modulates with these kernels."""

    def forward(self, out: Tensor, taught: Tensor | None = None) -> Tensor:
        work = _Work(self)
        energy = out.new_empty(len(out), triton.cdiv(work.width, work.tile["BN"]))
        for rows in work.blocks():
            work.launch(_forward, rows, (*work.ys, out, taught, energy), work.terms(rows))
        return energy.sum(dim=-1).div_(work.width)

    def backward(
        self, grad: Tensor, grad_energy: Tensor | None, into: Sequence[Tensor | None]
    ) -> Gradients:
        work = _Work(self, leaves=True)
        if grad_energy is not None:
            # the gradient of a sum is one expanded number; the kernels read N
            grad_energy = grad_energy.contiguous()
        tensors = (grad.contiguous(), *work.ys, grad_energy, *_filled(into, 2))
        grad_z = torch.zeros_like(self.z)
        of_weights = [torch.zeros_like(weight) for weight in work.weights]
        for rows in work.blocks():
            work.launch(_backward, rows, tensors, work.terms(rows), work.room(rows))
            for number, (weight, part) in enumerate(work.multiplied(rows)):
                grad_z[rows].addmm_(part, weight)
                of_weights[number].addmm_(part.t(), work.z[rows])
        if work.joined:
            # parameters keep their gradients, so each has memory of its own
            of_weights = [part.clone() for part in of_weights[0].split(work.width)]
        return grad_z, work.in_places(of_weights)


class _Work:
    """Launches a kernel for blocks of rows. `leaves`: the kernel writes gradients to the room.

    Attributes:
        ys: gate and up.
        given: M and B of each product in turn, None if absent.
        rank: rank of the kernels' own products, padded for Triton; 0 if torch multiplies.
        joined: whether torch multiplies by M and B of all products at once, to save launches.
        weights: the weights that torch multiplies by, [O, R] each.
        columns: width of the room.
        length: most rows of a block.
    """

    def __init__(self, modulation: Modulation, leaves: bool = False):
        self.config = modulation.config
        self.z = modulation.z.contiguous()
        ys = [product.y for product in modulation.products]
        self.ys = _filled(ys, 2)
        self.count, self.width = ys[0].shape
        self.given = [weight for product in modulation.products for weight in product[1:]]
        self.rank = _multiplied(self.z)
        self.tile = TILES[self.rank > 0]
        self.weights = [weight for weight in self.given if weight is not None]
        rank = self.z.shape[-1]
        self.joined = rank <= SMALL and len(self.weights) > 1
        self.columns = 0
        if leaves or not self.rank:
            self.columns = len(self.weights) * self.width
        # tiles have 32-bit addresses, and the second dimension of a grid has 16 bits
        addressed = (1 << 29) // max(self.width, self.columns)
        self.length = min(addressed, 65535 * self.tile["BM"])
        if self.columns:
            fitting = max(rank, ROOM // self.columns)
            self.length = min(fitting, self.length)
            if self.joined:
                self.weights = [torch.cat(self.weights)]
        self.memory = self.z.new_empty(min(self.length, self.count), self.columns)

    def blocks(self) -> Iterator[slice]:
        """Yield the rows of each block."""
        for start in range(0, self.count, self.length):
            yield slice(start, min(start + self.length, self.count))

    def in_places(self, parts: Iterable[Tensor]) -> list[Tensor | None]:
        """Return one part for each given weight, and None for each absent one."""
        left = iter(parts)
        return [None if weight is None else next(left) for weight in self.given]

    def room(self, rows: slice) -> list[Tensor | None]:
        """Return the room of each term [n, F]; None if the form lacks the term."""
        return self.in_places(self._split(rows, self.width))

    def multiplied(self, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the weights that torch multiplies by, with the room of their product [n, O]."""
        width = self.columns if self.joined else self.width
        return zip(self.weights, self._split(rows, width), strict=False)

    def _split(self, rows: slice, width: int) -> Iterable[Tensor]:
        return self.memory[: rows.stop - rows.start].split(width, dim=-1)

    def terms(self, rows: slice) -> list[Tensor | None]:
        """Return what the kernels read: M and B if they multiply, else M z and B z."""
        if self.rank:
            return self.given
        for weight, part in self.multiplied(rows):
            torch.mm(self.z[rows], weight.t(), out=part)
        return self.room(rows)

    def launch(
        self,
        kernel: Any,
        rows: slice,
        tensors: Iterable[Tensor | None],
        *terms: list[Tensor | None],
    ) -> None:
        """Launch a kernel for all tiles of a block."""
        arguments: list[Any] = [None if tensor is None else tensor[rows] for tensor in tensors]
        arguments.append(self.z[rows])
        for group in terms:
            arguments += _filled(group, 4)
        count = rows.stop - rows.start
        arguments += [count, self.width, self.columns, self.z.shape[-1]]
        arguments += [self.config.additive_scale, 2.0 * self.config.mult_bound]
        across = triton.cdiv(self.width, self.tile["BN"])
        down = triton.cdiv(count, self.tile["BM"])
        with torch.cuda.device(self.z.get_device()):  # -1 (none) in Triton's interpreter
            kernel[across, down](*arguments, RANK=self.rank, **self.tile)


def _filled(parts: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    """Return what gate and up have, in the order of the kernels' arguments. A product by itself
    stands for gate, and up has None.
    """
    return [*parts, *[None] * (count - len(parts))]


def _multiplied(z: Tensor) -> int:
    """Return the padded rank, or 0 if torch multiplies: for large ranks, without TF32, on AMD."""
    rank = z.shape[-1]
    if rank > SMALL or not tf32_allowed() or torch.version.hip:
        return 0
    if z.is_cuda and torch.cuda.get_device_capability(z.device) < (8, 0):
        return 0
    return max(16, triton.next_power_of_2(rank))  # tl.dot needs 16
