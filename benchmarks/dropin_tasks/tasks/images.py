"""Classification of small images: without a norm, with batch, group and layer norm."""

from __future__ import annotations

import numpy as np

from ..networks.images import VisionTransformer, batch_norm, convnet, convnext, group_norm, lenet, resnet
from ..networks.widths import scaled
from ..store import Store
from ..task import Data, Part, Task, split, tensors


def image_data(store: Store, source: str, outside: tuple[str, str] | None, *, test: int, train: int) -> Data:
    """Images as `[channels, height, width]`, standardised by each channel's mean and deviation in the training rows."""
    images = store.arrays(source)["x"].astype(np.float32)
    images = images[:, None] if images.ndim == 3 else images
    labels = store.arrays(source)["y"]
    rows = split(len(images), test, train)
    axes = (0, 2, 3)
    shift, scale = images[rows[0]].mean(axes, keepdims=True), images[rows[0]].std(axes, keepdims=True)
    train_part, validation, test_part = (
        Part(tensors((images[index] - shift) / scale), *tensors(labels[index])) for index in rows
    )
    others = None
    if outside is not None:
        name, key = outside
        strange = store.arrays(name)[key][:500].astype(np.float32)
        strange = strange[:, None] if strange.ndim == 3 else strange
        others = tensors((strange - shift) / scale)
    return Data(train_part, validation, test_part, others)


def digits(store: Store) -> Data:
    """Scikit-learn's digits."""
    return image_data(store, "digits", None, test=450, train=1347)


def mnist(store: Store) -> Data:
    """5000 images of MNIST; street numbers are out of distribution."""
    return image_data(store, "mnist", ("svhn", "grey"), test=1000, train=5000)


def cifar10(store: Store) -> Data:
    """6000 images of CIFAR-10 at half their resolution; street numbers are out of distribution."""
    return image_data(store, "cifar10", ("svhn", "half"), test=1000, train=6000)


TASKS = (
    Task(
        name="mnist-lenet",
        half="tune",
        kind="images, no norm",
        about="two convolutions and two linear layers",
        sources=("mnist", "svhn"),
        data=mnist,
        network=lambda _, width: lenet(1, 28, scaled(16, width), 10),
        likelihood="categorical",
        batch=64,
        steps=600,
    ),
    Task(
        name="cifar-convnet",
        half="report",
        kind="images, no norm",
        about="three convolutions, mean over positions",
        sources=("cifar10", "svhn"),
        data=cifar10,
        network=lambda _, width: convnet(3, tuple(scaled(w, width) for w in (32, 64, 128)), 10),
        likelihood="categorical",
        batch=64,
        steps=700,
    ),
    Task(
        name="cifar-resnet-batchnorm",
        half="tune",
        kind="images, BatchNorm",
        about="three residual blocks",
        sources=("cifar10", "svhn"),
        data=cifar10,
        network=lambda _, width: resnet(3, tuple(scaled(w, width) for w in (16, 32, 64)), 10, batch_norm),
        likelihood="categorical",
        batch=128,
        steps=300,
    ),
    Task(
        name="mnist-convnet-batchnorm",
        half="report",
        kind="images, BatchNorm",
        about="three convolutions",
        sources=("mnist", "svhn"),
        data=mnist,
        network=lambda _, width: convnet(1, tuple(scaled(w, width) for w in (16, 32, 64)), 10, batch_norm),
        likelihood="categorical",
        batch=128,
        steps=300,
    ),
    Task(
        name="mnist-resnet-groupnorm",
        half="tune",
        kind="images, GroupNorm",
        about="two residual blocks behind a convolution",
        sources=("mnist", "svhn"),
        data=mnist,
        network=lambda _, width: resnet(1, tuple(scaled(w, width) for w in (8, 16, 32)), 10, group_norm),
        likelihood="categorical",
        batch=64,
        steps=400,
    ),
    Task(
        name="cifar-resnet-groupnorm",
        half="report",
        kind="images, GroupNorm",
        about="three residual blocks",
        sources=("cifar10", "svhn"),
        data=cifar10,
        network=lambda _, width: resnet(3, tuple(scaled(w, width) for w in (16, 32, 64)), 10, group_norm),
        likelihood="categorical",
        batch=64,
        steps=600,
    ),
    Task(
        name="mnist-convnext",
        half="tune",
        kind="images, LayerNorm",
        about="depthwise convolutions and LayerNorm over channels",
        sources=("mnist", "svhn"),
        data=mnist,
        network=lambda _, width: convnext(1, scaled(24, width), 2, 10),
        likelihood="categorical",
        batch=64,
        steps=300,
    ),
    Task(
        name="cifar-vision-transformer",
        half="report",
        kind="images, LayerNorm",
        about="torch's encoder on patches of 4×4 pixels",
        sources=("cifar10", "svhn"),
        data=cifar10,
        network=lambda _, width: VisionTransformer(3, 16, 4, scaled(64, width), 3, 10),
        likelihood="categorical",
        batch=64,
        steps=500,
    ),
)
