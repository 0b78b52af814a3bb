"""Replicas trained at once equal the same trainings done alone, in everything that a user can ask for."""

from __future__ import annotations

import pytest
import torch

import noisygrad as ng
from noisygrad.networks import MLP, ReplicatedMLP
from noisygrad.predictions import Prediction
from support.compare import each_optimizer, make

SEEDS = [5, 17, 3]
STEPS = 50
CASES = {
    "learned noise, momentum": {"momentum": 0.9},
    "clipped, heavy ball, stale": {
        "kl_clip": 1e-3,
        "momentum_mode": "heavy_ball",
        "momentum": 0.8,
        "stats_every": 3,
        "factor_every": 5,
        "damping": 0.05,
    },
    "two samples, several noises": {"mc_samples": 2, "fisher": "exact", "per_output": True},
}


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(SEEDS), STEPS, 8, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(x[..., :2]) * torch.tensor([1.0, 2.0, 0.3], dtype=torch.float64).view(3, 1, 1, 1)
    return x, y + 0.1 * torch.randn(y.shape, generator=generator, dtype=torch.float64)


@pytest.fixture(params=CASES, scope="module")
def options(request):
    return dict(CASES[request.param])


def fit(kind, options):
    """The joint training and the lone ones, each with its optimiser's posterior."""
    options = dict(options)
    per_output = options.pop("per_output", False)
    x, y = data()
    joint = ReplicatedMLP((3,), 3, [6, 5], 2, "tanh", generators=[torch.Generator().manual_seed(s) for s in SEEDS])
    joint = joint.double()
    lone = [joint.replica(i) for i in range(3)]
    assert all(isinstance(model, MLP) for model in lone)
    together = make(kind, joint, ng.Gaussian(per_output=per_output), **options | {"seed": SEEDS, "lr": 0.02})
    alone = [
        make(kind, m, ng.Gaussian(per_output=per_output), **options | {"seed": s, "lr": 0.02})
        for m, s in zip(lone, SEEDS, strict=True)
    ]
    for step in range(STEPS):
        loss = together.step(lambda step=step: (joint(x[:, step]), y[:, step]))
        losses = [
            o.step(lambda m=m, i=i, step=step: (m(x[i, step]), y[i, step]))
            for i, (o, m) in enumerate(zip(alone, lone, strict=True))
        ]
        torch.testing.assert_close(loss, torch.stack(losses).sum(), rtol=1e-9, atol=1e-9)
    return together, alone


def close(mine, theirs, tolerance=1e-10):
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@each_optimizer
def test_replicas_equal_lone_trainings(kind, options):
    together, alone = fit(kind, options)
    for i, one in enumerate(alone):
        close(together.weights.mean.flat[i], one.weights.mean.flat)
        close(together.algorithm.momentum.average[i], one.algorithm.momentum.average)
        for name, statistics in together.covariance.statistics.items():
            theirs = one.covariance.statistics[name].tensors()
            for part, tensor in statistics.tensors().items():
                close(tensor[i], theirs[part])
        for name, buffer in together.likelihood.named_buffers():
            close(buffer[i], one.likelihood.get_buffer(name), 1e-9)
        assert torch.equal(together.generators[i].get_state(), one.generators[0].get_state())
    assert (together.weights.mean.flat[0] - together.weights.mean.flat[1]).abs().max() > 0.1
    _compare_posteriors(together.posterior(), [one.posterior() for one in alone])


def _compare_posteriors(joint, lone):
    """kl, log_prob, elbo and predict of each replica; the joint posterior is given the lone ones' draws."""
    close(joint.kl(), torch.stack([one.kl() for one in lone]), 1e-8)
    close(joint.likelihood.kl(), torch.stack([one.likelihood.kl() for one in lone]), 1e-8)
    draw = joint.sample(torch.Generator().manual_seed(1))
    apart = [{name: tensor[i] for name, tensor in draw.items()} for i in range(len(lone))]
    close(joint.log_prob(draw), torch.stack([one.log_prob(w) for one, w in zip(lone, apart, strict=True)]), 1e-8)

    def generators():
        return [torch.Generator().manual_seed(s) for s in SEEDS]

    mine = generators()
    joint._draw = lambda _: torch.stack([one._draw(g) for one, g in zip(lone, mine, strict=True)])
    x, y = (part[:, 0] for part in data())
    elbo = joint.elbo([(x, y)], num_samples=4)
    expected = [
        one.elbo([(x[i], y[i])], num_samples=4, generator=g)
        for i, (one, g) in enumerate(zip(lone, generators(), strict=True))
    ]
    close(elbo, torch.stack(expected), 1e-8)
    mine = generators()
    joint._draw = lambda _: torch.stack([one._draw(g) for one, g in zip(lone, mine, strict=True)])
    prediction = joint.predict(x, num_samples=6)
    assert isinstance(prediction, Prediction)
    for i, (one, g) in enumerate(zip(lone, generators(), strict=True)):
        theirs = one.predict(x[i], num_samples=6, generator=g)
        for name in ("mean", "variance", "epistemic"):
            close(getattr(prediction, name)[i], getattr(theirs, name), 1e-9)
        close(prediction.log_prob(y)[i], theirs.log_prob(y[i]), 1e-9)


def test_one_replica_is_clipped_by_its_own_length():
    """A replica with a huge gradient must not shorten another's step."""
    steps = []
    for scale in (1.0, 1000.0):
        generators = [torch.Generator().manual_seed(s) for s in SEEDS]
        model = ReplicatedMLP((3,), 3, [4], 2, "tanh", generators=generators).double()
        optimizer = make(ng.NoisyKFAC, model, ng.Gaussian(1.0), kl_clip=1e-3, noise=False, fisher="exact")
        x, y = (part[:, 0].clone() for part in data())
        y[2] *= scale
        optimizer.step(lambda model=model, x=x, y=y: (model(x), y))
        steps.append(optimizer.weights.mean.flat.clone())
    assert torch.equal(steps[0][:2], steps[1][:2])
    assert not torch.equal(steps[0][2], steps[1][2])


def test_seeds_are_one_per_replica():
    model = ReplicatedMLP((3,), 3, [4], 2)
    with pytest.raises(ValueError, match="seed must be an integer, or 3 of them"):
        make(ng.NoisyAdam, model, seed=[1, 2])
    seeds = [g.initial_seed() for g in make(ng.NoisyAdam, model, seed=7).generators]
    assert len(set(seeds)) == 3


@each_optimizer
@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("stats_batch", [1, 3])
def test_a_replica_of_whose_first_examples_none_counts_is_as_alone(kind, fisher, stats_batch):
    """It takes statistics from more of them; the others' are from as few as without it, and draw the same targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 3, generator=generator, dtype=torch.float64)
    label = torch.randint(3, (3, 7), generator=generator)
    weight = torch.rand(3, 7, generator=generator, dtype=torch.float64)
    weight[0, 0], weight[1, :4], label[2, 0] = 0.0, 0.0, -1

    def trained(replicas):
        torch.manual_seed(1)
        whole = ng.networks.ReplicatedMLP((3,), 3, [4], 3).double()
        model = ng.networks.ReplicatedMLP((len(replicas),), 3, [4], 3).double()
        for mine, every in zip(model.parameters(), whole.parameters(), strict=True):
            mine.data.copy_(every.data[replicas])
        optimizer = kind(
            model,
            ng.Categorical(ignore_index=-1),
            num_data=50,
            fisher=fisher,
            stats_every=1,
            factor_every=1,
            stats_batch=stats_batch,
            seed=[10 + replica for replica in replicas],
        )
        for _ in range(3):
            optimizer.step(lambda: (model(x[replicas]), label[replicas], weight[replicas]))
        return optimizer.weights.mean.flat

    joint = trained([0, 1, 2])
    for replica in range(3):
        torch.testing.assert_close(joint[replica], trained([replica])[0], rtol=1e-8, atol=1e-10)
