"""The networks of the image experiments: shapes and starts."""

import math

import pytest
import torch
from torch import nn

from noisygrad_paper.networks import VGG16, ConvNet


@pytest.mark.parametrize("batch_norm", [False, True])
def test_vgg16_is_the_papers(batch_norm):
    network = VGG16(batch_norm=batch_norm, generator=torch.Generator().manual_seed(0))
    convolutions = [layer for layer in network.features if isinstance(layer, nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [32] * 2 + [64] * 2 + [128] * 3 + [256] * 6
    assert all(c.kernel_size == (3, 3) and c.bias is not None and not c.bias.any() for c in convolutions)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in network.features) == (13 if batch_norm else 0)
    assert not any(getattr(layer, "inplace", False) for layer in network.modules())
    assert network.classifier.in_features == 256
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    bound = math.sqrt(6 / (9 * 128 + 9 * 256))
    assert 0.99 * bound < convolutions[7].weight.abs().max().item() <= bound


def test_vgg16_width_scales_channels():
    network = VGG16(classes=7, width=0.125)
    assert network.classifier.in_features == 32
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (1, 8), (3, 30), (1, 4)])
def test_convnet_for_any_image_size(channels, size):
    network = ConvNet(channels=channels, classes=4, image_size=size)
    assert network(torch.randn(2, channels, size, size)).shape == (2, 4)


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"expected \[batch, 3, 32, 32\]"):
        VGG16(width=0.125)(torch.zeros(2, 3, 28, 28))
    with pytest.raises(ValueError, match=r"expected \[batch, 1, 8, 8\]"):
        ConvNet(image_size=8)(torch.zeros(2, 64))


@pytest.mark.parametrize(
    "make",
    [
        lambda: VGG16(classes=0),
        lambda: VGG16(width=-1.0),
        lambda: VGG16(width=math.nan),
        lambda: ConvNet(channels=0),
        lambda: ConvNet(image_size=3),
    ],
)
def test_nonsense_sizes_are_refused(make):
    with pytest.raises(ValueError, match=r"got .*expected"):
        make()
