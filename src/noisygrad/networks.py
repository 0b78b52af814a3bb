"""Networks for the experiments and the estimators: an MLP, many MLPs at once, the paper's VGG16, a small ConvNet.

Nothing here knows of posteriors: any `nn.Module` can be given to an optimiser. Replicated layers carry leading
replica dimensions in their weights, which is how independent trainings are done at once (`docs/conventions.md`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from numbers import Integral

import torch
from torch import Tensor, nn

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}


class MLP(nn.Module):
    """Fully connected layers with one activation between each two of them.

    Args:
        inputs: Number of input features.
        hidden: Widths of the hidden layers; empty for a linear model.
        outputs: Number of outputs.
        activation: "elu", "gelu", "relu", "sigmoid", "silu", "softplus" or "tanh".
        generator: Source of the initial weights; the global one by default.

    Shapes: `[..., inputs]` to `[..., outputs]`.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        activation: str = "relu",
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        make_activation = _activation(activation)
        layers: list[nn.Module] = []
        for fan_in, fan_out in _layer_sizes(inputs, hidden, outputs):
            if generator is None:
                linear = nn.Linear(fan_in, fan_out)
            else:  # without nn.Linear's own draws, which would be from torch's global generator
                linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)
                _reset_linear(linear.weight, linear.bias, generator)
            layers += [linear, make_activation()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Outputs for `x`, `[..., inputs]`."""
        output: Tensor = self.layers(x)
        return output


class ReplicatedLinear(nn.Module):
    """Independent linear layers of the same size, one per replica, computed as one batched product.

    Args:
        replicas: Leading dimensions of weight and bias, for instance `(20,)`.
        in_features: Size of each input.
        out_features: Size of each output.
        bias: Whether a bias is added.
        generators: One source of initial weights per replica, in row-major order. A replica then starts as a lone
            layer would from the same generator. By default all draw from the global one.

    Shapes: weight `[*replicas, out_features, in_features]`, bias `[*replicas, out_features]`. An input
    `[*replicas, batch, in_features]` gives `[*replicas, batch, out_features]`; an input `[batch, in_features]` is shown
    to every replica.
    """

    def __init__(
        self,
        replicas: Sequence[int],
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        generators: Sequence[torch.Generator] | None = None,
    ) -> None:
        super().__init__()
        self.replicas = _replica_shape(replicas)
        self.in_features = _positive("in_features", in_features)
        self.out_features = _positive("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(*self.replicas, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(*self.replicas, out_features)) if bias else None
        self.reset_parameters(generators)

    def reset_parameters(self, generators: Sequence[torch.Generator] | None = None) -> None:
        """Draw new weights and biases, each replica as `nn.Linear` does."""
        count = self.replicas.numel()
        if generators is not None and len(generators) != count:
            raise ValueError(f"got {len(generators)} generators for {count} replicas; give one per replica")
        weights = self.weight.detach().view(count, self.out_features, self.in_features)
        biases = None if self.bias is None else self.bias.detach().view(count, self.out_features)
        for index in range(count):
            _reset_linear(
                weights[index],
                None if biases is None else biases[index],
                None if generators is None else generators[index],
            )

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of every replica, `[*replicas, batch, out_features]`."""
        self._check_input(x)
        count, batch = self.replicas.numel(), x.shape[-2]
        inputs = x.expand(*self.replicas, batch, self.in_features).reshape(count, batch, self.in_features)
        weight = self.weight.reshape(count, self.out_features, self.in_features)
        if self.bias is None:
            output = torch.bmm(inputs, weight.mT)
        else:
            output = torch.baddbmm(self.bias.reshape(count, 1, self.out_features), inputs, weight.mT)
        return output.reshape(*self.replicas, batch, self.out_features)

    def extra_repr(self) -> str:
        """What `print` shows between the brackets."""
        return (
            f"replicas={tuple(self.replicas)}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )

    def _check_input(self, x: Tensor) -> None:
        leading = x.shape[:-2]
        if x.dim() < 2 or x.shape[-1] != self.in_features or (leading and leading != self.replicas):
            raise ValueError(
                f"got an input of shape {tuple(x.shape)}; expected [batch, {self.in_features}] "
                f"or {[*self.replicas, 'batch', self.in_features]}".replace("'", "")
            )


class ReplicatedMLP(nn.Module):
    """Independent MLPs of the same shape, one per replica.

    Parameters have the names of those of an `MLP`, with the replica dimensions in front of their shapes.

    Args:
        replicas: Leading dimensions of every parameter, for instance `(20,)`.
        inputs: Number of input features.
        hidden: Widths of the hidden layers; empty for linear models.
        outputs: Number of outputs.
        activation: As for `MLP`.
        generators: One source of initial weights per replica, in row-major order; replica i then starts as
            `MLP(..., generator=generators[i])` would.

    Shapes: `[*replicas, batch, inputs]`, or `[batch, inputs]` for all, to `[*replicas, batch, outputs]`.
    """

    def __init__(
        self,
        replicas: Sequence[int],
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        activation: str = "relu",
        *,
        generators: Sequence[torch.Generator] | None = None,
    ) -> None:
        super().__init__()
        self.replicas = _replica_shape(replicas)
        make_activation = _activation(activation)
        layers: list[nn.Module] = []
        for fan_in, fan_out in _layer_sizes(inputs, hidden, outputs):
            layers += [ReplicatedLinear(replicas, fan_in, fan_out, generators=generators), make_activation()]
        self.layers = nn.Sequential(*layers[:-1])
        self._shape = (inputs, tuple(hidden), outputs, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of every replica, `[*replicas, batch, outputs]`."""
        output: Tensor = self.layers(x)
        return output

    def replica(self, index: int | tuple[int, ...]) -> MLP:
        """A lone copy of one replica; later changes to either do not touch the other."""
        position = self._position(index)
        state = {name: tensor[position] for name, tensor in self.state_dict().items()}
        some = next(self.parameters())
        mlp = MLP(*self._shape).to(device=some.device, dtype=some.dtype)
        mlp.load_state_dict(state)
        return mlp.train(self.training)

    @torch.no_grad()
    def load_replica_(self, index: int | tuple[int, ...], mlp: MLP) -> None:
        """Overwrite one replica in place with the weights of `mlp`, which must have the same layers."""
        position = self._position(index)
        theirs = mlp.state_dict()
        mine = {name: tensor[position] for name, tensor in self.state_dict().items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in mine.items()}
        if shapes != expected:
            raise ValueError(f"got an MLP with parameters {shapes}; expected {expected}")
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])

    def _position(self, index: int | tuple[int, ...]) -> tuple[int, ...]:
        position = (index,) if isinstance(index, int) else tuple(index)
        fits = len(position) == len(self.replicas)
        if not fits or any(not -size <= i < size for i, size in zip(position, self.replicas, strict=True)):
            raise ValueError(f"got replica index {index}; expected one inside {tuple(self.replicas)}")
        return position


class VGG16(nn.Module):
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
        _positive("classes", classes)
        if not (math.isfinite(width) and width > 0):
            raise ValueError(f"got width={width}; expected a positive number")
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

    def forward(self, x: Tensor) -> Tensor:
        """Logits for images `[batch, 3, 32, 32]`."""
        _check_images(x, 3, 32)
        output: Tensor = self.classifier(self.features(x).flatten(1))
        return output


class ConvNet(nn.Module):
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
        self.channels = _positive("channels", channels)
        _positive("classes", classes)
        if image_size < 4:
            raise ValueError(f"got image_size={image_size}; expected at least 4, for the image is halved twice")
        self.image_size = image_size
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

    def forward(self, x: Tensor) -> Tensor:
        """Logits for images `[batch, channels, image_size, image_size]`."""
        _check_images(x, self.channels, self.image_size)
        output: Tensor = self.classifier(self.features(x).flatten(1))
        return output


def _norm(channels: int, learned: bool) -> nn.BatchNorm2d:
    """As in the released code: a running average of 0.99 and epsilon 1e-3, TensorFlow's defaults."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01, affine=learned)


def _activation(name: str) -> type[nn.Module]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"got activation={name!r}; expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layer_sizes(inputs: int, hidden: Sequence[int], outputs: int) -> Iterator[tuple[int, int]]:
    sizes = [
        _positive("inputs", inputs),
        *(_positive("each width in hidden", width) for width in hidden),
        _positive("outputs", outputs),
    ]
    return itertools.pairwise(sizes)


def _positive(name: str, value: int) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"got {name}={value!r}; expected an integer of at least 1")
    return value


def _replica_shape(replicas: Sequence[int]) -> torch.Size:
    if any(size < 1 for size in replicas):
        raise ValueError(f"got replicas={tuple(replicas)}; expected sizes of at least 1")
    return torch.Size(replicas)


@torch.no_grad()
def _reset_linear(weight: Tensor, bias: Tensor | None, generator: torch.Generator | None) -> None:
    """The start of `nn.Linear`: uniform in ±1/sqrt(in), the weight drawn first."""
    bound = 1.0 / math.sqrt(weight.shape[-1])
    for tensor in (weight,) if bias is None else (weight, bias):
        _uniform_(tensor, bound, generator)


@torch.no_grad()
def _glorot(module: nn.Module, generator: torch.Generator | None) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # in + out connections of one unit: the kernel's positions count on both sides.
            fans = layer.weight[0].numel() + layer.weight.shape[0] * layer.weight[0, 0].numel()
            _uniform_(layer.weight, math.sqrt(6.0 / fans), generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _uniform_(tensor: Tensor, bound: float, generator: torch.Generator | None) -> None:
    # Drawn where the generator lives, so that a seed gives the same start on every device.
    device = tensor.device if generator is None else generator.device
    draw = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).uniform_(-bound, bound, generator=generator)
    tensor.copy_(draw)


def _check_images(x: Tensor, channels: int, size: int) -> None:
    if x.dim() != 4 or tuple(x.shape[1:]) != (channels, size, size):
        raise ValueError(f"got images of shape {tuple(x.shape)}; expected [batch, {channels}, {size}, {size}]")
