"""What HMC is given, and what it leaves: draws of the weights, predictions, and what chains say about themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from noisygrad.likelihoods import Gaussian, Likelihood
from noisygrad.posterior.modes import evaluating
from noisygrad.predictions import Prediction, RegressionPrediction

_AT_ONCE = {"cpu": 100_000, "cuda": 1_000_000}
"""Draws times inputs that go through the network together: what fits a cache, or what keeps a GPU busy."""


@dataclass(frozen=True, kw_only=True)
class HMCSettings:
    """How chains are run. The defaults reach an R̂ below 1.01 on regression with ten hidden units."""

    chains: int = 20
    warmup: int = 500
    """Iterations that find the step size, and are thrown away."""
    samples: int = 600
    """Kept of each chain."""
    thin: int = 4
    """Iterations for each sample that is kept."""
    leapfrog_steps: int = 32
    target_accept: float = 0.8
    largest_rhat: float = 1.01
    """Chains are made longer until R̂ of the predictions is at most this, or there were this many `extensions`."""
    extensions: int = 2
    """Each takes as many samples again as there are."""

    def __post_init__(self) -> None:
        for name in ("chains", "warmup", "samples", "thin", "leapfrog_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1; got {value!r}")
        if self.chains < 2 or self.samples < 4:
            raise ValueError("R̂ compares halves of two chains or more: give at least 2 chains and 4 samples")
        if not 0 < self.target_accept < 1 or not self.largest_rhat > 1:
            raise ValueError(
                "target_accept must lie between 0 and 1 and largest_rhat be above 1; got "
                f"{self.target_accept!r} and {self.largest_rhat!r}"
            )
        if not isinstance(self.extensions, int) or isinstance(self.extensions, bool) or self.extensions < 0:
            raise ValueError(f"extensions must be an integer of at least 0; got {self.extensions!r}")


@dataclass(frozen=True)
class HMCPosterior:
    """Draws of the weights from the posterior, with what the chains say about themselves.

    Attributes:
        weights: By parameter, `[chains, samples, *shape]`, in float64; predictions are made where they lie.
        rhat: The largest R̂ (split) of the predictions looked at and of their squared deviations from the mean.
        ess: The smallest effective sample size of those.
        acceptance: The mean probability of acceptance.
    """

    model: nn.Module
    likelihood: Likelihood
    weights: dict[str, Tensor]
    data: tuple[Tensor, Tensor]
    largest_rhat: float = 1.01
    rhat: float = math.nan
    ess: float = math.nan
    acceptance: float = math.nan

    @property
    def converged(self) -> bool:
        """Whether the chains agree: R̂ is at most `largest_rhat`."""
        return self.rhat <= self.largest_rhat

    @property
    def num_draws(self) -> int:
        """Of all chains."""
        chains, samples = next(iter(self.weights.values())).shape[:2]
        return chains * samples

    def with_rhat(self, at: Tensor) -> HMCPosterior:
        """The same with R̂ of the network's outputs for these inputs: cheap, to see whether chains are long enough.

        Of the outputs themselves, whose mean is the prediction, and of their squared deviations, whose mean is its
        variance.
        """
        from numpyro.diagnostics import split_gelman_rubin

        with np.errstate(divide="ignore", invalid="ignore"):  # a constant output, such as a dead network's
            return replace(self, rhat=float(np.nanmax(split_gelman_rubin(self._looked_at(at)))))

    def with_ess(self, at: Tensor) -> HMCPosterior:
        """The same with the effective sample size of those numbers, which takes longer."""
        from numpyro.diagnostics import effective_sample_size

        with np.errstate(divide="ignore", invalid="ignore"):
            return replace(self, ess=float(np.nanmin(effective_sample_size(self._looked_at(at)))))

    def _looked_at(self, at: Tensor) -> NDArray[np.float64]:
        """`[chains, samples, ...]`."""
        chains = next(iter(self.weights.values())).shape[0]
        outputs = self.outputs(at).flatten(1)
        both = torch.cat([outputs, (outputs - outputs.mean(0)).square()], 1)
        found: NDArray[np.float64] = both.unflatten(0, (chains, -1)).cpu().numpy()
        return found

    @torch.no_grad()
    def outputs(self, x: Tensor, num_samples: int | None = None, *, batch_size: int | None = None) -> Tensor:
        """The network's raw outputs `[num_samples, N, ...]` for draws spread evenly over all chains; None takes all.

        They are where the draws lie, whatever device `x` is on.
        """
        chosen = self._chosen(num_samples)
        model = self.model

        def one(weights: dict[str, Tensor], part: Tensor) -> Tensor:
            output: Tensor = functional_call(model, weights, (part,))
            return output

        asked = wide(x.to(next(iter(chosen.values())).device))
        parts = asked.split(batch_size) if batch_size is not None else (asked,)
        most = _AT_ONCE.get(asked.device.type, _AT_ONCE["cuda"])
        with evaluating(model):
            pieces = [
                vmap(one, in_dims=(0, None), chunk_size=max(1, most // max(1, len(part))))(chosen, part)
                for part in parts
            ]
        return torch.cat(pieces, dim=1)

    def predict(
        self,
        x: Tensor,
        num_samples: int | None = None,
        *,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """What the posterior says of `x`; a noise under a Gamma prior has its own posterior for each draw.

        Arguments are as of other posteriors; `generator` is not used, since the draws are there. It is made, and stays,
        where the draws lie.
        """
        outputs = self.outputs(x, num_samples, batch_size=batch_size)
        likelihood = self.likelihood
        if not isinstance(likelihood, Gaussian):
            return likelihood.predictive(outputs)
        if likelihood.fixed_variance is not None:
            return RegressionPrediction(outputs, outputs.new_tensor(likelihood.fixed_variance).sqrt())
        shape, rate = self._noise(num_samples)
        scale = (rate / shape).sqrt().unsqueeze(1)
        return RegressionPrediction(outputs, scale, 2.0 * shape.expand_as(scale))

    def _noise(self, num_samples: int | None) -> tuple[Tensor, Tensor]:
        """The Gamma posterior of the precision given each draw: its shape, and its rate `[num_samples, K]`."""
        assert isinstance(self.likelihood, Gaussian)
        assert self.likelihood.noise_prior is not None
        x, y = self.data
        outputs = self.outputs(x, num_samples)
        squared = (y.to(outputs) - outputs).square().sum(1)
        a, b = self.likelihood.noise_prior
        each = 1 if self.likelihood.per_output else squared.shape[-1]
        total = squared if self.likelihood.per_output else squared.sum(-1, keepdim=True)
        return outputs.new_tensor(a + 0.5 * len(y) * each), b + 0.5 * total

    def _chosen(self, num_samples: int | None) -> dict[str, Tensor]:
        total = self.num_draws
        if num_samples is not None and (not isinstance(num_samples, int) or not 1 <= num_samples <= total):
            raise ValueError(f"num_samples must be an integer from 1 to {total}, of all draws; got {num_samples!r}")
        flat = {name: tensor.flatten(0, 1) for name, tensor in self.weights.items()}
        if num_samples is None or num_samples == total:
            return flat
        places = torch.linspace(0, total - 1, num_samples, dtype=torch.float64).round().long()
        return {name: tensor[places] for name, tensor in flat.items()}


def wide(tensor: Tensor) -> Tensor:
    """In float64, where it holds numbers with a point."""
    return tensor.double() if tensor.is_floating_point() else tensor
