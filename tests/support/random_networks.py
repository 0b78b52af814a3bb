"""Networks, batches and likelihoods drawn at random: layers × dtypes × frozen parts × weight sharing × what counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.likelihoods import Likelihood
from support.truth import random_weights


class Twice(nn.Module):
    """Calls one layer twice in a row: both calls share its weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Attention(nn.Module):
    """Self-attention, sequence or batch first, perhaps causal."""

    def __init__(self, width: int, heads: int, *, batch_first: bool, causal: bool, bias: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, heads, batch_first=batch_first, bias=bias)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        length = x.shape[1 if self.layer.batch_first else 0]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if self.causal else None
        x = self.layer(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x if self.layer.batch_first else x.transpose(0, 1)


class SequenceInFront(nn.Module):
    """The layer sees `[positions, batch, features]`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Folded(nn.Module):
    """The layer sees `[batch · positions, features]`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class OverTime(nn.Module):
    """A layer of `[batch, channels, positions]` in a network of `[batch, positions, channels]`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Tied(nn.Module):
    """An embedding whose table is the head's matrix, too."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(tokens, width), nn.Linear(width, width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.table(x)).tanh())


@dataclass
class Case:
    """A network, a batch, what counts of it, and what it is to be told by."""

    seed: int
    model: nn.Module
    x: Tensor
    target: Tensor
    likelihood: Likelihood
    weight: Tensor | None
    mask: Tensor | None
    exact: bool
    """Whether per-example gradients of all parameters are known: a table shared with another layer has none."""

    def __str__(self) -> str:
        frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        return (
            f"seed {self.seed}: {self.model}\ninput {tuple(self.x.shape)} {self.x.dtype}, {self.likelihood}, frozen "
            f"{frozen}, weight {self.weight is not None}, mask {None if self.mask is None else self.mask.shape}"
        )


class Builder:
    """Draws a network layer by layer.

    None is narrower than three: a norm of two features is ±1 whatever they are, so that in float32 the gradients before
    it are rounding and nothing else.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        torch.manual_seed(seed)

    def maybe(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def pick(self, *choices: int) -> int:
        return self.random.choice(choices)

    def activation(self) -> nn.Module:
        return self.random.choice([nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Identity])()

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=self.maybe(0.8))

    def vector_layer(self, width: int) -> tuple[nn.Module, int]:
        new = self.pick(3, 4, 5)
        choices: list[Callable[[], tuple[nn.Module, int]]] = [
            lambda: (self.linear(width, new), new),
            lambda: (Residual(self.linear(width, width)), width),
            lambda: (Twice(self.linear(width, width)), width),
            lambda: (nn.LayerNorm(width, bias=self.maybe()), width),
            lambda: (nn.RMSNorm(width), width),
            lambda: (self.batch_norm(nn.BatchNorm1d, width), width),
        ]
        return self.random.choice(choices)()

    def batch_norm(self, kind: type[nn.Module], width: int) -> nn.Module:
        norm = kind(width).eval()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        return norm

    def sequence_layer(self, width: int) -> tuple[nn.Module, int]:
        new = self.pick(3, 4)
        groups = self.pick(1, 1, 2) if width % 2 == 0 else 1
        heads = self.pick(1, 2) if width % 2 == 0 else 1
        choices: list[Callable[[], tuple[nn.Module, int]]] = [
            lambda: (self.linear(width, new), new),
            lambda: (SequenceInFront(self.linear(width, new)), new),
            lambda: (Folded(self.linear(width, new)), new),
            lambda: (Twice(self.linear(width, width)), width),
            lambda: (nn.LayerNorm(width), width),
            lambda: (SequenceInFront(nn.LayerNorm(width)), width),
            lambda: (OverTime(self.convolution(nn.Conv1d, width, new * groups, groups)), new * groups),
            lambda: (
                Attention(width, heads, batch_first=self.maybe(), causal=self.maybe(), bias=self.maybe(0.8)),
                width,
            ),
            lambda: (
                nn.TransformerEncoderLayer(width, heads, 3, dropout=0.0, batch_first=True, norm_first=self.maybe()),
                width,
            ),
        ]
        return self.random.choice(choices)()

    def convolution(self, kind: type[nn.Module], width: int, new: int, groups: int) -> nn.Module:
        kernel = self.pick(1, 2, 3)
        options = {"groups": groups, "bias": self.maybe(0.8), "dilation": self.pick(1, 1, 2)}
        if self.maybe(0.7):
            return kind(width, new, kernel, padding="same", **options)
        return kind(width, new, kernel, padding=2 * kernel, stride=self.pick(1, 2), **options)

    def image_layer(self, width: int) -> tuple[nn.Module, int]:
        groups = self.pick(1, 1, 2) if width % 2 == 0 else 1
        choices: list[Callable[[], tuple[nn.Module, int]]] = [
            lambda: (self.convolution(nn.Conv2d, width, 2 * groups, groups), 2 * groups),
            lambda: (nn.GroupNorm(groups, width), width),
            lambda: (nn.InstanceNorm2d(width, affine=True), width),
            lambda: (self.batch_norm(nn.BatchNorm2d, width), width),
            lambda: (nn.MaxPool2d(2, ceil_mode=True), width),
        ]
        return self.random.choice(choices)()

    def body(self, layer: Callable[[int], tuple[nn.Module, int]], width: int) -> tuple[list[nn.Module], int]:
        parts = []
        for _ in range(self.pick(1, 2, 3)):
            part, width = layer(width)
            parts += [part, self.activation()]
        return parts, width

    def likelihood(self) -> tuple[Likelihood, int, int]:
        """It, how many outputs the network has, and how many targets these stand for (0: a class)."""
        found: list[tuple[Likelihood, int, int]] = [
            (ng.Gaussian(noise_variance=0.5), 2, 2),
            (ng.Categorical(), 3, 0),
            (ng.Bernoulli(), 2, 2),
            (ng.Poisson(), 1, 1),
            (ng.HeteroscedasticGaussian(), 2, 1),
        ]
        return self.random.choice(found)

    def case(self) -> Case:
        """The first that torch takes: a normalisation of a single pixel, for example, it does not."""
        while True:
            try:
                return self._case()
            except ValueError as error:
                if "Expected more than 1" not in str(error):
                    raise

    def _case(self) -> Case:
        kind = self.random.choice(["vectors", "sequences", "tokens", "images", "tied"])
        batch, length, width = self.pick(2, 3, 4), self.pick(2, 3, 4), self.pick(3, 4)
        likelihood, outputs, targets = self.likelihood()
        if kind == "vectors":
            parts, last = self.body(self.vector_layer, width)
            x = torch.randn(batch, width)
        elif kind in {"sequences", "tokens"}:
            parts, last = self.body(self.sequence_layer, width)
            x = torch.randn(batch, length, width)
            if kind == "tokens":
                parts.insert(0, nn.Embedding(5, width, padding_idx=self.random.choice([None, 0])))
                x = torch.randint(5, (batch, length))
            if self.maybe(0.3):
                parts = [*parts, Pooled()]
        elif kind == "images":
            parts, last = self.body(self.image_layer, width)
            x = torch.randn(batch, width, length, length)
            parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        else:
            parts, last, x = [Tied(3, width)], 3, torch.randint(3, (batch, length))
        model = nn.Sequential(*parts, self.linear(last, outputs))
        dtype = torch.float32 if self.maybe(0.3) else torch.float64
        model = random_weights(model.double(), self.seed).to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        self.freeze(model)
        with torch.no_grad():
            shape = model(x).shape[:-1]
            model(x[:1])  # as the truth will
        target = torch.zeros(*shape, targets, dtype=dtype) if targets else torch.randint(3, shape)
        weight = torch.rand(batch).to(dtype) + 0.1 if self.maybe(0.4) else None
        mask = self.mask(target) if self.maybe(0.5) else None
        if mask is not None and mask.shape == target.shape and not targets and self.maybe():
            target, mask, likelihood = target.masked_fill(~mask, -7), None, ng.Categorical(ignore_index=-7)
        if mask is not None and targets > 1 and mask.shape == target.shape == (batch, targets):
            mask = mask.unsqueeze(1)  # of outputs, whatever positions layers have
        likelihood.bind((), "cpu", dtype)
        return Case(self.seed, model, x, target, likelihood, weight, mask, kind != "tied")

    def mask(self, target: Tensor) -> Tensor:
        """Of examples, positions or single outputs; of the first something always counts."""
        dims = self.random.randint(1, target.dim())
        mask = torch.rand(target.shape[:dims]) < 0.6
        mask[0] = True
        return mask

    def freeze(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.requires_grad_(not self.maybe(0.2))
        parameters[-1].requires_grad_(True)
