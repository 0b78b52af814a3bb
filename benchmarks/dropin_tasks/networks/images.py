"""Networks for images: plain, with batch, group and layer norm, residual."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def batch_norm(channels: int) -> nn.Module:
    """Batch normalisation."""
    return nn.BatchNorm2d(channels)


def group_norm(channels: int) -> nn.Module:
    """Group normalisation in groups of eight channels."""
    return nn.GroupNorm(max(1, channels // 8), channels)


def convnet(channels: int, widths: tuple[int, ...], outputs: int, norm: Norm | None = None) -> nn.Sequential:
    """Convolution, norm and pooling for each width, then the mean over positions and a linear layer."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=norm is None)]
        layers += [] if norm is None else [norm(width)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))


def lenet(channels: int, size: int, width: int, outputs: int) -> nn.Sequential:
    """Two convolutions and two linear layers, without any norm."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (size // 4) ** 2, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, outputs),
    )


class ResidualBlock(nn.Module):
    """Two convolutions with norm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = norm(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = norm(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + self.second_norm(self.second(y)))


def resnet(channels: int, widths: tuple[int, ...], outputs: int, norm: Norm) -> nn.Sequential:
    """A stem and one residual block for each width, all but the first at half the resolution of the one before."""
    blocks: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), norm(widths[0]), nn.ReLU()]
    before = widths[0]
    for index, width in enumerate(widths):
        blocks.append(ResidualBlock(before, width, 1 if index == 0 else 2, norm))
        before = width
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))


class ConvNextBlock(nn.Module):
    """A depthwise convolution, LayerNorm and a perceptron over channels, beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand, self.reduce = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).movedim(1, -1))
        return x + self.reduce(F.gelu(self.expand(y))).movedim(-1, 1)


def convnext(channels: int, width: int, blocks: int, outputs: int) -> nn.Sequential:
    """Patches of 2×2 pixels, some blocks, the mean over positions."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 2, 2),
        *(ConvNextBlock(width) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(width),
        nn.Linear(width, outputs),
    )


class VisionTransformer(nn.Module):
    """torch's own encoder on patches, and the mean over them."""

    def __init__(self, channels: int, size: int, patch: int, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.encoder(tokens).mean(1)))
