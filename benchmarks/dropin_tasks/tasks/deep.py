"""Deep perceptrons, plain and residual."""

from __future__ import annotations

from torch import nn

from ..networks.tables import perceptron, residual_perceptron
from ..networks.widths import scaled
from ..task import Task
from .images import mnist
from .tables import columns_of, regression

TASKS = (
    Task(
        name="kin8nm-deep",
        half="tune",
        kind="deep, plain",
        about="eight tanh layers on a robot arm",
        sources=("uci-kin8nm",),
        data=lambda store: regression(store, "uci-kin8nm", test=1500, train=5000),
        network=lambda data, width: perceptron(columns_of(data), (scaled(64, width),) * 8, 1, nn.Tanh),
        likelihood="gaussian",
        batch=64,
        steps=4000,
    ),
    Task(
        name="mnist-deep",
        half="report",
        kind="deep, plain",
        about="ten ReLU layers on pixels",
        sources=("mnist", "svhn"),
        data=mnist,
        network=lambda _, width: nn.Sequential(nn.Flatten(), perceptron(784, (scaled(96, width),) * 9, 10)),
        likelihood="categorical",
        batch=64,
        steps=2000,
    ),
    Task(
        name="protein-residual",
        half="tune",
        kind="deep, residual",
        about="four residual blocks with LayerNorm on proteins",
        sources=("uci-protein",),
        data=lambda store: regression(store, "uci-protein", test=2000, train=6000),
        network=lambda data, width: residual_perceptron(columns_of(data), scaled(64, width), 4, 1),
        likelihood="gaussian",
        batch=64,
        steps=2500,
    ),
    Task(
        name="mnist-residual",
        half="report",
        kind="deep, residual",
        about="four residual blocks with LayerNorm on pixels",
        sources=("mnist", "svhn"),
        data=mnist,
        network=lambda _, width: nn.Sequential(nn.Flatten(), residual_perceptron(784, scaled(96, width), 4, 10)),
        likelihood="categorical",
        batch=64,
        steps=1500,
    ),
)
