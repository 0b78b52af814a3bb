"""The contract of `torch.optim.Optimizer`, and what each argument does to a step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import noisygrad as ng
from noisygrad.posterior.weights import FlatWeights
from support.compare import (
    assert_unchanged,
    batches,
    compare_optimizers,
    each_optimizer,
    each_with_improper_prior,
    make,
    mlp,
    snapshot,
    train,
)

SCHEDULERS = {
    "StepLR": (lambda o: lr_scheduler.StepLR(o, 2, gamma=0.1), [0.05, 0.05, 0.005, 0.005]),
    "LambdaLR": (lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)), [0.05, 0.025, 0.05 / 3, 0.0125]),
    "Cosine": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
        [0.025 * (1 + math.cos(math.pi * k / 4)) for k in range(4)],
    ),
    "warm-up from 0": (lambda o: lr_scheduler.LambdaLR(o, float), [0.0, 0.05, 0.1, 0.15]),
}


def flat_parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@each_optimizer
def test_is_a_torch_optimizer(kind):
    model = mlp()
    optimizer = make(kind, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    with pytest.raises(RuntimeError, match="groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, model, batches(1))
    assert calls == ["before", "after"]


def direction(optimizer, model, batch, **settings):
    """P⁻¹ of the gradient of a batch: the step of a twin that has the optimiser's state, lr 1 and no momentum."""
    twin_model = mlp()
    twin_model.load_state_dict(model.state_dict())
    twin = make(type(optimizer), twin_model, lr=1.0, momentum=0.0, **settings)
    twin.load_state_dict(optimizer.state_dict() | {"param_groups": twin.state_dict()["param_groups"]})
    train(twin, twin_model, [batch])
    return flat_parameters(model) - flat_parameters(twin_model)


@each_optimizer
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_a_schedule_sets_the_step(kind, name, tensor):
    """Without momentum a step is lr times a direction that does not depend on lr."""
    make_schedule, expected = SCHEDULERS[name]
    model, settings = mlp(), {"noise": False, "fisher": "exact"}
    lr = torch.tensor(0.05, dtype=torch.float64) if tensor else 0.05
    optimizer = make(kind, model, lr=lr, momentum=0.0, **settings)
    schedule = make_schedule(optimizer)
    for batch, rate in zip(batches(4), expected, strict=True):
        whole, start = direction(optimizer, model, batch, **settings), flat_parameters(model)
        train(optimizer, model, [batch], schedule)
        torch.testing.assert_close(start - flat_parameters(model), rate * whole)


@each_optimizer
@pytest.mark.parametrize("mode", ["average", "heavy_ball"])
def test_one_cycle_drives_momentum_too(kind, mode):
    """Between refreshes at steps 8 and 16 a step is linear in all gradients, and can be written out."""
    settings = {"momentum_mode": mode, "noise": False, "fisher": "exact", "stats_every": 1000, "factor_every": 1000}
    model, data = mlp(), batches(14)
    optimizer = make(kind, model, momentum=0.0, **settings)
    train(optimizer, model, data[:8])
    last = direction(optimizer, model, data[8], **settings)
    train(optimizer, model, data[8:9])
    momentum, weight = (torch.zeros_like(last), 0.0) if mode == "average" else (last, 1.0)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6, base_momentum=0.8, max_momentum=0.95)
    seen = set()
    for batch in data[9:]:
        rate, decay = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
        share = 1 - decay if mode == "average" else 1.0
        momentum = decay * momentum + share * direction(optimizer, model, batch, **settings)
        weight = decay * weight + share if mode == "average" else 1.0
        start = flat_parameters(model)
        train(optimizer, model, [batch], schedule)
        torch.testing.assert_close(start - flat_parameters(model), rate * momentum / weight)
        seen.add(decay)
    assert len(seen) > 3


def in_group(optimizer, name):
    """Where a parameter lies in the flat vector."""
    marks = FlatWeights.zeros(optimizer.structure, optimizer.dtype, optimizer.device)
    marks.load_dict_({n: torch.full_like(p, float(n == name)) for n, p in optimizer.structure.parameters.items()})
    return marks.flat.bool()


@each_optimizer
@pytest.mark.parametrize("mode", ["average", "heavy_ball"])
def test_each_group_has_its_own_settings(kind, mode):
    """Groups are separate blocks, so each moves as in an optimiser that has its settings for all."""
    options = {"2.*": {"lr": 0.2, "momentum": 0.3, "damping": 0.5}, "4.*": {"lr": 0.01, "momentum": 0.0}}
    everywhere = [{}, options["2.*"], options["4.*"]]
    common = {"noise": False, "fisher": "exact", "momentum_mode": mode, "lr": 0.05, "momentum": 0.9}

    def first_steps(groups, settings):
        model = mlp()
        optimizer = make(kind, model, groups=groups, **common | settings)
        train(optimizer, model, batches(1))
        return optimizer

    separate = {pattern: {} for pattern in options}
    mixed = first_steps(options, {})
    for layer, settings in zip("024", everywhere, strict=True):
        alone = first_steps(separate, settings)
        name = f"{layer}.weight"
        assert torch.equal(mixed.weights.mean.as_dict()[name], alone.weights.mean.as_dict()[name])
        if settings.get("momentum") != 0.0:
            velocities = [o.algorithm.momentum.average[in_group(o, name)] for o in (mixed, alone)]
            assert torch.equal(*velocities)
    if mode == "average":
        train(mixed, mixed.model, batches(2))
        torch.testing.assert_close(mixed.algorithm.momentum.weight, 1 - torch.tensor([0.9, 0.3, 0.0]).double() ** 3)


@each_optimizer
def test_a_group_without_noise_is_a_point(kind):
    model, ((x, _),) = mlp(), batches(1)
    optimizer = make(kind, model, groups={"2.*": {"noise": False}})
    train(optimizer, model, batches(2))
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    with optimizer.sampled() as _, torch.no_grad():
        model(x)
        assert {n for n, p in model.named_parameters() if torch.equal(p, mean[n])} == {"2.weight", "2.bias"}
    optimizer.zero_grad()
    posterior = optimizer.posterior()
    blocks = posterior.kl_by_block()
    assert {block.name for block in optimizer.structure.blocks if block.noise} == set(blocks)
    units = {unit.name for block in optimizer.structure.blocks if block.name in blocks for unit in block.units}
    assert units == {"0", "4"}
    assert torch.equal(posterior.sample()["2.weight"], mean["2.weight"])


@pytest.mark.parametrize("groups", [{"nothing.*": {}}, {"0.weight": {}}, {"0.*": {"speed": 1}}, {"0.*": {"lr": -1}}])
def test_groups_that_make_no_sense_are_refused(groups):
    with pytest.raises(ValueError, match=r"group|lr"):
        make(ng.NoisyKFAC, mlp(), groups=groups)


@each_optimizer
@pytest.mark.parametrize("clip", [1e-4, lambda step: 1e-4 * step], ids=["constant", "schedule"])
def test_the_trust_region_bounds_the_step(kind, clip):
    model = mlp()
    free_model = mlp()
    optimizer = make(kind, model, kl_clip=clip, momentum=0.0)
    free = make(kind, free_model, momentum=0.0)
    for step, batch in enumerate(batches(4), start=1):
        start = optimizer.weights.mean.flat.clone()
        train(optimizer, model, [batch])
        moved = optimizer.weights.mean.flat - start
        bound = 2 * (clip(step) if callable(clip) else clip)  # of two outputs
        # gᵀv = vᵀ P v for v = P⁻¹ g, so the step's length is that of what moved, in the metric of P.
        covariance = optimizer.covariance
        length = sum(
            covariance.statistics[b.name]
            .with_identity(covariance.identity_share)
            .factorise(covariance.priors[b.name])
            .quad(b.vector(moved))
            .sum()
            for b in optimizer.structure.blocks
        )
        assert float(length) == pytest.approx(bound, rel=1e-6)
    free_start = free.weights.mean.flat.clone()
    train(free, free_model, batches(1))
    assert (free.weights.mean.flat - free_start).norm() > moved.norm()


@each_optimizer
def test_a_wide_trust_region_changes_nothing(kind):
    models = [mlp(), mlp()]
    for model, clip in zip(models, (None, 1e9), strict=True):
        train(make(kind, model, kl_clip=clip), model, batches(3))
    assert torch.equal(flat_parameters(models[0]), flat_parameters(models[1]))


@each_optimizer
def test_the_decay_of_the_fisher_follows_its_schedule(kind):
    """A decay of 0 forgets everything before, one of 0.5 keeps half: F₃ / 2 + F₂ / 2 is left of three batches."""
    data = batches(3)

    def fishers(some, decay):
        model = mlp()
        optimizer = make(kind, model, ng.Gaussian(0.5), fisher_decay=decay, fisher="exact", noise=False, lr=1e-15)
        train(optimizer, model, some)
        return {(n, part): t for n, s in optimizer.covariance.statistics.items() for part, t in averages(s).items()}

    def averages(statistics):
        """The moving averages; of one in a basis of its own, which every refresh turns, the trace."""
        turned = statistics.basis_tensors()
        return {name: t.sum() if name in turned else t for name, t in statistics.averages().items()}

    second, third = fishers(data[1:2], 0.0), fishers(data[2:], 0.0)
    for name, tensor in fishers(data, lambda step: [0.0, 0.0, 0.5][step - 1]).items():
        torch.testing.assert_close(tensor, (second[name] + third[name]) / 2)


def test_full_without_noise_is_damped_newton_on_linear_regression():
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
    model = mlp(sizes=(3, 1))
    noise_variance, damping, variance, num_data, weight = 0.5, 0.2, 2.0, 40, 0.7
    optimizer = ng.NoisyFull(
        model,
        ng.Gaussian(noise_variance),
        num_data=num_data,
        lr=0.3,
        kl_weight=weight,
        prior_variance=variance,
        damping=damping,
        momentum=0.0,
        noise=False,
        fisher="exact",
        fisher_decay=0.0,
        factor_every=1,
    )
    design = torch.cat([x, torch.ones_like(y)], dim=1)
    w = torch.cat([model[0].weight.detach()[0], model[0].bias.detach()])
    gamma = weight / (num_data * variance)
    for _ in range(3):
        hessian = design.T @ design / 40 / noise_variance
        gradient = design.T @ (design @ w - y[:, 0]) / 40 / noise_variance + gamma * w
        w = w - 0.3 * torch.linalg.solve(hessian + (gamma + damping) * torch.eye(4, dtype=w.dtype), gradient)
        train(optimizer, model, [(x, y)])
        now = torch.cat([model[0].weight.detach()[0], model[0].bias.detach()])
        torch.testing.assert_close(now, w, rtol=1e-10, atol=1e-12)


@each_with_improper_prior
def test_an_infinite_prior_variance_means_no_decay(kind):
    """A loss without gradient: only the prior moves the mean, and with none nothing does."""
    x = torch.randn(8, 3, dtype=torch.float64)
    for variance, moves in ((float("inf"), False), (0.5, True)):
        model = mlp()
        optimizer = make(kind, model, ng.Gaussian(1.0), noise=False, damping=0.1, prior_variance=variance)
        start = flat_parameters(model)
        optimizer.step(lambda model=model: (model(x), model(x).detach()))
        assert torch.equal(flat_parameters(model), start) is not moves


@each_optimizer
def test_a_seed_decides_everything(kind):
    data = batches(3)

    def result(seed, manual=None):
        if manual is not None:
            torch.manual_seed(manual)
        model = mlp()
        optimizer = make(kind, model, seed=seed)
        train(optimizer, model, data)
        return flat_parameters(model)

    assert torch.equal(result(1), result(1))
    assert not torch.equal(result(1), result(2))
    assert torch.equal(result(None, 5), result(None, 5))
    assert not torch.equal(result(None, 5), result(None, 6))


@each_optimizer
def test_momentum_modes(kind):
    """Both are those of their formulas, over three steps on a fixed gradient direction."""
    x, y = batches(1)[0]
    steps = {}
    for mode in ("average", "heavy_ball"):
        model = mlp()
        optimizer = make(
            kind, model, ng.Gaussian(1.0), momentum=0.6, momentum_mode=mode, noise=False, fisher="exact", lr=1e-9
        )
        plain_model = mlp()
        plain = make(kind, plain_model, ng.Gaussian(1.0), momentum=0.0, noise=False, fisher="exact", lr=1e-9)
        ratios = []
        for _ in range(3):
            before, plain_before = optimizer.weights.mean.flat.clone(), plain.weights.mean.flat.clone()
            train(optimizer, model, [(x, y)])
            train(plain, plain_model, [(x, y)])
            ratios.append(
                float((optimizer.weights.mean.flat - before).norm() / (plain.weights.mean.flat - plain_before).norm())
            )
        steps[mode] = ratios
    # The gradient hardly changes, so its bias-corrected average is itself, while a velocity adds up.
    assert steps["average"] == pytest.approx([1.0, 1.0, 1.0], rel=1e-3)
    assert steps["heavy_ball"][0] == pytest.approx(1.0)
    assert steps["heavy_ball"][1] > 1.2
    assert steps["heavy_ball"][2] > steps["heavy_ball"][1]


def normed():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_fresh_pass_leaves_batch_norm_alone(frozen):
    torch.manual_seed(0)
    models = [normed(), normed()]
    models[1].load_state_dict(models[0].state_dict())
    if frozen:
        for model in models:
            model[1].eval()
    same, fresh = (
        make(ng.NoisyKFAC, model, fisher_pass=kind, noise=False, fisher="exact")
        for model, kind in zip(models, ("same", "fresh"), strict=True)
    )
    for batch in batches(3):
        models[1].load_state_dict(models[0].state_dict())
        for model, optimizer in zip(models, (same, fresh), strict=True):
            train(optimizer, model, [batch])
        for name, buffer in models[0].named_buffers():
            assert torch.equal(buffer, models[1].get_buffer(name))
        assert [m.training for m in models[0].modules()] == [m.training for m in models[1].modules()]
    gap = same.covariance.statistics["0"].outputs - fresh.covariance.statistics["0"].outputs
    assert (gap.abs().max() < 1e-12) == frozen  # in training mode the normalisation of the two passes differs


def test_a_fresh_pass_needs_a_closure():
    optimizer = make(ng.NoisyKFAC, mlp(), fisher_pass="fresh")
    with pytest.raises(RuntimeError, match="step"), optimizer.sampled():
        pass


@each_optimizer
@pytest.mark.parametrize("zeroing", [False, True])
def test_a_standard_closure_uses_the_empirical_fisher(kind, zeroing):
    data = batches(3)
    models = [mlp(), mlp()]
    likelihood = ng.Gaussian(0.5)
    standard = make(kind, models[0], likelihood)
    empirical = make(kind, models[1], ng.Gaussian(0.5), fisher="empirical")
    for x, y in data:

        def closure(x=x, y=y):
            if zeroing:
                standard.zero_grad()
            loss = likelihood.nll(models[0](x), y)
            loss.backward()
            return loss

        with pytest.warns(UserWarning, match="empirical") as caught:
            loss = standard.step(closure)
        assert caught[0].filename == __file__
        assert float(loss) == pytest.approx(float(empirical.step(lambda x=x, y=y: (models[1](x), y))))
    compare_optimizers(standard, empirical, 1e-10)


def test_a_standard_closure_must_have_called_backward():
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model, stats_every=10, factor_every=1)
    before = snapshot(optimizer)
    with pytest.warns(UserWarning, match="empirical"), pytest.raises(RuntimeError, match="backward"):
        optimizer.step(lambda: (model(x) - y).square().mean())
    assert_unchanged(before, optimizer)


@each_optimizer
@pytest.mark.parametrize("change", ["load_state_dict", "data", "in place", "storage"])
def test_parameters_changed_between_steps_are_the_mean(kind, change):
    data = batches(3)
    target = mlp(9)
    models = [mlp(), mlp()]
    changed, known = (make(kind, model) for model in models)
    for model, optimizer in zip(models, (changed, known), strict=True):
        train(optimizer, model, data[:2])
    with torch.no_grad():
        known.weights.mean.load_dict_(dict(target.named_parameters()))
        known.weights.mean.write_parameters_()
        if change == "load_state_dict":
            models[0].load_state_dict(target.state_dict())
        for p, q in zip(models[0].parameters(), target.parameters(), strict=True):
            if change == "data":
                p.data = q.detach().clone()
            elif change == "in place":
                p.copy_(q)
            elif change == "storage":
                p.set_(q.detach().clone())
    assert torch.equal(changed.posterior().mean["0.weight"], target[0].weight)
    for model, optimizer in zip(models, (changed, known), strict=True):
        train(optimizer, model, data[2:])
    compare_optimizers(changed, known)
