"""Products of matrices in the order that is fastest."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

LARGE = 512
"""From this size on it pays to leave out the half of a symmetric or triangular matrix that is known."""


def gram(rows: Tensor) -> Tensor:
    """XᵀX of `[..., rows, n]`; on a CPU only the blocks from the diagonal on are multiplied, and then mirrored."""
    size = rows.shape[-1]
    if rows.is_cuda or size < LARGE:
        return rows.mT @ rows
    product = rows.new_empty(*rows.shape[:-2], size, size)
    for a, b in pairwise(size * part // 8 for part in range(9)):
        upper = rows[..., a:b].mT @ rows[..., a:]
        product[..., a:b, a:] = upper
        product[..., b:, a:b] = upper[..., b - a :].mT
    return product


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """L R; for many small matrices a CPU is several times faster where the product is wide, so a tall one is turned."""
    if left.is_cuda or left.dim() < 3 or left.shape[-2] <= right.shape[-1]:
        return left @ right
    return (right.mT @ left.mT).mT


def times_lower(matrix: Tensor, lower: Tensor) -> Tensor:
    """X L for a lower triangular L; on a CPU without most of the products with its zeros, which are half of them."""
    size = lower.shape[-1]
    if lower.is_cuda or size < LARGE:
        return matrix @ lower
    cuts = [size * part // 8 for part in range(9)]
    return torch.cat([matrix[..., a:] @ lower[..., a:, a:b] for a, b in pairwise(cuts)], dim=-1)


def between(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """L X R for X `[samples..., ..., out, in]` with more dimensions than the factors have.

    The samples are laid side by side, so that each factor takes part in one product and is not copied for each of them.
    """
    extra = matrix.dim() - left.dim()
    if extra <= 0:
        return left @ matrix @ right
    stacked = matrix.flatten(0, extra - 1).movedim(0, -3)
    count, rows = stacked.shape[-3:-1]
    times_right = wide_product(stacked.flatten(-3, -2), right).unflatten(-2, (count, rows))
    product = left @ times_right.movedim(-3, -2).flatten(-2)
    apart: Tensor = product.unflatten(-1, (count, -1)).movedim(-2, 0).unflatten(0, matrix.shape[:extra])
    return apart
