"""Squares of per-example gradients on a GPU in one launch for each layer, and without anything that they are made from.

For outputs' gradients g and inputs a, Σ_b (Σ_t g_bt a_btᵀ)² needs every example's matrix, if only to square it: 128
times a layer's weights, and its patches beside them. The kernel here makes each matrix tile by tile in registers, reads
the patches from the image itself, and writes the sum. Needs Triton, which comes with torch for NVIDIA GPUs; where it is
missing, and for whatever `applies` says no to, the matrices are made of some examples at a time (`passes`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def applies(gradients: Tensor) -> bool:
    """Whether there is a kernel for output gradients `[B, T, out]` such as these."""
    plain = gradients.is_cuda and gradients.dtype == torch.float32 and gradients.dim() == 3 and gradients.shape[1] > 1
    return plain and _installed() and not torch.compiler.is_compiling()


def of_sequences(gradients: Tensor, inputs: Tensor, constant: bool) -> Tensor:
    """Σ_b (Σ_t g aᵀ)² for gradients `[B, T, p]` and inputs `[B, T, q]`, row by row: `[p · q]`.

    With `constant` followed by that of an input that is always 1: `[p · q + p]`.
    """
    return squared_products(gradients, inputs.mT.unsqueeze(2), Window(), inputs.shape[1], constant)


def of_convolution(module: Any, gradients: Tensor, images: Tensor, constant: bool) -> Tensor | None:
    """The same for a convolution, from its images `[B, channels, ...]`; None for one of three axes."""
    kernel, stride, dilation = (tuple(map(int, each)) for each in (module.kernel_size, module.stride, module.dilation))
    if len(kernel) > 2:
        return None
    padding = list(module._reversed_padding_repeated_twice)
    if module.padding_mode != "zeros":
        images, padding = F.pad(images, padding, mode=module.padding_mode), [0] * len(padding)
    before = tuple(padding[::2][::-1])
    width = (images.shape[-1] + padding[0] + padding[1] - dilation[-1] * (kernel[-1] - 1) - 1) // stride[-1] + 1
    if len(kernel) == 1:
        images, kernel, stride = images.unsqueeze(2), (1, *kernel), (1, *stride)
        dilation, before = (1, *dilation), (0, *before)
    window = Window(*map(_pair, (kernel, stride, dilation, before)))
    return squared_products(gradients, images, window, width, constant)


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    down, across = numbers
    return down, across


def squared_products(gradients: Tensor, images: Tensor, window: Window, width: int, constant: bool) -> Tensor:
    """Σ_b (Σ_t g_bt a_btᵀ)² row by row, where a_bt is what the window sees of an image at position t.

    Args:
        gradients: `[B, T, out]`; positions are counted line by line.
        images: `[B, channels, height, width]`, in any order of memory.
        window: What is seen of them.
        width: How many positions there are in a line.
        constant: Whether Σ_b (Σ_t g_bt)² follows.
    """
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
        exact=not torch.backends.cuda.matmul.allow_tf32,
    )
    return sums[0] if len(sums) == 1 else sums.sum(dim=0)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
