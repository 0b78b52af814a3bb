"""What a posterior says about an input: moments, probabilities, log-densities and quantiles.

A prediction is an equal mixture over S weight samples of the likelihood's own distribution. Everything here takes
plain tensors whose first dimension is the sample; the dimensions after it are `[*replicas, batch, *event]`.

The variance splits by the law of total variance: `epistemic` is the variance over weight samples of the conditional
mean (S in the denominator), `aleatoric` the mean of the conditional variance, `variance` their sum.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Any, Self

import scipy
import torch
from torch import Tensor

_BISECTIONS = 60
_STIRLING_FROM = 1e4  # above it the series for lgamma(x + 1/2) - lgamma(x) is exact in float64, the difference is not


def _at_least_float32(tensor: Tensor) -> Tensor:
    """`tensor` detached, widened when its type is too narrow for probabilities."""
    tensor = tensor.detach()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _entropy_terms(probs: Tensor) -> Tensor:
    """−p log p of each element, 0 at p = 0."""
    terms: Tensor = torch.special.entr(probs)
    return terms


class Prediction(ABC):
    """The predictive mixture; base of the four kinds below. Per-example values have shape `[*replicas, batch]`."""

    def __init__(self, event_dims: int) -> None:
        self.event_dims = event_dims

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """All that a kind of prediction holds, each `[samples, ...]`; the first has the shape of the outputs."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same prediction with `function` applied to each of its tensors."""
        found = copy(self)
        vars(found).update({name: function(tensor) for name, tensor in self._tensors.items()})
        return found

    @abstractmethod
    def _conditional_mean(self) -> Tensor:
        """The mean of y under each weight sample."""

    @abstractmethod
    def _conditional_variance(self) -> Tensor:
        """The variance of y under each weight sample."""

    @abstractmethod
    def _conditional_log_prob(self, target: Tensor) -> Tensor:
        """The log-probability of every element of `target` under each weight sample."""

    @property
    def target_shape(self) -> torch.Size:
        """The shape a tensor of targets must have."""
        return next(iter(self._tensors.values())).shape[1:]

    @property
    def num_samples(self) -> int:
        """How many weight samples the mixture averages."""
        return next(iter(self._tensors.values())).shape[0]

    @property
    def mean(self) -> Tensor:
        """The mean of the mixture (for classes: the probabilities)."""
        return self._conditional_mean().mean(0)

    @property
    def epistemic(self) -> Tensor:
        """Variance due to the weights: that of the conditional mean over samples."""
        return self._conditional_mean().var(0, correction=0)

    @property
    def aleatoric(self) -> Tensor:
        """Variance due to the observation noise: the mean of the conditional variance."""
        return self._conditional_variance().mean(0)

    @property
    def variance(self) -> Tensor:
        """Variance of the mixture: `epistemic + aleatoric`."""
        return self.epistemic + self.aleatoric

    @property
    def probs(self) -> Tensor:
        """Class probabilities; only predictions of Categorical and Bernoulli likelihoods have them."""
        raise AttributeError(f"{type(self).__name__} has no probs: only Categorical and Bernoulli likelihoods do.")

    def log_prob(self, target: Tensor) -> Tensor:
        """Log-density of `target` under the mixture, per example, summed over the event inside each sample.

        Raises ValueError when `target` is not of shape `target_shape`.
        """
        if target.shape != self.target_shape:
            raise ValueError(
                f"target has shape {list(target.shape)}, but this prediction is of targets of shape "
                f"{list(self.target_shape)}: reshape the target."
            )
        log_probs = self._conditional_log_prob(target)
        if self.event_dims:
            log_probs = log_probs.flatten(-self.event_dims).sum(-1)
        return torch.logsumexp(log_probs, 0) - math.log(log_probs.shape[0])

    def quantile(self, q: float | Tensor) -> Tensor:
        """Marginal quantiles of each output: shape `target_shape`, or `[len(q), *target_shape]` for a 1-d `q`."""
        levels = torch.as_tensor(q, dtype=torch.float64)
        if levels.ndim > 1 or levels.numel() == 0 or not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"q must be a number or a 1-d tensor of numbers strictly between 0 and 1; got {q!r}.")
        found = torch.stack([self._quantile(level) for level in levels.reshape(-1).tolist()])
        return found.reshape(levels.shape + self.target_shape)

    def _quantile(self, level: float) -> Tensor:
        raise ValueError(
            f"{type(self).__name__} has no quantiles, as those of Gaussian, Bernoulli and Poisson likelihoods have: "
            "they need an ordered target, and a method _quantile(level)."
        )

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds `level` of the probability: its lower and upper ends."""
        if not 0 < level < 1:
            raise ValueError(f"level must be strictly between 0 and 1; got {level}.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def replica(self, index: int) -> Self:
        """The prediction of one replica, where the first dimension after the samples is one of replicas."""
        if len(self.target_shape) - self.event_dims < 2:
            raise ValueError(f"this prediction has no replicas: its targets have shape {list(self.target_shape)}.")
        return self._map(lambda tensor: tensor[:, index])

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same prediction on another device or in another type; arguments as of `Tensor.to`."""
        return self._map(lambda tensor: tensor.to(*args, **kwargs))


class RegressionPrediction(Prediction):
    """A mixture of Gaussians or, with `degrees_of_freedom`, of Student-t distributions.

    `location` is `[samples, *replicas, batch, *event]`; `scale` and `degrees_of_freedom` broadcast to it. Outputs are
    independent given a weight sample, also where they share a noise variance.
    """

    def __init__(
        self, location: Tensor, scale: Tensor, degrees_of_freedom: Tensor | None = None, event_dims: int = 1
    ) -> None:
        super().__init__(event_dims)
        self.location = _at_least_float32(location)
        self.scale = scale.detach().to(self.location.dtype).expand_as(location)
        self.degrees_of_freedom = degrees_of_freedom
        if degrees_of_freedom is not None:
            self.degrees_of_freedom = degrees_of_freedom.detach().to(self.location.dtype).expand_as(location)

    def _conditional_mean(self) -> Tensor:
        return self.location

    def _conditional_variance(self) -> Tensor:
        variance = self.scale.square()
        if self.degrees_of_freedom is None:
            return variance
        degrees = self.degrees_of_freedom
        return torch.where(degrees > 2, variance * degrees / (degrees - 2), torch.inf)

    def _conditional_log_prob(self, target: Tensor) -> Tensor:
        # In float64: with thousands of degrees of freedom the lgammas cancel to nothing in float32.
        scale = self.scale.double()
        squared = ((target.double() - self.location.double()) / scale).square()
        if self.degrees_of_freedom is None:
            log_prob = -0.5 * (squared + math.log(2 * math.pi)) - scale.log()
        else:
            degrees = self.degrees_of_freedom.double()
            log_prob = (
                _log_gamma_ratio(degrees / 2)
                - 0.5 * torch.log(math.pi * degrees)
                - scale.log()
                - 0.5 * (degrees + 1) * torch.log1p(squared / degrees)
            )
        return log_prob.to(self.location.dtype)

    def cdf(self, y: Tensor) -> Tensor:
        """Marginal probability that each output is at most `y` (which broadcasts to `target_shape`), in float64."""
        standard = (y.double() - self.location.double()) / self.scale.double()
        if self.degrees_of_freedom is None:
            components: Tensor = torch.special.ndtr(standard)
        else:
            values = scipy.special.stdtr(self.degrees_of_freedom.double().cpu().numpy(), standard.cpu().numpy())
            components = torch.from_numpy(values).to(standard.device)
        return components.mean(0)

    def _quantile(self, level: float) -> Tensor:
        if self.degrees_of_freedom is None:
            standard = torch.full_like(self.location, float(scipy.special.ndtri(level)), dtype=torch.float64)
        else:
            values = scipy.special.stdtrit(self.degrees_of_freedom.double().cpu().numpy(), level)
            standard = torch.from_numpy(values).to(self.location.device)
        components = self.location.double() + self.scale.double() * standard
        # A mixture's quantile lies between the least and the greatest of its components'.
        low, high = components.amin(0), components.amax(0)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (0.5 * (low + high)).to(self.location.dtype)

    def rescaled(self, shift: float | Tensor, scale: float | Tensor) -> Self:
        """The prediction of `shift + scale * y`: undoes a standardisation of the targets.

        `shift` and `scale` are numbers or tensors that broadcast to `target_shape`. `log_prob` is then a density of
        the new variable. Raises ValueError when a scale is not positive.
        """
        factor = torch.as_tensor(scale, dtype=self.location.dtype, device=self.location.device)
        offset = torch.as_tensor(shift, dtype=self.location.dtype, device=self.location.device)
        if not bool((factor > 0).all()):
            raise ValueError(f"scale must be positive; got {scale!r}.")
        return type(self)(
            offset + factor * self.location, factor * self.scale, self.degrees_of_freedom, self.event_dims
        )


def _log_gamma_ratio(x: Tensor) -> Tensor:
    """log Γ(x + ½) − log Γ(x) without cancellation at large `x`."""
    series = 0.5 * x.log() - 1 / (8 * x) + 1 / (192 * x**3)
    return torch.where(x > _STIRLING_FROM, series, torch.lgamma(x + 0.5) - torch.lgamma(x))


class _LabelPrediction(Prediction):
    """What predictions of labels share."""

    @abstractmethod
    def _entropy(self, probs: Tensor) -> Tensor:
        """Of the distributions with these probabilities, per target."""

    @property
    def probs(self) -> Tensor:
        """Class probabilities, or that of 1: the mean over samples."""
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """Entropy in nats of the mixture, per target."""
        return self._entropy(self.probs)

    @property
    def mutual_information(self) -> Tensor:
        """Information in nats that the label would bring about the weights (BALD): what more data can remove."""
        return (self.entropy - self._conditional_entropy().mean(0)).clamp_min(0)

    def _conditional_entropy(self) -> Tensor:
        return self._entropy(self._conditional_mean())


class CategoricalPrediction(_LabelPrediction):
    """A mixture over classes, from `logits` `[samples, *replicas, batch, *positions, classes]`.

    `event_dims` counts the positions only. Moments are those of the one-hot target, per class.
    """

    def __init__(self, logits: Tensor, event_dims: int = 0) -> None:
        super().__init__(event_dims)
        self.log_probs = torch.log_softmax(_at_least_float32(logits), -1)

    @property
    def target_shape(self) -> torch.Size:
        """The shape of the labels: that of the probabilities without the classes."""
        return super().target_shape[:-1]

    def _conditional_mean(self) -> Tensor:
        return self.log_probs.exp()

    def _conditional_variance(self) -> Tensor:
        probs = self.log_probs.exp()
        return probs * (1 - probs)

    def _conditional_log_prob(self, target: Tensor) -> Tensor:
        if target.dtype.is_floating_point or target.dtype == torch.bool:
            raise ValueError(f"class labels must be integers; got {target.dtype}: use target.long().")
        if bool(((target < 0) | (target >= self.log_probs.shape[-1])).any()):
            raise ValueError(f"class labels must lie in 0..{self.log_probs.shape[-1] - 1}; some do not.")
        index = target.long().expand(self.log_probs.shape[:-1]).unsqueeze(-1)
        return self.log_probs.gather(-1, index).squeeze(-1)

    @property
    def labels(self) -> Tensor:
        """The most probable class."""
        return self.probs.argmax(-1)

    def _entropy(self, probs: Tensor) -> Tensor:
        return _entropy_terms(probs).sum(-1)


class BernoulliPrediction(_LabelPrediction):
    """A mixture over {0, 1}, from `logits` `[samples, *replicas, batch, *event]`; `probs` is that of 1."""

    def __init__(self, logits: Tensor, event_dims: int = 1) -> None:
        super().__init__(event_dims)
        self.logits = _at_least_float32(logits)

    def _conditional_mean(self) -> Tensor:
        return torch.sigmoid(self.logits)

    def _conditional_variance(self) -> Tensor:
        return torch.sigmoid(self.logits) * torch.sigmoid(-self.logits)

    def _conditional_log_prob(self, target: Tensor) -> Tensor:
        positive = torch.nn.functional.logsigmoid(self.logits)
        return torch.lerp(positive - self.logits, positive, target.to(self.logits.dtype).expand_as(self.logits))

    def _quantile(self, level: float) -> Tensor:
        return (level > 1 - self.probs.double()).to(self.logits.dtype)

    @property
    def labels(self) -> Tensor:
        """The more probable of 0 and 1."""
        return (self.probs > 0.5).long()

    def _entropy(self, probs: Tensor) -> Tensor:
        return _entropy_terms(probs) + _entropy_terms(1 - probs)

    def _conditional_entropy(self) -> Tensor:
        # From the logits: near 1, a probability has lost the digits of its complement.
        return _entropy_terms(torch.sigmoid(self.logits)) + _entropy_terms(torch.sigmoid(-self.logits))


class PoissonPrediction(Prediction):
    """A mixture over counts, from `log_rate` `[samples, *replicas, batch, *event]`."""

    def __init__(self, log_rate: Tensor, event_dims: int = 1) -> None:
        super().__init__(event_dims)
        self.log_rate = _at_least_float32(log_rate)

    def _conditional_mean(self) -> Tensor:
        return self.log_rate.exp()

    def _conditional_variance(self) -> Tensor:
        return self.log_rate.exp()

    def _conditional_log_prob(self, target: Tensor) -> Tensor:
        count = target.to(self.log_rate.dtype)
        return count * self.log_rate - self.log_rate.exp() - torch.lgamma(count + 1)

    def cdf(self, y: Tensor) -> Tensor:
        """Marginal probability that each count is at most `y` (which broadcasts to `target_shape`), in float64."""
        count = y.double().floor().expand(self.target_shape)
        rate = self.log_rate.double().exp()
        below = torch.special.gammaincc(count.clamp_min(0).add(1).expand_as(rate), rate).mean(0)
        return torch.where(count < 0, 0.0, below)

    def _quantile(self, level: float) -> Tensor:
        low = torch.full(self.target_shape, -1.0, dtype=torch.float64, device=self.log_rate.device)
        high = self._conditional_mean().double().amax(0).ceil()
        if not bool(high.isfinite().all()):
            raise ValueError("some rates are not finite, so that their quantiles do not exist: check the network.")
        while bool((short := self.cdf(high) < level).any()):
            low, high = torch.where(short, high, low), torch.where(short, 2 * high + 1, high)
        # The invariant is cdf(low) < level <= cdf(high): it ends at the smallest integer that reaches the level, or,
        # above 2^53, at the smallest that there is a number for.
        while bool((((middle := torch.floor(0.5 * (low + high))) > low) & (middle < high)).any()):
            below = self.cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high.to(self.log_rate.dtype)
