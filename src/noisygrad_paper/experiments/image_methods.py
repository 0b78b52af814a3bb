"""The methods of the classification experiments by the paper's names: their settings, and how a step of each is made.

A configuration is a suffix of the method: `noisy-K-FAC/D+B` is trained with augmented data (D) and batch normalisation
(B). Constants are those of the released code where it has any (`docs/reproduce-classification.md`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisygrad.distributed import processes
from noisygrad.likelihoods import Categorical
from noisygrad.optim import NoisyAdam, NoisyKFAC
from noisygrad.optim.execution import executor_for
from noisygrad.optim.options import fraction, positive
from noisygrad.posterior.posterior import Posterior
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import build_structure
from noisygrad.posterior.weights import FlatWeights
from noisygrad.training import CapturedStep
from noisygrad_paper.baselines.bbb_network import BayesByBackprop
from noisygrad_paper.experiments.configurations import CONFIGURATIONS

Config = dict[str, Any]

METHODS = ("SGD", "K-FAC", "K-FAC+WD", "BBB", "noisy-Adam", "noisy-K-FAC")
_CIFAR_PRIOR = {"plain": (0.5, 0.1, 1e-3), "D": (0.1, 0.1, 1e-3), "B": (0.5, 1.0, 1e-2), "D+B": (0.1, 1.0, 1e-2)}
"""λ, η and the trust region c₀ of the released configurations."""
_FISHER = ("fisher_decay", "safeguard", "fisher_floor", "stats_every", "factor_every")
_GIVEN = ("lr", "kl_weight", "damping", "momentum", "noise", *_FISHER)
"""Settings that an optimiser is given under their own names."""


def settings(method: str, configuration: str) -> Config:
    """What a method is set to unless a data set has choices of its own; λ, η and c₀ depend on the configuration.

    As in the released code, the Fisher keeps what is left of the identity it starts from. Without that, the first
    statistics of the network without batch norm, which are nearly zero, make the noise wider than the weights, and
    nothing is learned (`docs/reproduce-classification.md`).
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}; the methods are {', '.join(METHODS)}")
    if configuration not in CONFIGURATIONS:
        raise ValueError(
            f"there is no configuration {configuration!r}; the configurations are {', '.join(CONFIGURATIONS)}"
        )
    kl_weight, prior_variance, clip = _CIFAR_PRIOR[configuration]
    natural: Config = {"lr": 0.01, "lr_drops": [], "momentum": 0.9, "damping": 1e-3, "kl_weight": kl_weight}
    natural |= {"fisher_decay": 0.99, "safeguard": "fading", "stats_every": 10, "factor_every": 200}
    natural |= {"kl_clip": clip, "kl_clip_decay": 0.95, "prior_variance": prior_variance}
    natural |= {"noise": True, "test_samples": 10}
    if method == "SGD":
        return {"lr": 0.02, "lr_drops": [0.5, 0.75], "momentum": 0.9, "test_samples": 1}
    if method == "BBB":
        own = {"lr": 3e-4, "lr_drops": [0.5, 0.75], "initial_std": 1e-3, "test_samples": 10}
        return own | {"kl_weight": kl_weight, "prior_variance": prior_variance}
    if method == "noisy-Adam":
        return natural | {"fisher_decay": 0.995, "factor_every": 10, "kl_clip": 1e-4, "kl_clip_decay": 1.0}
    if method == "noisy-K-FAC":
        return natural
    point = natural | {"noise": False, "test_samples": 1}
    return point if method == "K-FAC+WD" else point | {"prior_variance": None}


@dataclass(frozen=True)
class ImageProblem:
    """What depends on the data set: the network, how long it is trained, what an augmented image is, other settings."""

    network: str
    epochs: int
    batch_size: int
    padding: int
    flip: bool
    settings: dict[str, Config] = field(default_factory=dict)
    """By method, in place of its usual ones (`settings`)."""
    choices: dict[tuple[str, str], Config] = field(default_factory=dict)
    """By method and configuration, in place of those."""


_SHORT: dict[str, Config] = {
    "SGD": {"lr": 0.05},
    "BBB": {"lr": 1e-3, "initial_std": 0.01},
    **{method: {"safeguard": "brief"} for method in ("K-FAC", "K-FAC+WD", "noisy-Adam", "noisy-K-FAC")},
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


def optional(method: str) -> Config:
    """Settings of a method that a configuration need not have, as they then are."""
    own = {"SGD": {"weight_decay": 0.0}, "BBB": {}}
    return {"warm_up": 0, **own.get(method, {"fisher_floor": 0.0})}


def schedule(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.lr_scheduler.LRScheduler:
    """By epochs: the step size rises from epoch to epoch during the warm-up, and is divided by ten at each drop."""
    warm_up = config.get("warm_up", 0)
    drops = [max(1, int(share * config["epochs"] + 1e-9)) for share in config["lr_drops"]]

    def factor(epoch: int) -> float:
        return float(min(1.0, (epoch + 1) / (warm_up + 1)) * 0.1 ** sum(epoch >= drop for drop in drops))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def check_settings(method: str, config: Config) -> None:
    """Refuse values that a training could not start with, by starting one on the smallest network there is."""
    if config["test_samples"] < 1:
        raise ValueError("test_samples must be at least 1: a prediction needs a draw of the weights")
    if not all(isinstance(share, int | float) and 0 < share <= 1 for share in config["lr_drops"]):
        raise ValueError(f"lr_drops must be shares of the training, above 0 and at most 1; got {config['lr_drops']}")
    if config.get("warm_up", 0) < 0:
        raise ValueError(f"warm_up must be a number of epochs, at least 0; got {config['warm_up']}")
    for name in ("lr", "kl_clip_decay"):
        positive(name, config.get(name, 1.0))
    fraction("momentum", config.get("momentum", 0.0))
    nothing = torch.zeros(1, 1)
    with torch.random.fork_rng(devices=[]):  # the network's initial weights are nobody's concern
        make_trainer(
            method,
            config,
            nn.Linear(1, 1),
            num_data=1,
            steps_per_epoch=1,
            inputs=nothing,
            labels=nothing,
            prepare=lambda: None,
            seed=0,
        )


@dataclass
class Trainer:
    """A method at work on one network."""

    optimizer: torch.optim.Optimizer
    step: Callable[[], Tensor]
    """One step on the batch that the buffers hold; returns its loss."""
    posterior: Callable[[], Posterior]
    """What it has learned; a point estimate for the methods without noise."""


def make_trainer(
    method: str,
    config: Config,
    model: nn.Module,
    *,
    num_data: int,
    steps_per_epoch: int,
    inputs: Tensor,
    labels: Tensor,
    prepare: Callable[[], None],
    seed: int,
) -> Trainer:
    """The method for a network whose batches appear in `inputs` and `labels` whenever `prepare` has run."""
    config = optional(method) | config
    narrow = config.get("network_dtype") == "bfloat16"

    def closure() -> tuple[Tensor, Tensor]:
        # A narrow copy of the weights that was kept for later would be that of an earlier draw.
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=narrow, cache_enabled=False):
            outputs = model(inputs)
        return outputs.float(), labels

    network: nn.Module = getattr(model, "module", model)  # without what several processes wrap it in
    if method == "SGD":
        own = {name: config[name] for name in ("lr", "momentum", "weight_decay")}
        sgd = torch.optim.SGD(model.parameters(), **own)

        def move() -> Tensor:
            loss = F.cross_entropy(*closure())
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            return loss.detach()

        step = _replayed(sgd, network, prepare, move)
        return Trainer(sgd, step, lambda: _point(network, Categorical(), num_data))
    if method == "BBB":
        own = {name: config[name] for name in ("lr", "kl_weight", "prior_variance", "initial_std")}
        bbb = BayesByBackprop(network, Categorical(), num_data=num_data, seed=seed, **own)
        step = _replayed(bbb, network, prepare, lambda: bbb.step(closure), bbb.generator)
        return Trainer(bbb, step, bbb.posterior)
    kind = NoisyAdam if method == "noisy-Adam" else NoisyKFAC
    start, decay = config["kl_clip"], config["kl_clip_decay"]
    given = {name: config[name] for name in _GIVEN}
    optimizer = kind(
        model,
        Categorical(),
        num_data=num_data,
        prior_variance=math.inf if config["prior_variance"] is None else config["prior_variance"],
        momentum_mode="heavy_ball",
        kl_clip=lambda step: start * decay ** ((step - 1) // steps_per_epoch),
        fisher_pass="fresh",
        seed=seed,
        **given,
    )
    return Trainer(optimizer, CapturedStep(optimizer, closure, prepare), optimizer.posterior)


def _replayed(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    prepare: Callable[[], None],
    move: Callable[[], Tensor],
    *generators: torch.Generator,
) -> Callable[[], Tensor]:
    """A step that is replayed on a GPU, and recorded anew when its learning rate or the model's mode changes."""
    device = next(model.parameters()).device
    # The messages between processes are not recorded.
    replays = executor_for(device if processes().size == 1 else torch.device("cpu"), generators)
    loss = torch.zeros((), device=device)

    def work() -> None:
        prepare()
        loss.copy_(move())

    def step() -> Tensor:
        replays.run("step", (optimizer.param_groups[0]["lr"], model.training), work)
        return loss

    return step


@torch.no_grad()
def _point(model: nn.Module, likelihood: Categorical, num_data: int) -> Posterior:
    """A network without uncertainty, as a posterior whose draws are all the same."""
    structure = build_structure(model, "diagonal", noise=(False,))
    device = next(model.parameters()).device
    likelihood.bind(structure.replicas, device, torch.float32)
    mean = FlatWeights.zeros(structure, torch.float32, device)
    mean.read_parameters_()
    priors = BlockPriors.build(structure, 1.0, None, torch.float32, device)
    return Posterior(
        model,
        likelihood,
        structure,
        mean.flat,
        {block.name: block.family.identity(priors.blocks[block.name]) for block in structure.blocks},
        priors,
        num_data=num_data,
        kl_weight=1.0,
        damping_mode="factored",
    )
