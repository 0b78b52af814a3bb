"""Hamiltonian Monte Carlo: the posterior itself, as far as chains can tell, for networks small enough.

The paper judges variances by it. Needs the extra `hmc` (numpyro with JAX); the network is an ordinary `nn.Module` of
supported layers, the likelihood one of noisygrad's, and the prior N(0, η) of each weight as for the optimisers. A noise
precision under its Gamma prior is integrated out exactly, so chains are over weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisygrad.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from noisygrad.posterior.modes import evaluating
from noisygrad.priors import PriorVariance, check_patterns, check_prior_variance, is_improper, prior_precision
from noisygrad_paper.baselines.hmc_posterior import HMCPosterior, HMCSettings, wide
from noisygrad_paper.extras import require

if TYPE_CHECKING:
    from noisygrad_paper.baselines.jax_sampler import Potential

__all__ = ["HMC", "HMCPosterior", "HMCSettings", "fit"]

Report = Callable[[float, str], None]
"""Told the fraction that is done, and a word on it."""


def fit(
    model: nn.Module,
    likelihood: Likelihood,
    data: tuple[Tensor, Tensor],
    *,
    prior_variance: PriorVariance = 1.0,
    at: Tensor | None = None,
    seed: int = 0,
    settings: HMCSettings | None = None,
    device: str = "cpu",
    report: Report | None = None,
) -> HMCPosterior:
    """Sample the posterior of a network's weights given (x, y).

    Args:
        model: A small network of supported layers; its own weights are not used and not changed.
        likelihood: Any of the library's; a Gaussian's noise is fixed, or under a Gamma prior.
        data: Inputs `[N, ...]` and targets.
        prior_variance: η, for all weights or by patterns of parameter names.
        at: Inputs whose predictions R̂ is of; the training inputs by default.
        seed: Of the first weights and all that is drawn.
        settings: How long and how many the chains are.
        report: Told how far it is.
        device: Where JAX runs the chains and the draws lie; these are on the CPU where torch is without CUDA.

    Raises UnsupportedLayerError for a layer that cannot be translated.
    """
    x, y = data
    sampler = HMC(model, likelihood, prior_variance=prior_variance, settings=settings, device=device)
    return sampler.fit(x[None], y[None], at=None if at is None else at[None], seeds=[seed], report=report)[0]


class HMC:
    """`fit` for several data sets of one shape at once, and again without compiling again.

    Arguments are as of `fit`.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        prior_variance: PriorVariance = 1.0,
        settings: HMCSettings | None = None,
        device: str = "cpu",
    ) -> None:
        self.settings = settings or HMCSettings()
        self.model, self.likelihood = model, likelihood
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not names:
            raise ValueError("the model has no trainable parameters")
        check_prior_variance(prior_variance)
        check_patterns(prior_variance, names)
        if is_improper(prior_variance):
            raise ValueError("HMC needs a proper prior: every prior_variance must be finite")
        if any(not parameter.requires_grad for parameter in model.parameters()) or list(model.buffers()):
            raise ValueError("HMC samples all weights: a model with frozen parameters or buffers is not supported")
        _check_likelihood(likelihood)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        each = [prior_precision(prior_variance, name) for name in names]
        self._precision = np.repeat(np.array(each), self._sizes)
        require("HMC", "jax", "numpyro")
        from noisygrad_paper.baselines.jax_networks import as_jax
        from noisygrad_paper.baselines.jax_sampler import ChainSampler

        self._network = as_jax(model)
        self._sampler: Any = ChainSampler(self._potential(self._network), self.settings)
        self._device = jax_device(device)
        self._place = device if torch.device(device).type != "cuda" or torch.cuda.is_available() else "cpu"

    def _potential(self, network: Callable[..., Any]) -> Potential:
        import jax.numpy as jnp

        from noisygrad_paper.baselines.jax_likelihoods import negative_log_likelihood

        ends = np.cumsum(self._sizes)[:-1].tolist()
        data_term = negative_log_likelihood(self.likelihood)

        def potential(data: tuple[Any, Any, Any]) -> Callable[[Any], Any]:
            x, y, weight = data

            def energy(flat: Any) -> Any:
                parts = jnp.split(flat, ends)
                weights = {name: part.reshape(s) for (name, s), part in zip(self._shapes.items(), parts, strict=True)}
                prior = 0.5 * jnp.sum(self._precision * flat**2)
                return data_term(network(weights, x), y, weight) + prior

            return energy

        return potential

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        *,
        weight: Tensor | None = None,
        at: Tensor | None = None,
        seeds: Sequence[int] | None = None,
        report: Report | None = None,
    ) -> list[HMCPosterior]:
        """The posterior of each of R data sets, x `[R, N, ...]` and y `[R, N, ...]`.

        `weight` `[R, N]` is 1 for an example and 0 for padding, so that sets of different sizes can have one shape.
        Each set has its own of the `seeds` (0, 1, ... by default) and chains that do not depend on the other sets.
        """
        _check_data(x, y, weight)
        weight = torch.ones(x.shape[:2]) if weight is None else weight
        x, y, weight, at = (part.cpu() for part in (x, y, weight, x if at is None else at))
        self._check_outputs(x, y, weight, at)
        say = report or (lambda done, word: None)
        count, chosen = x.shape[0], self.settings
        seeds = range(count) if seeds is None else seeds
        if len(seeds) != count:
            raise ValueError(f"there are {count} data sets and {len(seeds)} seeds")
        shape = (chosen.chains, len(self._precision))
        # From the prior, but not further than where weights are usually looked for.
        spread = np.minimum(1.0, self._precision**-0.5)
        first = np.stack([np.random.default_rng(seed).standard_normal(shape) for seed in seeds]) * spread
        with _wide_on(self._device):
            self._sampler.start(tuple(_array(part) for part in (x, y, weight)), first, seeds)
            self._sampler.warm_up(lambda done: say(0.2 * done, "warming up"))
            draws = list(self._sampler.draw(lambda done: say(0.2 + 0.8 * done, "sampling")))

            def posterior(index: int) -> HMCPosterior:
                kept = weight[index] > 0
                return self._posterior(draws[index], (x[index][kept], y[index][kept])).with_rhat(at[index])

            found = [posterior(index) for index in range(count)]
            for number in range(chosen.extensions):
                late = [index for index, each in enumerate(found) if not each.converged]
                if not late:
                    break
                worst = max(found[index].rhat for index in late)
                word = f"chains disagree (R̂ up to {worst:.3f}): extension {number + 1}"
                for _ in range(2**number):
                    more = self._sampler.draw(lambda done, word=word: say(0.2 + 0.8 * done, word), late)
                    for index, part in zip(late, more, strict=True):
                        draws[index] = np.concatenate([draws[index], part], axis=1)
                for index in late:
                    found[index] = posterior(index)
            rates = self._sampler.acceptance
        triples = zip(found, rates, at, strict=True)
        return [replace(each.with_ess(inputs), acceptance=rate) for each, rate, inputs in triples]

    @torch.no_grad()
    def _check_outputs(self, x: Tensor, y: Tensor, weight: Tensor, at: Tensor) -> None:
        """The targets against the network's outputs, and the translated network against the network."""
        own = {name: parameter.detach().cpu().double() for name, parameter in self.model.named_parameters()}
        with evaluating(self.model):
            try:
                right = functional_call(self.model, own, (wide(at[0]),))
                outputs = [functional_call(self.model, own, (wide(inputs),)) for inputs in x]
            except RuntimeError as error:
                raise ValueError(f"the model cannot take such inputs: {error}") from error
        for output, target, own_weight in zip(outputs, y, weight, strict=True):
            self.likelihood.check(output[own_weight > 0], target[own_weight > 0])
        with _wide_on(self._device):
            try:
                found = np.asarray(self._network({name: part.numpy() for name, part in own.items()}, _array(at[0])))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{type(self.model).__name__} is written in a way that is not supported: {error!r}"
                ) from error
        if found.shape != tuple(right.shape) or not np.allclose(found, right.numpy(), rtol=1e-6, atol=1e-9):
            raise ValueError(f"{type(self.model).__name__} is not supported: translated, it computes something else")

    def _posterior(self, draws: np.ndarray[Any, Any], data: tuple[Tensor, Tensor]) -> HMCPosterior:
        """Of one data set, from the flat weights of its chains, `[C, samples, P]`."""
        parts = torch.from_numpy(np.ascontiguousarray(draws)).to(self._place).split(self._sizes, dim=-1)
        weights = {name: part.unflatten(-1, s) for (name, s), part in zip(self._shapes.items(), parts, strict=True)}
        return HMCPosterior(self.model, self.likelihood, weights, data, self.settings.largest_rhat)


def _check_likelihood(likelihood: Likelihood) -> None:
    supported = (Gaussian, HeteroscedasticGaussian, Categorical, Bernoulli, Poisson)
    if not isinstance(likelihood, supported):
        names = ", ".join(kind.__name__ for kind in supported)
        raise ValueError(f"HMC does not know the likelihood {type(likelihood).__name__}; it knows {names}")
    if isinstance(likelihood, Gaussian) and likelihood.fixed_variance is None and likelihood.noise_prior is None:
        raise ValueError("HMC samples a posterior: fix the noise_variance of Gaussian, or give it a noise_prior")


def _check_data(x: Tensor, y: Tensor, weight: Tensor | None) -> None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise TypeError(f"inputs and targets must be tensors; got {type(x).__name__} and {type(y).__name__}")
    if x.shape[:2] != y.shape[:2] or (weight is not None and weight.shape != x.shape[:2]):
        shapes = [list(part.shape) for part in (x, y, weight) if part is not None]
        raise ValueError(f"inputs and targets must have as many examples; got the shapes {shapes}")
    if x.shape[1] == 0:
        raise ValueError("there are no examples")
    for name, part in (("inputs", x), ("targets", y)):
        if part.is_floating_point() and not bool(part.isfinite().all()):
            raise ValueError(f"the {name} have NaN or infinite values")


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = wide(tensor).cpu().numpy()
    return found


@contextmanager
def _wide_on(device: Any) -> Iterator[None]:
    """Float64 and that device for all that JAX computes inside."""
    import jax

    with jax.enable_x64(True), jax.default_device(device):
        yield


def jax_device(device: str) -> Any:
    """JAX's name of a device of torch's; raises ValueError where JAX has no such device."""
    import jax

    asked = torch.device(device)
    try:
        return jax.devices("gpu" if asked.type == "cuda" else asked.type)[asked.index or 0]
    except (RuntimeError, IndexError):
        raise ValueError(
            f"JAX has no device {device} here: leave the device out, or install JAX for it (such as jax[cuda12])"
        ) from None
