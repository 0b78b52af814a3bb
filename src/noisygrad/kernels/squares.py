"""Squares of per-example gradients on a GPU, without anything in memory that they are made from.

For outputs' gradients g and inputs a, Σ_b (Σ_t g_bt a_btᵀ)² needs every example's matrix, if only to square it: as many
as a batch has examples, and their patches beside them. The kernel here makes each matrix tile by tile in registers,
reads the patches from the image itself, and writes sums. Needs Triton, which comes with torch for NVIDIA GPUs; where it
does not work, and for whatever there is no kernel for, the matrices are made of some examples at a time (`passes`).
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from noisygrad.kernels.factorisation import capturing

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


def applies(gradients: Tensor, positions: int) -> bool:
    """Whether there may be a kernel for output gradients such as these, at so many positions of each example."""
    plain = positions > 1 and gradients.is_cuda and gradients.dtype == torch.float32
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
    return squared_products(gradients.mT.unsqueeze(2), inputs.mT.unsqueeze(2), Window(), constant)


def squared_products(
    gradients: Tensor, images: Tensor, window: Window, constant: bool, channels_last: bool = False
) -> Tensor | None:
    """Σ_b (Σ_t g_bt a_btᵀ)² row by row, where a_bt is what the window sees of an image at position t.

    None where there is nothing to multiply, or where an example is too large for the kernel's indices.

    Args:
        gradients: `[B, out, lines, positions of a line]`, in any order of memory.
        images: `[B, channels, height, width]`, likewise.
        window: What is seen of them.
        constant: Whether Σ_b (Σ_t g_bt)² follows.
        channels_last: Whether a row counts tap by tap, of each all channels; else channel by channel.
    """
    device = gradients.device
    lines, width = gradients.shape[2:]
    if min(lines, width) > 1 and gradients.stride(2) != width * gradients.stride(3):
        gradients = gradients.contiguous()  # the kernel counts on over the lines
    like = (gradients.shape, gradients.stride(), images.shape, images.stride())
    plan = _plan(*like, window, constant, channels_last, _processors(device))
    if plan is None:
        return None
    sums = gradients.new_empty(plan.parts, plan.numbers)
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    with torch.cuda.device(device) if _elsewhere(device) else nullcontext():
        _launcher()(plan.grid, gradients, images, sums, plan.sizes, plan.constants, exact=exact)
    return sums[0] if plan.parts == 1 else sums.sum(dim=0)


@cache
def _launcher() -> Callable[..., None]:
    from noisygrad.kernels import triton_squares

    return triton_squares.launch


@dataclass(frozen=True)
class LaunchPlan:
    """How the kernel is run on tensors of certain shapes and strides."""

    parts: int
    """So many parts of the batch, each with a sum of its own, that all of the GPU has something to do."""
    numbers: int
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: tuple[int, ...]
    """What is compiled in."""


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    image_shape: tuple[int, ...],
    image_strides: tuple[int, ...],
    window: Window,
    constant: bool,
    channels_last: bool,
    processors: int,
) -> LaunchPlan | None:
    (batch, outputs, lines, width), (_, channels, *image) = shape, image_shape
    (next_gradients, next_output, next_line, next_position), positions = strides, lines * width
    if width == 1:  # then that stride means nothing
        next_position = next_line
    reach = max(_span(shape, strides), _span(image_shape, image_strides))
    if not math.prod(shape) or not math.prod(image_shape) or reach > _LARGEST_INDEX:
        return None
    taps = window.kernel[0] * window.kernel[1]
    rows = _ROWS if outputs > _FEW_ROWS else _FEW_ROWS
    positions_per_tile = _POSITIONS if positions > _FEW_POSITIONS else _FEW_POSITIONS
    tiles = (-(-outputs // rows), -(-channels * taps // _COLUMNS))
    each = -(-batch // max(1, min(batch, processors * _BLOCKS_PER_PROCESSOR // math.prod(tiles))))
    parts = -(-batch // each)
    next_one = (next_gradients, next_position, next_output)
    seen = (width, *image, window.kernel[1], *window.stride, *window.dilation, *window.before)
    return LaunchPlan(
        parts,
        outputs * (channels * taps + constant),
        (*tiles, parts),
        (batch, each, positions, outputs, channels, taps, *seen, *next_one, *image_strides),
        (int(constant), int(channels_last), rows, _COLUMNS, positions_per_tile),
    )


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The distance in memory of an example's last number from its first."""
    return sum((size - 1) * step for size, step in zip(shape[1:], strides[1:], strict=True))


def _elsewhere(device: torch.device) -> bool:
    """Whether this is a GPU, but not the one that kernels are started on."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
