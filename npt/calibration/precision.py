"""Full fp32 products for what a calibration solves, whatever the run's --matmul_precision is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from npt.base.quantization_error import fp32_products


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute fp32 products in fp32 within the context, and restore the setting after it.

    A Gram matrix of rows X is summed from fp32 products of at most `solve.CHUNK` rows, each added
    in fp64. With unit roundoff u = 2^-24, a product of n rows is off by at most n u |X|'|X|, and in
    practice by about sqrt(n) u: 3e-6 of the diagonal for n = 2048, below the share of the largest
    eigenvalue (`solve.SMALLEST`, 1e-5) at which eigenvalues are cut off. TF32 rounds the rows
    themselves to 2^-11, 5e-4, far above it: the directions that are whitened would be noise.
    """
    with fp32_products("highest"):
        yield
