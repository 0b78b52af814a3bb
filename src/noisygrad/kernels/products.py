"""Products of matrices in the order and by the library that is fastest, and second moments.

Large float32 matrices are multiplied on a CPU by oneDNN, where that is faster than `@`.

`@` uses MKL, which most likely leaves AVX-512 unused on processors that are not Intel's; oneDNN, with which torch
computes convolutions, uses it. On two cores of a Zen 5, 256×2305 times 2305×2305 takes 5.5 ms instead of 13.9. Torch
does not report the maker of a processor, so oneDNN is used on all that have AVX-512; it was not timed on Intel's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

LARGE = 1 << 21
"""From this many multiplications on, a call of oneDNN (11 µs) is worth its cost."""


def has_onednn() -> bool:
    """Whether torch may use oneDNN."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


@cache
def onednn() -> Callable[[Tensor, Tensor], Tensor] | None:
    """X Wᵀ for matrices without gaps by oneDNN; None where there is no such op, or no AVX-512."""
    found = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if found is None or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return None
    operator = found.default
    return lambda rows, columns: operator(rows, columns, None, "none", [], "")


def use_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN multiplies two matrices faster: large ones, float32, on a CPU, where nothing is differentiated."""
    return (
        left.dim() == right.dim() == 2
        and left.shape[1] == right.shape[0]
        and use_onednn_at(left.shape[0], *right.shape, left, right)
    )


def use_onednn_at(rows: int, inner: int, columns: int, *factors: Tensor) -> bool:
    """Whether oneDNN is faster for a product of this size with factors like these."""
    return (
        rows * inner * columns >= LARGE
        and all(factor.dtype == torch.float32 and factor.device.type == "cpu" for factor in factors)
        and not torch.is_grad_enabled()  # it has no derivatives
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and has_onednn()
        and onednn() is not None
    )


def without_autocast(device: str) -> AbstractContextManager[object]:
    """No autocast inside, by this thread, for this type of device: what is computed there keeps its own type."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """L R, of any number of leading dimensions."""
    if left.numel() * right.shape[-1] < LARGE or not use_onednn(left, right):  # the first costs a small product least
        return left @ right
    multiply = onednn()
    assert multiply is not None
    # Columns with gaps would be multiplied one number at a time, hundreds of times slower.
    columns = right.mT if right.is_contiguous() else right.mT.contiguous()
    return multiply(left.contiguous(), columns)


LARGE_SIDE = 512
"""From this size on it is faster to leave out the known half of a symmetric or triangular matrix."""


def gram(rows: Tensor) -> Tensor:
    """XᵀX of `[..., rows, n]`; on a CPU only the blocks on and right of the diagonal are multiplied, then mirrored."""
    size = rows.shape[-1]
    if rows.is_cuda or size < LARGE_SIDE:
        return rows.mT @ rows
    product = rows.new_empty(*rows.shape[:-2], size, size)
    for a, b in pairwise(size * part // 8 for part in range(9)):
        upper = matmul(rows[..., a:b].mT, rows[..., a:])
        product[..., a:b, a:] = upper
        product[..., b:, a:b] = upper[..., b - a :].mT
    return product


def second_moment(left: Tensor, right: Tensor, left_constant: bool, right_constant: bool) -> Tensor:
    """The mean of left rightᵀ over examples and positions, for `[..., B, T, p]` and `[..., B, T, q]`.

    With `left_constant` or `right_constant` that side is followed by a 1, as a border of means, which makes the result
    one larger: the inputs, which are large, are not copied.
    """
    count = left.shape[-3] * left.shape[-2]
    rows, others = left.flatten(-3, -2), right.flatten(-3, -2)
    moment = (gram(rows) if left is right else wide_product(rows.mT, others)).div_(count)
    column = column_sums(rows).div_(count) if right_constant else None
    if left is right and left_constant and right_constant:
        return with_border(moment, column, column)
    return with_border(moment, column_sums(others).div_(count) if left_constant else None, column)


def with_border(moment: Tensor, row: Tensor | None, column: Tensor | None) -> Tensor:
    """`[..., p, q]` with a row below it, a column beside it and a 1 in the corner; None for a side without."""
    if row is None and column is None:
        return moment
    p, q = moment.shape[-2:]
    bordered = moment.new_ones(*moment.shape[:-2], p + (row is not None), q + (column is not None))
    bordered[..., :p, :q] = moment
    if row is not None:
        bordered[..., p, :q] = row
    if column is not None:
        bordered[..., :p, q] = column
    return bordered


def column_sums(rows: Tensor) -> Tensor:
    """The sum of `[..., rows, n]` over its rows; on a GPU by a product, several times faster than a reduction."""
    if not rows.is_cuda:
        return rows.sum(-2)
    # 1 is exact in every number format, 1/n is not.
    return (rows.new_ones(*rows.shape[:-2], 1, rows.shape[-2]) @ rows).squeeze(-2)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """L R; a tall product of many small matrices is transposed, since a CPU is several times faster on wide ones."""
    if left.is_cuda or left.dim() < 3 or left.shape[-2] <= right.shape[-1]:
        return matmul(left, right)
    return (right.mT @ left.mT).mT


def rows_times(rows: Tensor, right: Tensor) -> Tensor:
    """X R for `[..., B, T, n]` and `[..., n, m]`, with B and T as the rows of one product."""
    product: Tensor = matmul(rows.flatten(-3, -2), right).unflatten(-2, rows.shape[-3:-1])
    return product


def between(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """L X R for X `[samples..., ..., out, in]` with more dimensions than the factors have.

    The samples are placed side by side, so that each factor is in one product and is not copied for each sample.
    """
    extra = matrix.dim() - left.dim()
    if extra <= 0:
        return matmul(matmul(left, matrix), right)
    stacked = matrix.flatten(0, extra - 1).movedim(0, -3)
    count, rows = stacked.shape[-3:-1]
    times_right = wide_product(stacked.flatten(-3, -2), right).unflatten(-2, (count, rows))
    product = matmul(left, times_right.movedim(-3, -2).flatten(-2))
    separate: Tensor = product.unflatten(-1, (count, -1)).movedim(-2, 0).unflatten(0, matrix.shape[:extra])
    return separate
