"""A step takes the gradients of its draws, all of them and no others: what was dropped or added is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import noisygrad as ng
from support.compare import assert_unchanged, batches, each_optimizer, make, mlp, snapshot


def draw(optimizer, model, batch):
    x, y = batch
    with optimizer.sampled() as current:
        current.nll(model(x), y).backward()


def dropped(optimizer, model, batch):
    draw(optimizer, model, batch)
    model.zero_grad()


def zeroed(optimizer, model, batch):
    draw(optimizer, model, batch)
    model.zero_grad(set_to_none=False)


def dropped_by_another(optimizer, model, batch):
    other = torch.optim.SGD(model.parameters(), 0.1)
    draw(optimizer, model, batch)
    other.zero_grad()


def replaced(optimizer, model, batch):
    dropped(optimizer, model, batch)
    model(batch[0]).square().mean().backward()


def dropped_in_part(optimizer, model, batch):
    draw(optimizer, model, batch)
    model[0].weight.grad = None


def dropped_inside(optimizer, model, batch):
    x, y = batch
    with optimizer.sampled() as current:
        current.nll(model(x), y).backward()
        model.zero_grad()


def dropped_between_two_losses(optimizer, model, batch):
    x, y = batch
    with optimizer.sampled() as current:
        current.nll(model(x), y).backward()
        model.zero_grad()
        current.nll(model(x), y).backward()


def dropped_in_a_second_context(optimizer, model, batch):
    x, y = batch
    draw(optimizer, model, batch)
    with optimizer.sampled() as current:
        model.zero_grad()
        current.nll(model(x), y).backward()


def added(optimizer, model, batch):
    draw(optimizer, model, batch)
    model(batch[0]).square().mean().backward()


def added_to_one(optimizer, model, batch):
    draw(optimizer, model, batch)
    model[0].weight.square().sum().backward()


DROPPED = [
    dropped, zeroed, dropped_by_another, replaced, dropped_in_part, dropped_inside, dropped_between_two_losses,
    dropped_in_a_second_context,
]  # fmt: skip


@each_optimizer
@pytest.mark.parametrize("loop", DROPPED, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("steps", [0, 2])
def test_gradients_that_were_dropped_are_missed(kind, loop, steps):
    """The step would be that of the prior alone, or of half of the batches."""
    if loop is zeroed:
        steps += steps // 2  # which clipping may do, so only some steps look
    model, data = mlp(), batches(4)
    optimizer = make(kind, model)
    for batch in data[:steps]:
        draw(optimizer, model, batch)
        optimizer.step()
    before = snapshot(optimizer)

    def attempt():
        loop(optimizer, model, data[-1])
        optimizer.step()

    with pytest.raises(RuntimeError, match="Take zero_grad out"):
        attempt()
    assert_unchanged(before, optimizer)
    draw(optimizer, model, data[-1])
    optimizer.step()


@each_optimizer
@pytest.mark.parametrize("loop", [added, added_to_one], ids=lambda loop: loop.__name__)
def test_gradients_that_were_added_to_after_the_last_draw_are_refused(kind, loop):
    """In the first step and those of number 2, 4, 8, …: a loop is the same in all."""
    model, data = mlp(), batches(4)
    optimizer = make(kind, model)
    for number, batch in enumerate(data, start=1):
        if number != 3:
            before = snapshot(optimizer)
            loop(optimizer, model, batch)
            with pytest.raises(RuntimeError, match="after the last draw, outside sampled"):
                optimizer.step()
            assert_unchanged(before, optimizer)
        draw(optimizer, model, batch)
        optimizer.step()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_gradient_of_a_layer_that_had_none_is_refused_in_every_step():
    model, data = mlp(), batches(3)
    optimizer = make(ng.NoisyKFAC, model)
    for batch in data[:2]:
        draw(optimizer, model, batch)
        optimizer.step()
    with optimizer.sampled() as current:
        current.nll(model[4](torch.ones(6, 4).double()), data[2][1]).backward()
    model[0].weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="after the last draw, outside sampled"):
        optimizer.step()


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clipped_by_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def halved(model):
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def frozen_for_a_step(model):
    model[0].weight.grad.zero_()


def looked_at(model):
    model(torch.ones(1, 3).double())
    torch.autograd.grad(model(torch.ones(1, 3).double()).sum(), list(model.parameters()))


@each_optimizer
@pytest.mark.parametrize("change", [clipped, clipped_by_value, halved, frozen_for_a_step, looked_at])
def test_gradients_may_be_changed_in_place_before_the_step(kind, change):
    model, data = mlp(), batches(4)
    optimizer = make(kind, model)
    for batch in data:
        draw(optimizer, model, batch)
        draw(optimizer, model, batch)
        change(model)
        optimizer.step()
    assert optimizer.steps == 4


def test_hooks_of_the_users_own_stay():
    model, data = mlp(), batches(3)
    optimizer, seen = make(ng.NoisyKFAC, model), []
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
    for batch in data:
        draw(optimizer, model, batch)
        optimizer.step()
    assert len(seen) == 3
    handle.remove()
