"""The patches of images that a convolution multiplies with its kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from noisygrad.kernels.scratch import memory_bound


def unfold(images: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The patch at each position of padded images `[B, channels, *sizes]`: `[B, positions, channels · kernel]`."""
    if len(kernel) == 2 and memory_bound(images):  # on a GPU it would be one launch for each image
        return F.unfold(images, tuple(kernel), dilation=tuple(dilation), stride=tuple(stride)).mT
    (batch, channels, *sizes), (next_image, next_channel, *next_pixel) = images.shape, images.stride()
    axes = zip(sizes, kernel, stride, dilation, strict=True)
    positions = [(size - gap * (taps - 1) - 1) // step + 1 for size, taps, step, gap in axes]
    next_position = [pixel * step for pixel, step in zip(next_pixel, stride, strict=True)]
    next_tap = [pixel * gap for pixel, gap in zip(next_pixel, dilation, strict=True)]
    windows = images.as_strided(
        (batch, *positions, channels, *kernel), (next_image, *next_position, next_channel, *next_tap)
    )
    return windows.reshape(batch, math.prod(positions), channels * math.prod(kernel))
