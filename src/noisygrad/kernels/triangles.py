"""Large symmetric and triangular matrices, stored as the columns of their lower half: in little over half the memory.

A matrix of d rows is cut into a few bands of columns, [a, b), and of each band the rows from a on are kept:

    ┌──┐· · ·
    │  ├──┐· ·       The squares on the diagonal are complete. Above them is zero (a lower triangle)
    │  │  ├──┐·      or the transpose of what is below them (a symmetric matrix).
    └──┴──┴──┘

Products use the bands directly, without making the whole matrix.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from noisygrad.kernels import products
from noisygrad.kernels.products import matmul

Bands: TypeAlias = tuple[Tensor, ...]

LARGE = 1024
"""From this size on matrices are kept in bands."""
WIDTH = 128
"""The least width of a band, except the last."""
ALIGNMENT = 64
"""The widths are multiples of it, as tensor cores prefer."""


def cut(matrix: Tensor, bands: int) -> Bands:
    """`[..., d, d]` in at most this many bands, as views: (1 + 1/bands)/2 of the numbers."""
    size = matrix.shape[-1]
    width = max(WIDTH, -(-size // (bands * ALIGNMENT)) * ALIGNMENT)
    return tuple(matrix[..., a:, a:b] for a, b in pairwise([*range(0, size, width), size]))


def pack(matrix: Tensor, bands: int) -> Bands:
    """A copy in bands, or the matrix itself as the only band where it is too small."""
    if matrix.shape[-1] < LARGE:
        return (matrix,)
    # Not `.contiguous()`: a last band of one number already is, and as a view would keep the whole matrix in memory.
    return tuple(band.clone(memory_format=torch.contiguous_format) for band in cut(matrix, bands))


def lower(bands: Sequence[Tensor]) -> Tensor:
    """The lower triangular matrix."""
    return _whole(bands, None)


def symmetric(bands: Sequence[Tensor]) -> Tensor:
    """The symmetric matrix."""
    return _whole(bands, lambda below: below.mT)


def _whole(bands: Sequence[Tensor], above: Callable[[Tensor], Tensor] | None) -> Tensor:
    if len(bands) == 1:
        return bands[0]
    size = bands[0].shape[-2]
    whole = bands[0].new_zeros(*bands[0].shape[:-2], size, size)
    for start, stop, band in _places(bands):
        whole[..., start:, start:stop] = band
        if above is not None:
            whole[..., start:stop, stop:] = above(band[..., stop - start :, :])
    return whole


def diagonal(bands: Sequence[Tensor]) -> Tensor:
    """The diagonal, `[..., d]`."""
    parts = [band.diagonal(dim1=-2, dim2=-1) for band in bands]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def add_to_diagonal_(bands: Sequence[Tensor], value: Tensor) -> None:
    """In place: the matrix + value · I, for one value per matrix, `[..., 1]`."""
    for band in bands:
        band.diagonal(dim1=-2, dim2=-1).add_(value)


def times_lower(matrix: Tensor, bands: Sequence[Tensor]) -> Tensor:
    """X L for the lower triangular L."""
    parts = [matmul(matrix[..., start:], band) for start, _, band in _places(bands)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def times_large_lower(matrix: Tensor, lower: Tensor) -> Tensor:
    """X L for a large lower triangular L; on a CPU without most of the products with its zeros, half of them all."""
    if lower.is_cuda or products.use_onednn(matrix, lower):
        return matmul(matrix, lower)  # oneDNN is faster with all of them than with what is cut out of a matrix
    return times_lower(matrix, cut(lower, 8))


def times_symmetric(matrix: Tensor, bands: Sequence[Tensor]) -> Tensor:
    """X A for the symmetric A."""
    product = times_lower(matrix, bands)
    for start, stop, band in _places(bands[:-1]):
        part, below = matrix[..., start:stop], band[..., stop - start :, :].mT
        if part.dim() == below.dim() == 3:
            product[..., stop:].baddbmm_(part, below)
        else:
            product[..., stop:] += matmul(part, below)
    return product


def upper_times(bands: Sequence[Tensor], matrix: Tensor) -> Tensor:
    """Lᵀ X for the lower triangular L."""
    return matmul(bands[0].mT, matrix) if len(bands) == 1 else times_lower(matrix.mT, bands).mT


def symmetric_times(bands: Sequence[Tensor], matrix: Tensor) -> Tensor:
    """A X for the symmetric A."""
    return matmul(bands[0], matrix) if len(bands) == 1 else times_symmetric(matrix.mT, bands).mT


def _places(bands: Sequence[Tensor]) -> list[tuple[int, int, Tensor]]:
    """Each band with its columns [start, stop)."""
    found, start = [], 0
    for band in bands:
        found.append((start, start + band.shape[-1], band))
        start += band.shape[-1]
    return found
