"""Which pixels of its images the kernel of a convolution sees: patches, windows and axes."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from noisygrad.kernels import squares
from noisygrad.kernels.scratch import memory_bound


def patches(module: Any, inputs: Tensor) -> Tensor:
    """The input patch under each output position, `[B, positions, channels · kernel]`, in the order of the weight."""
    images, kernel = _padded(module, inputs), module.kernel_size
    if len(kernel) == 2 and memory_bound(images):  # on a GPU it would be one launch for each image
        return F.unfold(images, kernel, dilation=module.dilation, stride=module.stride).mT
    (batch, channels, *sizes), (next_image, next_channel, *next_pixel) = images.shape, images.stride()
    axes = list(zip(sizes, next_pixel, kernel, module.stride, module.dilation, strict=True))
    positions = [(size - gap * (taps - 1) - 1) // step + 1 for size, _, taps, step, gap in axes]
    next_position = [pixel * step for _, pixel, _, step, _ in axes]
    next_tap = [pixel * gap for _, pixel, _, _, gap in axes]
    windows = images.as_strided(
        (batch, *positions, channels, *kernel), (next_image, *next_position, next_channel, *next_tap)
    )
    return windows.reshape(batch, math.prod(positions), channels * math.prod(kernel))


def _padded(module: Any, inputs: Tensor) -> Tensor:
    padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(inputs, padding, mode=mode) if any(padding) else inputs


def two_axes(module: Any, images: Tensor) -> tuple[Tensor, squares.Window]:
    """A convolution of one or two axes as one of two with zeros around its images, `[B, channels, height, width]`."""
    zeros = module.padding_mode == "zeros"
    padding = tuple(module._reversed_padding_repeated_twice) if zeros else None
    images = images if zeros else _padded(module, images)
    window = _window(tuple(module.kernel_size), tuple(module.stride), tuple(module.dilation), padding)
    return images if images.dim() == 4 else images.unsqueeze(2), window


@lru_cache(maxsize=1024)
def _window(
    kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], padding: tuple[int, ...] | None
) -> squares.Window:
    """The window of a convolution, given the zeros at both ends of each axis, the last axis first."""
    before = (0,) * len(kernel) if padding is None else padding[::2][::-1]
    axes = list(zip(kernel, stride, dilation, before, strict=True))
    down, across = axes if len(axes) == 2 else ((1, 1, 1, 0), *axes)
    return squares.Window(*zip(down, across, strict=True))


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution of stride 1: sizes of image, output and kernel, zeros in front, gap between taps."""

    size: int
    outputs: int
    kernel: int
    before: int
    dilation: int

    def window(self, *taps: int) -> tuple[int, int]:
        """The output positions [start, stop) at which all these taps are on the image; none where stop = start."""
        places = [self.dilation * tap - self.before for tap in taps]
        start = max(0, *(-place for place in places))
        return start, max(start, min(self.outputs, *(self.size - place for place in places)))

    def under(self, tap: int) -> slice:
        """The pixels that a tap multiplies."""
        place = self.dilation * tap - self.before
        start, stop = self.window(tap)
        return slice(start + place, stop + place)

    @property
    def after(self) -> int:
        """Zeros behind the image."""
        return self.outputs + self.dilation * (self.kernel - 1) - self.size - self.before

    def pairs(self) -> dict[int, dict[tuple[int, int], list[tuple[int, int]]]]:
        """The pairs of taps by the shift between them, then by the range of pixels that the first of them visits."""
        found: dict[int, dict[tuple[int, int], list[tuple[int, int]]]] = {}
        for first, second in product(range(self.kernel), repeat=2):
            start, stop = self.window(first, second)
            if start < stop:
                place = self.dilation * first - self.before
                ranges = found.setdefault(self.dilation * (second - first), {})
                ranges.setdefault((start + place, stop + place), []).append((first, second))
        return found
