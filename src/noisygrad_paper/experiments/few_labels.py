"""What the experiments with twenty labelled points share: the trials, and the methods as they are set there.

The network has one hidden layer of ten units. Inputs and targets are standardised by the whole table, no method has a
momentum, damping or trust region, and α̃ = β̃ = 0.01, as in the paper; what it leaves open is in
`docs/reproduce-few-labels.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from noisygrad.joint_information import GaussianBatch, greedy
from noisygrad.likelihoods import Gaussian
from noisygrad.networks import MLP
from noisygrad.replicas.engine import Execution, ReplicaGenerators, train_replicas
from noisygrad.replicas.learner import Learner
from noisygrad.replicas.noisy import NoisyLearner, NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad.replicas.variational import VariationalLearner
from noisygrad_paper.baselines.hmc import HMC, HMCPosterior, HMCSettings
from noisygrad_paper.baselines.pbp import PBP
from noisygrad_paper.data.tables import DataTable
from noisygrad_paper.experiments.cells import Report

Config = dict[str, Any]

DATA = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "wine", "yacht")
LABELLED, OTHERS = 20, 100
EVERY = slice(None)
_HIDDEN = 10


@dataclass(frozen=True)
class Trial:
    """Row numbers: the labelled points, a hundred others, and all the rest."""

    labelled: NDArray[np.intp]
    others: NDArray[np.intp]
    pool: NDArray[np.intp]


def trial(table: DataTable, seed: int, pool: int = 0) -> Trial:
    """The rows of a trial, of which the first `LABELLED` and the next `OTHERS` are taken in random order."""
    needed = LABELLED + OTHERS + pool
    if table.rows < needed:
        raise ValueError(
            f"{table.name} has {table.rows} rows; a trial needs {needed}: {LABELLED} labelled, {OTHERS} others"
            + (f" and a pool of at least {pool}" if pool else "")
        )
    order = np.random.default_rng([20180715, seed]).permutation(table.rows)
    return Trial(order[:LABELLED], order[LABELLED : LABELLED + OTHERS], order[LABELLED + OTHERS :])


class Fitted(Protocol):
    """R fitted networks."""

    def moments(self, x: Tensor, only: slice = EVERY) -> tuple[Tensor, Tensor]:
        """Mean and variance of the function (without noise) at x `[r, n, inputs]`, each `[r, n]`, of those networks."""

    def diagnostics(self) -> dict[str, Tensor]:
        """Figures about the fit, `[R]` by name."""


@dataclass(frozen=True)
class FewPoints:
    """R sets of labelled points, standardised: x `[R, N, inputs]` and y `[R, N, 1]`; `at` `[R, n, inputs]` are others.

    What is looked for is the function at those others; HMC's chains run until they agree there.
    """

    x: Tensor
    y: Tensor
    at: Tensor
    device: str = "cpu"
    execution: Execution = "auto"


@dataclass(frozen=True)
class DrawnFit:
    """A trained learner, and weights drawn from its posterior once, `[R, S, n]`: all points see the same."""

    learner: VariationalLearner
    weights: Tensor

    def moments(self, x: Tensor, only: slice = EVERY) -> tuple[Tensor, Tensor]:
        """As of every fit."""
        x = x.to(device=self.learner.device, dtype=self.learner.dtype)
        outputs = self.learner.outputs(x, self.weights[only]).squeeze(-1)
        return outputs.mean(0), outputs.var(0)

    def batch(self, x: Tensor, network: int, count: int) -> list[int]:
        """Which of the points x `[n, inputs]` tell one network most when they are labelled together."""
        x = x.to(device=self.learner.device, dtype=self.learner.dtype)
        functions = self.learner.outputs(x[None], self.weights[network : network + 1]).squeeze(-1).squeeze(1)
        noise = self.learner.likelihood.noise_variance[network]
        return greedy(GaussianBatch(functions.double(), noise.double()), count, tolerance=0.0)[0].tolist()

    def diagnostics(self) -> dict[str, Tensor]:
        """Those of the learner."""
        return self.learner.diagnostics()


@dataclass(frozen=True)
class PropagatedFit:
    """A trained PBP, whose moments are propagated."""

    learner: PBP

    def moments(self, x: Tensor, only: slice = EVERY) -> tuple[Tensor, Tensor]:
        """As of every fit."""
        # It has no way to look at some of its networks alone; the others are asked something, and not listened to.
        asked = x.new_zeros(self.learner.replicas, *x.shape[1:])
        asked[only] = x
        mean, variance = self.learner.moments(asked.to(self.learner.device))
        return mean[only].squeeze(-1), variance[only].squeeze(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Those of the learner."""
        return self.learner.diagnostics()


def _fit_noisy(data: FewPoints, seeds: Sequence[int], config: Config, report: Report) -> DrawnFit:
    """On full batches, so that an epoch is a step."""
    streams = ReplicaGenerators.of(seeds, data.device)
    learner = NoisyLearner(
        Perceptrons((data.x.shape[-1], config["hidden"], 1)),
        Gaussian(noise_prior=tuple(config["noise_prior"])),
        NoisySettings(**{each.name: config[each.name] for each in fields(NoisySettings)}),
        num_data=data.x.shape[1],
        generators=streams.start,
        device=data.device,
        dtype=getattr(torch, config["dtype"]),
    )
    _train(learner, data, streams, config["epochs"], data.x.shape[1], report)
    return DrawnFit(learner, learner.draws(config["test_samples"], streams.test))


def _fit_pbp(data: FewPoints, seeds: Sequence[int], config: Config, report: Report) -> PropagatedFit:
    streams = ReplicaGenerators.of(seeds, data.device)
    sizes = data.x.shape[-1], [config["hidden"]], 1
    learner = PBP(*sizes, replicas=len(seeds), generators=streams.start, device=data.device, dtype=torch.float64)
    _train(learner, data, streams, config["epochs"], 1, report)
    return PropagatedFit(learner)


def _train(
    learner: Learner, data: FewPoints, streams: ReplicaGenerators, epochs: int, batch_size: int, report: Report
) -> None:
    x, y = (part.to(device=learner.device, dtype=learner.dtype) for part in (data.x, data.y))
    train_replicas(
        learner,
        x,
        y,
        epochs=epochs,
        batch_size=batch_size,
        streams=streams,
        execution=data.execution,
        on_epoch=lambda epoch: report(epoch / epochs, f"epoch {epoch}"),
    )


@dataclass(frozen=True)
class HMCFit:
    """Draws from the posterior itself."""

    posteriors: list[HMCPosterior]

    def moments(self, x: Tensor, only: slice = EVERY) -> tuple[Tensor, Tensor]:
        """From all draws."""
        asked = zip(self.posteriors[only], x, strict=True)
        draws = [posterior.outputs(part).squeeze(-1) for posterior, part in asked]
        means, variances = zip(*((one.mean(0), one.var(0)) for one in draws), strict=True)
        return torch.stack(means), torch.stack(variances)

    def diagnostics(self) -> dict[str, Tensor]:
        """What the chains say of themselves."""
        names = ("rhat", "ess", "acceptance")
        return {name: torch.tensor([getattr(each, name) for each in self.posteriors]) for name in names}


def _fit_hmc(data: FewPoints, seeds: Sequence[int], config: Config, report: Report) -> HMCFit:
    """All chains of all sets at once; points that are still to come are padding, so that nothing compiles again."""
    settings = HMCSettings(**{each.name: config[each.name] for each in fields(HMCSettings)})
    prior = tuple(config["noise_prior"]), config["prior_variance"]
    sampler = _sampler(data.x.shape[-1], config["hidden"], *prior, settings, data.device)
    x, y, weight = _padded(data.x, data.y)
    return HMCFit(sampler.fit(x, y, weight=weight, at=data.at, seeds=seeds, report=report))


def _padded(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With empty points up to the next multiple of ten, and weights that are 0 for them."""
    missing = -x.shape[1] % 10
    weight = F.pad(torch.ones(x.shape[:2]), (0, missing))
    return F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, 0, 0, missing)), weight


@lru_cache(maxsize=1)
def _sampler(
    inputs: int,
    hidden: int,
    noise_prior: tuple[float, float],
    prior_variance: float,
    settings: HMCSettings,
    device: str,
) -> HMC:
    """The one that was compiled last, where it can be used again."""
    network, likelihood = MLP(inputs, (hidden,), 1), Gaussian(noise_prior=noise_prior)
    return HMC(network, likelihood, prior_variance=prior_variance, settings=settings, device=device)


@dataclass(frozen=True)
class RidgeFit:
    """Variances of a linear model with unit noise and unit prior: xᵀ (XᵀX + I)⁻¹ x, x with a constant 1."""

    precision: Tensor
    weights: Tensor

    def moments(self, x: Tensor, only: slice = EVERY) -> tuple[Tensor, Tensor]:
        """In closed form."""
        x = _with_constant(x)
        solved = torch.linalg.solve(self.precision[only], x.mT)
        return (x @ self.weights[only]).squeeze(-1), (x.mT * solved).sum(-2)

    def diagnostics(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}


def _fit_ridge(data: FewPoints, seeds: Sequence[int], config: Config, report: Report) -> RidgeFit:
    x, y = _with_constant(data.x), data.y.double()
    precision = x.mT @ x + config["ridge"] * torch.eye(x.shape[-1], dtype=torch.float64)
    return RidgeFit(precision, torch.linalg.solve(precision, x.mT @ y))


def _with_constant(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1).double()


@dataclass(frozen=True)
class FewLabelsMethod:
    """All settings by name, and what fits one network with such settings to each of R sets of points."""

    config: Config
    fit: Callable[[FewPoints, Sequence[int], Config, Report], Fitted]


def hamiltonian(settings: HMCSettings) -> FewLabelsMethod:
    """HMC with the prior, the network and the noise model of the noisy methods."""
    shared = {"hidden": _HIDDEN, "noise_prior": [6.0, 6.0], "prior_variance": 1.0}
    return FewLabelsMethod(shared | asdict(settings), _fit_hmc)


def _noisy(**changes: Any) -> FewLabelsMethod:
    shared = {"hidden": _HIDDEN, "epochs": 5000, "noise_prior": [6.0, 6.0], "dtype": "float32"}
    return FewLabelsMethod(shared | asdict(NoisySettings(fisher_decay=0.99, momentum=0.0, **changes)), _fit_noisy)


METHODS: dict[str, FewLabelsMethod] = {
    "HMC": hamiltonian(HMCSettings()),
    "PBP": FewLabelsMethod({"hidden": _HIDDEN, "epochs": 40, "dtype": "float64"}, _fit_pbp),
    "NNG-FFG": _noisy(family="diagonal"),
    "NNG-MVG": _noisy(family="kronecker"),
    "NNG-BlkTri": _noisy(family="tridiagonal", factor_every=20),
    "NNG-full": _noisy(family="full", factor_every=20),
    "NNG-MVG/exact": _noisy(family="kronecker", damping_mode="exact", factor_every=20),
    "NNG-MVG/lambda=1.4": _noisy(family="kronecker", kl_weight=1.4),
    "NNG-BlkTri/lambda=1.4": _noisy(family="tridiagonal", factor_every=20, kl_weight=1.4),
    # No network at all: the leverage of a point in ridge regression.
    "ridge": FewLabelsMethod({"ridge": 1.0}, _fit_ridge),
}
