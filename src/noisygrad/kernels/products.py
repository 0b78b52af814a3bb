"""Products of large float32 matrices on a CPU by oneDNN, where that is faster than `@`.

`@` uses MKL, which most likely leaves AVX-512 unused on processors that are not Intel's; oneDNN, with which torch
computes convolutions, uses it. On two cores of a Zen 5, 256×2305 times 2305×2305 takes 5.5 ms instead of 13.9. Torch
does not report the maker of a processor, so oneDNN is used on all that have AVX-512; it was not timed on Intel's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """L R, of any number of leading dimensions."""
    if not use_onednn(left, right):
        return left @ right
    multiply = onednn()
    assert multiply is not None
    # Columns with gaps would be multiplied one number at a time, hundreds of times slower.
    columns = right.mT if _is_dense(right) else right.mT.contiguous()
    return multiply(left.contiguous(), columns)


def _is_dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.mT.is_contiguous()
