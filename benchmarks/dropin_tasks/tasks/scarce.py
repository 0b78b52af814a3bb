"""Little to learn from: a hundred rows, or two hundred steps."""

from __future__ import annotations

from ..networks.images import convnet
from ..networks.tables import perceptron
from ..networks.widths import scaled
from ..store import Store
from ..task import Data, Task
from .images import cifar10, image_data
from .tables import columns_of, regression


def few_digits(store: Store) -> Data:
    """A hundred of scikit-learn's digits."""
    return image_data(store, "digits", None, test=1000, train=100)


TASKS = (
    Task(
        name="digits-hundred",
        half="tune",
        kind="a hundred rows",
        about="a convolutional network on 8×8 digits",
        sources=("digits",),
        data=few_digits,
        network=lambda _, width: convnet(1, (scaled(16, width), scaled(32, width)), 10),
        likelihood="categorical",
        batch=16,
        steps=1000,
    ),
    Task(
        name="diabetes-hundred",
        half="report",
        kind="a hundred rows",
        about="progression of diabetes",
        sources=("sklearn-diabetes",),
        data=lambda store: regression(store, "sklearn-diabetes", test=300, train=100),
        network=lambda data, width: perceptron(columns_of(data), (scaled(32, width),), 1),
        likelihood="gaussian",
        batch=16,
        steps=1000,
    ),
    Task(
        name="cifar-few-steps",
        half="tune",
        kind="two hundred steps",
        about="three convolutions",
        sources=("cifar10", "svhn"),
        data=cifar10,
        network=lambda _, width: convnet(3, tuple(scaled(w, width) for w in (24, 48, 96)), 10),
        likelihood="categorical",
        batch=128,
        steps=200,
    ),
    Task(
        name="protein-few-steps",
        half="report",
        kind="two hundred steps",
        about="two layers on proteins",
        sources=("uci-protein",),
        data=lambda store: regression(store, "uci-protein", test=2000, train=6000),
        network=lambda data, width: perceptron(columns_of(data), (scaled(128, width), scaled(128, width)), 1),
        likelihood="gaussian",
        batch=128,
        steps=200,
    ),
)
