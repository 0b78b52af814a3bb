"""The trust region over several param groups: all of them, each with its own learning rate, make the step's length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.algorithm.step import clip_factor
from support.compare import batches, each_optimizer, make, mlp, train
from support.families import few, normal, seeds

CLIP = 1e-4


def naive_factor(gradient: Tensor, step: Tensor, rates: list[float], sizes: list[int], clip: float) -> float:
    """min(1, √(c / Σ lr² gᵀv)), number by number."""
    every_rate = [rate for rate, size in zip(rates, sizes, strict=True) for _ in range(size)]
    length = sum(lr**2 * float(g) * float(v) for lr, g, v in zip(every_rate, gradient, step, strict=True))
    return min(1.0, math.sqrt(clip / length))


@pytest.mark.parametrize("replicas", [(), (3,)], ids=str)
@few
@given(
    seed=seeds,
    groups=st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(1, 4)), min_size=1, max_size=4),
    clip=st.sampled_from([1e-6, 1e-2, 1e9]),
)
def test_the_factor_is_that_of_all_groups(
    replicas: tuple[int, ...], seed: int, groups: list[tuple[float, int]], clip: float
) -> None:
    rates, sizes = [rate for rate, _ in groups], [size for _, size in groups]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    gradient = normal(seed, *replicas, ends[-1])
    step = gradient * normal(seed + 1, *replicas, ends[-1]).exp()  # P⁻¹ g for a diagonal P
    settings = [({"lr": rate}, part) for rate, part in zip(rates, parts, strict=True)]
    found = clip_factor(gradient, step, settings, clip)
    pairs = zip(gradient.reshape(-1, ends[-1]), step.reshape(-1, ends[-1]), strict=True)
    expected = [naive_factor(g, v, rates, sizes, clip) for g, v in pairs]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype).reshape(*replicas, 1))


@each_optimizer
@pytest.mark.parametrize("order", [("2.*", "4.*"), ("4.*", "2.*")], ids=str)
def test_a_step_of_several_groups_is_as_long_as_it_may_be(kind: type, order: tuple[str, str]) -> None:
    """gᵀv = vᵀ P v for v = P⁻¹ g, so the length is that of what moved, each group by its rate, in the metric of P.

    P is what the step was made with, the start's share of the identity included. A target of two numbers has twice the
    Fisher of one, and its steps may be twice as long.
    """
    rates = dict(zip(order, (0.2, 0.5), strict=True))
    model = mlp()
    optimizer = make(kind, model, kl_clip=CLIP, momentum=0.0, groups={name: {"lr": lr} for name, lr in rates.items()})
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.2, 0.5]
    for batch in batches(3):
        start = optimizer.weights.mean.flat.clone()
        train(optimizer, model, [batch])
        moved, covariance = optimizer.weights.mean.flat - start, optimizer.covariance
        lengths = dict.fromkeys(range(3), 0.0)
        for block in covariance.blocks:
            near = covariance.statistics[block.name].with_identity(covariance.identity_share)
            precision = near.factorise(covariance.priors[block.name])
            lengths[block.group] += float(precision.quad(block.vector(moved)).sum())
        assert sum(lengths.values()) == pytest.approx(2 * CLIP, rel=1e-6)
        assert min(lengths.values()) > 0


@pytest.mark.parametrize(
    ("outputs", "likelihood", "parts"),
    [
        ((), ng.Gaussian(), 1),
        ((3,), ng.Gaussian(), 3),
        ((4, 3), ng.Gaussian(), 12),
        ((3,), ng.Categorical(), 1),
        ((4, 3), ng.Categorical(), 4),
    ],
    ids=lambda given: getattr(type(given), "__name__", "") if isinstance(given, ng.Likelihood) else str(given),
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_trust_region_grows_with_the_parts_of_a_target(
    outputs: tuple[int, ...], likelihood: ng.Likelihood, parts: int, masked: bool
) -> None:
    """With outputs of a Gaussian and positions of classes; those that a mask leaves out do not count."""
    torch.manual_seed(0)
    positions = outputs[:-1] if isinstance(likelihood, ng.Categorical) else outputs
    if masked and not positions:
        pytest.skip("there is but one part")
    model = nn.Sequential(nn.Linear(3, math.prod(outputs)), nn.Unflatten(1, outputs or (1,))).double()
    optimizer = make(ng.NoisyAdam, model, likelihood, kl_clip=CLIP, momentum=0.0)
    x = normal(1, 6, 3)
    if isinstance(likelihood, ng.Categorical):
        target = normal(2, 6, *positions, outputs[-1]).argmax(-1)
    else:
        target = normal(2, 6, *(outputs or (1,)))
    before, counted = optimizer.weights.mean.flat.clone(), []
    if masked:
        counted = [None, torch.ones(6, *positions, dtype=torch.bool)]
        counted[1].flatten(1)[:, 0] = False
        parts -= 1
    optimizer.step(lambda: (model(x), target, *counted))
    moved = optimizer.weights.mean.flat - before
    precision = 1 / optimizer.covariance.solve(torch.ones_like(moved))
    assert float((precision * moved.square()).sum()) == pytest.approx(parts * CLIP, rel=1e-6)
