"""The likelihoods as JAX functions, for samplers that are written in JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from noisygrad.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson


def negative_log_likelihood(likelihood: Likelihood) -> Callable[[Any, Any, Any], Any]:
    """From outputs, targets and the weights of examples to minus the log-likelihood, up to a constant."""

    def per_example(values: Any) -> Any:
        return values.reshape(values.shape[0], -1).sum(-1)

    def gaussian(f: Any, y: Any, weight: Any) -> Any:
        squared = (y - f) ** 2 * weight.reshape(-1, *(1 for _ in f.shape[1:]))
        if likelihood.fixed_variance is not None:
            return 0.5 * squared.sum() / likelihood.fixed_variance
        a, b = likelihood.noise_prior
        total = squared.sum(0).reshape(-1)
        outputs = 1 if likelihood.per_output else total.shape[0]
        sums = total if likelihood.per_output else total.sum(keepdims=True)
        return ((a + 0.5 * weight.sum() * outputs) * jnp.log(b + 0.5 * sums)).sum()

    def heteroscedastic(f: Any, y: Any, weight: Any) -> Any:
        mean, log_variance = jnp.split(f, 2, axis=-1)
        return 0.5 * (weight * per_example((y - mean) ** 2 * jnp.exp(-log_variance) + log_variance)).sum()

    def categorical(f: Any, y: Any, weight: Any) -> Any:
        log_probs = jax.nn.log_softmax(f, axis=-1)
        return -(weight * per_example(jnp.take_along_axis(log_probs, y[..., None], axis=-1))).sum()

    def bernoulli(f: Any, y: Any, weight: Any) -> Any:
        return (weight * per_example(jax.nn.softplus(f) - y * f)).sum()

    def poisson(f: Any, y: Any, weight: Any) -> Any:
        return (weight * per_example(jnp.exp(f) - y * f)).sum()

    terms: dict[type[Likelihood], Callable[[Any, Any, Any], Any]] = {
        Gaussian: gaussian,
        HeteroscedasticGaussian: heteroscedastic,
        Categorical: categorical,
        Bernoulli: bernoulli,
        Poisson: poisson,
    }
    return next(term for kind, term in terms.items() if isinstance(likelihood, kind))
