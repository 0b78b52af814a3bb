"""Second moments, and products of matrices in the order that is fastest."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from noisygrad.families import triangles

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


def second_moment(left: Tensor, right: Tensor, left_constant: bool, right_constant: bool) -> Tensor:
    """The mean of left rightᵀ over examples and positions, for `[..., B, T, p]` and `[..., B, T, q]`.

    A constant of 1 is appended to either side where asked, as a border of means: the (large) inputs are not copied.

    Returns:
        `[..., p + left_constant, q + right_constant]`.
    """
    rows = left.shape[-3] * left.shape[-2]
    flat = left.flatten(-3, -2)
    moment = (gram(flat) if left is right else wide_product(flat.mT, right.flatten(-3, -2))).div_(rows)
    if not (left_constant or right_constant):
        return moment
    p, q = moment.shape[-2:]
    bordered = moment.new_ones(*moment.shape[:-2], p + left_constant, q + right_constant)
    bordered[..., :p, :q] = moment
    right_mean = _mean_row(right) if left_constant else None
    if right_mean is not None:
        bordered[..., p, :q] = right_mean
    if right_constant:
        bordered[..., :p, q] = _mean_row(left) if left is not right or right_mean is None else right_mean
    return bordered


def _mean_row(rows: Tensor) -> Tensor:
    """The mean over examples and positions; on a GPU a product, several times faster than a reduction of columns."""
    if not rows.is_cuda:
        return rows.mean((-3, -2))
    flat = rows.flatten(-3, -2)
    ones = flat.new_ones(*flat.shape[:-2], 1, flat.shape[-2])  # 1 is exact in every number format, 1/n is not
    return (ones @ flat).squeeze(-2) / flat.shape[-2]


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
    return triangles.times_lower(matrix, triangles.cut(lower))


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
