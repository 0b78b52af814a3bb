"""The distribution of a target given the network's output, with the state of its own noise."""

from noisygrad.likelihoods.base import Likelihood
from noisygrad.likelihoods.bernoulli import Bernoulli
from noisygrad.likelihoods.categorical import Categorical
from noisygrad.likelihoods.gaussian import Gaussian
from noisygrad.likelihoods.heteroscedastic import HeteroscedasticGaussian
from noisygrad.likelihoods.poisson import Poisson

__all__ = ["Likelihood", "Gaussian", "HeteroscedasticGaussian", "Categorical", "Bernoulli", "Poisson", "by_name"]

_BY_NAME: dict[str, type[Likelihood]] = {
    likelihood.__name__: likelihood
    for likelihood in (Gaussian, HeteroscedasticGaussian, Categorical, Bernoulli, Poisson)
}


def by_name(name: str) -> type[Likelihood]:
    """The likelihood class of that name, e.g. "Gaussian"; raises ValueError with the names there are."""
    if name not in _BY_NAME:
        raise ValueError(f"no likelihood is called {name!r}; there are {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]
