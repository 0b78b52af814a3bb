"""What tests of training share: a toy regression, an optimiser of it, and what an optimiser holds."""

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


def snapshot(optimizer):
    posterior = optimizer.posterior()
    tensors = {f"mean.{name}": tensor for name, tensor in posterior.mean.items()}
    for block, statistics in posterior.statistics.items():
        tensors |= {f"{block}.{name}": tensor for name, tensor in statistics.tensors().items()}
    return tensors | {f"noise.{name}": tensor for name, tensor in posterior.likelihood.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
