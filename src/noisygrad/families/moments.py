"""Products of a matrix with itself."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

LARGE = 512
"""From this size on it pays to leave out the half of a symmetric product that mirrors the other."""


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
