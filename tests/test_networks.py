"""Networks: shapes, starts, and that a replica is the lone network it claims to be."""

import itertools
import math

import pytest
import torch
from torch import nn

from noisygrad.networks import MLP, ReplicatedLinear, ReplicatedMLP


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("hidden", [(), (5,), (5, 4)])
def test_mlp_has_the_layers_asked_for(hidden):
    mlp = MLP(3, hidden, 2, activation="tanh")
    linears = [layer for layer in mlp.layers if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in linears] == [*hidden, 2]
    assert sum(isinstance(layer, nn.Tanh) for layer in mlp.layers) == len(hidden)
    assert mlp(torch.randn(7, 3)).shape == (7, 2)


def test_same_generator_seed_gives_the_same_mlp():
    first, second = (MLP(3, (4,), 1, generator=seeded(5)) for _ in range(2))
    x = torch.randn(6, 3)
    assert torch.equal(first(x), second(x))


def test_generator_start_has_the_range_of_nn_linear():
    weight = MLP(100, (), 200, generator=seeded(0)).layers[0].weight
    assert weight.abs().max() <= 0.1
    assert weight.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("replicas", [(), (3,), (2, 3)])
def test_replicated_linear_equals_a_loop(replicas, bias):
    layer = ReplicatedLinear(replicas, 4, 5, bias=bias).double()
    assert layer.replicas == torch.Size(replicas)
    assert layer.weight.shape == (*replicas, 5, 4)
    own = torch.randn(*replicas, 6, 4, dtype=torch.float64)
    shared = torch.randn(6, 4, dtype=torch.float64)
    for x in (own, shared):
        output = layer(x)
        assert output.shape == (*replicas, 6, 5)
        for at in itertools.product(*map(range, replicas)):
            b = layer.bias[at] if bias else None
            expected = nn.functional.linear(x[at] if x is own else x, layer.weight[at], b)
            torch.testing.assert_close(output[at], expected, rtol=1e-13, atol=1e-13)


def test_replicated_gradients_are_those_of_lone_networks():
    many = ReplicatedMLP((3,), 4, (5,), 2, activation="tanh").double()
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    many(x).square().sum().backward()
    for r in range(3):
        lone = many.replica(r)
        lone(x[r]).square().sum().backward()
        for (name, alone), together in zip(lone.named_parameters(), many.parameters(), strict=True):
            torch.testing.assert_close(together.grad[r], alone.grad, msg=name)


def test_replica_starts_as_a_lone_mlp_from_the_same_generator():
    many = ReplicatedMLP((2, 2), 3, (4, 4), 1, generators=[seeded(s) for s in range(4)])
    for seed, index in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        lone = MLP(3, (4, 4), 1, generator=seeded(seed))
        for name, parameter in many.named_parameters():
            assert torch.equal(parameter[index], lone.get_parameter(name))


def test_replica_is_a_copy_and_load_replica_puts_it_back():
    many = ReplicatedMLP((2,), 3, (4,), 1)
    before = {name: p.detach().clone() for name, p in many.named_parameters()}
    lone = many.replica(1)
    with torch.no_grad():
        for parameter in lone.parameters():
            parameter.add_(1.0)
    for name, parameter in many.named_parameters():
        assert torch.equal(parameter, before[name])
    many.load_replica_(1, lone)
    for name, parameter in many.named_parameters():
        assert torch.equal(parameter[0], before[name][0])
        assert torch.equal(parameter[1], lone.get_parameter(name))


def test_replica_keeps_dtype_and_mode():
    lone = ReplicatedMLP((2,), 3, (4,), 1).double().eval().replica(-1)
    assert lone.layers[0].weight.dtype is torch.float64
    assert not lone.training


def test_replicated_mlp_under_bf16_autocast():
    many = ReplicatedMLP((2,), 3, (4,), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = many(torch.randn(5, 3))
    output.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in many.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: MLP(0, (), 1),
        lambda: MLP(1, (0,), 1),
        lambda: MLP(1, (), 0),
        lambda: MLP(1, (), 1, activation="swosh"),
        lambda: ReplicatedLinear((0,), 1, 1),
        lambda: ReplicatedLinear((2,), 0, 1),
        lambda: ReplicatedLinear((2,), 1, 1, generators=[torch.Generator()]),
    ],
)
def test_nonsense_sizes_are_refused(make):
    with pytest.raises(ValueError, match=r"got .*expected|got .*give"):
        make()


@pytest.mark.parametrize("shape", [(3,), (6, 4), (3, 6, 3), (2, 2, 6, 3), (1, 6, 3)])
def test_replicated_linear_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"expected \[batch, 3\] or \[2, batch, 3\]"):
        ReplicatedLinear((2,), 3, 1)(torch.zeros(shape))


@pytest.mark.parametrize("index", [2, -3, (0, 0), ()])
def test_replica_index_out_of_range(index):
    many = ReplicatedMLP((2,), 3, (), 1)
    with pytest.raises(ValueError, match="replica index"):
        many.replica(index)
    with pytest.raises(ValueError, match="replica index"):
        many.load_replica_(index, MLP(3, (), 1))


def test_load_replica_refuses_another_shape():
    with pytest.raises(ValueError, match="got an MLP"):
        ReplicatedMLP((2,), 3, (4,), 1).load_replica_(0, MLP(3, (5,), 1))
