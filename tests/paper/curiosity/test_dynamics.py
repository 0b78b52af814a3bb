"""Models of the dynamics: the gain against dense matrices, replicas against lone models, and that they learn."""

import dataclasses

import numpy as np
import pytest

for _module in ("Box2D", "gymnasium", "sb3_contrib"):
    pytest.importorskip(_module)

import torch
from torch.func import jacrev

from noisygrad.replicas.noisy import NoisySettings
from noisygrad_paper.curiosity import Dynamics, DynamicsSettings, ReplayPool, Transitions
from noisygrad_paper.environments import TASKS
from noisygrad_paper.environments.vector import TaskVector
from noisygrad_paper.exploration import MODELS, Recorder


def rollout(task: str, steps: int = 300, seed: int = 0) -> Transitions:
    env = Recorder(TaskVector(TASKS[task], 5, seed=seed))
    env.reset()
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        env.step(draw.normal(size=(5, 1)).clip(-1, 1).astype(np.float32))
    return env.take()


def filled(transitions: Transitions, seed: int = 0) -> ReplayPool:
    pool = ReplayPool(seed=seed)
    pool.add(transitions)
    return pool


def small(name: str, updates: int = 30):
    return dataclasses.replace(SETTINGS[name], hidden=(4,), updates=updates)


def dense_gain(dynamics: Dynamics, replica: int, x, y, draws, diagonal: bool):
    """½ gᵀΣg + ¼ tr(FΣFΣ), each layer by itself, from the weights' covariance as samples have it.

    A diagonal posterior can only move the diagonal of its covariance, so only that of F counts.
    """
    network, variance = dynamics.network, dynamics.settings.noise_std**2
    size = network.num_weights
    unit = torch.zeros(dynamics.replicas, size, size)
    unit[replica] = torch.eye(size)
    root = (dynamics.learner.weights(unit)[replica] - dynamics.learner.mean[replica]).double()
    covariance = root.T @ root

    def outputs(weights):
        return network.forward(weights[None, None], x[None, None].double())[1].flatten()

    gradient, fisher = torch.zeros(size).double(), torch.zeros(size, size).double()
    for draw in draws.double():
        jacobian = jacrev(outputs)(draw)
        gradient += jacobian.T @ (y.double() - outputs(draw)) / variance / len(draws)
        fisher += jacobian.T @ jacobian / variance / len(draws)
    total, start = 0.0, 0
    for rows, columns in network.shapes:
        own = slice(start, start + rows * columns)
        start = own.stop
        g, f, sigma = gradient[own], fisher[own, own], covariance[own, own]
        f = f.diag().diag() if diagonal else f
        total += 0.5 * g @ sigma @ g + 0.25 * torch.trace(f @ sigma @ f @ sigma)
    return float(total)


EXACT = dataclasses.replace(MODELS["NNG-MVG"].fit, damping_mode="exact")
SETTINGS = {**MODELS, "exact damping": dataclasses.replace(MODELS["NNG-MVG"], fit=EXACT)}


@pytest.mark.parametrize("name", ["NNG-MVG", "NNG-FFG", "BBB", "BBB/released", "exact damping"])
def test_gain_equals_dense_matrices(name):
    seen = rollout("MountainCar", steps=120)
    pools = [filled(seen, seed) for seed in (0, 1)]
    dynamics = Dynamics(2, 1, small(name), seeds=[5, 6])
    dynamics.train(pools)
    generator = dynamics._streams.test[1]
    state = generator.get_state()
    gain, errors = dynamics.gain(1, seen, num_samples=3)
    after = generator.get_state()
    generator.set_state(state)
    draws = dynamics._draws(1, 3)
    assert torch.equal(generator.get_state(), after)
    assert gain.shape == seen.rewards.shape
    scales = pools[1].scales()
    for step, copy in ((0, 0), (60, 3), (119, 4)):
        parts = [seen.observations, seen.actions, seen.next_observations]
        o, a, n = (s.standardise(part[step, copy]) for s, part in zip(scales, parts, strict=True))
        truth = dense_gain(
            dynamics, 1, torch.tensor([*o, *a]), torch.tensor(n), draws, name not in ("NNG-MVG", "exact damping")
        )
        assert gain[step, copy] == pytest.approx(1e-4 * truth, rel=2e-3)
    observations, _, following = seen.flat()
    steps = scales[2].standardise(following) - scales[2].standardise(observations)
    assert errors.persistence == pytest.approx(np.square(steps).mean(), rel=1e-3)


def test_blockwise_is_another_gain_of_a_kronecker_posterior_alone():
    seen = rollout("MountainCar", steps=120)
    exact = Dynamics(2, 1, small("NNG-MVG"), seeds=[0])
    exact.train([filled(seen)])
    state = exact._streams.test[0].get_state()
    first, _ = exact.gain(0, seen)
    exact._streams.test[0].set_state(state)
    second, _ = exact.gain(0, seen, covariance="blockwise")
    assert (second > 0).all()
    assert not np.allclose(first, second, rtol=1e-2, atol=0.0)
    diagonal = Dynamics(2, 1, small("BBB"), seeds=[0])
    with pytest.raises(RuntimeError, match="learned nothing yet"):
        diagonal.gain(0, seen)
    diagonal.train([filled(seen)])
    with pytest.raises(ValueError, match="blockwise gain is of a Kronecker posterior"):
        diagonal.gain(0, seen, covariance="blockwise")
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        diagonal.gain(0, seen, num_samples=0)


@pytest.mark.parametrize("name", ["NNG-MVG", "BBB"])
def test_a_model_is_the_same_whatever_others_there_are(name):
    first, second = rollout("CartPoleSwingup", 150, seed=0), rollout("CartPoleSwingup", 150, seed=1)
    together = Dynamics(4, 1, small(name), seeds=[3, 8])
    together.train([filled(first, 1), filled(second, 2)])
    alone = Dynamics(4, 1, small(name), seeds=[8])
    alone.train([filled(second, 2)])
    torch.testing.assert_close(together.learner.mean[1:], alone.learner.mean, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(together.gain(1, second)[0], alone.gain(0, second)[0], rtol=1e-2)
    assert not torch.allclose(together.learner.mean[0], together.learner.mean[1], atol=1e-2)


@pytest.mark.parametrize("name", ["NNG-MVG", "NNG-FFG", "BBB"])
def test_ours_learn_the_dynamics_and_the_released_do_not(name):
    pool = filled(rollout("MountainCar"))
    found = {}
    for setting in (name, f"{name}/released"):
        model = Dynamics(2, 1, dataclasses.replace(MODELS[setting], updates=800), seeds=[0])
        model.train([pool])
        found[setting] = model.gain(0, rollout("MountainCar", seed=1))[1]
    assert found[name].model < 0.6 * found[name].persistence
    assert found[f"{name}/released"].model > 0.5


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (NoisySettings(family="full"), "must be diagonal or a Kronecker"),
        (NoisySettings(family="tridiagonal"), "must be diagonal or a Kronecker"),
        (NoisySettings(noise=False), "a point estimate"),
    ],
)
def test_a_posterior_without_a_closed_form_is_refused_before_training(fit, message):
    with pytest.raises(ValueError, match=message):
        Dynamics(2, 1, DynamicsSettings(fit=fit), seeds=[0])


def test_a_model_that_diverges_is_named():
    model = Dynamics(2, 1, small("BBB"), seeds=[0, 1])
    model.learner.mean[1, 0] = float("nan")
    pool = filled(rollout("MountainCar", steps=120))
    with pytest.raises(FloatingPointError, match=r"the models \[1\] have diverged"):
        model.train([pool, pool])
