"""Bayesian networks that predict the next observation: what an agent is curious about.

A `Dynamics` holds R of them as replicas of one batched network, one for each agent: ten agents that learn side by side
train their models in a fifth of the time they would take alone. Inputs are observation and action, the target is the
next observation; all are standardised by the mean and deviation of the agent's own pool, anew before every training.

`MODELS` has settings that learn to predict: `docs/exploration.md` says how they were chosen.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from noisygrad.exploration.gain import CovarianceTerm, layer_gain
from noisygrad.exploration.sensitivity import Sensitivity
from noisygrad.kernels.threads import one_thread
from noisygrad.likelihoods import Gaussian
from noisygrad.optim.options import positive
from noisygrad.replicas.engine import ReplicaGenerators
from noisygrad.replicas.noisy import NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad.replicas.variational import VariationalLearner
from noisygrad_paper.curiosity.recording import Transitions
from noisygrad_paper.curiosity.replay import ReplayPool, Scale

Array = NDArray[np.float64]

_NOISE_AHEAD = 50
"""Random numbers are drawn for this many updates at a time."""
_CHUNK = 512
"""Transitions whose gain is computed at a time, so that their inner products stay in the processor's cache."""


class LearnerSettings(Protocol):
    """The settings of a way to fit posteriors to perceptrons."""

    def learner(
        self, network: Perceptrons, likelihood: Gaussian, *, num_data: int, generators: Sequence[torch.Generator]
    ) -> VariationalLearner:
        """What is trained with these settings, one replica for each generator."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicsSettings:
    """How a model of the dynamics is made and trained; raises ValueError when made with a value out of range."""

    fit: LearnerSettings
    """The posterior and its optimiser, such as `NoisySettings`; its covariance must have a closed form layer by layer
    (of the built-in families, diagonal and Kronecker)."""
    num_data: int = 2500  # N
    """How much the data weigh against the prior; more than the number of transitions is overconfidence."""
    noise_std: float = 0.5
    """Of the standardised next observations, fixed."""
    hidden: tuple[int, ...] = (32,)
    updates: int = 500
    """Steps of the optimiser after each rollout."""
    batch_size: int = 10
    initial_std: float | None = None
    """Of normal initial means; None for Glorot's rule."""

    def __post_init__(self) -> None:
        for name in ("num_data", "noise_std", "updates", "batch_size"):
            positive(name, getattr(self, name))
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden must be one or more sizes of at least 1; got {self.hidden!r}")


_COMMON: dict[str, Any] = {"lr": 0.03, "prior_variance": 0.25, "momentum": 0.0, "kl_clip": 1e-3, "factor_every": 10}
MODELS: dict[str, DynamicsSettings] = {
    "NNG-MVG": DynamicsSettings(fit=NoisySettings(family="kronecker", **_COMMON)),
    "NNG-FFG": DynamicsSettings(fit=NoisySettings(family="diagonal", **_COMMON)),
}
"""Settings by the paper's names of their posteriors: matrix-variate (Kronecker) and fully factorised (diagonal)."""


@dataclasses.dataclass(frozen=True)
class Errors:
    """Mean squared errors of standardised next observations: 1 is what predicting the mean of the pool would get."""

    model: float
    """Of the model's mean prediction."""
    persistence: float
    """Of the prediction that nothing changes."""


class Dynamics:
    """R models of the dynamics, each learning from a pool of its own.

    Args:
        observations: The number of entries of an observation; `actions` is that of an action.
        settings: Of all models; ValueError where their posterior's information gain has no closed form.
        seeds: One for each model: of its initial weights and all its draws. A model is the same whatever others there
            are.
    """

    def __init__(self, observations: int, actions: int, settings: DynamicsSettings, seeds: Sequence[int]) -> None:
        if observations < 1 or actions < 1 or not seeds:
            given = f"{observations}, {actions} and {list(seeds)}"
            raise ValueError(f"a model needs at least one observation, one action and one seed; got {given}")
        self.settings = settings
        self.network = Perceptrons((observations + actions, *settings.hidden, observations))
        self._streams = ReplicaGenerators.of(seeds)
        likelihood = Gaussian(noise_variance=settings.noise_std**2)
        self.learner = settings.fit.learner(
            self.network, likelihood, num_data=settings.num_data, generators=self._streams.start
        )
        self.learner.layer_covariances(0)  # a posterior without a closed form is refused before it is trained
        if settings.initial_std is not None:
            for mean, generator in zip(self.learner.mean, self._streams.start, strict=True):
                mean.normal_(0.0, settings.initial_std, generator=generator)
        self._shapes = self.learner.noise_shapes(settings.batch_size)
        self._scales: list[tuple[Scale, ...]] = []
        self._steps = 0

    @property
    def replicas(self) -> int:
        """R."""
        return self.learner.replicas

    @property
    def trained(self) -> bool:
        """Whether `train` has been called."""
        return self._steps > 0

    def train(self, pools: Sequence[ReplayPool]) -> None:
        """`settings.updates` steps on batches from each model's pool.

        Raises ValueError where a pool has not reached its minimum, FloatingPointError where a model has diverged.
        """
        if len(pools) != self.replicas:
            raise ValueError(f"there are {self.replicas} models and {len(pools)} pools: give one to each")
        with one_thread(), torch.no_grad():
            self._scales = [pool.scales() for pool in pools]
            size = self.settings.updates, self.settings.batch_size
            pairs = zip(pools, self._scales, strict=True)
            x, y = zip(*(_pairs(scales, pool.sample(*size)) for pool, scales in pairs), strict=True)
            self._update(torch.stack(x, 1), torch.stack(y, 1))
        if not bool(self.learner.mean.isfinite().all()):
            diverged = (~self.learner.mean.isfinite().all(-1)).nonzero().flatten().tolist()
            raise FloatingPointError(
                f"the models {diverged} have diverged: lower num_data or the learning rate, or set a kl_clip"
            )

    def _update(self, x: Tensor, y: Tensor) -> None:
        """Steps on x and y, `[updates, R, batch, ...]`."""
        learner, sizes = self.learner, [math.prod(shape) for shape in self._shapes.values()]
        for start in range(0, len(x), _NOISE_AHEAD):
            count = min(_NOISE_AHEAD, len(x) - start)
            rows = torch.empty(self.replicas, count, sum(sizes))
            for row, generator in zip(rows, self._streams.noise, strict=True):
                row.normal_(generator=generator)
            parts = [
                part.transpose(0, 1).unflatten(-1, shape).contiguous()
                for part, shape in zip(rows.split(sizes, dim=-1), self._shapes.values(), strict=True)
            ]
            for index in range(count):
                noise = {name: part[index] for name, part in zip(self._shapes, parts, strict=True)}
                learner.step_(x[start + index], y[start + index], noise)
                self._steps += 1
                if learner.refresh_due(self._steps):
                    learner.refresh_()
                learner.move_()

    # ---------------------------------------------------------------- what a model says of a rollout

    @torch.no_grad()
    def gain(
        self, replica: int, transitions: Transitions, *, num_samples: int = 10, covariance: CovarianceTerm = "exact"
    ) -> tuple[Array, Errors]:
        """The information gain of each action by one model, in nats, `[steps, copies]`; and how well it predicted.

        It is that of a natural-gradient step of size 0.01, from `num_samples` draws of the weights; the model need not
        have seen the rollout. Raises RuntimeError before `train`, and ValueError where a setting is out of range, or
        "blockwise", as in the paper, is asked of a posterior that is no Kronecker product.
        """
        if not self.trained:
            raise RuntimeError("the model has learned nothing yet: call train() first")
        if num_samples < 1 or covariance not in ("exact", "blockwise"):
            raise ValueError(
                "num_samples must be at least 1 and covariance 'exact' or 'blockwise'; "
                f"got {num_samples!r} and {covariance!r}"
            )
        with one_thread():
            scales, seen = self._scales[replica], transitions.flat()
            x, y = _pairs(scales, seen)
            persistence = np.square(scales[2].standardise(seen[0]) - y.numpy(), dtype=np.float64).mean()
            weights = self._draws(replica, num_samples)
            covariances = self.learner.layer_covariances(replica)
            gains, squares = [], 0.0
            for rows, targets in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
                layers = perceptron_sensitivities(self.network, weights, rows, targets, self.settings.noise_std)
                parts = [layer_gain(*pair, covariance) for pair in zip(layers, covariances, strict=True)]
                gains.append(torch.stack(parts).sum(0))
                # The gradient at the outputs is (y − f)/σ².
                errors = layers[-1].gradients.mean(1) * self.settings.noise_std**2
                squares += float(errors.double().square().sum())
        found = 1e-4 * torch.cat(gains).double().numpy()
        return found.reshape(transitions.rewards.shape), Errors(squares / y.numel(), float(persistence))

    def _draws(self, replica: int, count: int) -> Tensor:
        """`[count, n]` from the posterior of one model."""
        noise = torch.zeros(self.replicas, count, self.network.num_weights)
        noise[replica].normal_(generator=self._streams.test[replica])
        return self.learner.weights(noise)[replica]


def _pairs(scales: Sequence[Scale], parts: Sequence[NDArray[np.float32]]) -> tuple[Tensor, Tensor]:
    """Inputs (observation and action) and targets (next observation), standardised."""
    observations, actions, following = (
        torch.from_numpy(scale.standardise(part)) for scale, part in zip(scales, parts, strict=True)
    )
    return torch.cat([observations, actions], -1), following


def perceptron_sensitivities(
    network: Perceptrons, weights: Tensor, inputs: Tensor, targets: Tensor, noise_std: float
) -> list[Sensitivity]:
    """The sensitivity of every layer of a perceptron with Gaussian noise, by hand: far quicker than by hooks.

    `weights` are `[K, n]`, a draw in each row; inputs `[B, inputs]`, targets `[B, outputs]`.
    """
    draws = weights.unsqueeze(0)
    below, outputs = network.forward(draws, inputs.unsqueeze(0))
    gradients = network.backward(draws, below, (targets - outputs) / noise_std**2)
    rows = [part.squeeze(0).transpose(0, 1).contiguous() for part in below]
    # The Fisher of the outputs is I / noise_std²: the columns of its root are unit vectors, for every example.
    roots = [torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)[None, None] / noise_std]
    for matrix, under in zip(network.matrices(weights)[:0:-1], rows[:0:-1], strict=True):
        roots.append((roots[-1] @ matrix[..., :-1]) * (under > 0).unsqueeze(-2))
    return [
        Sensitivity(F.pad(row, (0, 1), value=1.0), gradient.squeeze(0).transpose(0, 1), root)
        for row, gradient, root in zip(rows, gradients, reversed(roots), strict=True)
    ]
