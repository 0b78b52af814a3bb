"""The data sets of the classification experiments: network, length of the training, and settings of their own."""

from dataclasses import dataclass, field

from noisygrad_paper.experiments.image_methods import Config


@dataclass(frozen=True)
class ImageProblem:
    """What depends on the data set: the network, how long it is trained, what an augmented image is, other settings."""

    network: str
    epochs: int
    batch_size: int
    padding: int
    flip: bool
    settings: dict[str, Config] = field(default_factory=dict)
    """By method, in place of its usual ones (`image_methods.settings`)."""
    choices: dict[tuple[str, str], Config] = field(default_factory=dict)
    """By method and configuration, in place of those."""


_SHORT: dict[str, Config] = {
    "SGD": {"lr": 0.05},
    "BBB": {"lr": 1e-3, "initial_std": 0.01},
    **{method: {"fisher_start": "forgotten"} for method in ("K-FAC", "K-FAC+WD", "noisy-Adam", "noisy-K-FAC")},
}
"""A shallow network bears larger steps, and a short training would end before the Fisher's start has faded."""
_CHOSEN: dict[tuple[str, str], Config] = {
    ("SGD", "plain"): {"weight_decay": 1e-3},
    ("SGD", "B"): {"lr": 0.05},
    ("BBB", "plain"): {"kl_weight": 1.0},
    ("BBB", "D"): {"kl_weight": 0.2, "prior_variance": 0.03},
    ("BBB", "B"): {"kl_weight": 1.0},
    ("BBB", "D+B"): {"kl_weight": 0.2},
    ("K-FAC", "plain"): {"lr_drops": [0.5, 0.75]},
    ("K-FAC+WD", "plain"): {"prior_variance": 0.03},
    ("K-FAC+WD", "D"): {"prior_variance": 0.03},
    ("noisy-K-FAC", "plain"): {"prior_variance": 0.03},
    ("noisy-K-FAC", "D"): {"prior_variance": 0.03},
}
"""On CIFAR-10. `docs/reproduce-classification.md` says which were tried on held-out images and which were not."""
PROBLEMS = {
    "cifar10": ImageProblem(
        "VGG16",
        epochs=150,
        batch_size=128,
        padding=4,
        flip=True,
        settings={"noisy-Adam": {"lr_drops": [0.5, 0.75]}},
        choices=_CHOSEN,
    ),
    "mnist": ImageProblem("ConvNet", epochs=3, batch_size=128, padding=2, flip=False, settings=_SHORT),
    "digits": ImageProblem("ConvNet", epochs=30, batch_size=32, padding=1, flip=False, settings=_SHORT),
}
