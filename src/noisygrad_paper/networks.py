"""Networks of the image experiments: the paper's VGG16, and a small one for digits."""

import math

import torch
from torch import Tensor, nn

from noisygrad.networks import positive, uniform_


class _ImageNetwork(nn.Module):
    """Features of images of one shape, and the logits that they give."""

    features: nn.Sequential
    classifier: nn.Module
    shape: tuple[int, int, int]

    def forward(self, x: Tensor) -> Tensor:
        """Logits for images `[batch, channels, height, width]`."""
        if x.shape[1:] != self.shape:
            expected = ", ".join(map(str, self.shape))
            raise ValueError(f"got images of shape {tuple(x.shape)}; expected [batch, {expected}]")
        output: Tensor = self.classifier(self.features(x).flatten(1))
        return output


class VGG16(_ImageNetwork):
    """The paper's VGG16 for 32×32 colour images: thirteen 3×3 convolutions at half the usual width, one linear layer.

    Channels are 32-32, 64-64, 128×3, 256×3, 256×3, each group followed by a 2×2 max-pool, so that the classifier sees
    256 features. Weights start Glorot-uniform, biases at zero. Activations are not in place.

    Args:
        classes: Number of outputs (logits).
        batch_norm: Whether each convolution is followed by a BatchNorm2d (running average 0.99, epsilon 1e-3).
        learned_norm: Whether its scales and shifts are learned; the paper leaves them at 1 and 0.
        width: Factor on every number of channels; 2.0 is the usual VGG16, small values make a quick test.
        generator: Source of the initial weights; the global one by default.

    Shapes: `[batch, 3, 32, 32]` to `[batch, classes]`.
    """

    GROUPS = ((32, 32), (64, 64), (128, 128, 128), (256, 256, 256), (256, 256, 256))

    def __init__(
        self,
        classes: int = 10,
        batch_norm: bool = False,
        width: float = 1.0,
        *,
        learned_norm: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        positive("classes", classes)
        if not (math.isfinite(width) and width > 0):
            raise ValueError(f"got width={width}; expected a positive number")
        self.shape = 3, 32, 32
        layers: list[nn.Module] = []
        channels = 3
        for group in VGG16.GROUPS:
            for full in group:
                wide = max(1, round(full * width))
                layers.append(nn.Conv2d(channels, wide, 3, padding="same"))
                if batch_norm:
                    layers.append(_norm(wide, learned_norm))
                layers.append(nn.ReLU())
                channels = wide
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)
        _glorot(self, generator)


class ConvNet(_ImageNetwork):
    """A small network for digits: two 3×3 convolutions (16, 32 channels) with pooling, 64 hidden units, the logits.

    Args:
        channels: Channels of the images.
        classes: Number of outputs (logits).
        image_size: Height and width of the images, at least 4: 28 for MNIST, 8 for scikit-learn's digits.
        batch_norm: Whether each convolution is followed by a BatchNorm2d, as in `VGG16`.
        learned_norm: Whether its scales and shifts are learned.
        generator: Source of the initial weights; the global one by default.

    Shapes: `[batch, channels, image_size, image_size]` to `[batch, classes]`.
    """

    def __init__(
        self,
        channels: int = 1,
        classes: int = 10,
        image_size: int = 28,
        *,
        batch_norm: bool = False,
        learned_norm: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        positive("channels", channels)
        positive("classes", classes)
        if image_size < 4:
            raise ValueError(f"got image_size={image_size}; expected at least 4, for the image is halved twice")
        self.shape = channels, image_size, image_size
        layers: list[nn.Module] = []
        for before, after in ((channels, 16), (16, 32)):
            layers.append(nn.Conv2d(before, after, 3, padding=1))
            if batch_norm:
                layers.append(_norm(after, learned_norm))
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        pooled = image_size // 2 // 2
        self.classifier = nn.Sequential(nn.Linear(32 * pooled * pooled, 64), nn.ReLU(), nn.Linear(64, classes))
        _glorot(self, generator)


def _norm(channels: int, learned: bool) -> nn.BatchNorm2d:
    """As in the released code: a running average of 0.99 and epsilon 1e-3, TensorFlow's defaults."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01, affine=learned)


@torch.no_grad()
def _glorot(module: nn.Module, generator: torch.Generator | None) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # in + out connections of one unit: the kernel's positions count on both sides.
            fans = layer.weight[0].numel() + layer.weight.shape[0] * layer.weight[0, 0].numel()
            uniform_(layer.weight, math.sqrt(6.0 / fans), generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
