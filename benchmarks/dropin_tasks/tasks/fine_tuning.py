"""Fine-tuning of what was trained before: the last layer, or low-rank adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..networks.adapters import AdaptedLinear, FrozenTrunk, LowRankLinear, adapted
from ..sources.trunks import (
    PRETRAINED,
    cifar_trunk,
    coloured,
    grey,
    language_model,
    mnist_perceptron,
    mnist_trunk,
)
from ..store import Store
from ..task import Data, Task, parts, split
from .sequences import windows


def loaded(model: nn.Module, data: Data) -> nn.Module:
    """`model` with the weights that come with the data."""
    model.load_state_dict(dict(data.weights))
    return model


def with_new_head(trunk: nn.Module, data: Data, outputs: int) -> nn.Module:
    """The trained network without its last layer, frozen, and a new last layer."""
    assert isinstance(trunk, nn.Sequential)
    loaded(trunk, data)
    *body, head = trunk
    assert isinstance(head, nn.Linear)
    return nn.Sequential(FrozenTrunk(nn.Sequential(*body)), nn.Linear(head.in_features, outputs))


def weights_of(store: Store, source: str) -> dict[str, Tensor]:
    """The tensors of a trained network."""
    return {name: torch.from_numpy(np.asarray(array)) for name, array in store.arrays(source).items()}


def fine_tuned(
    store: Store,
    trunk: str,
    x: NDArray[Any],
    y: NDArray[Any],
    *,
    test: int,
    train: int,
    outside: NDArray[np.float32] | None = None,
) -> Data:
    """Rows with the weights of a trained network beside them."""
    strange = None if outside is None else (torch.from_numpy(outside),)
    return Data(*parts((x,), y, split(len(x), test, train)), strange, weights_of(store, trunk))


def enlarged_digits(store: Store) -> Data:
    """Scikit-learn's digits at MNIST's size."""
    arrays = store.arrays("digits")
    large = np.kron(arrays["x"].astype(np.float32) * 255 / 16, np.ones((1, 3, 3), dtype=np.float32))
    x = grey(np.pad(large, ((0, 0), (2, 2), (2, 2))))
    return fine_tuned(
        store, "trunk-mnist", x, arrays["y"], test=500, train=1200, outside=grey(store.arrays("svhn")["grey"])
    )


def other_classes(store: Store) -> Data:
    """The last five classes of CIFAR-10, of which the trunk has seen nothing."""
    arrays = store.arrays("cifar10")
    mine = arrays["y"] >= 5
    return fine_tuned(
        store,
        "trunk-cifar10",
        coloured(arrays["x"][mine]),
        arrays["y"][mine] - 5,
        test=1000,
        train=1000,
        outside=coloured(store.arrays("svhn")["half"]),
    )


def source_code(store: Store) -> Data:
    """Source code for a model that has read the manual."""
    plain = windows(store, "library", 1500)
    return Data(plain.train, plain.validation, plain.test, None, weights_of(store, "trunk-topics"))


def turned_digits(store: Store) -> Data:
    """Images of MNIST, on their side, that the trained network has not seen upright either."""
    arrays = store.arrays("mnist")
    x = np.ascontiguousarray(np.rot90(grey(arrays["x"][PRETRAINED:]), axes=(2, 3)))
    return fine_tuned(
        store,
        "trunk-mnist-perceptron",
        x,
        arrays["y"][PRETRAINED:],
        test=1000,
        train=1000,
        outside=grey(store.arrays("svhn")["grey"]),
    )


TASKS = (
    Task(
        name="digits-last-layer",
        half="tune",
        kind="last layer",
        about="a network trained on MNIST, for scikit-learn's digits",
        sources=("digits", "svhn", "trunk-mnist"),
        data=enlarged_digits,
        network=lambda data, _: with_new_head(mnist_trunk(), data, 10),
        likelihood="categorical",
        batch=32,
        steps=2000,
    ),
    Task(
        name="cifar-last-layer",
        half="report",
        kind="last layer",
        about="a network trained on five classes of CIFAR-10, for the other five",
        sources=("cifar10", "svhn", "trunk-cifar10"),
        data=other_classes,
        network=lambda data, _: with_new_head(cifar_trunk(), data, 5),
        likelihood="categorical",
        batch=32,
        steps=1200,
    ),
    Task(
        name="library-adapters",
        half="tune",
        kind="low-rank adapters",
        about="a language model of the manual, for source code; adapters are parameters",
        sources=("library", "trunk-topics"),
        data=source_code,
        network=lambda data, _: adapted(loaded(language_model(), data), LowRankLinear, 4),
        likelihood="categorical",
        batch=16,
        steps=400,
    ),
    Task(
        name="mnist-adapters",
        half="report",
        kind="low-rank adapters",
        about="a residual perceptron of MNIST, for images on their side; adapters are layers",
        sources=("mnist", "svhn", "trunk-mnist-perceptron"),
        data=turned_digits,
        network=lambda data, _: adapted(loaded(mnist_perceptron(), data), AdaptedLinear, 8),
        likelihood="categorical",
        batch=32,
        steps=1500,
    ),
)
