"""What only a GPU can show: no waiting in a step, replays equal to eager steps, whole steps captured."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import noisygrad as ng
from noisygrad.algorithm import stacks
from noisygrad.optim.execution import GraphCache, Replay, Work
from noisygrad.training import CapturedStep
from noisygrad_paper.data import load_images
from noisygrad_paper.experiments.classification import Learning, plan
from noisygrad_paper.experiments.image_methods import METHODS
from support.compare import OPTIMIZERS, tensors_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 6, device="cuda", generator=generator, dtype=torch.float64)
    return x, x[:, :1] * 2


def make(kind: type[ng.NoisyOptimizer], **more: object) -> tuple[torch.nn.Module, ng.NoisyOptimizer]:
    torch.manual_seed(0)
    model = ng.networks.MLP(6, (12, 12), 1).cuda().double()
    settings = {"lr": 0.02, "damping": 1e-3, "stats_every": 5, "factor_every": 20, "kl_clip": 1e-2, "seed": 3}
    return model, kind(model, ng.Gaussian(noise_variance=0.1), num_data=200, **(settings | more))


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("likelihood", [ng.Gaussian(), ng.Gaussian(noise_variance=1.0)])
def test_a_step_between_refreshes_never_waits_for_the_device(
    kind: type[ng.NoisyOptimizer], likelihood: ng.Likelihood
) -> None:
    model = ng.networks.MLP(6, (12,), 1).cuda()
    optimizer = kind(
        model, ng.Gaussian.from_config(likelihood.config()), num_data=100, stats_every=2, factor_every=1000
    )
    x, y = torch.randn(8, 6, device="cuda"), torch.randn(8, 1, device="cuda")
    for _ in range(9):
        optimizer.step(lambda: (model(x), y))
    for _ in range(5):  # captures, which wait, are over after these
        optimizer.steps = 100
        optimizer.step(lambda: (model(x), y))
    with no_waiting():
        for _ in range(10):
            optimizer.step(lambda: (model(x), y))


class AsItIs(GraphCache):
    """What a GPU runs where nothing is recorded: the same pieces of work, with their numbers in tensors."""

    def run(self, name: str, key: Hashable, work: Work) -> None:
        del name, key
        work()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replayed_steps_equal_eager_ones(kind: type[ng.NoisyOptimizer]) -> None:
    means = []
    for enabled in (True, False):
        model, optimizer = make(kind)
        if not enabled:
            optimizer.update.executor = optimizer.weights._executor = AsItIs(torch.device("cuda"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.5)
        generator = torch.Generator("cuda").manual_seed(5)
        for step in range(100):
            x, y = batch(generator)
            if step == 60:  # parameters that move in memory must not be missed
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            optimizer.step(lambda x=x, y=y, model=model: (model(x), y))
            scheduler.step()
        means.append(optimizer.weights.mean.flat.clone())
    assert torch.equal(*means)


@pytest.mark.parametrize("kind", [ng.NoisyAdam, ng.NoisyKFAC])
def test_a_whole_step_can_be_captured_and_follows_a_changing_learning_rate(kind: type[ng.NoisyOptimizer]) -> None:
    means = []
    for captured in (False, True):
        model, optimizer = make(kind, capturable=True, stats_every=10**6, factor_every=10**6)
        x, y = (t.clone() for t in batch(torch.Generator("cuda").manual_seed(5)))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                optimizer.step(lambda x=x, y=y, model=model: (model(x), y))
        torch.cuda.current_stream().wait_stream(side)
        optimizer.steps = 4
        for generator in optimizer.generators:
            generator.manual_seed(11)
        graph = None
        if captured:
            graph = torch.cuda.CUDAGraph()
            optimizer.register_with(graph)
            with torch.cuda.graph(graph):
                optimizer.step(lambda x=x, y=y, model=model: (model(x), y))
        for step in range(6):
            if step == 3:
                optimizer.param_groups[0]["lr"].fill_(1e-4)
            if graph is None:
                optimizer.steps = 4
                optimizer.step(lambda x=x, y=y, model=model: (model(x), y))
            else:
                graph.replay()
        means.append(optimizer.weights.mean.flat.clone())
    torch.testing.assert_close(means[0], means[1], rtol=1e-9, atol=1e-12)


def test_labels_out_of_range_and_nan_are_masked_and_reported_at_the_next_refresh() -> None:
    for spoil in ("labels", "inputs"):
        model = ng.networks.MLP(4, (8,), 3).cuda()
        optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=100, factor_every=10)
        x, y = torch.randn(16, 4, device="cuda"), torch.randint(3, (16,), device="cuda")
        for _ in range(12):
            optimizer.step(lambda x=x, y=y, model=model: (model(x), y))
        before = optimizer.weights.mean.flat.clone()
        bad_x, bad_y = x.clone(), y.clone()
        if spoil == "labels":
            bad_y[0] = 7
        else:
            bad_x[0, 0] = float("nan")
        optimizer.step(lambda x=bad_x, y=bad_y, model=model: (model(x), y))
        assert torch.equal(optimizer.weights.mean.flat, before)
        for _ in range(6):
            optimizer.step(lambda x=x, y=y, model=model: (model(x), y))
        with pytest.raises(ng.NonFiniteError):
            optimizer.step(lambda x=x, y=y, model=model: (model(x), y))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fisher_pass", ["same", "fresh"])
def test_captured_steps_equal_eager_ones(kind: type[ng.NoisyOptimizer], fisher_pass: str) -> None:
    """Plain, statistics and refresh steps in turn, with schedules that always change and a new batch each step."""
    found = []
    for captured in (False, True):
        model, optimizer = make(
            kind,
            stats_every=3,
            factor_every=16,
            kl_clip=lambda step: 1e-2 / step,
            fisher_decay=lambda step: 1 - 0.2 / step,
            fisher_pass=fisher_pass,
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        x, y = (tensor.clone() for tensor in batch(torch.Generator("cuda").manual_seed(5)))
        turn = torch.zeros((), device="cuda")
        fresh = x.clone()

        def prepare(x=x, turn=turn, fresh=fresh) -> None:
            x.copy_(fresh * torch.cos(turn))
            turn.add_(1.0)

        def closure(x=x, y=y, model=model):
            return model(x), y

        step = CapturedStep(optimizer, closure, prepare)
        losses = []
        for _ in range(60):
            if captured:
                losses.append(step().clone())
            else:
                prepare()
                losses.append(optimizer.step(closure))
            scheduler.step()
        state = optimizer.state_dict()
        found.append((torch.stack(losses), optimizer.weights.mean.flat.clone(), state))
    (losses, mean, state), (others, other, captured_state) = found
    torch.testing.assert_close(others, losses, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(other, mean, rtol=1e-6, atol=1e-8)
    assert captured_state["steps"] == state["steps"] == 60
    for name, tensor in tensors_of(state).items():
        torch.testing.assert_close(tensors_of(captured_state)[name], tensor, rtol=1e-5, atol=1e-7)


def test_a_captured_step_reports_bad_numbers_at_the_next_refresh() -> None:
    model, optimizer = make(ng.NoisyKFAC, stats_every=2, factor_every=32)
    x, y = (tensor.clone() for tensor in batch(torch.Generator("cuda").manual_seed(5)))
    step = CapturedStep(optimizer, lambda: (model(x), y))
    for _ in range(50):
        step()
    before = optimizer.weights.mean.flat.clone()
    x.fill_(float("nan"))
    for _ in range(5):
        step()
    assert torch.equal(optimizer.weights.mean.flat, before)
    while not optimizer.options.factors_due(optimizer.steps + 1):
        step()
    with pytest.raises(ng.NonFiniteError):
        step()


@pytest.mark.parametrize("method", METHODS)
def test_trainings_of_images_are_replayed_and_learn(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method of the classification experiment, with crops and batch norm inside the recorded step."""
    (job,) = plan("digits", [method], ["D+B"], epochs=1)
    learning = Learning(job, 0, load_images("digits", None), "cuda")
    learning.model.train()
    generator = torch.Generator().manual_seed(0)
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))[1])
    losses = []
    for _ in range(120):
        rows = torch.randperm(len(learning.x_train), generator=generator)[: learning.batch_size].cuda()
        losses.append(float(learning._step(learning.x_train[rows], learning.y_train[rows])))
    assert len(replays) > 80  # all but warm-ups and refreshes
    assert sum(losses[-20:]) < 0.8 * sum(losses[:5]) * 4
    learning._raw.copy_(learning.x_train[: learning.batch_size])
    crops = []
    for _ in range(3):
        learning.trainer.step()
        crops.append(learning._inputs.clone())
    assert not torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[1], crops[2])
    assert 0.0 <= learning.test_accuracy() <= 100.0
    assert learning.network.training


def test_a_replayed_sgd_is_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found = []
    for replayed in (True, False):
        (job,) = plan("digits", ["SGD"], ["plain"], epochs=1)
        learning = Learning(job, 0, load_images("digits", None), "cuda")
        learning.model.train()
        optimizer = torch.optim.SGD(learning.network.parameters(), lr=job.config["lr"], momentum=0.9)
        for index in range(30):
            x = learning.x_train[32 * index : 32 * index + 32]
            y = learning.y_train[32 * index : 32 * index + 32]
            if index == 15:
                for group in (*learning.trainer.optimizer.param_groups, *optimizer.param_groups):
                    group["lr"] = 0.01
            if replayed:
                learning._step(x, y)
            else:
                learning._raw.copy_(x)
                learning._prepare()
                torch.nn.functional.cross_entropy(learning.model(learning._inputs), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.cat([parameter.detach().flatten() for parameter in learning.network.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["factored", "exact"])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_stacked_blocks_step_like_single_ones(damping: float, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for devices in ({"cuda"}, set()):
        monkeypatch.setattr(stacks, "DEVICES", devices)
        torch.manual_seed(0)
        model = ng.networks.MLP(6, (12, 12, 12), 1).cuda().double()
        optimizer = ng.NoisyKFAC(
            model,
            ng.Gaussian(noise_variance=0.1),
            num_data=200,
            noise=False,
            damping=damping,
            damping_mode=mode,
            stats_every=2,
            factor_every=4,
            seed=3,
        )
        if devices:
            assert any(len(stack.blocks) > 1 for stack in optimizer.covariance._stacks.stacks)
        else:
            assert optimizer.covariance._stacks is None
        generator = torch.Generator("cuda").manual_seed(5)
        for index in range(20):
            x, y = batch(generator)
            if index == 10:
                optimizer.param_groups[0]["damping"] = 0.1 - damping
            optimizer.step(lambda x=x, y=y, model=model: (model(x), y))
        found.append(optimizer.weights.mean.flat.clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", [ng.NoisyAdam, ng.NoisyKFAC])
def test_channels_last_images_train_like_a_cpu(kind: type[ng.NoisyOptimizer], captured: bool) -> None:
    """Other memory, statistics while the backward pass is under way, stacks: the same numbers."""
    states = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.ReLU(inplace=True),
            torch.nn.Conv2d(8, 8, 3, padding=1, stride=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 8, 3, padding=1),
            torch.nn.Conv2d(8, 4, 1),
            torch.nn.Flatten(),
            torch.nn.Linear(64, 3),
        ).double()
        x = torch.randn(12, 3, 8, 8, dtype=torch.float64).to(device)
        y = torch.randint(3, (12,)).to(device)
        model = model.to(device)
        if device == "cuda":
            model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        settings = {"lr": 0.02, "damping": 1e-2, "stats_every": 2, "factor_every": 6, "kl_clip": 1e-2, "seed": 3}
        optimizer = kind(model, ng.Categorical(), num_data=200, noise=False, fisher="empirical", **settings)
        assert (optimizer.structure is optimizer._canonical_structure) == (device == "cpu")
        step = CapturedStep(optimizer, lambda model=model, x=x, y=y: (model(x), y)) if captured else None
        for _ in range(25):
            if step is None:
                optimizer.step(lambda model=model, x=x, y=y: (model(x), y))
            else:
                step()
        states.append({name: tensor.cpu() for name, tensor in tensors_of(optimizer.state_dict()).items()})
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_statistics_do_not_keep_all_output_gradients() -> None:
    """Of twenty layers, whose outputs are all of one size, only a few gradients are there at a time."""
    size = 4 * 32 * 128 * 64 * 64  # bytes of one output
    layers = [module for _ in range(20) for module in (torch.nn.Conv2d(32, 32, 1), torch.nn.ReLU(inplace=True))]
    pool = torch.nn.AdaptiveAvgPool2d(1)
    model = torch.nn.Sequential(*layers, pool, torch.nn.Flatten()).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(128, 32, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(32, (128,), device="cuda")
    optimizer = ng.NoisyAdam(model, ng.Categorical(), num_data=1000, stats_every=2, factor_every=100, seed=0)
    peaks = []
    for before in (102, 103, 102, 103):  # a plain step, and one that takes statistics
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer.steps = before
        optimizer.step(lambda: (model(x), y))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[3] - peaks[2] < 8 * size


def test_a_replay_keeps_what_its_work_reads_and_writes():
    """A recording knows addresses alone: memory that only the work held must not be given to others."""

    def made(total):
        kept = torch.ones(1 << 20, device="cuda")
        return Replay(lambda: total.add_(kept.sum()), total.device, differentiates=False)

    total = torch.zeros((), device="cuda")
    replay = made(total)
    for _ in range(5):
        replay()
    others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]
    replay()
    assert float(total) == 6 * (1 << 20)
    assert len(others) == 8
