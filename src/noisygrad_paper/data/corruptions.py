"""Images made worse by degrees, to see whether a network's doubt grows: noise, blur and loss of contrast.

The strengths 1 to 5 have the constants of CIFAR-10-C (Hendrycks & Dietterich 2019).
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Generator, Tensor
from torch.nn import functional

Corruption: TypeAlias = Callable[[Tensor, int, Generator], Tensor]
"""Images, a strength from 1 to 5 and a generator of the CPU -> images, which may leave [0, 1]."""

STRENGTHS = range(1, 6)
"""From hardly seen to plain."""

_NOISE = (0.04, 0.06, 0.08, 0.09, 0.10)
_BLUR = (0.4, 0.6, 0.7, 0.8, 1.0)
_CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)


def _noise(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Gaussian noise of standard deviation σ for every number."""
    # Drawn on the CPU and in one precision, so that every device sees the same.
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float32)
    return x + _NOISE[strength - 1] * noise.to(x)


def _blur(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Gaussian blur of σ pixels, cut off at 4 σ; beyond its edge an image is mirrored."""
    sigma = _BLUR[strength - 1]
    radius = int(4 * sigma + 0.5)
    if min(x.shape[-2:]) <= radius:
        raise ValueError(
            f"blur of strength {strength} needs images of at least {radius + 1} × {radius + 1} pixels; got "
            f"{x.shape[-2]} × {x.shape[-1]}"
        )
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.softmax(-0.5 * (offsets / sigma) ** 2, dim=0).tolist()
    padded = functional.pad(x, (radius,) * 4, mode="reflect")
    # A sum of shifted images: a convolution of the library's may round to TF32 on a GPU.
    for axis in (-2, -1):
        size = x.shape[axis]
        padded = sum((weight * padded.narrow(axis, i, size) for i, weight in enumerate(weights)), padded.new_zeros(()))
    return padded


def _contrast(x: Tensor, strength: int, generator: Generator) -> Tensor:
    """Towards the mean of each channel of the image."""
    mean = x.mean(dim=(-2, -1), keepdim=True)
    return mean + _CONTRAST[strength - 1] * (x - mean)


CORRUPTIONS: dict[str, Corruption] = {"noise": _noise, "blur": _blur, "contrast": _contrast}
"""Every corruption by its name; `corrupted` applies one, with checks."""


def corrupted(x: Tensor, kind: str, strength: int, generator: Generator) -> Tensor:
    """Images made worse, again in [0, 1]; the given ones are unchanged.

    `x` is [n, C, H, W], floating point in [0, 1], before it is normalised, on any device; the generator is one of the
    CPU all the same. ValueError for other images, for an unknown kind, or for a strength that is not 1, 2, ... 5.
    """
    if kind not in CORRUPTIONS:
        raise ValueError(f"there is no corruption {kind!r}; the known ones are {', '.join(CORRUPTIONS)}")
    if not isinstance(strength, int) or strength not in STRENGTHS:
        raise ValueError(f"the strength of a corruption is a whole number from 1 to 5; got {strength!r}")
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(
            f"images must be [n, C, H, W] in floating point, bytes divided by 255; got {x.dtype} {list(x.shape)}"
        )
    if x.numel() and not (x.min() >= 0.0 and x.max() <= 1.0):
        raise ValueError(
            f"images must lie in [0, 1], and are to be normalised after they are corrupted; got values in "
            f"{x.min().item():g}..{x.max().item():g}"
        )
    if generator.device.type != "cpu":
        raise ValueError(
            f"noise is drawn on the CPU, so that every device sees the same; got a generator on {generator.device}: "
            "give torch.Generator()"
        )
    return CORRUPTIONS[kind](x, strength, generator).clamp(0.0, 1.0)
