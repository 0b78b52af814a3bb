"""What is spoilt after the optimiser was made is named before anything changes, or taken back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import noisygrad as ng
from support.compare import (
    assert_unchanged,
    batches,
    compare_optimizers,
    differences,
    each_optimizer,
    make,
    mlp,
    snapshot,
    take_step,
    train,
)


@each_optimizer
@pytest.mark.parametrize("form", ["closure", "explicit"])
def test_a_frozen_layer_is_refused_by_name(kind, form):
    model, (batch,) = mlp(), batches(1)
    optimizer = make(kind, model)
    take_step(optimizer, model, batch, form)
    before = snapshot(optimizer)
    model[2].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"^2\.weight, 2\.bias: frozen .*as_prior"):
        take_step(optimizer, model, batch, form)
    assert_unchanged(before, optimizer)
    assert str(optimizer.coverage()).count("frozen since") == 2
    optimizer.posterior().as_prior()
    model[2].requires_grad_(True)
    take_step(optimizer, model, batch, form)


@each_optimizer
def test_a_layer_frozen_between_draw_and_step_is_refused(kind):
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(kind, model)
    before = snapshot(optimizer)
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"^0\.weight, 0\.bias: frozen"):
        optimizer.step()
    assert not differences(before, snapshot(optimizer), but=("generators",))


@each_optimizer
def test_a_layer_that_took_no_part_is_no_frozen_layer(kind):
    model, ((_, y),) = mlp(), batches(1)
    optimizer = make(kind, model)
    optimizer.step(lambda: (model[4](torch.ones(6, 4, dtype=torch.float64)), y))
    assert "frozen" not in str(optimizer.coverage())


NEVER = [math.nan, math.inf, 1e300, 10**400, -0.1, True, "0.1", None, 0.1j, torch.ones(2)]
SENSELESS = [
    *[("lr", value) for value in [*NEVER, torch.tensor(math.nan), torch.tensor(-1.0), torch.tensor(1)]],
    *[("momentum", value) for value in [*NEVER, 1.0, 2, torch.tensor(0.5)]],
    *[("damping", value) for value in [*NEVER, torch.tensor(0.5)]],
]


@each_optimizer
@pytest.mark.parametrize(("name", "value"), SENSELESS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("form", ["closure", "explicit"])
def test_a_number_without_sense_is_refused(kind, name, value, form):
    model, (batch,) = mlp(), batches(1)
    optimizer = make(kind, model, groups={"0.*": {"lr": 0.1}})
    take_step(optimizer, model, batch, form)
    before = snapshot(optimizer)
    sensible, optimizer.param_groups[1][name] = optimizer.param_groups[1][name], value
    with pytest.raises(ValueError, match=f"^{name} (of a param group )?must be"):
        take_step(optimizer, model, batch, form)
    optimizer.param_groups[1][name] = sensible
    assert_unchanged(before, optimizer)
    take_step(optimizer, model, batch, form)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 1), ("lr", np.float32(0.1)), ("momentum", 0), ("damping", 1)], ids=str
)
def test_a_number_of_another_type_is_a_number(name, value):
    model, (batch,) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model)
    optimizer.param_groups[0][name] = value
    take_step(optimizer, model, batch, "closure")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def without_momentum(optimizer, model):
    del optimizer.param_groups[0]["momentum"]


def with_a_parameter(optimizer, model):
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(7)))


def with_a_frozen_parameter(optimizer, model):
    optimizer.param_groups[0]["params"].append(model.frozen)


def without_a_parameter(optimizer, model):
    optimizer.param_groups[0]["params"].pop()


def with_a_group(optimizer, model):
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_momentum, "has no 'momentum'"),
        (with_a_parameter, r"a Parameter of shape \[7\] added, none lost"),
        (with_a_frozen_parameter, "frozen added, none lost"),
        (without_a_parameter, r"none added, 4\.bias lost"),
        (with_a_group, "there are 2 param groups, but the optimiser was made with 1"),
    ],
)
@pytest.mark.parametrize("form", ["closure", "explicit"])
def test_a_param_group_of_other_content_is_refused(change, message, form):
    model, (batch,) = mlp(), batches(1)
    model.frozen = nn.Parameter(torch.zeros(3).double(), requires_grad=False)
    optimizer = make(ng.NoisyKFAC, model)
    take_step(optimizer, model, batch, form)
    before = [parameter.clone() for parameter in model.parameters()]
    change(optimizer, model)
    with pytest.raises(ValueError, match=message):
        take_step(optimizer, model, batch, form)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@each_optimizer
def test_a_warm_up_may_begin_at_zero(kind):
    model, data = mlp(), batches(3)
    optimizer = make(kind, model, kl_clip=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    start = model[0].weight.clone()
    train(optimizer, model, data[:1], schedule)
    assert torch.equal(model[0].weight, start)
    train(optimizer, model, data[1:], schedule)
    assert not torch.equal(model[0].weight, start)


@each_optimizer
@pytest.mark.parametrize("moment", ["before backward", "after backward"])
def test_gradients_are_not_zeroed_between_a_loss_and_its_step(kind, moment):
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(kind, model)
    before = snapshot(optimizer)

    def attempt():
        with optimizer.sampled() as draw:
            loss = draw.nll(model(x), y)
            if moment == "after backward":
                loss.backward()
            optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"zero_grad\(\) inside sampled\(\).*none is needed"):
        attempt()
    assert_unchanged(before, optimizer)


@each_optimizer
def test_gradients_may_be_zeroed_where_there_is_no_loss_yet(kind):
    models, data = [mlp(), mlp()], batches(3)
    plain, zeroing = (make(kind, model) for model in models)
    train(plain, models[0], data)
    for x, y in data:
        with zeroing.sampled() as draw:
            with torch.no_grad():
                draw.nll(models[1](x), y)
            zeroing.zero_grad()
            draw.nll(models[1](x), y).backward()
        zeroing.step()
        zeroing.zero_grad()
    compare_optimizers(plain, zeroing)


class Normed(nn.Sequential):
    """Norm layers with running statistics, and buffers that are no statistics."""

    def __init__(self, momentum=0.1):
        norms = [nn.BatchNorm2d(2, momentum=momentum), nn.BatchNorm1d(8, momentum=momentum)]
        super().__init__(nn.Conv2d(1, 2, 2), norms[0], nn.Flatten(), nn.Linear(18, 8), norms[1], nn.Linear(8, 2))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))


def images(bad=False):
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    if bad:
        x[2, 0, 1, 1] = math.nan
    return x, torch.arange(6) % 2


@each_optimizer
@pytest.mark.parametrize("form", ["closure", "explicit"])
@pytest.mark.parametrize("momentum", [0.1, None], ids=str)
def test_a_refused_batch_leaves_running_statistics_as_they_were(kind, form, momentum):
    model = Normed(momentum)
    optimizer = make(kind, model, ng.Categorical(), factor_every=3)
    take_step(optimizer, model, images(), form)
    before = snapshot(optimizer)
    with pytest.raises(ng.NonFiniteError, match=r"raise damping$"):
        take_step(optimizer, model, images(bad=True), form)
    assert_unchanged(before, optimizer, but=("generators",))
    assert optimizer.posterior().predict(images()[0], num_samples=2).probs.isfinite().all()
    take_step(optimizer, model, images(), form)


@pytest.mark.parametrize("how", ["an exception", "zero_grad", "a later draw", "a GradScaler"])
def test_running_statistics_are_taken_back_however_a_bad_batch_is_dropped(how):
    model = Normed()
    optimizer = make(ng.NoisyKFAC, model, ng.Categorical())
    take_step(optimizer, model, images(), "explicit")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def draw(bad, stop=False):
        x, y = images(bad)
        with optimizer.sampled() as draw:
            loss = draw.nll(model(x), y)
            assert not stop, "stopped"
            loss.backward()

    if how == "an exception":
        with pytest.raises(AssertionError, match="stopped"):
            draw(bad=True, stop=True)
    elif how == "zero_grad":
        draw(bad=True)
        optimizer.zero_grad()
    elif how == "a later draw":
        draw(bad=False)
        draw(bad=True)
        with pytest.raises(ng.NonFiniteError):
            optimizer.step()
    else:
        draw(bad=True)
        optimizer.found_inf = torch.ones(1)
        optimizer.step()
        del optimizer.found_inf
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class RunningMean(nn.Module):
    """A running statistic that the library knows nothing of."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        self.seen.lerp_(x.detach().mean(0), 0.1)
        return x - self.seen


def test_a_buffer_that_cannot_be_taken_back_is_named():
    model, ((x, y),) = nn.Sequential(RunningMean(), *mlp()), batches(1)
    optimizer = make(ng.NoisyAdam, model)
    with pytest.raises(ng.NonFiniteError, match=r"But 0\.seen took bad numbers"):
        train(optimizer, model, [(x * math.nan, y)])
