"""Blocks of equal shape as one: the same numbers as one by one. Stacking is for GPUs, so it is switched on here."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.algorithm import stacks
from noisygrad.algorithm.covariance import Covariance
from noisygrad.kernels.factorisation import FactorisationError, deferred, inverse_root
from noisygrad.kernels.tensors import average_into_
from support.compare import tensors_of


def network(replicas: tuple[int, ...] = ()) -> nn.Module:
    torch.manual_seed(0)
    if replicas:
        return ng.networks.ReplicatedMLP(replicas, 5, (7, 7, 7), 3).double()
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(64, 4),
        nn.Linear(4, 4, bias=False),
        nn.Linear(4, 4, bias=False),
    ).double()


def train_on(optimizer: ng.NoisyKFAC, replicas: tuple[int, ...], seed: int, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        shape = (*replicas, 8, 5) if replicas else (8, 2, 4, 4)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (*replicas, 8), generator=generator)
        optimizer.step(lambda x=x, y=y: (optimizer.model(x), y))


def trained(monkeypatch: pytest.MonkeyPatch, stacked: bool, **more: object) -> ng.NoisyKFAC:
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"} if stacked else set())
    replicas = more.pop("replicas", ())
    settings = {"num_data": 100, "stats_every": 1, "factor_every": 2, "seed": 1, "noise": False, **more}
    optimizer = ng.NoisyKFAC(network(replicas), ng.Categorical(), **settings)
    train_on(optimizer, replicas, seed=2)
    return optimizer


CASES = [
    {"damping": 0.0},
    {"damping": 0.1},
    {"damping": 0.1, "damping_mode": "exact"},
    {"damping": 0.1, "replicas": (2,)},
    {"damping": 0.1, "damping_mode": "exact", "replicas": (2,)},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_stacked_step_is_that_of_single_blocks(settings, monkeypatch):
    one, other = (trained(monkeypatch, stacked, **settings) for stacked in (False, True))
    assert one.covariance._stacks is None
    assert other.covariance._stacks is not None
    assert any(len(stack.blocks) > 1 for stack in other.covariance._stacks.stacks)
    torch.testing.assert_close(other.weights.mean.flat, one.weights.mean.flat, rtol=1e-10, atol=1e-12)
    saved = tensors_of(one.state_dict())
    for name, tensor in tensors_of(other.state_dict()).items():
        assert tensor.shape == saved[name].shape
        if "damping_mode" not in settings or "/factors/" not in name:  # eigenvectors have no sign of their own
            torch.testing.assert_close(tensor, saved[name], rtol=1e-9, atol=1e-11)
    other.load_state_dict(one.state_dict())  # a checkpoint of a GPU is one of a CPU
    for optimizer in (one, other):
        train_on(optimizer, settings.get("replicas", ()), seed=7)
    torch.testing.assert_close(other.weights.mean.flat, one.weights.mean.flat, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("large", [1, stacks.LARGE], ids=["apart", "twice"])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_stack_factorised_in_parts_is_the_same(settings, noise, large, monkeypatch):
    """What draws and what steps need are made in one batch, or, of large ones, apart."""
    whole = trained(monkeypatch, True, **settings, noise=noise)
    monkeypatch.setattr(stacks, "TOGETHER", 1)
    monkeypatch.setattr(stacks, "LARGE", large)
    parted = trained(monkeypatch, True, **settings, noise=noise)
    assert any(len(stack.split()) > 1 for stack in parted.covariance._stacks.stacks)
    torch.testing.assert_close(parted.weights.mean.flat, whole.weights.mean.flat, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("sizes", "replicas"), [((4, 32, 4), ()), ((8, 8, 8, 8), (5,))], ids=["tall", "replicas"])
def test_parts_of_a_stack_are_not_larger_than_they_should_be(sizes, replicas, monkeypatch):
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"})
    monkeypatch.setattr(stacks, "TOGETHER", 2 * 32 * 32)
    if replicas:
        model = ng.networks.ReplicatedMLP(replicas, sizes[0], sizes[1:-1], sizes[-1])
    else:
        model = nn.Sequential(*[nn.Linear(a, b) for a, b in [sizes[:2], sizes[1:]] * 4])
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10, damping=0.1)
    parts = [part for stack in optimizer.covariance._stacks.stacks for part in stack.split()]
    assert len(parts) > len(optimizer.covariance._stacks.stacks)
    for part in parts:
        largest = max(tensor.numel() for tensor in part.factors.stepper.tensors().values())
        assert largest <= stacks.TOGETHER


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_stacked_draws_have_the_covariance_of_single_ones(settings, monkeypatch):
    found: list[Tensor] = []
    for stacked in (False, True):
        optimizer = trained(monkeypatch, stacked, **settings, noise=True)
        posterior_free = trained(monkeypatch, False, **settings)  # the same statistics, whatever was drawn
        optimizer.covariance.fisher.moments.copy_(posterior_free.covariance.fisher.moments)
        optimizer.covariance.refresh_({0: settings["damping"]})
        replicas = settings.get("replicas", ())
        size = optimizer.covariance.noise_size
        units = torch.eye(size, dtype=torch.float64)
        rows = torch.stack([optimizer.covariance.sample(unit.expand(*replicas, size)) for unit in units])
        found.append(torch.einsum("k...i,k...j->...ij", rows, rows))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def test_groups_without_noise_are_stacked_apart(monkeypatch):
    optimizer = trained(monkeypatch, True, damping=0.1, noise=True, groups={"8.*": {"noise": False}})
    spread = optimizer.covariance.sample(torch.ones(optimizer.covariance.noise_size, dtype=torch.float64))
    silent = [block for block in optimizer.covariance.blocks if not block.noise]
    assert [block.name for block in silent] == ["8@1"]
    for block in optimizer.covariance.blocks:
        assert bool((block.segment(spread) == 0).all()) == (not block.noise)


def test_another_damping_makes_other_stacks(monkeypatch):
    optimizer = trained(monkeypatch, True, damping=0.0, noise=True)
    shared = [stack.factors.shared for stack in optimizer.covariance._stacks.stacks]
    optimizer.covariance.refresh_({0: 0.1})
    apart = [stack.factors.shared for stack in optimizer.covariance._stacks.stacks]
    assert all(shared)
    assert not any(apart)
    for stack in optimizer.covariance._stacks.stacks:
        for index, block in enumerate(stack.blocks):
            own = optimizer.covariance.factors[block.name].stepper
            assert own.left.data_ptr() == stack.factors.stepper.left[index].data_ptr()


def solved_densely(optimizer: ng.NoisyKFAC, gradient: Tensor, dampings: dict[int, float]) -> Tensor:
    """P⁻¹ g of every block by a dense inverse of equation (11)."""
    solved = torch.zeros_like(gradient)
    for block in optimizer.covariance.blocks:
        prior = optimizer.covariance.priors[block.name]
        statistics = optimizer.covariance.statistics[block.name].with_identity(optimizer.covariance.identity_share)
        precision = statistics.factorise(prior, dampings[block.group], optimizer.options.damping_mode)
        if block.family.name == "diagonal":
            block.write_(solved, precision.solve(block.vector(gradient)))
        else:
            dense = torch.linalg.inv(precision.to_dense())
            block.write_(solved, (dense @ block.vector(gradient).unsqueeze(-1)).squeeze(-1))
    return solved


@pytest.mark.parametrize("damping_mode", ["factored", "exact"])
def test_a_fitted_prior_is_stacked_too(damping_mode, monkeypatch):
    first = trained(monkeypatch, True, damping_mode=damping_mode, noise=True)
    prior = first.posterior().as_prior()
    again = trained(monkeypatch, True, damping_mode=damping_mode, damping=0.1, noise=True, prior=prior)
    again.covariance.refresh_({0: 0.1})
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(again.weights.mean.flat.shape, dtype=torch.float64, generator=generator)
    truth = solved_densely(again, gradient, {0: 0.1})
    torch.testing.assert_close(again.covariance.solve(gradient), truth, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("damping_mode", ["factored", "exact"])
def test_a_failure_in_a_stack_names_its_layer_and_stores_nothing(damping_mode, monkeypatch):
    optimizer = trained(monkeypatch, True, damping=0.1, damping_mode=damping_mode, noise=True)
    before = {name: t.clone() for b in optimizer.covariance.blocks for name, t in named(optimizer, b)}
    moments = optimizer.covariance.fisher.moments.clone()
    optimizer.covariance.fisher.moments.mul_(1.5)  # all others would change
    optimizer.covariance.statistics["9"].outputs.fill_(float("nan"))
    with pytest.raises(FactorisationError, match="layer 9"):
        optimizer.covariance.refresh_({0: 0.1})
    for block in optimizer.covariance.blocks:
        for name, tensor in named(optimizer, block):
            assert torch.equal(tensor, before[name]), name
    optimizer.covariance.fisher.moments.copy_(moments)
    optimizer.covariance.refresh_({0: 0.0})  # other stacks, after a failure
    gradient = torch.ones_like(optimizer.weights.mean.flat)
    truth = solved_densely(optimizer, gradient, {0: 0.0})
    torch.testing.assert_close(optimizer.covariance.solve(gradient), truth, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:A .* precision factor is not positive definite")
def test_a_stack_that_needs_repair_is_made_block_by_block(monkeypatch):
    optimizer = trained(monkeypatch, True, damping=0.1, noise=True)
    (stack,) = [each for each in optimizer.covariance._stacks.stacks if "9" in [block.name for block in each.blocks]]
    assert len(stack.blocks) > 1
    optimizer.covariance.statistics["9"].outputs.fill_(1e40)  # of rank 1: what is added to its diagonal is rounded off
    made = []
    real = Covariance._factorise
    monkeypatch.setattr(Covariance, "_factorise", lambda self, b, d: made.append(b.name) or real(self, b, d))
    optimizer.covariance.refresh_({0: 0.1})
    assert {block.name for block in stack.blocks} <= set(made)
    assert len(made) < len(optimizer.covariance.blocks)
    for block in stack.blocks:
        kept, right = optimizer.covariance.factors[block.name], real(optimizer.covariance, block, 0.1)
        for mine, theirs in ((kept.stepper, right.stepper), (kept.sampler, right.sampler)):
            for name, tensor in theirs.tensors().items():
                assert torch.equal(mine.tensors()[name], tensor)


@pytest.mark.parametrize("stacked", [False, True])
def test_damping_that_is_lost_in_rounding_is_told_of_once_with_the_layers_name(stacked, monkeypatch):
    optimizer = trained(monkeypatch, stacked, damping=0.1, noise=True)
    optimizer.covariance.statistics["9"].outputs.fill_(1e40)  # of rank 1
    with pytest.warns(RuntimeWarning) as told:
        optimizer.covariance.refresh_({0: 0.1})
    assert [str(one.message).split(": ")[0] for one in told] == ["layer 9"]
    assert "lost in the rounding of its torch.float64 entries" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.covariance.refresh_({0: 0.1})
    with pytest.warns(RuntimeWarning, match="^layer 9: "):  # it hands its damping out
        optimizer.posterior().kl()


def named(optimizer: ng.NoisyKFAC, block) -> list[tuple[str, Tensor]]:
    factors = optimizer.covariance.factors[block.name]
    return [(f"{block.name} {name}", tensor) for name, tensor in factors.tensors().items()]


def test_a_failed_change_of_damping_leaves_no_stale_stack(monkeypatch):
    optimizer = trained(monkeypatch, True, damping=0.0, noise=True, groups={"9.*": {"damping": 0.0}})
    moments = optimizer.covariance.fisher.moments.clone()
    optimizer.covariance.statistics["9@1"].outputs.fill_(float("nan"))
    with pytest.raises(FactorisationError):
        optimizer.covariance.refresh_({0: 0.5, 1: 0.0})
    optimizer.covariance.fisher.moments.copy_(moments)
    for _ in range(2):
        optimizer.covariance.refresh_({0: 0.5, 1: 0.0})
    gradient = torch.ones_like(optimizer.weights.mean.flat)
    truth = solved_densely(optimizer, gradient, {0: 0.5, 1: 0.0})
    torch.testing.assert_close(optimizer.covariance.solve(gradient), truth, rtol=1e-8, atol=1e-10)


def test_the_moving_average_is_the_usual_one(monkeypatch):
    optimizer = trained(monkeypatch, False)
    factors, rate = optimizer.covariance, torch.tensor(0.3, dtype=torch.float64)
    old = [tensor for b in factors.blocks for tensor in factors.statistics[b.name].tensors().values()]
    new = [torch.randn_like(tensor) for tensor in old]
    expected = torch.lerp(factors.fisher.moments, torch.cat([tensor.flatten() for tensor in new]), rate)
    moments = factors.fisher.moments.clone()
    average_into_(new, old, rate)
    torch.testing.assert_close(torch.cat([tensor.flatten() for tensor in new]), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(factors.fisher.moments, moments)


def test_deferred_failures_are_told_at_the_end_and_then_raised():
    good, bad = torch.eye(3), torch.full((3, 3), float("nan"))
    with deferred() as failures:
        inverse_root(good, 0.5)
        inverse_root(bad, 0.5)
    assert [bool(failure) for failure in failures] == [False, True]
    with pytest.raises(FactorisationError):
        inverse_root(bad, 0.5)


def test_failures_are_collected_by_their_own_thread():
    bad = torch.full((2, 2), float("nan"))
    with deferred() as failures, ThreadPoolExecutor(1) as pool:
        other = pool.submit(inverse_root, bad, 0.5)
        with pytest.raises(FactorisationError):
            other.result()
    assert failures == []


PRECISIONS = {
    "old": "torch.set_float32_matmul_precision('high')",
    "old flag": "torch.backends.cuda.matmul.allow_tf32 = True",
    "new": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "new, all": "torch.backends.fp32_precision = 'tf32'",
    "new, CPU": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
}


@pytest.mark.parametrize("how", PRECISIONS)
def test_rounding_that_a_user_allows_is_off_in_factorisations_and_on_again_after_them(how):
    """In a process of its own: torch has no way back from one kind of setting to the other."""
    script = f"""
import torch
from noisygrad.kernels.switches import full_precision
cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
{PRECISIONS[how]}
before = cuda.fp32_precision, cpu.fp32_precision
with full_precision():
    with full_precision():
        pass
    assert not {{cuda.fp32_precision, cpu.fp32_precision}} & {{"tf32", "bf16"}}
    torch.ones(2, 2) @ torch.ones(2, 2)
assert (cuda.fp32_precision, cpu.fp32_precision) == before
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
