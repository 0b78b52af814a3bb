"""Mistakes are named before anything changes; data that is merely awkward works."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import noisygrad as ng
from support.compare import (
    assert_nothing_pending,
    assert_unchanged,
    batches,
    each_optimizer,
    each_with_improper_prior,
    make,
    mlp,
    snapshot,
    tensors_of,
    train,
)

BAD_OPTIONS = {
    "num_data": [0, -5, 3.5, True],
    "kl_weight": [0.0, -1.0, math.nan, math.inf, True],
    "prior_variance": [0.0, -1.0, math.nan, {"0.*": 1.0, "*": -1.0}],
    "lr": [
        0.0,
        -1e-3,
        math.nan,
        True,
        "0.1",
        torch.tensor(-1.0),
        torch.tensor(math.nan),
        torch.tensor(1),
        torch.ones(1),
    ],
    "fisher_decay": [1.0, -0.1, 1.5, lambda step: 2.0],
    "momentum": [1.0, -0.1, False],
    "damping": [-1e-3, math.nan, math.inf, True],
    "stats_every": [0, 1.5],
    "factor_every": [0, -2],
    "mc_samples": [0],
    "kl_clip": [0.0, -1.0, lambda step: math.nan],
    "fisher": ["true"],
    "fisher_pass": ["other"],
    "momentum_mode": ["nesterov"],
    "damping_mode": ["some"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_OPTIONS.items() for value in values],
    ids=lambda value: "schedule" if callable(value) else str(value),
)
def test_an_option_without_sense_is_refused(name, value):
    model = mlp()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=name):
        make(ng.NoisyAdam, model, **{"seed": None, name: value})
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["none", "all frozen"])
def test_a_model_without_parameters_is_refused(model):
    with pytest.raises(ValueError, match="no trainable parameters"):
        make(ng.NoisyKFAC, model)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=torch.complex128)

    def forward(self, x):
        return self.inner(x.to(torch.complex128)).abs()


def test_complex_parameters_are_refused_by_name_unless_they_are_frozen():
    model, ((x, y),) = nn.Sequential(Complex(), nn.Linear(2, 2).double()), batches(1)
    with pytest.raises(ValueError, match=r"^0\.inner\.weight, 0\.inner\.bias: complex"):
        make(ng.NoisyKFAC, model)
    model[0].requires_grad_(False)
    before = model[0].inner.weight.clone()
    train(make(ng.NoisyKFAC, model), model, [(x, y)])
    assert torch.equal(model[0].inner.weight, before)


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import noisygrad as ng

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
ways = {
    "FSDP2": lambda model: fully_shard(model, mesh=mesh),
    "tensor parallel": lambda model: parallelize_module(model, mesh, {"0": ColwiseParallel()}),
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
}
for name, way in ways.items():
    model = way(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    try:
        ng.NoisyKFAC(model, ng.Gaussian(), num_data=10)
    except ValueError as error:
        print(name, error)
model = ways["tensor parallel"](nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
model[0].requires_grad_(False)
optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10)
optimizer.step(lambda: (model(torch.randn(5, 3)), torch.randn(5, 2)))
print("frozen", optimizer.steps)
"""


def test_parameters_that_are_shared_out_are_refused_by_name():
    command = [sys.executable, "-W", "ignore", "-c", SHARDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    *refused, frozen = done.stdout.splitlines()
    names = [line.split(": parameters that are shared out")[0] for line in refused]
    prefix = "_fsdp_wrapped_module."
    assert names == [
        "FSDP2 0.weight, 0.bias, 1.weight, 1.bias",
        "tensor parallel 0.weight, 0.bias",
        f"FSDP1 {prefix}0.weight, {prefix}0.bias, {prefix}1.weight, {prefix}1.bias",
    ]
    assert frozen == "frozen 1"


def test_a_likelihood_of_another_library_is_refused():
    with pytest.raises(TypeError, match="likelihood"):
        make(ng.NoisyKFAC, mlp(), nn.MSELoss())


def targets(*shape, fill=0.0, dtype=torch.float64):
    return torch.full(shape, fill, dtype=dtype)


BAD_BATCHES = {
    "fewer targets": (ng.Gaussian, targets(5, 2), "batches disagree"),
    "fewer labels": (ng.Categorical, targets(4, dtype=torch.int64), "batches disagree"),
    "label too large": (ng.Categorical, targets(6, fill=2, dtype=torch.int64), "0..1"),
    "label below zero": (ng.Categorical, targets(6, fill=-1, dtype=torch.int64), "0..1"),
    "labels as floats": (ng.Categorical, targets(6), "int64"),
    "one-hot labels": (ng.Categorical, targets(6, 2, dtype=torch.int64), "one-hot"),
    "integers for reals": (ng.Gaussian, targets(6, 2, dtype=torch.int64), "floating point"),
    "a column too few": (ng.Gaussian, targets(6), "shape"),
    "a column too many": (ng.Gaussian, targets(6, 3), "shape"),
    "NaN": (ng.Gaussian, targets(6, 2, fill=math.nan), "NaN or infinite"),
    "inf": (ng.Gaussian, targets(6, 2, fill=math.inf), "NaN or infinite"),
    "not a probability": (ng.Bernoulli, targets(6, 2, fill=2.0), "0"),
    "below zero": (ng.Poisson, targets(6, 2, fill=-1.0), "count"),
    "an empty batch": (ng.Gaussian, targets(0, 2), "empty"),
}


@each_optimizer
@pytest.mark.parametrize("case", BAD_BATCHES)
@pytest.mark.parametrize("form", ["closure", "explicit"])
def test_a_bad_batch_is_refused_before_anything_changes(kind, case, form):
    likelihood, target, message = BAD_BATCHES[case]
    model, (x, _) = mlp(), batches(1)[0]
    optimizer = make(kind, model, likelihood())
    good = torch.ones(6, dtype=torch.int64) if likelihood is ng.Categorical else torch.ones(6, 2, dtype=torch.float64)
    train(optimizer, model, [(x, good)])
    before = snapshot(optimizer)

    def explicit():
        with optimizer.sampled() as draw:
            draw.nll(model(x), target).backward()

    attempt = explicit if form == "explicit" else lambda: optimizer.step(lambda: (model(x), target))
    with pytest.raises(ValueError, match=message):
        attempt()
    assert_unchanged(before, optimizer)
    train(optimizer, model, [(x, good)])


LIKELIHOODS = [ng.Gaussian, ng.HeteroscedasticGaussian, ng.Categorical, ng.Bernoulli, ng.Poisson]


@each_optimizer
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: likelihood.__name__)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_inputs_that_are_not_finite_are_named_by_layer(kind, likelihood, bad):
    model, (x, y) = mlp(), batches(1)[0]
    optimizer = make(kind, model, likelihood(), momentum=0.5)
    good = {
        ng.Categorical: torch.zeros(6, dtype=torch.int64),
        ng.HeteroscedasticGaussian: y[:, :1],
        ng.Gaussian: y,
    }.get(likelihood, torch.ones(6, 2, dtype=torch.float64))
    train(optimizer, model, [(x, good)])
    before = snapshot(optimizer)
    spoilt = x.clone()
    spoilt[2, 1] = bad
    with pytest.raises(ng.NonFiniteError, match="statistics of 0"):
        train(optimizer, model, [(spoilt, good)])
    assert_unchanged(before, optimizer, but=("generators",))
    train(optimizer, model, [(x, good)])
    assert optimizer.weights.mean.flat.isfinite().all()


@each_optimizer
def test_a_gradient_that_is_not_finite_is_named_between_statistics(kind):
    model, (x, y) = mlp(), batches(1)[0]
    optimizer = make(kind, model, stats_every=10)
    before = snapshot(optimizer)
    with pytest.raises(ng.NonFiniteError, match=r"gradient of 0\.weight"):
        train(optimizer, model, [(x * math.nan, y)])
    assert_unchanged(before, optimizer, but=("generators",))


class BadBackward(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


class Spoilt(nn.Sequential):
    """Linear layers "0", "2" and "4" with something bad at one of them."""

    def __init__(self, how, layer):
        linears = mlp(dtype=torch.float32)[::2]
        super().__init__(linears[0], nn.LeakyReLU(), linears[1], nn.LeakyReLU(), linears[2])
        self.how, self.layer = how, layer
        with torch.no_grad():
            if how == "NaN weight":
                self[layer].weight[0, 0] = math.nan
            elif how == "overflow":
                self[layer].weight.fill_(1e38)

    def forward(self, x):
        x = 100.0 * x if self.how == "overflow" else x
        for index, module in enumerate(self):
            x = module(x)
            if index == self.layer and self.how == "bad backward":
                x = BadBackward.apply(x)
        return x


@each_optimizer
@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("how", ["NaN weight", "overflow", "bad backward"])
@pytest.mark.parametrize("fisher", ["sampled", "empirical", "exact", "sampled, masked"])
def test_the_layer_where_it_began_is_named_and_no_other(kind, layer, how, fisher):
    """A bad number spreads to the inputs of all later layers and to the gradients of all earlier ones.

    A step that a GradScaler has let pass is masked by flags, as every step on a GPU is.
    """
    model, (x, y) = Spoilt(how, layer), batches(1, dtype=torch.float32)[0]
    optimizer = make(kind, model, ng.Categorical(), fisher=fisher.partition(",")[0])
    if "masked" in fisher:
        optimizer.found_inf = torch.zeros(1)
    with pytest.raises(ng.NonFiniteError, match=f"the statistics of {layer} went bad"):
        train(optimizer, model, [(x.abs() + 1.0, (y[:, 0] > 0).long())])
    assert_nothing_pending(optimizer)


@each_optimizer
def test_statistics_that_overflow_by_themselves_name_their_layer(kind):
    """Inputs and gradients are finite, their squares are not."""
    model, (x, y) = mlp(dtype=torch.float32), batches(1, dtype=torch.float32)[0]
    with torch.no_grad():
        model[0].weight.mul_(1e-20)
    optimizer = make(kind, model, noise=False)
    with pytest.raises(ng.NonFiniteError, match="the statistics of 0 went bad"):
        train(optimizer, model, [(x * 1e20, y)])


@pytest.mark.parametrize("kind", [ng.NoisyAdam, ng.NoisyKFAC], ids=lambda kind: kind.__name__)
def test_the_layer_is_named_in_a_network_of_many_kinds(kind):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten())
    model = nn.Sequential(*model, nn.LayerNorm(18), nn.Linear(18, 2))
    x, y = torch.randn(4, 1, 7, 7), torch.zeros(4, dtype=torch.int64)
    optimizer = make(kind, model, ng.Categorical())
    train(optimizer, model, [(x, y)])
    with torch.no_grad():
        model[3].bias.fill_(math.inf)
    with pytest.raises(ng.NonFiniteError, match="the statistics of 3 went bad"):
        train(optimizer, model, [(x, y)])


@each_with_improper_prior
@pytest.mark.parametrize("damping", [0.0, 1e-30])
def test_a_failed_factorisation_names_its_layer_and_condition(kind, damping):
    """No prior, no damping worth the name, and inputs that say nothing: the Fisher of the first layer is singular."""
    model = mlp(dtype=torch.float32)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.zero_()
    optimizer = make(
        kind, model, ng.Gaussian(1.0), prior_variance=math.inf, damping=damping, fisher_decay=0.0, fisher="exact"
    )
    before = snapshot(optimizer)
    zeros = torch.zeros(6, 3)
    with pytest.raises(ng.FactorisationError, match=r"^layer 0: .*condition number") as caught:
        train(optimizer, model, [(zeros, torch.ones(6, 2))])
    assert caught.value.condition > 1e6
    after = snapshot(optimizer)
    tensors = [name for name, leaf in before.items() if isinstance(leaf, torch.Tensor)]
    kept = [name for name in tensors if name.startswith("/model/") or name.endswith(("/mean", "/momentum/average"))]
    assert len(kept) == 3 * len(list(model.parameters()))
    for name in kept:
        assert torch.equal(before[name], after[name])
    assert after["/optimizer/steps"] == before["/optimizer/steps"]


def spoil(posterior, layer, value):
    """A number of the statistics of one layer, whatever the family."""
    for block in posterior.structure.blocks:
        for name, piece in block.pieces(posterior.statistics[block.name]):
            if name == layer:
                piece[(0,) * piece.dim()] = value


@each_optimizer
@pytest.mark.parametrize("layer", ["0", "2", "4"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_failed_factorisation_names_no_other_layer(kind, layer, value):
    model = mlp()
    optimizer = make(kind, model)
    posterior = optimizer.posterior()
    spoil(posterior, layer, value)
    with pytest.raises(ng.FactorisationError, match=f"^layer {layer}: "):
        posterior.kl()
    optimizer.covariance.statistics.update(posterior.statistics)
    with pytest.raises(ng.FactorisationError, match=f"^layer {layer}: "):
        optimizer.covariance.refresh_({0: 0.1})


def awkward_regression():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=generator), torch.randn(12, 2, generator=generator)
    twice = torch.stack([x[:, 0], x[:, 0], x[:, 0]], dim=1)
    return {
        "constant inputs": (torch.full_like(x, 3.0), y),
        "zero inputs": (torch.zeros_like(x), y),
        "duplicate columns": (twice, y),
        "huge columns": (x * 1e4, y),
        "a single example": (x[:1], y[:1]),
        "zero-variance targets": (x, torch.ones_like(y)),
    }


@each_optimizer
@pytest.mark.parametrize("case", awkward_regression())
def test_awkward_data_works(kind, case):
    model, batch = mlp(dtype=torch.float32), awkward_regression()[case]
    optimizer = make(kind, model, factor_every=2)
    losses = train(optimizer, model, [batch] * 20)
    assert all(map(math.isfinite, losses))
    assert all(t.isfinite().all() for t in tensors_of(optimizer.state_dict()).values())
    posterior = optimizer.posterior()
    assert posterior.kl().isfinite()
    assert posterior.predict(batch[0], num_samples=3).log_prob(batch[1]).isfinite().all()


@each_optimizer
def test_a_single_class_works(kind):
    model, x = mlp(dtype=torch.float32), awkward_regression()["huge columns"][0] / 1e4
    optimizer = make(kind, model, ng.Categorical())
    y = torch.zeros(12, dtype=torch.int64)
    losses = train(optimizer, model, [(x, y)] * 20)
    assert losses[-1] < losses[0]
    assert optimizer.posterior().kl().isfinite()


@pytest.mark.parametrize("bad", [0, 1], ids=["first", "last"])
def test_a_layer_whose_moments_are_finite_but_not_its_spectrum_is_named(bad):
    """Inputs and gradients of 1e10 have squares that float32 holds, but not the product of these."""
    sizes, variance = [(1e10, 1e-10, 1e10), (1.0, 1e10, 1e-10)][bad], [1.0, 1e-20][bad]
    model, ((x, _),) = mlp(dtype=torch.float32), batches(1, dtype=torch.float32)
    model = nn.Sequential(model[0], model[2])
    with torch.no_grad():
        for layer, size in zip(model, sizes[1:], strict=True):
            layer.weight.mul_(size)
            layer.bias.zero_()
    optimizer = make(ng.NoisyEKFAC, model, ng.Gaussian(variance), noise=False, fisher="exact")
    before = snapshot(optimizer)
    with optimizer.sampled() as draw:
        output = model(x * sizes[0])
        draw.nll(output, output.detach()).backward()
    found = optimizer.accumulated.statistics[str(bad)].averages()
    assert [name for name, tensor in found.items() if not tensor.isfinite().all()] == ["fisher"]
    with pytest.raises(ng.NonFiniteError, match=f"the statistics of {bad} went bad"):
        optimizer.step()
    assert_unchanged(before, optimizer)
