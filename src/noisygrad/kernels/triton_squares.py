"""The Triton kernel of `kernels.squares`; import it only where Triton is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_SIZES = [
    *("batch", "each", "positions", "outputs", "channels", "taps", "width", "image_height", "image_width"),
    *("kernel_width", "step_down", "step_across", "gap_down", "gap_across", "above", "left"),
]
"""Sizes that the kernel is not specialised on; it is on strides that are 1 or multiples of 16."""


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    gradients,
    images,
    sums,
    batch,
    each,
    positions,
    outputs,
    channels,
    taps,
    width,
    image_height,
    image_width,
    kernel_width,
    step_down,
    step_across,
    gap_down,
    gap_across,
    above,
    left,
    next_gradients,
    next_position,
    next_output,
    next_image,
    next_channel,
    next_line,
    next_pixel,
    CONSTANT: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of the sum over the examples of one part of the batch."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Adjacent columns are adjacent channels of one tap, as in an image in channels-last order.
    tap, channel = column // channels, column % channels
    row_there, column_there = row < outputs, tap < taps
    down, across = tap // kernel_width * gap_down - above, tap % kernel_width * gap_across - left
    part = tl.program_id(2).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for number in range(0, each):
        example = part * each + number
        g = gradients + example * next_gradients
        a = images + example * next_image
        product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, positions, POSITIONS):
            position = start + tl.arange(0, POSITIONS)
            there = (position < positions) & (example < batch)
            left_side = tl.load(
                g + row[:, None] * next_output + position[None, :] * next_position,
                mask=row_there[:, None] & there[None, :],
                other=0.0,
            )
            line = (position // width * step_down)[:, None] + down[None, :]
            pixel = (position % width * step_across)[:, None] + across[None, :]
            inside = (line >= 0) & (line < image_height) & (pixel >= 0) & (pixel < image_width)
            right_side = tl.load(
                a + channel[None, :] * next_channel + line * next_line + pixel * next_pixel,
                mask=inside & there[:, None] & column_there[None, :],
                other=0.0,
            )
            product = tl.dot(left_side, right_side, product, input_precision=PRECISION)
        total += product * product
    weights = outputs * channels * taps
    own = sums + part * (weights + outputs * CONSTANT)
    within = column if CHANNELS_LAST else channel * taps + tap
    place = row[:, None] * (channels * taps) + within[None, :]
    tl.store(own + place, total, mask=row_there[:, None] & column_there[None, :])
    if CONSTANT and tl.program_id(1) == 0:
        constant = tl.zeros((ROWS,), dtype=tl.float32)
        for number in range(0, each):
            example = part * each + number
            g = gradients + example * next_gradients
            tile = tl.zeros((ROWS, POSITIONS), dtype=tl.float32)
            for start in range(0, positions, POSITIONS):
                position = start + tl.arange(0, POSITIONS)
                there = (position < positions) & (example < batch)
                tile += tl.load(
                    g + row[:, None] * next_output + position[None, :] * next_position,
                    mask=row_there[:, None] & there[None, :],
                    other=0.0,
                )
            summed = tl.sum(tile, axis=1)
            constant += summed * summed
        tl.store(own + weights + row, constant, mask=row_there)


def launch(
    grid: tuple[int, int, int],
    gradients: Tensor,
    images: Tensor,
    sums: Tensor,
    sizes: Sequence[int],
    constants: Sequence[int],
    *,
    exact: bool,
) -> None:
    """Fill `sums`, `[parts, n]`, of a `kernels.squares.LaunchPlan`."""
    compiled: Any = _kernel
    compiled[grid](gradients, images, sums, *sizes, *constants, "ieee" if exact else "tf32")
