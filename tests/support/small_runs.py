"""A small problem and a fresh optimiser for it: what tests of `train` share."""

import torch

import noisygrad as ng
from noisygrad.networks import MLP
from noisygrad.training import StepDecay


def toy(n=24, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=dtype)
    return x, x.sum(-1, keepdim=True).sin()


def fresh(seed=0, **options):
    model = MLP(3, (5,), 1, generator=torch.Generator().manual_seed(seed))
    options = {"stats_every": 2, "factor_every": 4, "kl_clip": StepDecay(1e-2, (9,))} | options
    return ng.NoisyKFAC(model, ng.Gaussian(), num_data=24, seed=seed, **options)
