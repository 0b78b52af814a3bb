"""Squares of per-example gradients on a GPU, without the gradients or the patches in memory.

For output gradients g and inputs a, Σ_b (Σ_t g_bt a_btᵀ)² needs the matrix of every example, and their patches. The
kernel here makes each matrix tile by tile in registers, reads the patches from the image itself, and writes sums. It
needs Triton, which comes with torch for NVIDIA GPUs; where that does not work, and where there is no kernel, the
matrices of a few examples are made at a time (`squared_products`).
"""

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
    """Which pixels a convolution of two axes multiplies at each position; by default a single tap."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    before: tuple[int, int] = (0, 0)
    """Zeros above and to the left."""


def applies(gradients: Tensor, positions: int) -> bool:
    """Whether there may be a kernel for these output gradients, at this many positions of each example."""
    plain = positions > 1 and gradients.is_cuda and gradients.dtype == torch.float32
    return plain and not torch.compiler.is_compiling() and _works(gradients.device)


_WORKING: dict[torch.device, bool] = {}


def _works(device: torch.device) -> bool:
    """Whether Triton is installed and works (it needs a C compiler, for example); tried once for each device."""
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

    With `constant` followed by the sums for an input that is always 1: `[p · q + p]`. None where there is no kernel.
    """
    return squared_products(gradients.mT.unsqueeze(2), inputs.mT.unsqueeze(2), Window(), constant)


def squared_products(
    gradients: Tensor, images: Tensor, window: Window, constant: bool, channels_last: bool = False
) -> Tensor | None:
    """Σ_b (Σ_t g_bt a_btᵀ)² row by row, where a_bt are the pixels under the window at position t.

    None where there is nothing to multiply, or where an example is too large for the kernel's indices.

    Gradients are `[B, out, lines, positions of a line]` and images `[B, channels, height, width]`, in any order of
    memory. With `constant`, Σ_b (Σ_t g_bt)² follows. A row is ordered by channel and then by tap, with `channels_last`
    by tap and then by channel.
    """
    device = gradients.device
    lines, width = gradients.shape[2:]
    if min(lines, width) > 1 and gradients.stride(2) != width * gradients.stride(3):
        gradients = gradients.contiguous()  # the kernel steps evenly from one line to the next
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
    """How many parts the batch is divided into, each with its own sum, to occupy all of the GPU."""
    numbers: int
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: tuple[int, ...]
    """Values that are compiled into the kernel."""


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
