"""The parts of an optimiser, made and joined."""

from collections.abc import Sequence

import torch
from torch import nn

from noisygrad.algorithm.covariance import Covariance
from noisygrad.algorithm.step import NoisyNaturalGradient
from noisygrad.distributed import Ranks
from noisygrad.likelihoods import Likelihood
from noisygrad.optim import execution
from noisygrad.optim.draw import DrawnWeights
from noisygrad.optim.finite import DivergenceWatch, FiniteGuard, RunningStatistics
from noisygrad.optim.generators import make_generators
from noisygrad.optim.measurement import BatchMeasurement
from noisygrad.optim.options import Options
from noisygrad.optim.update import ParamGroups, Update
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import Structure
from noisygrad.posterior.weights import FlatWeights, ParameterViews


def assemble(
    model: nn.Module,
    structure: Structure,
    priors: BlockPriors,
    likelihood: Likelihood,
    options: Options,
    groups: ParamGroups,
    *,
    seed: int | Sequence[int] | None,
    ranks: Ranks,
    same_draw: bool,
) -> Update:
    """All that steps of a training of `model` are made of, with factors of the Fisher it starts from."""
    dtype, device = priors.mean.dtype, priors.mean.device
    executor = execution.executor_for(device, differentiates=False)
    units = options.kl_weight / options.num_data
    covariance = Covariance(
        structure.blocks,
        priors.scaled(units),
        damping_mode=options.damping_mode,
        safeguard=options.safeguard,
        most_determined=None if options.noise_limit is None else 2.0 * options.noise_limit / units,
        floor=options.fisher_floor,
        ranks=ranks,
    )
    covariance.refresh_(groups.dampings())
    views = ParameterViews(structure)
    mean = FlatWeights.zeros(structure, dtype, device, views)
    mean.read_parameters_()
    algorithm = NoisyNaturalGradient(
        mean.flat,
        covariance,
        scale=units**0.5,
        prior_mean=priors.centre,
        momentum_mode=options.momentum_mode,
        groups=len(groups.parts),
    )
    count = max(1, torch.Size(structure.replicas).numel())
    generators = make_generators(seed, count, device, ranks, same_draw=same_draw)
    weights = DrawnWeights(structure, views, mean, algorithm, generators=generators, executor=executor)
    running = RunningStatistics(model, device)
    divergence = DivergenceWatch(mean.flat, deferred=executor.deferred)
    guard = FiniteGuard(
        structure, covariance.statistics, running, divergence, deferred=executor.deferred, device=device
    )
    measurement = BatchMeasurement(
        model=model,
        structure=structure,
        fisher=covariance.fisher,
        likelihood=likelihood,
        options=options,
        generators=generators,
        guard=guard,
        ranks=ranks,
        like=mean.flat,
    )
    return Update(
        algorithm=algorithm,
        weights=weights,
        measurement=measurement,
        guard=guard,
        running=running,
        likelihood=likelihood,
        options=options,
        gradient=FlatWeights.zeros(structure, dtype, device, views),
        groups=groups,
        ranks=ranks,
        executor=executor,
    )
