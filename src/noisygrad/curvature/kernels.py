"""Squares of per-example gradients on a GPU, without anything in memory that they are made from.

For outputs' gradients g and inputs a, Σ_b (Σ_t g_bt a_btᵀ)² needs every example's matrix, if only to square it: as many
as a batch has examples, and their patches beside them. The kernel here makes each matrix tile by tile in registers,
reads the patches from the image itself, and writes sums. Needs Triton, which comes with torch for NVIDIA GPUs; where it
does not work, and for whatever there is no kernel for, the matrices are made of some examples at a time (`passes`).
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from noisygrad.families.factorisation import capturing

_CAPABILITY = (7, 0)
_LARGEST_INDEX = 2**31 - 1
_BLOCKS_PER_PROCESSOR = 4
_ROWS, _FEW_ROWS, _COLUMNS = 64, 32, 64
_POSITIONS, _FEW_POSITIONS = 32, 16


@dataclass(frozen=True)
class Window:
    """How a convolution of two axes looks at its image; one tap, where it is no convolution."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    before: tuple[int, int] = (0, 0)
    """Zeros above and to the left."""


def applies(gradients: Tensor) -> bool:
    """Whether there may be a kernel for output gradients `[B, T, out]` such as these."""
    plain = gradients.is_cuda and gradients.dtype == torch.float32 and gradients.dim() == 3 and gradients.shape[1] > 1
    return plain and not torch.compiler.is_compiling() and _works(gradients.device)


_WORKING: dict[torch.device, bool] = {}


def _works(device: torch.device) -> bool:
    """Whether Triton is there and can do what it is asked for: it needs a C compiler, for example. Tried once."""
    if device not in _WORKING:
        if capturing():
            return False
        known = importlib.util.find_spec("triton") is not None and torch.version.hip is None
        _WORKING[device] = known and torch.cuda.get_device_capability(device) >= _CAPABILITY and _tried(device)
    return _WORKING[device]


def _tried(device: torch.device) -> bool:
    g = torch.ones(1, 2, 1, device=device)
    try:
        found = of_sequences(g, g, constant=True)
        return found is not None and found.tolist() == [4.0, 4.0]
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(
            f"Triton does not work here ({type(error).__name__}: {error}): statistics take more memory and more time",
            stacklevel=2,
        )
        return False


def of_sequences(gradients: Tensor, inputs: Tensor, constant: bool) -> Tensor | None:
    """Σ_b (Σ_t g aᵀ)² for gradients `[B, T, p]` and inputs `[B, T, q]`, row by row: `[p · q]`.

    With `constant` followed by that of an input that is always 1: `[p · q + p]`. None where there is no kernel for it.
    """
    return squared_products(gradients, inputs.mT.unsqueeze(2), Window(), inputs.shape[1], constant)


def squared_products(gradients: Tensor, images: Tensor, window: Window, width: int, constant: bool) -> Tensor | None:
    """Σ_b (Σ_t g_bt a_btᵀ)² row by row, where a_bt is what the window sees of an image at position t.

    None where there is nothing to multiply, or where an example is too large for the kernel's indices.

    Args:
        gradients: `[B, T, out]`; positions are counted line by line.
        images: `[B, channels, height, width]`, in any order of memory.
        window: What is seen of them.
        width: How many positions there are in a line.
        constant: Whether Σ_b (Σ_t g_bt)² follows.
    """
    if not gradients.numel() or not images.numel() or max(_span(gradients), _span(images)) > _LARGEST_INDEX:
        return None
    from noisygrad.curvature import triton_squares

    (batch, positions, outputs), channels = gradients.shape, images.shape[1]
    taps = window.kernel[0] * window.kernel[1]
    rows = _ROWS if outputs > _FEW_ROWS else _FEW_ROWS
    tiles = -(-outputs // rows) * -(-channels * taps // _COLUMNS)
    # So many parts of the batch, each with a sum of its own, that all of the GPU has something to do.
    parts = max(1, min(batch, _processors(gradients.device) * _BLOCKS_PER_PROCESSOR // tiles))
    each = -(-batch // parts)
    sums = gradients.new_empty(-(-batch // each), outputs * (channels * taps + constant))
    triton_squares.launch(
        gradients,
        images,
        sums,
        window,
        width,
        each,
        constant=constant,
        blocks=(rows, _COLUMNS, _POSITIONS if positions > _FEW_POSITIONS else _FEW_POSITIONS),
        exact=torch.backends.cuda.matmul.fp32_precision != "tf32",
    )
    return sums[0] if len(sums) == 1 else sums.sum(dim=0)


def _span(tensor: Tensor) -> int:
    """The distance in memory of an example's last number from its first."""
    return sum((size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
