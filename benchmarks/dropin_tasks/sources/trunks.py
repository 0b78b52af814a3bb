"""Networks that were trained before, for fine-tuning; their weights are kept like data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..networks.images import batch_norm, convnet
from ..networks.sequences import CharacterTransformer
from ..networks.tables import residual_perceptron
from ..task import Arrays
from .texts import CHARACTERS

if TYPE_CHECKING:
    from ..store import Store

WINDOW = 64
PRETRAINED = 5000
"""The first images of MNIST, which trunks have seen; fine-tuning takes later ones."""


def grey(images: NDArray[Any]) -> NDArray[np.float32]:
    """Images of 28×28 from 0 to 255, standardised as is usual for MNIST."""
    return ((images.astype(np.float32) / 255 - 0.1307) / 0.3081)[:, None]


def coloured(images: NDArray[Any]) -> NDArray[np.float32]:
    """Images of CIFAR-10 from 0 to 255, standardised about as is usual."""
    return (images.astype(np.float32) / 255 - 0.47) / 0.24


def mnist_trunk() -> nn.Sequential:
    """A convolutional network for MNIST."""
    return convnet(1, (16, 32, 64), 10, batch_norm)


def mnist_perceptron() -> nn.Sequential:
    """A residual perceptron for MNIST."""
    return nn.Sequential(nn.Flatten(), residual_perceptron(784, 128, 2, 10))


def cifar_trunk() -> nn.Sequential:
    """A convolutional network for the first five classes of CIFAR-10."""
    return convnet(3, (32, 64, 96), 5, batch_norm)


def language_model() -> nn.Module:
    """A causal Transformer over characters."""
    return CharacterTransformer(CHARACTERS, WINDOW, 64, 2)


def trained(make: Callable[[], nn.Module], x: Tensor, y: Tensor, *, steps: int, batch: int = 64) -> Arrays:
    """The weights after so many steps of AdamW."""
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        model = make().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(steps):
            index = torch.randint(len(x), (batch,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]).flatten(0, -2), y[index].flatten()).backward()
            optimizer.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def _labels(labels: NDArray[Any]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def trunk_mnist(store: Store) -> Arrays:
    """Weights of `mnist_trunk`."""
    arrays = store.arrays("mnist")
    x, y = torch.from_numpy(grey(arrays["x"][:PRETRAINED])), _labels(arrays["y"][:PRETRAINED])
    return trained(mnist_trunk, x, y, steps=300)


def trunk_mnist_perceptron(store: Store) -> Arrays:
    """Weights of `mnist_perceptron`."""
    arrays = store.arrays("mnist")
    x, y = torch.from_numpy(grey(arrays["x"][:PRETRAINED])), _labels(arrays["y"][:PRETRAINED])
    return trained(mnist_perceptron, x, y, steps=600)


def trunk_cifar10(store: Store) -> Arrays:
    """Weights of `cifar_trunk`."""
    arrays = store.arrays("cifar10")
    mine = arrays["y"] < 5
    return trained(cifar_trunk, torch.from_numpy(coloured(arrays["x"][mine])), _labels(arrays["y"][mine]), steps=500)


def trunk_topics(store: Store) -> Arrays:
    """Weights of `language_model` after reading Python's manual."""
    text = _labels(store.arrays("topics")["x"])
    windows = text[: len(text) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    return trained(language_model, windows[:, :-1], windows[:, 1:], steps=1000, batch=32)


SOURCES: Mapping[str, Callable[[Store], Arrays]] = {
    "trunk-mnist": trunk_mnist,
    "trunk-mnist-perceptron": trunk_mnist_perceptron,
    "trunk-cifar10": trunk_cifar10,
    "trunk-topics": trunk_topics,
}
