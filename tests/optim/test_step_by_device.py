"""The way a step takes on a GPU, walked on a CPU: its numbers are tensors, its pieces are handed to `GraphCache`."""

import contextlib
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import noisygrad as ng
from noisygrad.algorithm import stacks
from noisygrad.algorithm.covariance import Covariance
from noisygrad.optim import execution as graphs

STEPS = 24
X, Y = torch.randn(8, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3


class Recording(TorchDispatchMode):
    """The operations that are run inside, with their tensors."""

    def __init__(self):
        super().__init__()
        self._operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a number is read on the host, which a graph cannot do")
        made = function(*args, **(kwargs or {}))
        self._operations.append((function, args, kwargs or {}, made))
        return made

    def replay(self):
        """The same operations on the same tensors: what a Python function would do otherwise now, it does not do."""
        for function, args, kwargs, made in self._operations:
            given = {place(tensor) for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, torch.Tensor)}
            again = function(*args, **kwargs)
            for old, new in zip(tree_flatten(made)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor) and place(old) not in given:  # neither a view nor in place
                    old.copy_(new)


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class Recorder:
    """What `GraphCache` does on a GPU: the work itself at first, then a recording, again and again."""

    def __init__(self):
        self.names, self.keys, self._entries = [], set(), {}

    def run(self, name, key, work):
        self.names.append(name)
        self.keys.add(key)
        if self._entries.get(name, (None,))[0] != key:
            self._entries[name] = [key, 0, None]
        entry = self._entries[name]
        entry[1] += 1
        if entry[1] <= graphs.WARM_UPS:
            work()
        elif entry[2] is None:
            with Recording() as entry[2]:
                work()
        else:
            entry[2].replay()


def made(family, monkeypatch, *, gpu, **options):
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)]
    model = nn.Sequential(*body).double()
    settings = {"lr": 1e-2, "damping": 1e-3, "momentum_mode": "heavy_ball", **options}
    optimizer = family(model, ng.Categorical(), num_data=100, stats_every=2, factor_every=4, seed=1, **settings)
    if gpu:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        optimizer.device = optimizer.guard._device = types.SimpleNamespace(type="cuda")
        optimizer.update._executor = Recorder()
    return model, optimizer


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


CHANGES = [change_nothing, change_rates, change_damping_and_momentum, move_weights, load_state]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"mc_samples": 2}, {"momentum_mode": "average"}], ids=str)
@pytest.mark.parametrize("family", [ng.NoisyAdam, ng.NoisyKFAC])
def test_both_ways_end_at_the_same_place(family, options, change, monkeypatch):
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"})
    found = []
    for gpu in (False, True):
        model, optimizer = made(family, monkeypatch, gpu=gpu, **options)
        for step in range(STEPS):
            change(optimizer, step)
            optimizer.step(lambda model=model: (model(X), Y))
        found.append(weights(model))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def test_factors_that_were_brought_together_anew_are_another_place(monkeypatch):
    """After a refresh that failed, the next one makes new stacks."""
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"})
    _, optimizer = made(ng.NoisyKFAC, monkeypatch, gpu=False)
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
    model, optimizer = made(ng.NoisyKFAC, monkeypatch, gpu=True)
    replays = optimizer.update._executor
    for _ in range(STEPS):
        optimizer.step(lambda: (model(X), Y))
    # Of a step with statistics only the move of the mean; every piece is recorded once.
    assert [name for name in replays.names if name != "draw"] == ["move", "move", *["step", "move"] * (STEPS // 2 - 1)]
    assert replays.names.count("draw") == STEPS
    assert len(replays.keys) == 2


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


@pytest.mark.parametrize("family", [ng.NoisyAdam, ng.NoisyKFAC])
def test_a_bad_step_with_statistics_is_masked(family, monkeypatch):
    model, optimizer = made(family, monkeypatch, gpu=True)
    for _ in range(5):
        optimizer.step(lambda: (model(X), Y))
    before = weights(model)
    fisher = {name: statistics.clone() for name, statistics in optimizer.covariance.statistics.items()}
    optimizer.step(lambda: (model(X * torch.nan), Y))
    assert optimizer.update._executor.names[-1] == "move"
    assert torch.equal(weights(model), before)
    for name, kept in fisher.items():
        for part, tensor in kept.tensors().items():
            assert torch.equal(optimizer.covariance.statistics[name].tensors()[part], tensor)
    optimizer.step(lambda: (model(X), Y))
    with pytest.raises(ng.NonFiniteError):  # the eighth refreshes the factors
        optimizer.step(lambda: (model(X), Y))
