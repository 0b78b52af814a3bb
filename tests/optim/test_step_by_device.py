"""The way a step takes on a GPU, walked on a CPU: its numbers are tensors, its pieces are recorded and replayed."""

import contextlib
import types

import pytest
import torch
from torch import nn

import noisygrad as ng
from noisygrad.algorithm import stacks
from noisygrad.algorithm.covariance import Covariance
from noisygrad.optim import execution as graphs
from support.compare import REMADE, TIES, each_optimizer, tensors_of
from support.replay_executor import ReplayExecutor, replayed

STEPS = 24
LARGE_GRADIENTS = 4.0
"""The scale that a GradScaler is at."""


def images():
    body = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 3)]
    return nn.Sequential(*body), ng.Categorical(), (2, 6, 6), ()


def learned_noise():
    return ng.networks.MLP(3, (5, 4), 2), ng.Gaussian(), (3,), ()


def replicas():
    return ng.networks.ReplicatedMLP((2,), 3, (5,), 2), ng.Gaussian(noise_variance=0.5), (3,), (2,)


def batch(model, shape, lead, step):
    """Other numbers at every step: what is recorded must not remember them."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(*lead, 8, *shape, generator=generator, dtype=torch.float64)
    if len(shape) == 3:
        return x, torch.randint(3, (8,), generator=generator)
    return x, torch.sin(x[..., :2] * 2.0)


def made(kind, monkeypatch, *, replay, problem=images, **options):
    with monkeypatch.context() as patch:
        if replay:
            replayed(patch)
        torch.manual_seed(0)
        model, likelihood, *sizes = problem()
        model = model.double()
        settings = {"lr": 1e-2, "damping": 1e-3, "momentum_mode": "heavy_ball", "seed": 1, **options}
        optimizer = kind(model, likelihood, num_data=100, stats_every=2, factor_every=4, **settings)
    return model, optimizer, lambda step: batch(model, *sizes, step)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def change_rates(optimizer, step):
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)


def change_damping_and_momentum(optimizer, step):
    optimizer.param_groups[0]["damping"] = 1e-3 if step < STEPS // 2 else 0.0
    optimizer.param_groups[0]["momentum"] = 0.9 if step < STEPS // 3 else 0.5


def move_weights(optimizer, step):
    if step == STEPS // 2:
        for parameter in optimizer.model.parameters():
            parameter.data = parameter.data.clone()


def load_state(optimizer, step):
    if step == STEPS // 2:
        optimizer.load_state_dict(optimizer.state_dict())


def change_nothing(optimizer, step):
    pass


def everything(optimizer):
    """Copies of the mean, the Fisher, the momentum and the observation noise; the factors may be made anew."""
    noise = {name: tensor.clone() for name, tensor in optimizer.likelihood.state_dict().items()}
    return noise | {name: t for name, t in tensors_of(optimizer.state_dict()).items() if "/factors/" not in name}


def same_both_ways(found):
    """Weights and everything that belongs to the state."""
    (_, usual), (_, replay) = found
    assert isinstance(replay.update.executor, ReplayExecutor)
    assert replay.update.executor.replays > 0
    assert not usual.update.executor.deferred
    mine, theirs = (tensors_of(optimizer.state_dict()) for optimizer in (replay, usual))
    assert mine.keys() == theirs.keys()
    near = TIES.get(type(usual), 1e-12)
    for name, tensor in theirs.items():
        signless = "–" in name and "/factors/" in name  # eigenvectors have no sign of their own
        if not signless and not any(part in name for part in REMADE.get(type(usual), ())):
            torch.testing.assert_close(
                mine[name], tensor, rtol=100 * near, atol=near, msg=lambda text, n=name: f"{n} {text}"
            )
    torch.testing.assert_close(weights(replay.model), weights(usual.model), rtol=0, atol=near)
    for name, tensor in usual.likelihood.state_dict().items():
        torch.testing.assert_close(replay.likelihood.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)


CHANGES = [change_nothing, change_rates, change_damping_and_momentum, move_weights, load_state]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"mc_samples": 2}, {"momentum_mode": "average"}], ids=str)
@each_optimizer
def test_both_ways_end_at_the_same_place(kind, options, change, monkeypatch):
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"})
    found = []
    for replay in (False, True):
        model, optimizer, data = made(kind, monkeypatch, replay=replay, **options)
        for step in range(STEPS):
            change(optimizer, step)
            x, y = data(step)
            optimizer.step(lambda model=model, x=x, y=y: (model(x), y))
        found.append((model, optimizer))
    same_both_ways(found)


OPTIONS = [
    {"kl_clip": lambda step: 1e-3 / step},
    {"kl_clip": lambda step: 1e-4 if step < STEPS // 2 else 1e-6, "fisher_decay": lambda step: 1 - 1 / (step + 1)},
    {"noise": False},
    {"prior_variance": 0.3, "momentum": 0.0, "momentum_mode": "average"},
    {"safeguard": "fading", "fisher_floor": 0.1},
    {"lr": torch.tensor(0.02)},
]


@pytest.mark.parametrize("problem", [images, learned_noise, replicas])
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@each_optimizer
def test_schedules_replicas_and_learned_noise_are_the_same_both_ways(kind, options, problem, monkeypatch):
    found = []
    for replay in (False, True):
        model, optimizer, data = made(kind, monkeypatch, replay=replay, problem=problem, **options)
        for step in range(STEPS):
            x, y = data(step)
            optimizer.step(lambda model=model, x=x, y=y: (model(x), y))
        found.append((model, optimizer))
    same_both_ways(found)


@pytest.mark.parametrize("problem", [images, learned_noise, replicas])
@each_optimizer
def test_what_a_grad_scaler_skips_is_the_same_both_ways(kind, problem, monkeypatch):
    found = []
    for replay in (False, True):
        model, optimizer, data = made(kind, monkeypatch, replay=replay, problem=problem, kl_clip=1e-3)
        for step in range(STEPS):
            x, y = data(step)
            with optimizer.sampled() as draw:
                (draw.nll(model(x), y).sum() * LARGE_GRADIENTS).backward()
            skip, before = step % 5 == 3, everything(optimizer)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(LARGE_GRADIENTS), torch.tensor(float(skip))
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            after = everything(optimizer)
            changed = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
            changed = [name for name in changed if not any(part in name for part in REMADE.get(kind, ()))]
            assert not changed if skip else len(changed) > len(list(model.parameters()))
        found.append((model, optimizer))
    same_both_ways(found)


def test_factors_that_were_brought_together_anew_are_another_place(monkeypatch):
    """After a refresh that failed, the next one makes new stacks."""
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"})
    _, optimizer, _ = made(ng.NoisyKFAC, monkeypatch, replay=False)
    factors = optimizer.covariance
    real = Covariance._store
    monkeypatch.setattr(Covariance, "_store", lambda self, block, new: real(self, block, new) or fail())
    with pytest.raises(KeyboardInterrupt):
        factors.refresh_({0: 0.0})
    monkeypatch.setattr(Covariance, "_store", real)
    before, old = factors.generation, factors._stacks
    factors.refresh_({0: 1e-3})
    assert factors._stacks is not old
    assert factors.generation != before


def fail():
    raise KeyboardInterrupt


def test_what_is_replayed(monkeypatch):
    model, optimizer, data = made(ng.NoisyKFAC, monkeypatch, replay=True)
    executor = optimizer.update.executor
    x, y = data(0)
    for _ in range(STEPS):
        optimizer.step(lambda: (model(x), y))
    # Of a step with statistics only the move of the mean; every piece is recorded once.
    assert [name for name in executor.names if name != "draw"] == ["move", "move", *["step", "move"] * (STEPS // 2 - 1)]
    assert executor.names.count("draw") == STEPS
    assert len(executor.keys) == 2
    pieces = len(set(executor.names))
    assert executor.replays == len(executor.names) - pieces * (graphs.WARM_UPS + 1)


def test_all_graphs_use_the_memory_of_the_first(monkeypatch):
    pools = []

    def recorded(replay):
        pools.append(replay._pool())
        return types.SimpleNamespace(replay=lambda: None, pool=lambda: pools[-1] or "the first")

    monkeypatch.setattr(graphs.Replay, "_recorded", recorded)
    monkeypatch.setattr(graphs, "capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    replays = graphs.GraphCache(types.SimpleNamespace(type="cuda"), differentiates=False)
    for step in range(20):
        for name in ("draw", "move" if step % 3 == 0 else "step"):
            replays.run(name, 0, lambda: None)
    assert pools == [None, "the first", "the first"]


@each_optimizer
def test_a_bad_step_with_statistics_is_masked(kind, monkeypatch):
    model, optimizer, data = made(kind, monkeypatch, replay=True)
    for step in range(5):
        x, y = data(step)
        optimizer.step(lambda x=x, y=y: (model(x), y))
    before = weights(model)
    fisher = {name: statistics.clone() for name, statistics in optimizer.covariance.statistics.items()}
    optimizer.step(lambda: (model(x * torch.nan), y))
    assert optimizer.update.executor.names[-1] == "move"
    assert torch.equal(weights(model), before)
    for name, kept in fisher.items():
        for part, tensor in kept.tensors().items():
            assert torch.equal(optimizer.covariance.statistics[name].tensors()[part], tensor)
    optimizer.step(lambda: (model(x), y))
    with pytest.raises(ng.NonFiniteError):  # the eighth refreshes the factors
        optimizer.step(lambda: (model(x), y))


def test_a_bad_step_that_is_replayed_is_masked(monkeypatch):
    """A plain step, whose check is part of the recording."""
    model, optimizer, data = made(ng.NoisyAdam, monkeypatch, replay=True)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.step(lambda x=x, y=y: (model(x), y))
    before, replays = weights(model), optimizer.update.executor.replays
    optimizer.step(lambda: (model(x * torch.nan), y))
    assert optimizer.update.executor.names[-1] == "step"
    assert optimizer.update.executor.replays == replays + 2
    assert torch.equal(weights(model), before)
    with pytest.raises(ng.NonFiniteError):
        optimizer.posterior()
