"""Networks for the estimators and for experiments: an MLP, and many MLPs at once.

Nothing here knows of posteriors: any `nn.Module` can be given to an optimiser. Replicated layers carry leading
replica dimensions in their weights, which is how independent trainings are done at once (`docs/conventions.md`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
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


__all__ = ["MLP", "ReplicatedLinear", "ReplicatedMLP"]


class MLP(nn.Module):
    """Fully connected layers with one activation between each two of them; without `hidden` layers a linear model.

    Args:
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

        def linear(fan_in: int, fan_out: int) -> nn.Module:
            if generator is None:
                return nn.Linear(fan_in, fan_out)
            # Without nn.Linear's own draws, which would be from torch's global generator.
            layer: nn.Linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)
            _reset_linear(layer.weight, layer.bias, generator)
            return layer

        self.layers = _stacked(linear, inputs, hidden, outputs, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs for `x`, `[..., inputs]`."""
        output: Tensor = self.layers(x)
        return output


class ReplicatedLinear(nn.Module):
    """Independent linear layers of the same size, one per replica, computed as one batched product.

    Args:
        replicas: Leading dimensions of weight and bias, for instance `(20,)`; the others are as of `nn.Linear`.
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
        self.in_features = positive("in_features", in_features)
        self.out_features = positive("out_features", out_features)
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
        for index, generator in enumerate(generators or [None] * count):
            _reset_linear(weights[index], None if biases is None else biases[index], generator)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of every replica, `[*replicas, batch, out_features]`."""
        if x.dim() < 2 or x.shape[-1] != self.in_features or x.shape[:-2] not in {(), self.replicas}:
            raise ValueError(
                f"got an input of shape {tuple(x.shape)}; expected [batch, {self.in_features}] "
                f"or {[*self.replicas, 'batch', self.in_features]}".replace("'", "")
            )
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


class ReplicatedMLP(nn.Module):
    """Independent MLPs of the same shape, one per replica.

    Parameters have the names of those of an `MLP`, with the replica dimensions in front of their shapes. Arguments that
    are not here are as of an `MLP`.

    Args:
        replicas: Leading dimensions of every parameter, for instance `(20,)`.
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
        linear = partial(ReplicatedLinear, replicas, generators=generators)
        self.layers = _stacked(linear, inputs, hidden, outputs, activation)
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
        theirs, mine = mlp.state_dict(), {name: tensor[position] for name, tensor in self.state_dict().items()}
        shapes, expected = ({name: tuple(t.shape) for name, t in state.items()} for state in (theirs, mine))
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


def _stacked(
    linear: Callable[[int, int], nn.Module], inputs: int, hidden: Sequence[int], outputs: int, activation: str
) -> nn.Sequential:
    """Linear layers with one activation between each two of them."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"got activation={activation!r}; expected one of {', '.join(_ACTIVATIONS)}")
    widths = [positive("each width in hidden", width) for width in hidden]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([positive("inputs", inputs), *widths, positive("outputs", outputs)]):
        layers += [linear(fan_in, fan_out), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def positive(name: str, value: int) -> int:
    """The value, if it is an integer of at least 1; raises ValueError otherwise."""
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
        uniform_(tensor, bound, generator)


def uniform_(tensor: Tensor, bound: float, generator: torch.Generator | None) -> None:
    """Fill a tensor from U(−bound, bound) in place, with the same numbers on every device for the same seed."""
    # Drawn where the generator lives, so that a seed gives the same start on every device.
    device = tensor.device if generator is None else generator.device
    draw = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).uniform_(-bound, bound, generator=generator)
    tensor.copy_(draw)
