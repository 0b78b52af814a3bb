"""Mean, blocks and prior: a fitted Gaussian posterior, and its file."""

from noisygrad.posterior.loading import load_posterior
from noisygrad.posterior.posterior import Posterior

__all__ = ["Posterior", "load_posterior"]
