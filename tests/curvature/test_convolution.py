"""Convolutions without patches give what patches give, and what autograd gives example by example."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import noisygrad as ng
from noisygrad.curvature import convolution
from noisygrad.curvature.capture import Capture
from noisygrad.curvature.convolution import ConvolutionPass, PatchedPass
from noisygrad.curvature.fisher import fisher_passes
from noisygrad.curvature.network import find_units
from noisygrad.curvature.passes import Batch, MatrixPass
from noisygrad.curvature.registry import find_layer
from noisygrad.curvature.windows import patches, two_axes
from noisygrad.families.units import joined
from noisygrad.kernels import products, squared_products
from noisygrad.kernels import squares as kernels
from noisygrad.kernels.products import second_moment
from support.truth import close

IMAGES = {"even": (6, 8), "odd": (5, 7), "narrow": (1, 6), "tiny": (2, 2), "one pixel": (1, 1)}
SHAPES = [
    {"kernel_size": kernel, "padding": padding, "dilation": dilation}
    for kernel, padding, dilation in product((1, 3, (5, 3), 2), ("same", "valid", 2), (1, 2))
]


def make_conv(channels=3, outputs=4, **arguments):
    torch.manual_seed(0)
    return nn.Conv2d(channels, outputs, dtype=torch.float64, **arguments)


def observe(module, images, batch=None):
    """The pass that the registry makes of these images and random output gradients; also those gradients."""
    (units,) = find_units(module)[1].values()
    gradient = torch.randn_like(module(images))
    layer = find_layer(module)
    size = batch or len(images)
    with torch.no_grad():
        return layer.observe(units[0], module, images, gradient, Batch(size, size, images.dtype)), gradient


def squares_of(seen):
    """The mean over the batch of squared gradients."""
    return joined(seen.square_sums()) / seen.examples


def truth(module, images, gradient, constant):
    """The same from explicit patches, formula by formula."""
    a, g = patches(module, images), gradient.flatten(2).mT
    rows = g.mT @ a
    squares = rows.square().mean(0).flatten()
    ones = a.new_ones(*a.shape[:-1], 1)
    if constant:
        squares = torch.cat([squares, g.sum(1).square().mean(0)])
        a = torch.cat([a, ones], dim=-1)
    a, count = a.flatten(0, 1), len(a)
    g = g.flatten(0, 1)
    return a.T @ a / len(a), g.T @ g / count, squares


def assert_as_with_patches(module, images):
    seen, gradient = observe(module, images)
    assert isinstance(seen, ConvolutionPass)
    inputs, outputs, squares = truth(module, images, gradient, seen.constant)
    close(seen.input_moment(), inputs)
    close(seen.output_moment(), outputs)
    close(squares_of(seen), squares)


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_every_geometry_agrees_with_its_patches(shape, size):
    module = make_conv(**shape)
    images = torch.randn(3, 3, *IMAGES[size], dtype=torch.float64)
    spread = [gap * (k - 1) + 1 for gap, k in zip(module.dilation, module.kernel_size, strict=True)]
    padding = module._reversed_padding_repeated_twice
    room = [images.shape[2] + padding[2] + padding[3], images.shape[3] + padding[0] + padding[1]]
    if any(needed > there for needed, there in zip(spread, room, strict=True)):
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            module(images)
        return
    assert_as_with_patches(module, images)


@pytest.mark.parametrize("frozen", [None, "bias"])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes_with_and_without_bias(mode, frozen):
    module = make_conv(kernel_size=3, padding=1, padding_mode=mode)
    if frozen:
        module.bias.requires_grad_(False)
    assert_as_with_patches(module, torch.randn(3, 3, 5, 4, dtype=torch.float64))


@pytest.mark.parametrize("padding", [0, 2, "same"])
def test_one_axis(padding):
    torch.manual_seed(0)
    module = nn.Conv1d(3, 4, 4, padding=padding, dilation=2, dtype=torch.float64)
    assert_as_with_patches(module, torch.randn(3, 3, 9, dtype=torch.float64))


@pytest.mark.parametrize("cache", [1, 40, 300])
def test_matrices_larger_than_the_cache_are_summed_in_panels(cache, monkeypatch):
    monkeypatch.setattr(squared_products, "CACHE", cache)
    monkeypatch.setitem(squared_products.CHUNK, "cpu", cache)
    assert_as_with_patches(make_conv(kernel_size=3, padding=1), torch.randn(5, 3, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 3, "stride": (1, 2), "padding": 1},
        {"kernel_size": 3, "groups": 3, "outputs": 6},
    ],
    ids=["stride", "one stride", "groups"],
)
def test_other_geometries_keep_their_patches(arguments):
    module = make_conv(**arguments)
    seen, gradient = observe(module, torch.randn(3, 3, 6, 7, dtype=torch.float64))
    assert type(seen) is (PatchedPass if module.groups == 1 else MatrixPass)
    close(squares_of(seen), seen.rows().square().mean(dim=0))
    if module.groups == 1:
        a = torch.cat([seen.activations, torch.ones_like(seen.activations[..., :1])], -1).flatten(0, 1)
        close(seen.input_moment(), a.T @ a / len(a))
        g = gradient.movedim(1, -1).flatten(0, 2)
        close(seen.output_moment(), g.T @ g / 3)


def many_positions(name):
    """Convolutions of many positions by name, and images for them: 12 × 13 pixels, or 150 of one axis."""
    if name == "one axis":
        return nn.Conv1d(14, 4, 5, padding=2), torch.randn(7, 14, 150)
    arguments = {
        "usual": {"kernel_size": 3, "padding": 1},
        "valid": {"kernel_size": 1},
        "gaps": {"kernel_size": (3, 2), "padding": (2, 1), "dilation": (2, 1)},
        "other zeros behind": {"kernel_size": 4, "padding": "same"},
        "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
        "no bias": {"kernel_size": 3, "padding": 1, "bias": False},
    }[name]
    return nn.Conv2d(66, 4, **arguments), torch.randn(7, 66, 12, 13)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
@pytest.mark.parametrize("cache", [1, 2000, 1 << 19])
@pytest.mark.parametrize("name", ["one axis", "usual", "valid", "gaps", "other zeros behind", "circular", "no bias"])
def test_examples_as_groups_of_one_convolution(name, cache, monkeypatch):
    torch.manual_seed(0)
    module, images = many_positions(name)
    seen, gradient = observe(module, images)
    assert isinstance(seen, ConvolutionPass)
    *_, right = truth(module, images.double(), gradient.double(), seen.constant)
    monkeypatch.setattr(convolution, "CACHE", cache)
    asked = []
    usual = convolution.conv2d_weight
    monkeypatch.setattr(convolution, "conv2d_weight", lambda *args, **kwargs: asked.append(0) or usual(*args, **kwargs))
    swapped = gradient.transpose(0, 1).contiguous().transpose(0, 1)  # the same in another order of memory
    for given, size in ((gradient, 1.0), (swapped, 1.0), (gradient * 1e-15, 1e-30)):
        found = squares_of(ConvolutionPass(module, images, given, seen.constant))
        assert asked
        asked.clear()
        torch.testing.assert_close(found.double() / size, right, rtol=1e-5, atol=1e-6 * float(right.max()))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    other = squares_of(ConvolutionPass(module, images, gradient, seen.constant))
    assert not asked
    torch.testing.assert_close(other.double(), right, rtol=1e-5, atol=1e-6 * float(right.max()))


FEW = {
    "one axis": (nn.Conv1d, {"kernel_size": 3, "padding": 1}, (9,)),
    "usual": (nn.Conv2d, {"kernel_size": 3, "padding": 1}, (4, 4)),
    "gaps": (nn.Conv2d, {"kernel_size": (3, 2), "padding": (2, 1), "dilation": (2, 1)}, (4, 5)),
    "circular": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, (4, 4)),
    "no bias": (nn.Conv2d, {"kernel_size": 3, "bias": False}, (5, 5)),
}


@pytest.mark.parametrize("cache", [1, 2000, 1 << 19])
@pytest.mark.parametrize("name", FEW)
def test_whole_patches_by_onednn(name, cache, onednn, monkeypatch):
    torch.manual_seed(0)
    kind, arguments, size = FEW[name]
    module, images = kind(6, 8, **arguments), torch.randn(7, 6, *size)
    monkeypatch.setattr(products, "LARGE", 64)
    monkeypatch.setattr(convolution, "CACHE", cache)
    seen, gradient = observe(module, images)
    *_, right = truth(module, images.double(), gradient.double(), seen.constant)
    swapped = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    for given, scale in ((gradient, 1.0), (swapped, 1.0), (gradient * 1e-15, 1e-30)):
        onednn.clear()
        with torch.no_grad():
            found = squares_of(ConvolutionPass(module, images, given, seen.constant))
        assert len(onednn) == 7
        torch.testing.assert_close(found.double() / scale, right, rtol=1e-5, atol=1e-6 * float(right.max()))


@pytest.mark.parametrize("chunk", [1, 500, 1000, 10**6])
@pytest.mark.parametrize("stride", [1, 2])
def test_patches_of_some_examples_at_a_time_are_enough(chunk, stride, monkeypatch):
    module = make_conv(kernel_size=3, stride=stride, padding=1)
    images = torch.randn(5, 3, 6, 7, dtype=torch.float64)
    gradient = torch.randn_like(module(images))
    inputs, outputs, squares = truth(module, images, gradient, True)
    monkeypatch.setitem(squared_products.CHUNK, "cpu", chunk)
    seen = PatchedPass(module, images, gradient, True)
    close(seen.input_moment(), inputs)
    close(seen.output_moment(), outputs)
    close(squares_of(seen), squares)


def test_a_frozen_weight_leaves_the_bias():
    module = make_conv(kernel_size=3, padding=1)
    module.weight.requires_grad_(False)
    seen, gradient = observe(module, torch.randn(3, 3, 4, 4, dtype=torch.float64))
    close(squares_of(seen), gradient.sum((2, 3)).square().mean(0))
    close(seen.input_moment(), torch.ones(1, 1, dtype=torch.float64))


def test_several_images_of_one_example_add_up():
    module = make_conv(kernel_size=3, padding=1)
    seen, _ = observe(module, torch.randn(6, 3, 4, 4, dtype=torch.float64), batch=3)
    close(squares_of(seen), seen.rows().square().mean(dim=0))


class Twice(nn.Module):
    """One convolution called twice, in a network with something on either side."""

    def __init__(self):
        super().__init__()
        self.conv = make_conv(channels=2, outputs=2, kernel_size=3, padding=1)
        self.last = nn.Linear(2 * 5 * 4, 2, dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.tanh(self.conv(torch.tanh(self.conv(x)))).flatten(1))


@pytest.mark.parametrize("keep", [None, 2])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_squares_are_those_of_gradients_example_by_example(keep, twice):
    """No formula of this package: autograd differentiates one example at a time."""
    model = Twice()
    if not twice:
        model = nn.Sequential(model.conv, nn.Tanh(), nn.Flatten(), model.last)
    x, y = torch.randn(4, 2, 5, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    likelihood = ng.Gaussian(0.5)
    likelihood.bind((), torch.device("cpu"), torch.float64)
    units, layers = find_units(model)
    with Capture(layers) as capture:
        output = model(x)
        (seen,) = fisher_passes(
            "empirical",
            likelihood,
            output,
            y,
            records=capture.take(),
            others=[],
            generators=[torch.Generator()],
            dtype=torch.float64,
            keep=keep,
        )
    kept = keep or len(x)
    conv = model.conv if twice else model[0]
    rows = []
    for index in range(kept):
        loss = likelihood.log_prob(model(x[index : index + 1]), y[index : index + 1]).sum()
        weight, bias = torch.autograd.grad(loss, [conv.weight, conv.bias])
        rows.append(torch.cat([weight.flatten(), bias]))
    name = units[0].name
    assert isinstance(seen[name], ConvolutionPass) is not twice
    close(seen[name].rows(), torch.stack(rows))
    close(squares_of(seen[name]), torch.stack(rows).square().mean(0))


def test_half_precision_inputs_are_converted():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(1.0), num_data=10, seed=0)
    x, y = torch.randn(5, 2, 4, 4), torch.randn(5, 2)

    def closure():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x.bfloat16()), y

    optimizer.step(closure)
    inputs = optimizer.covariance.statistics["0"].tensors()["inputs"]
    a = patches(model[0], x.bfloat16().float()).flatten(0, 1)
    expected = second_moment(a[None], a[None], True, True)
    assert inputs.dtype is torch.float32
    torch.testing.assert_close(inputs, expected, rtol=1e-4, atol=1e-5)


def test_settings_that_somebody_made_lists_of():
    module, images = nn.Conv2d(2, 3, 3, padding=2), torch.zeros(1, 2, 6, 6)
    module.stride, module.dilation = [1, 1], [2, 2]
    assert two_axes(module, images)[1] == kernels.Window((3, 3), (1, 1), (2, 2), (2, 2))
