"""Mixed precision: autocast, GradScaler, and models whose parameters are narrow themselves."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import noisygrad as ng
from noisygrad.optim import execution as graphs
from support.compare import (
    REMADE,
    assert_nothing_pending,
    assert_unchanged,
    batches,
    compare_optimizers,
    differences,
    each_optimizer,
    make,
    mlp,
    snapshot,
    tensors_of,
    train,
)

SCALE = 2.0**12


def explicit_step(optimizer, model, x, y, scaler=None, autocast=False, clip=None):
    """One step as users of autocast and GradScaler write it."""
    with optimizer.sampled() as draw:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = model(x)
            loss = draw.nll(output, y)
        (loss if scaler is None else scaler.scale(loss)).backward()
    if clip is not None:
        if scaler is not None:
            optimizer.unscale_(scaler)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return output


def scaler_of(scale=SCALE):
    return torch.amp.GradScaler("cpu", init_scale=scale)


@each_optimizer
def test_autocast_gives_float32_statistics_close_to_the_exact_ones(kind):
    data = batches(3, size=32, dtype=torch.float32)
    models = [mlp(dtype=torch.float32), mlp(dtype=torch.float32)]
    plain, narrow = (make(kind, model, ng.Gaussian(0.5), fisher="exact", noise=False, lr=1e-4) for model in models)
    for x, y in data:
        explicit_step(plain, models[0], x, y)
        assert explicit_step(narrow, models[1], x, y, autocast=True).dtype == torch.bfloat16
    gaps = []
    for name, mine in narrow.covariance.statistics.items():
        for part, tensor in mine.tensors().items():
            theirs = plain.covariance.statistics[name].tensors()[part]
            assert tensor.dtype == torch.float32
            gaps.append(float((tensor - theirs).norm() / theirs.norm()))
    assert 0 < max(gaps) < 0.02


@each_optimizer
@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_scaler_changes_nothing(kind, clip, autocast):
    data = batches(4, dtype=torch.float32)
    models = [mlp(dtype=torch.float32), mlp(dtype=torch.float32)]
    plain, scaled = (make(kind, model, kl_clip=0.1, factor_every=2) for model in models)
    scaler = scaler_of()
    for x, y in data:
        explicit_step(plain, models[0], x, y, autocast=autocast, clip=clip)
        explicit_step(scaled, models[1], x, y, scaler, autocast=autocast, clip=clip)
    # A power of two scales without rounding; what is left is the order in which the step is multiplied.
    compare_optimizers(plain, scaled, 2e-5)
    assert not hasattr(scaled, "grad_scale")


@each_optimizer
def test_statistics_do_not_see_the_scale(kind):
    ((x, y),) = batches(1, dtype=torch.float32)
    models = [mlp(dtype=torch.float32), mlp(dtype=torch.float32)]
    small, large = (make(kind, model) for model in models)
    explicit_step(small, models[0], x, y, scaler_of(1.0))
    explicit_step(large, models[1], x, y, scaler_of(1000.0))  # no power of two: gradients are rounded, statistics not
    compare_optimizers(small, large, but=("mean", "momentum", "/model/"))


@each_optimizer
@pytest.mark.parametrize("mode", ["average", "heavy_ball"])
@pytest.mark.parametrize("first", [True, False], ids=["at the first step", "later"])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled"])
def test_an_overflow_skips_the_step(kind, mode, first, unscale):
    model, data = mlp(dtype=torch.float32), batches(4, dtype=torch.float32)
    optimizer = make(kind, model, momentum_mode=mode, kl_clip=1e-2, damping=0.1)
    scaler = scaler_of()
    for x, y in data[: 0 if first else 2]:
        explicit_step(optimizer, model, x, y, scaler)
    before = snapshot(optimizer)
    with optimizer.sampled() as draw:
        scaler.scale(draw.nll(model(data[2][0]), data[2][1])).backward()
        model[0].weight.grad[0, 0] = float("inf")
    if unscale:
        optimizer.unscale_(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    # The factors were due and are made again from the same statistics; the steps are counted, as a GPU must.
    found = snapshot(optimizer)
    assert found.pop("/optimizer/steps") == before.pop("/optimizer/steps") + 1
    optimizer.steps -= 1
    assert_unchanged(
        before | {"/optimizer/steps": optimizer.steps}, optimizer, but=("generators", *REMADE.get(kind, ()))
    )
    optimizer.steps += 1
    explicit_step(optimizer, model, *data[3], scaler)
    assert optimizer.weights.mean.flat.isfinite().all()


@each_optimizer
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_skipped_step_leaves_nothing_of_statistics_that_are_not_finite(kind, bad):
    """NaN times a mask of 0 is NaN: what was measured is cleaned before it is averaged."""
    model, data = mlp(dtype=torch.float32), batches(4, dtype=torch.float32)
    optimizer = make(kind, model, kl_clip=1e-2, damping=0.1, factor_every=5)
    scaler = scaler_of()
    for x, y in data[:2]:
        explicit_step(optimizer, model, x, y, scaler)
    before, (x, y) = snapshot(optimizer), data[2]
    with optimizer.sampled() as draw:
        x[1, 2] = bad
        scaler.scale(draw.nll(model(x), y)).backward()
        model[0].weight.grad[0, 0] = float("inf")
    found = [t for s in optimizer.accumulated.statistics.values() for t in s.tensors().values()]
    assert not all(bool(tensor.isfinite().all()) for tensor in found)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    before["/optimizer/steps"] += 1
    assert_unchanged(before, optimizer, but=("generators",))
    explicit_step(optimizer, model, *data[3], scaler)
    assert optimizer.weights.mean.flat.isfinite().all()


def test_an_error_in_a_scaled_step_leaves_no_scale_behind():
    models, data = [mlp(dtype=torch.float32), mlp(dtype=torch.float32)], batches(2, dtype=torch.float32)
    failed, clean = (make(ng.NoisyKFAC, model, noise=False, fisher="exact") for model in models)
    scaler = scaler_of()
    with failed.sampled() as draw:
        scaler.scale(draw.nll(models[0](data[0][0]), data[0][1])).backward()
    failed.accumulated.statistics["0"].inputs.fill_(float("nan"))
    failed.accumulated.known_finite = False  # as if they had been measured so
    with pytest.raises(ng.NonFiniteError, match="statistics of 0 went bad"):
        scaler.step(failed)
    assert_nothing_pending(failed)
    explicit_step(failed, models[0], *data[1], scaler_of())
    explicit_step(clean, models[1], *data[1], scaler_of())
    compare_optimizers(failed, clean)


@each_optimizer
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_a_bf16_model_keeps_a_float32_mean(kind, autocast):
    model, data = mlp(dtype=torch.bfloat16), batches(30, size=16, dtype=torch.bfloat16)
    optimizer = make(kind, model, lr=2e-3, num_data=500, prior_variance=5.0)
    losses = []
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            losses += train(optimizer, model, [(x, y)])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {t.dtype for name, t in tensors_of(optimizer.state_dict()).items()} == {torch.float32}
    assert torch.equal(optimizer.weights.mean.rounded(), optimizer.weights.mean.flat.bfloat16().float())
    shown = torch.cat([p.detach().flatten() for p in model.parameters()])
    kept = torch.cat([p.flatten() for p in optimizer.weights.mean.as_dict(like_parameters=False).values()])
    assert torch.equal(shown, kept.bfloat16())
    assert not torch.equal(shown.float(), kept)  # digits that bf16 cannot hold
    assert sum(losses[-5:]) < sum(losses[:5])


def test_small_steps_add_up_in_a_bf16_model():
    """Each step is far below the spacing of bf16 numbers; in the float32 mean they add up all the same."""
    ((x, y),) = batches(1, size=16, dtype=torch.float32)
    models = [mlp(dtype=torch.bfloat16), mlp(dtype=torch.bfloat16)]
    narrow, still = (
        make(ng.NoisyAdam, model, noise=False, lr=lr) for model, lr in zip(models, (3e-4, 1e-9), strict=True)
    )
    for optimizer, model in zip((narrow, still), models, strict=True):
        train(optimizer, model, [(x.bfloat16(), y)] * 60)
    gap = (narrow.weights.mean.flat - still.weights.mean.flat).abs().max()
    assert gap > 2e-3
    moved = [not torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)]
    assert any(moved)


def test_a_parameter_set_by_hand_wins_over_the_kept_digits():
    model, data = mlp(dtype=torch.bfloat16), batches(3, dtype=torch.bfloat16)
    optimizer = make(ng.NoisyAdam, model)
    train(optimizer, model, data[:2])
    with torch.no_grad():
        model[0].weight[0, 0] = 3.0
    kept = optimizer.weights.mean.flat.clone()
    with optimizer.sampled():
        assert (optimizer.weights.mean.flat != kept).sum() == 1
    assert optimizer.posterior().mean["0.weight"][0, 0] == 3.0


class Watched(torch.nn.Sequential):
    """Keeps its outputs."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.seen = []

    def forward(self, x):
        output = super().forward(x)
        self.seen.append(output.detach().float())
        return output


@pytest.mark.parametrize("form", ["step", "fresh", "sampled", "after a step"])
def test_every_draw_is_seen_inside_one_region_of_autocast(form):
    """Autocast keeps narrow copies of the weights, and does not notice that these are changed in place."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    model = Watched(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    options = {"fisher_pass": "fresh"} if form == "fresh" else {"mc_samples": 2} if form == "step" else {}
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(0.5), num_data=8, stats_every=1, seed=0, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if form in ("step", "fresh"):
            optimizer.step(lambda: (model(x), y))
        elif form == "sampled":
            for _ in range(2):
                with optimizer.sampled() as draw:
                    draw.nll(model(x), y).backward()
        else:
            with optimizer.sampled() as draw:
                draw.nll(model(x), y).backward()
            optimizer.step()
            model(x)
    first, second = model.seen
    assert float((first - second).abs().max()) > 0.05
    if form == "after a step":
        torch.testing.assert_close(second, model(x), rtol=0.05, atol=0.05)  # the mean, as in full precision


def test_what_a_replayed_graph_changes_is_seen_inside_a_region_of_autocast(monkeypatch):
    """Emulated on a CPU: a graph that has moved the weights, of which autocast keeps narrow copies."""

    class Replayed:
        pool = None

        def __init__(self, work, *args, **kwargs):
            self.work = work

        def __call__(self):
            self.work()

    monkeypatch.setattr(graphs, "Replay", Replayed)
    monkeypatch.setattr(graphs, "capturing", lambda: False)
    layer, x = nn.Linear(3, 2, bias=False), torch.ones(1, 3)
    replays = graphs.GraphCache(types.SimpleNamespace(type="cuda"))
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        replays.run("move", 0, lambda: layer.weight.data.mul_(2.0))
        after = layer(x)
    assert torch.equal(after, 2 * before)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_draws_steps_and_posteriors_inside_autocast_keep_their_digits(kind, dtype):
    """As in Lightning's manual optimisation, which has all of a training step in a region of autocast."""
    found = []
    for inside in (False, True):
        model = mlp(dtype=torch.float32)
        optimizer = make(kind, model, factor_every=2, fisher="exact")
        for x, y in batches(3, dtype=torch.float32):
            around, within = (torch.autocast("cpu", dtype, enabled=on, cache_enabled=False) for on in (inside, True))
            with around:
                with optimizer.sampled() as draw, within:
                    draw.nll(model(x), y).backward()
                optimizer.step()
        with torch.autocast("cpu", dtype, enabled=inside):
            drawn = optimizer.posterior().sample(torch.Generator().manual_seed(0))
        found.append(snapshot(optimizer) | drawn)
    assert not differences(*found)
