"""The parts of an optimiser, made and joined."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from noisygrad.algorithm.covariance import Covariance
from noisygrad.algorithm.step import NoisyNaturalGradient
from noisygrad.distributed import Ranks
from noisygrad.likelihoods import Likelihood
from noisygrad.optim import execution
from noisygrad.optim.draw import DrawnWeights, make_generators
from noisygrad.optim.finite import FiniteGuard, RunningStatistics
from noisygrad.optim.measurement import BatchMeasurement
from noisygrad.optim.options import Options
from noisygrad.optim.update import ParamGroups, Update
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import Structure
from noisygrad.posterior.weights import FlatWeights, ParameterViews


@dataclass(frozen=True)
class Parts:
    """What a step is made of."""

    algorithm: NoisyNaturalGradient
    weights: DrawnWeights
    running: RunningStatistics
    guard: FiniteGuard
    measurement: BatchMeasurement
    update: Update


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
    dtype: torch.dtype,
    device: torch.device,
) -> Parts:
    """All parts of an optimiser that trains `model`, with factors made of the Fisher it starts from."""
    place: dict[str, Any] = {"dtype": dtype, "device": device}
    executor = execution.executor_for(device, differentiates=False)
    units = options.kl_weight / options.num_data
    covariance = Covariance(
        structure.blocks,
        priors.scaled(units),
        damping_mode=options.damping_mode,
        start=options.fisher_start,
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
    guard = FiniteGuard(structure, covariance.statistics, running, deferred=executor.deferred, device=device)
    measurement = BatchMeasurement(
        model,
        structure,
        covariance.fisher,
        likelihood,
        options,
        generators=generators,
        guard=guard,
        ranks=ranks,
        deferred=executor.deferred,
        **place,
    )
    update = Update(
        algorithm,
        weights,
        measurement,
        guard,
        likelihood,
        options,
        gradient=FlatWeights.zeros(structure, dtype, device, views),
        groups=groups,
        ranks=ranks,
        executor=executor,
    )
    return Parts(algorithm, weights, running, guard, measurement, update)
