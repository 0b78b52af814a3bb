"""The distribution of a target given the network's output, with the state of its own noise."""

from noisygrad.likelihoods.base import Likelihood
from noisygrad.likelihoods.bernoulli import Bernoulli
from noisygrad.likelihoods.categorical import Categorical
from noisygrad.likelihoods.counted import Counted
from noisygrad.likelihoods.gaussian import Gaussian
from noisygrad.likelihoods.heteroscedastic import HeteroscedasticGaussian
from noisygrad.likelihoods.poisson import Poisson
from noisygrad.likelihoods.registry import UnknownLikelihoodError, by_name, check_saveable, register_likelihood

__all__ = [
    "Likelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Categorical",
    "Counted",
    "Bernoulli",
    "Poisson",
    "UnknownLikelihoodError",
    "by_name",
    "check_saveable",
    "register_likelihood",
]

for _kind in (Gaussian, HeteroscedasticGaussian, Categorical, Bernoulli, Poisson):
    register_likelihood(_kind)
