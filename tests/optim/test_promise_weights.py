"""A loss's weight is seen: whatever it is multiplied by before `backward`, a step takes the mean over losses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import noisygrad as ng
from support.compare import (
    assert_nothing_pending,
    assert_unchanged,
    batches,
    compare_optimizers,
    differences,
    each_optimizer,
    make,
    mlp,
    snapshot,
    train,
)
from support.replay_executor import replayed

SCALE = 2.0**12
BASES = ("–4/factors/sampler.left", "–4/factors/sampler.right")
"""Eigenvectors, whose signs follow the last digit."""
COUPLINGS = ("cross_inputs", "/factors/")
"""Two heads are never seen in one backward pass, so their inputs are not coupled; nor are their gradients."""


def accumulate(optimizer, model, batch, factors, *, together=False, scaler=None):
    """Micro-batches of one step, their losses multiplied by factors, each in a context of its own or all in one."""
    parts = list(zip(*(tensor.chunk(len(factors)) for tensor in batch), factors, strict=True))
    for context in [parts] if together else [[part] for part in parts]:
        with optimizer.sampled() as draw:
            for x, y, factor in context:
                loss = draw.nll(model(x), y) * factor
                (loss if scaler is None else scaler.scale(loss)).backward()


def pair(kind, *, dtype=torch.float64, **options):
    models = [mlp(dtype=dtype), mlp(dtype=dtype)]
    return models, [make(kind, model, **options) for model in models]


@each_optimizer
@pytest.mark.parametrize("together", [False, True], ids=["contexts", "one context"])
@pytest.mark.parametrize("factor", [0.25, 4.0, 1 / 3])
def test_divided_losses_are_averaged_once(kind, together, factor):
    """As accelerate's `accumulate(4)` divides them."""
    models, (divided, plain) = pair(kind, kl_clip=1e-2, damping=0.01)
    for batch in batches(5, size=8):
        accumulate(divided, models[0], batch, [factor] * 4, together=together)
        accumulate(plain, models[1], batch, [1.0] * 4, together=together)
        divided.step()
        plain.step()
    compare_optimizers(divided, plain, 1e-10, but=BASES)


@each_optimizer
def test_a_scaler_divided_losses_and_clipping_change_nothing_else(kind):
    models, (scaled, plain) = pair(kind, dtype=torch.float32, factor_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for number, batch in enumerate(batches(4, size=8, dtype=torch.float32)):
        accumulate(scaled, models[0], batch, [0.5, 0.5], scaler=scaler)
        accumulate(plain, models[1], batch, [0.5, 0.5])
        if number % 2:
            scaled.unscale_(scaler)
            for model in models:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(scaled)
        scaler.update()
        plain.step()
    compare_optimizers(scaled, plain, 2e-5)


def test_gradients_that_were_unscaled_unseen_are_refused():
    models, (optimizer, clean) = pair(ng.NoisyKFAC, dtype=torch.float32, noise=False, fisher="exact")
    first, second = batches(2, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = snapshot(optimizer)
    accumulate(optimizer, models[0], first, [1.0], scaler=scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"call optimizer\.unscale_\(scaler\) in place of"):
        scaler.step(optimizer)
    assert_unchanged(before, optimizer, but=("generators",))
    for one, model in zip((optimizer, clean), models, strict=True):
        accumulate(one, model, second, [1.0])
        one.step()
    compare_optimizers(optimizer, clean)


@each_optimizer
def test_gradients_that_were_unscaled_before_the_last_batch_are_refused(kind):
    """Those of later batches would have the scale still."""
    models, (optimizer, clean) = pair(kind, dtype=torch.float32, noise=False, fisher="exact")
    first, second = batches(2, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    accumulate(optimizer, models[0], first, [1.0], scaler=scaler)
    optimizer.unscale_(scaler)
    with pytest.raises(RuntimeError, match="once, after the last draw"):
        accumulate(optimizer, models[0], second, [1.0], scaler=scaler)
    scaler.step(optimizer)  # what was refused has changed nothing
    scaler.update()
    accumulate(clean, models[1], first, [1.0])
    clean.step()
    compare_optimizers(optimizer, clean, 2e-5)


@each_optimizer
@pytest.mark.parametrize("replay", [False, True], ids=["", "replayed"])
def test_factors_are_read_where_the_step_is_made(kind, replay, monkeypatch):
    """On a GPU they are tensors, which a replayed step reads anew."""
    with monkeypatch.context() as patch:
        if replay:
            replayed(patch)
        models, (scaled, plain) = pair(kind, stats_every=3, factor_every=4)
    for number, batch in enumerate(batches(20)):
        accumulate(scaled, models[0], batch, [0.1 * (number + 1)])
        accumulate(plain, models[1], batch, [1.0])
        scaled.step()
        plain.step()
    compare_optimizers(scaled, plain, 1e-9)


@pytest.mark.parametrize(("factors", "words"), [((0.0, 0.0), "zero"), ((3.0, -1.0), "negative"), ((-1.0,), "negative")])
def test_losses_without_a_mean_are_refused(factors, words):
    models, (optimizer, _) = pair(ng.NoisyKFAC)
    before = snapshot(optimizer)
    accumulate(optimizer, models[0], batches(1)[0], factors)
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert_unchanged(before, optimizer, but=("generators",))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("others", [(), (1.0,)], ids=["alone", "with another"])
def test_a_factor_that_is_not_finite_is_refused_or_skipped(factor, others):
    models, (optimizer, skipped) = pair(ng.NoisyKFAC, dtype=torch.float32)
    ((x, y),) = batches(1, dtype=torch.float32)
    before = snapshot(optimizer)
    accumulate(optimizer, models[0], (x, y), [*others, factor])
    with pytest.raises(ng.NonFiniteError, match="a loss was multiplied by a number that is infinite or NaN"):
        optimizer.step()
    assert_unchanged(before, optimizer, but=("generators",))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    accumulate(skipped, models[1], (x, y), [*others, factor], scaler=scaler)
    scaler.step(skipped)
    assert skipped.steps == 1
    assert not differences(before, snapshot(skipped), but=("generators", "/steps"))


@pytest.mark.parametrize("factors", [(0.0,), (-1.0,), (3.0, -1.0), (float("inf"),)])
def test_what_a_gpu_does_with_losses_without_a_mean(factors, monkeypatch):
    """It masks the step, and says so at the next refresh."""
    with monkeypatch.context() as patch:
        replayed(patch)
        models, (optimizer, _) = pair(ng.NoisyKFAC, factor_every=100)
    train(optimizer, models[0], batches(4))
    before = optimizer.weights.mean.flat.clone()
    accumulate(optimizer, models[0], batches(1)[0], factors)
    optimizer.step()
    assert torch.equal(optimizer.weights.mean.flat, before)
    with pytest.raises(ng.NonFiniteError, match="zero or negative"):
        optimizer.posterior()


@each_optimizer
def test_other_terms_keep_their_ratio_to_the_nll(kind):
    models, optimizers = pair(kind)
    for x, y in batches(4):
        for optimizer, model, factor in zip(optimizers, models, (1.0, 0.125), strict=True):
            with optimizer.sampled() as draw:
                penalty = sum(parameter.square().sum() for parameter in model.parameters())
                (factor * (draw.nll(model(x), y) + 0.1 * penalty)).backward()
            optimizer.step()
    compare_optimizers(*optimizers, 1e-10)


@each_optimizer
def test_a_loss_that_is_only_looked_at_does_not_count(kind):
    models, (plain, looking) = pair(kind)
    for x, y in batches(3):
        train(plain, models[0], [(x, y)])
        with looking.sampled() as draw:
            output = models[1](x)
            assert not draw.nll(output.detach(), y).requires_grad
            loss = draw.nll(output, y)
            torch.autograd.grad(loss, list(models[1].parameters()), retain_graph=True)
            loss.backward()
        looking.step()
    compare_optimizers(plain, looking)


def test_a_loss_that_leaves_no_gradients_is_refused():
    models, (optimizer, _) = pair(ng.NoisyKFAC)
    ((x, y),) = batches(1)
    before = snapshot(optimizer)

    def differentiate():
        with optimizer.sampled() as draw:
            torch.autograd.grad(draw.nll(models[0](x), y), list(models[0].parameters()))

    with pytest.raises(RuntimeError, match=r"autograd\.grad leaves no gradients"):
        differentiate()
    assert_unchanged(before, optimizer)


@pytest.mark.parametrize(("form", "draws"), [("explicit", 0), ("explicit", 1), ("closure", 0)])
def test_gradients_that_were_made_outside_a_draw_are_refused(form, draws):
    """Lightning's automatic optimisation differentiates all but the last of `accumulate_grad_batches` there."""
    models, (optimizer, _) = pair(ng.NoisyKFAC)
    first, (x, y) = batches(2)
    for _ in range(draws):
        accumulate(optimizer, models[0], first, [1.0])
    (models[0](x) - y).square().mean().backward()
    forms = {
        "explicit": lambda: accumulate(optimizer, models[0], (x, y), [1.0]),
        "closure": lambda: optimizer.step(lambda: (models[0](x), y)),
    }
    with pytest.raises(RuntimeError, match="made, or changed, outside sampled"):
        forms[form]()
    optimizer.zero_grad()
    assert_nothing_pending(optimizer)
    train(optimizer, models[0], [(x, y)])


def test_a_closure_after_draws_may_only_do_what_frameworks_do_there():
    """Lightning's manual optimisation gives `step` a closure that computes nothing."""
    models, (given, plain) = pair(ng.NoisyKFAC)
    for batch in batches(3):
        for optimizer, model in zip((given, plain), models, strict=True):
            accumulate(optimizer, model, batch, [1.0, 1.0])
        given.step(given.zero_grad)  # which does nothing there
        plain.step()
    compare_optimizers(given, plain)
    accumulate(given, models[0], batch, [1.0])
    with pytest.raises(TypeError, match="must compute nothing"):
        given.step(lambda: (models[0](batch[0]), batch[1]))


def test_a_loss_that_is_differentiated_again_later_is_refused():
    models, (optimizer, _) = pair(ng.NoisyKFAC)
    ((x, y),) = batches(1)

    def differentiate():
        with optimizer.sampled() as draw:
            loss = draw.nll(models[0](x), y)
            loss.backward(retain_graph=True)
            draw.nll(models[0](x), y).backward()
            loss.backward()

    with pytest.raises(RuntimeError, match="differentiated again"):
        differentiate()
    assert_nothing_pending(optimizer)


# Several heads


class TwoHeads(nn.Module):
    def __init__(self, *, joined: bool):
        super().__init__()
        self.trunk, self.left, self.right = mlp(sizes=(3, 5, 4)), nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
        for seed, head in enumerate((self.left, self.right)):
            nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(seed))
            nn.init.zeros_(head.bias)
        self.joined = joined

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        outputs = self.left(hidden), self.right(hidden)
        return torch.cat(outputs, -1) if self.joined else outputs


@each_optimizer
@pytest.mark.parametrize("options", [{}, {"stats_every": 3, "factor_every": 2}], ids=["", "rare statistics"])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("noise", [0.5, None], ids=["fixed noise", "learned noise"])
def test_heads_of_one_forward_pass_add_as_one_output_would(kind, options, factor, noise):
    apart, together = TwoHeads(joined=False), TwoHeads(joined=True)
    two, one = (make(kind, m, ng.Gaussian(noise), fisher="exact", **options) for m in (apart, together))
    for x, y in batches(5, outputs=4):
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):  # passes are averaged all the same
            with two.sampled() as draw:
                left, right = apart(part_x)
                losses = draw.nll(left, part_y[:, :2]) + draw.nll(right, part_y[:, 2:])
                (factor * losses).backward()
            with one.sampled() as draw:
                (factor * draw.nll(together(part_x), part_y)).backward()
        two.step()
        one.step()
    compare_optimizers(two, one, 1e-9, but=COUPLINGS)


def test_noise_is_learned_of_heads_with_their_weights():
    """A head of half the weight has half the outputs and half the squared error of the first."""
    model, ((x, y),) = TwoHeads(joined=False), batches(1)
    optimizer = make(ng.NoisyAdam, model, ng.Gaussian(noise_decay=0.0), noise=False, num_data=60)
    with optimizer.sampled() as draw:
        left, right = model(x)
        errors = [float((output.detach() - y).square().sum() / len(x)) for output in (left, right)]
        (3 * draw.nll(left, y) + 1.5 * draw.nll(right, y)).backward()
    optimizer.step()
    shape, rate = 6 + 60 / 2 * (2 + 0.5 * 2), 6 + 60 / 2 * (errors[0] + 0.5 * errors[1])
    assert float(optimizer.likelihood.noise_shape) == pytest.approx(shape)
    assert float(optimizer.likelihood.noise_rate) == pytest.approx(rate)


@each_optimizer
def test_heads_have_the_fisher_of_their_weights(kind):
    """F = F_left + ¼ F_right, where the largest weight is that of the pass."""
    ((x, y),) = batches(1)
    found = []
    for weights in ((1.0, 0.25), (1.0, 0.0), (0.0, 1.0)):
        model = TwoHeads(joined=False)
        optimizer = make(kind, model, ng.Gaussian(0.5), fisher="exact", noise=False)
        with optimizer.sampled() as draw:
            left, right = model(x)
            (8 * weights[0] * draw.nll(left, y) + 8 * weights[1] * draw.nll(right, y)).backward()
        found.append(optimizer.accumulated.statistics)
    for name, both in found[0].items():
        left, right = (one[name].averages() for one in found[1:])
        for part, tensor in both.averages().items():
            expected = left[part] if "inputs" in part else left[part] + 0.25 * right[part]
            torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12)


@each_optimizer
def test_a_head_after_backward_is_refused(kind):
    model, ((x, y),) = TwoHeads(joined=False), batches(1)
    optimizer = make(kind, model)
    before = snapshot(optimizer)

    def differentiate():
        with optimizer.sampled() as draw:
            left, right = model(x)
            draw.nll(left, y).backward(retain_graph=True)
            draw.nll(right, y).backward()

    with pytest.raises(RuntimeError, match="compute all of them before backward"):
        differentiate()
    assert_unchanged(before, optimizer)


@pytest.mark.parametrize("heads", [1, 2])
def test_nothing_of_a_batch_outlives_its_step(heads):
    """Not even in a cycle, which would keep statistics until garbage is collected."""
    model, ((x, y),) = TwoHeads(joined=False), batches(1)
    optimizer = make(ng.NoisyKFAC, model)
    gc.collect()
    gc.disable()
    try:
        with optimizer.sampled() as draw:
            sum(draw.nll(output, y) for output in model(x)[:heads]).backward()
            calls = [weakref.ref(call) for call in optimizer.accumulated.pending]
        optimizer.step()
        del draw
        assert [call() for call in calls] == [None] * heads
    finally:
        gc.enable()
