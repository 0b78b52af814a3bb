"""The models of the dynamics that the experiment compares, by the names of its methods.

Those that end in "/released" have the constants of the paper's code, in which the noise (5 standard deviations of the
data) drowns the dynamics: such a model never learns to predict. The others have been set so that it does;
`docs/exploration.md` has the figures.
"""

import dataclasses

from noisygrad.replicas.noisy import NoisySettings
from noisygrad_paper.baselines.bbb import BBBSettings
from noisygrad_paper.curiosity.dynamics import MODELS as GENERAL
from noisygrad_paper.curiosity.dynamics import DynamicsSettings


def _as_released(name: str) -> DynamicsSettings:
    fit = GENERAL[name].fit
    assert isinstance(fit, NoisySettings)
    # The released code's likelihood is a mean over the batch for NNG, so that N is its number of batches.
    slow = dataclasses.replace(fit, lr=0.01, safeguard="fading", kl_clip=None, factor_every=1)
    return DynamicsSettings(fit=slow, num_data=5, noise_std=5.0)


MODELS: dict[str, DynamicsSettings] = {
    **GENERAL,
    "BBB": DynamicsSettings(fit=BBBSettings(lr=0.01, prior_variance=0.25, initial_std=0.05)),
    "NNG-MVG/released": _as_released("NNG-MVG"),
    "NNG-FFG/released": _as_released("NNG-FFG"),
    # There the likelihood is a sum over the batch, so that N is ten times as large.
    "BBB/released": DynamicsSettings(
        fit=BBBSettings(lr=1e-4, prior_variance=0.25, initial_std=0.5), num_data=50, noise_std=5.0, initial_std=1.0
    ),
}
"""The settings of the experiments."""
