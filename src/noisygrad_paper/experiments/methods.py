"""The methods of the regression experiments by the paper's names: what each is set to, and the learner it makes.

A variant is a suffix: `NNG-MVG/point-noise`. The settings of a cell are the whole of what made it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from noisygrad.likelihoods import Gaussian
from noisygrad.replicas.learner import Learner
from noisygrad.replicas.noisy import NoisyLearner, NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad_paper.baselines.bbb import BBB, BBBSettings
from noisygrad_paper.baselines.pbp import PBP
from noisygrad_paper.baselines.pbp_mv import PBPMV
from noisygrad_paper.baselines.vmg import VMG
from noisygrad_paper.data import Standardised
from noisygrad_paper.experiments.public_optimizer import OptimizerLearner

Config = dict[str, Any]
Make = Callable[[Config, Standardised, Sequence[torch.Generator], str], Learner]

SMALL_SETS = ("boston", "concrete", "energy", "wine", "yacht")
"""Sets on which a full covariance fits: at most 751 weights, and few enough steps."""
_MOST_WEIGHTS = 1000
"""What a full covariance can have of a table of one's own."""


@dataclass(frozen=True)
class Problem:
    """What the settings of a method may depend on."""

    name: str
    batch_size: int
    hidden: int
    weights: int


@dataclass(frozen=True)
class Method:
    """How a method is set for a problem, and how it is made from its settings."""

    config: Callable[[Problem], Config]
    learner: Make
    cost: float = 1.0
    """Of one step, beside the others: for the estimate of the time left."""
    only: tuple[str, ...] | None = None
    """The sets it can be run on; None for all."""

    def fits(self, problem: Problem) -> bool:
        """Whether it is run on this problem; a table of one's own may have at most `_MOST_WEIGHTS` weights."""
        if self.only is None or problem.name in self.only:
            return True
        return problem.name.startswith("csv-") and problem.weights <= _MOST_WEIGHTS


def _common(problem: Problem, **more: Any) -> Config:
    shared = {"epochs": 1000, "batch_size": problem.batch_size, "hidden": [problem.hidden], "anneal": 0.1}
    return {**shared, "test_samples": 100, "dtype": "float32", **more}


def _made(kind: Callable[..., Learner], settings: type[NoisySettings] | type[BBBSettings]) -> Make:
    """Makes a learner of this kind, with the settings that a configuration has under their names."""

    def learner(config: Config, data: Standardised, generators: Sequence[torch.Generator], device: str) -> Learner:
        prior = config["noise_prior"]
        return kind(
            Perceptrons((data.x_train.shape[-1], *config["hidden"], data.y_train.shape[-1])),
            Gaussian(noise_prior=None if prior is None else tuple(prior)),
            settings(**{each.name: config[each.name] for each in fields(settings)}),
            num_data=data.x_train.shape[1],
            generators=generators,
            device=device,
            dtype=getattr(torch, config["dtype"]),
        )

    return learner


def _propagating(kind: Callable[..., Learner], *names: str) -> Make:
    """Makes a PBP of this kind, in float64, with the settings of these names."""

    def learner(config: Config, data: Standardised, generators: Sequence[torch.Generator], device: str) -> Learner:
        sizes, own = (data.x_train.shape[-1], config["hidden"], data.y_train.shape[-1]), {n: config[n] for n in names}
        return kind(*sizes, replicas=len(generators), generators=generators, device=device, **own)

    return learner


def _noisy(
    noise_prior: Sequence[float] | None = (6.0, 6.0),
    cost: float = 1.0,
    only: tuple[str, ...] | None = None,
    **settings: Any,
) -> Method:
    # As released, but for the trust region. It shortens fewer than one step in a hundred, in the first epochs; without
    # it some replicas diverge on protein. Chosen by the ELBO of the training data.
    chosen = NoisySettings(safeguard="fading", kl_clip=1e-3, **settings)

    def config(problem: Problem) -> Config:
        prior = None if noise_prior is None else list(noise_prior)
        return _common(problem, noise_prior=prior, **asdict(chosen))

    return Method(config, _made(NoisyLearner, NoisySettings), cost, only)


def _bbb() -> Method:
    # Of 0.001 … 0.03 for lr and 0.01, 0.05 for the width, the best by the ELBO of the training data of five splits of
    # boston, concrete, energy and yacht. The two exceptions were chosen on held-out training rows: on energy a quarter
    # of the trainings that start wide end in a worse optimum, and protein wants smaller steps.
    names = asdict(BBBSettings(lr=0.003, initial_std=0.01))
    own = {"energy": {"initial_std": 0.001}, "protein": {"lr": 0.001}}

    def config(problem: Problem) -> Config:
        return _common(problem, noise_prior=[6.0, 6.0], **names) | own.get(problem.name, {})

    return Method(config, _made(BBB, BBBSettings))


def _pbp() -> Method:
    def config(problem: Problem) -> Config:
        epochs = 20 if problem.hidden > 50 else 40
        own = {"epochs": epochs, "batch_size": 1, "anneal": 1.0, "test_samples": 1, "dtype": "float64"}
        # The published figures of naval are of inputs divided by their computed deviation. Of the constant 0.998 that
        # is 1e-16, so it became 1: a second bias, which PBP, whose biases have a prior too, fits better with.
        ones = {"ones": [11]} if problem.name == "naval" else {}
        return _common(problem) | own | ones

    return Method(config, _propagating(PBP), cost=0.5)


def _pbp_mv() -> Method:
    # Chosen on a held-out fifth of the training part of two splits, among PBP's own number and longer ones, up to what
    # there was time for; concrete and wine have PBP's own.
    longer = {"yacht": 200, "energy": 200, "protein": 40}
    longer |= dict.fromkeys(("kin8nm", "power", "naval", "naval-turbine"), 100)
    # Chosen so too, on protein alone; other sets were not tried.
    rotation_lr = {"protein": 3e-4}

    def config(problem: Problem) -> Config:
        epochs = longer.get(problem.name, 20 if problem.hidden > 50 else 40)
        own = {"epochs": epochs, "batch_size": 1, "anneal": "cosine", "test_samples": 1, "dtype": "float64"}
        return _common(problem) | own | {"reflections": 2, "rotation_lr": rotation_lr.get(problem.name, 1e-3)}

    return Method(config, _propagating(PBPMV, "reflections", "rotation_lr"))


def _vmg() -> Method:
    # Yacht's are the released ones; the others were chosen on held-out training rows, the more epochs the better on the
    # four large sets, up to what there was time for. Naval's noise is far below what a Gamma(6, 6) prior on the
    # original scale allows, so there the targets are standardised.
    own: dict[str, Config] = {
        "yacht": {"epochs": 2000, "batch_size": 5, "pseudo_pairs": 5},
        "energy": {"epochs": 1000},
        "wine": {"epochs": 200},
        "kin8nm": {"epochs": 2000},
        "power": {"epochs": 2000},
        "naval": {"epochs": 2000, "original_scale": False},
        "naval-turbine": {"epochs": 2000, "original_scale": False},
        "protein": {"epochs": 500},
    }

    def config(problem: Problem) -> Config:
        common = _common(problem, lr=1e-3, pseudo_pairs=10, original_scale=True, noise_prior=[6.0, 6.0])
        return common | {"epochs": 500, "anneal": 1.0} | own.get(problem.name, {})

    def learner(config: Config, data: Standardised, generators: Sequence[torch.Generator], device: str) -> Learner:
        return VMG(
            data.x_train.shape[-1],
            config["hidden"],
            data.y_train.shape[-1],
            num_data=data.x_train.shape[1],
            y_std=torch.from_numpy(data.y_std) if config["original_scale"] else 1.0,
            replicas=len(generators),
            generators=generators,
            pseudo_pairs=config["pseudo_pairs"],
            noise_prior=tuple(config["noise_prior"]),
            lr=config["lr"],
            device=device,
        )

    return Method(config, learner, cost=3.0)


METHODS: dict[str, Method] = {
    "NNG-MVG": _noisy(family="kronecker"),
    "NNG-FFG": _noisy(family="diagonal", cost=0.5),
    "NNG-EMVG": _noisy(family="eigen", factor_every=20, cost=3.0),
    "NNG-BlkTri": _noisy(family="tridiagonal", factor_every=20, cost=2.0),
    "NNG-full": _noisy(family="full", factor_every=20, cost=10.0, only=SMALL_SETS),
    "BBB": _bbb(),
    "PBP": _pbp(),
    "PBP_MV": _pbp_mv(),
    "VMG": _vmg(),
    "NNG-MVG/point-noise": _noisy(family="kronecker", noise_prior=None),
    "point": _noisy(family="kronecker", noise=False, noise_prior=None),
}
# By the optimiser that users have, to be compared with the engine's.
METHODS["NNG-MVG/optimizer"] = replace(METHODS["NNG-MVG"], learner=_made(OptimizerLearner, NoisySettings), cost=5.0)


def find_method(name: str) -> Method:
    """The method of that name; raises ValueError, which lists those there are."""
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; the methods are {', '.join(METHODS)}")
    return METHODS[name]
