"""Micro-batches, several weight samples, and what happens to them when something goes wrong in between."""

from __future__ import annotations

import pytest
import torch

import noisygrad as ng
from noisygrad.optim.accumulated import Accumulated
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


@each_optimizer
def test_two_micro_batches_equal_one_large_batch(kind):
    data = batches(6, size=8)
    models = [mlp(), mlp()]
    small, large = (make(kind, model, fisher="exact", momentum=0.5, kl_clip=1e-2) for model in models)
    for x, y in data:
        with small.sampled() as draw:
            for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
                draw.nll(models[0](part_x), part_y).backward()
        small.step()
    train(large, models[1], data)
    compare_optimizers(small, large, 1e-10)


@each_optimizer
def test_unequal_micro_batches_are_weighed_by_what_their_losses_are_scaled_by(kind):
    """Scaled by their share of the examples, they equal one large batch; as they are, each counts as much."""
    models = [mlp(), mlp(), mlp()]
    shares, large, equal = (make(kind, model, fisher="exact") for model in models)
    for x, y in batches(3, size=6):
        for optimizer, model, weights in ((shares, models[0], (2 / 3, 1 / 3)), (equal, models[2], (1.0, 1.0))):
            with optimizer.sampled() as draw:
                for part, weight in zip((slice(0, 4), slice(4, 6)), weights, strict=True):
                    (draw.nll(model(x[part]), y[part]) * weight).backward()
            optimizer.step()
        train(large, models[1], [(x, y)])
    compare_optimizers(shares, large, 1e-10)
    assert differences(snapshot(equal), snapshot(large), 1e-3)


@each_optimizer
@pytest.mark.parametrize("options", [{}, {"stats_every": 3, "factor_every": 2, "damping": 0.1}, {"noise": False}])
def test_closure_equals_explicit_form(kind, options):
    data = batches(5)
    models = [mlp(), mlp()]
    closure, explicit = (make(kind, model, **options) for model in models)
    losses = train(closure, models[0], data)
    for (x, y), expected in zip(data, losses, strict=True):
        with explicit.sampled() as draw:
            loss = draw.nll(models[1](x), y)
            loss.backward()
        assert loss.item() == expected
        assert explicit.step() is None
    compare_optimizers(closure, explicit)


@each_optimizer
def test_two_samples_equal_two_contexts(kind):
    data = batches(4)
    models = [mlp(), mlp(), mlp()]
    two, explicit, one = (make(kind, model, mc_samples=count) for model, count in zip(models, (2, 1, 1), strict=True))
    losses = train(two, models[0], data)
    train(one, models[2], data)
    for (x, y), expected in zip(data, losses, strict=True):
        seen = []
        for _ in range(2):
            with explicit.sampled() as draw:
                loss = draw.nll(models[1](x), y)
                loss.backward()
                seen.append(loss.item())
        explicit.step()
        assert expected == pytest.approx(sum(seen) / 2, rel=1e-12)
    compare_optimizers(two, explicit)
    assert (two.weights.mean.flat - one.weights.mean.flat).abs().max() > 1e-6


def test_the_gradient_is_the_mean_over_samples():
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(ng.NoisyAdam, model, ng.Gaussian(0.5), momentum=0.0, prior_variance=float("inf"), fisher="exact")
    before = optimizer.weights.mean.flat.clone()
    gradients = []
    for _ in range(3):
        with optimizer.sampled() as draw:
            inside = draw.nll(model(x), y)
            gradients.append(torch.autograd.grad(inside, list(model.parameters()), retain_graph=True))
            inside.backward()
    optimizer.step()
    (fisher,) = (s.fisher for s in optimizer.covariance.statistics.values())
    mean = torch.cat([torch.stack([g[i] for g in gradients]).mean(0).flatten() for i in range(len(gradients[0]))])
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = torch.cat([p.detach().flatten() for p in mlp().parameters()])
    fisher_by_parameter = _in_order(optimizer, fisher)
    torch.testing.assert_close(after, start - 0.05 * mean / fisher_by_parameter, rtol=1e-10, atol=1e-12)
    assert not torch.equal(before, optimizer.weights.mean.flat)


def _in_order(optimizer, flat):
    from noisygrad.posterior.weights import FlatWeights

    tensors = FlatWeights(optimizer.structure, flat.clone()).as_dict()
    return torch.cat([tensors[name].flatten() for name, _ in optimizer.model.named_parameters()])


@each_optimizer
def test_zero_grad_drops_what_is_pending(kind):
    first, second = batches(2)
    models = [mlp(), mlp()]
    clean, dropped = (make(kind, model, noise=False, fisher="exact") for model in models)
    with dropped.sampled() as draw:
        draw.nll(models[1](first[0]), first[1]).backward()
    dropped.zero_grad()
    assert_nothing_pending(dropped)
    for optimizer, model in zip((clean, dropped), models, strict=True):
        train(optimizer, model, [second])
    compare_optimizers(clean, dropped)


def test_step_without_a_draw_is_refused():
    optimizer = make(ng.NoisyKFAC, mlp())
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="nothing to work with"):
        optimizer.step()
    assert_unchanged(before, optimizer)


def test_a_loss_that_bypasses_the_draw_is_refused_where_statistics_are_due():
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model)
    before = snapshot(optimizer)
    with optimizer.sampled():
        (model(x) - y).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"draw\.nll"):
        optimizer.step()
    optimizer.zero_grad()
    assert_unchanged(before, optimizer, but=("generators",))


def fail_by_exception(optimizer, model, x, y):
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
        raise KeyError("a user's mistake")


def fail_by_leaving_a_loss(optimizer, model, x, y):
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
        draw.nll(model(x), y)


def fail_by_nesting(optimizer, model, x, y):
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
        with optimizer.sampled():
            pass


def fail_by_stepping_inside(optimizer, model, x, y):
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
        optimizer.step()


def fail_by_closure_inside(optimizer, model, x, y):
    with optimizer.sampled():
        optimizer.step(lambda: (model(x), y))


def fail_by_interrupt(optimizer, model, x, y):
    def closure():
        model(x)
        raise KeyboardInterrupt

    optimizer.step(closure)


def fail_by_bad_closure(optimizer, model, x, y):
    optimizer.step(lambda: model(x).tolist())


FAILURES = {
    fail_by_exception: KeyError,
    fail_by_leaving_a_loss: RuntimeError,
    fail_by_nesting: RuntimeError,
    fail_by_stepping_inside: RuntimeError,
    fail_by_closure_inside: RuntimeError,
    fail_by_interrupt: KeyboardInterrupt,
    fail_by_bad_closure: TypeError,
}


@each_optimizer
@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_failure_inside_leaves_everything_as_it_was(kind, fail, dtype):
    model, data = mlp(dtype=dtype), batches(4, dtype=dtype)
    optimizer = make(kind, model)
    train(optimizer, model, data[:2])
    before = snapshot(optimizer)
    with optimizer.sampled() as draw:  # an earlier draw is dropped too: its gradients cannot be told apart
        draw.nll(model(data[2][0]), data[2][1]).backward()
    with pytest.raises(FAILURES[fail]):
        fail(optimizer, model, *data[3])
    by_closure = fail in {fail_by_interrupt, fail_by_bad_closure}  # which begins with a zero_grad
    assert_unchanged(before, optimizer, but=("generators",) if by_closure else ())
    train(optimizer, model, data[3:])


@pytest.mark.parametrize("noise", [True, False])
def test_the_posterior_inside_a_draw_is_that_of_the_mean(noise):
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model, noise=noise)
    before = snapshot(optimizer)
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
        inside = optimizer.posterior()
    assert all(torch.equal(inside.mean[name], before[f"/model/{name}"]) for name in inside.mean)
    optimizer.zero_grad()
    assert_unchanged(before, optimizer, but=("generators",))


@each_optimizer
def test_evaluation_inside_a_draw_changes_nothing(kind):
    ((x, y), (other, target)) = batches(2)
    models = [mlp(), mlp()]
    plain, looking = (make(kind, model) for model in models)
    train(plain, models[0], [(x, y)])
    with looking.sampled() as draw:
        with torch.no_grad():
            assert not draw.nll(models[1](other), target).requires_grad
        models[1](other)  # a forward pass with a graph, of no consequence
        draw.nll(models[1](x), y).backward()
        with torch.no_grad():
            models[1](other)
    looking.step()
    compare_optimizers(plain, looking)


def test_a_draw_is_over_when_its_context_is():
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(ng.NoisyAdam, model)
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
    with pytest.raises(RuntimeError, match="draw is over"):
        draw.nll(model(x), y)


@pytest.mark.parametrize("options", [{"mc_samples": 2}, {"fisher_pass": "fresh"}])
def test_zero_grad_in_a_closure_drops_no_earlier_draw(options):
    data = batches(3)
    models = [mlp(), mlp(), mlp()]
    plain, zeroing, dropping = (make(ng.NoisyKFAC, model, **options) for model in models)
    train(plain, models[0], data)
    for x, y in data:
        zeroing.step(lambda x=x, y=y: (zeroing.zero_grad(), (models[1](x), y))[1])
    compare_optimizers(plain, zeroing)
    x, y = data[0]
    before = snapshot(dropping)
    with pytest.raises(RuntimeError, match="Take zero_grad out"):
        dropping.step(lambda: (models[2].zero_grad(), (models[2](x), y))[1])
    assert_unchanged(before, dropping, but=("generators",))


@each_optimizer
def test_all_forward_passes_before_all_losses(kind):
    """Each loss has the statistics of its own forward pass, whichever came first."""
    (x1, y1), (x2, y2) = batches(2)
    models = [mlp(), mlp()]
    apart, together = (make(kind, model, fisher="exact") for model in models)
    with apart.sampled() as draw:
        draw.nll(models[0](x1), y1).backward()
        draw.nll(models[0](5 * x2), y2).backward()
    with together.sampled() as draw:
        first, second = models[1](x1), models[1](5 * x2)
        (draw.nll(first, y1) + draw.nll(second, y2)).backward()
    for optimizer in (apart, together):
        optimizer.step()
    compare_optimizers(apart, together, 1e-10)


@pytest.mark.parametrize(("weight", "mask", "expected"), [(0.0, None, 0), (3.0, None, 1), (3.0, 0.0, 0), (3.0, 1.0, 1)])
def test_statistics_of_no_example_of_any_rank_change_nothing(weight, mask, expected):
    found = Accumulated(fisher_weight=torch.tensor(weight))
    assert found.used_by_ranks(None if mask is None else torch.tensor(mask)) == expected
    alone = Accumulated(fisher_weight=weight)
    assert alone.used_by_ranks(None) is None
