"""Inverse roots of float64 matrices A + diag(r) whose r is near the rounding of A, with error far below a millionth.

A float64 Cholesky of a nearby matrix gives X, with XᵀMX near the identity where M = A + diag(r) is as it should be.
That product, made with some 95 bits, says how far it is off, and its own root corrects X (as Ogita and Oishi do, 2012).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDS = 3
"""The first leaves the shift that makes Cholesky sure, the second what rounding made of that, the third nothing."""

SLICES = 5
"""Of at least 19 bits each, with up to 2000 rows."""

CLOSE = 1e-2
"""Before the last round XᵀMX is this near to the identity; the round squares that, to the rounding of float64."""


def refined_inverse_root(factor: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The root of (A + diag(r))⁻¹, upper triangular, for A in `[k, d, d]` and r in `[k, d]`.

    Returns (root, log |A + diag(r)|, squared pivots, 0 where it succeeded), as of a Cholesky factorisation.
    """
    factor = factor.tril() + factor.tril(-1).mT  # the half that a Cholesky factorisation reads
    matrix = factor + torch.diag_embed(ridge)
    size = matrix.shape[-1]
    # Cholesky is sure to succeed where no eigenvalue is below this.
    shift = size * torch.finfo(matrix.dtype).eps * matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    root = _inverse_root(matrix + torch.diag_embed(shift[..., None].expand_as(ridge)))
    eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    gap = matrix
    for _ in range(ROUNDS):
        high, low = accurate_product(factor, root)
        product, rest = accurate_product(root.mT, high)
        product = product + (rest + root.mT @ low + root.mT @ (ridge[..., :, None] * root))
        gap = product - eye
        root = root @ _inverse_root(product)
    pivots = root.diagonal(dim1=-2, dim2=-1).reciprocal()
    failed = ~(torch.linalg.matrix_norm(gap) < CLOSE)  # NaN where a product was not positive definite
    return root, 2.0 * pivots.log().sum(-1), pivots.square(), failed.int()


def _inverse_root(matrix: Tensor) -> Tensor:
    """Upper triangular; NaN where the matrix is not positive definite."""
    cholesky, info = torch.linalg.cholesky_ex(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    root: Tensor = torch.linalg.solve_triangular(cholesky, eye.expand_as(matrix), upper=False).mT
    return torch.where((info == 0)[..., None, None], root, math.nan)


def accurate_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """left @ right of float64 matrices as a sum of two, the second below the rounding of the first.

    Both are cut into slices of so few bits that products of two slices are exact (Ozaki and others, 2012).
    """
    size = left.shape[-1]
    rows, columns = _slices(left, -1, size), _slices(right, -2, size)
    high = torch.zeros_like(rows[0] @ columns[0])
    low = torch.zeros_like(high)
    for total in range(SLICES):
        for index in range(total + 1):
            part = rows[index] @ columns[total - index]
            added = high + part
            before = added - part
            low = low + ((high - before) + (part - (added - before)))
            high = added
    return high, low


def _slices(matrix: Tensor, dim: int, size: int) -> list[Tensor]:
    """Matrices that add up to this one, each of few bits relative to the largest entry that is left along `dim`."""
    dropped = math.ceil((55 + math.log2(size)) / 2)
    found = []
    for _ in range(SLICES):
        large = matrix.abs().amax(dim, keepdim=True) * 2.0**dropped
        found.append((matrix + large) - large)
        matrix = matrix - found[-1]
    return found
