"""Large factors in bands: the same numbers as whole ones, in less memory. It is for GPUs, so it is switched on here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.algorithm import stacks
from noisygrad.families import kronecker, packed
from noisygrad.kernels import triangles
from noisygrad.kernels.factorisation import FactorisationError
from support.compare import tensors_of
from support.truth import close

SIZES = (5, 8, 9, 16, 21)


@pytest.fixture
def small(monkeypatch):
    """Bands of four columns, of matrices from five rows on."""
    for name, value in {"LARGE": 5, "WIDTH": 4, "ALIGNMENT": 2}.items():
        monkeypatch.setattr(triangles, name, value)


def matrices(size: int, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """A symmetric and a lower triangular one."""
    rows = torch.randn(*batch, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    product = rows @ rows.mT
    return (product + product.mT) / 2, rows.tril()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_bands_are_the_matrix(size, batch, small):
    symmetric, lower = matrices(size, batch)
    for whole, back in ((symmetric, triangles.symmetric), (lower, triangles.lower)):
        bands = triangles.pack(whole, 3)
        assert len(bands) > 1
        assert torch.equal(back(bands), whole)
        assert sum(band.untyped_storage().nbytes() for band in bands) < whole.untyped_storage().nbytes()
        assert torch.equal(triangles.diagonal(bands), whole.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("size", SIZES)
def test_products_with_bands_are_those_with_the_matrix(size, small):
    symmetric, lower = matrices(size, (3,))
    rows = torch.randn(3, 4, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    close(triangles.times_symmetric(rows, triangles.pack(symmetric, 3)), rows @ symmetric)
    close(triangles.times_lower(rows, triangles.pack(lower, 3)), rows @ lower)
    close(triangles.symmetric_times(triangles.pack(symmetric, 3), rows.mT), symmetric @ rows.mT)
    close(triangles.upper_times(triangles.pack(lower, 3), rows.mT), lower.mT @ rows.mT)
    samples = rows.expand(2, 3, 4, size)
    close(triangles.times_symmetric(samples, triangles.pack(symmetric, 3)), samples @ symmetric)


@pytest.mark.parametrize("bands", [4, 8, 16])
def test_bands_take_little_more_than_half_of_the_memory(bands):
    """Those of a convolution with 256 channels; the last band is narrower."""
    found = triangles.cut(torch.empty(2305, 2305, device="meta"), bands)
    assert len(found) <= bands
    assert len({band.shape[-1] for band in found[:-1]}) == 1
    assert sum(band.numel() for band in found) / 2305**2 == pytest.approx((1 + 1 / bands) / 2, abs=0.015)


def test_small_matrices_stay_whole(small):
    symmetric, _ = matrices(4)
    assert triangles.pack(symmetric, 3)[0] is symmetric


@pytest.mark.parametrize(("outputs", "inputs"), [(3, 9), (9, 3), (9, 8)], ids=str)
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_packed_factors_solve_and_sample_as_whole_ones(outputs, inputs, damping, small):
    statistics = kronecker.Statistics(matrices(inputs, (2,))[0], matrices(outputs, (2,))[0])
    prior = kronecker.Prior.from_columns(torch.full((2, inputs), 0.3, dtype=torch.float64), outputs)
    precision = packed.pack_statistics(statistics).factorise(prior, damping)
    vector = torch.randn(2, outputs * inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for whole in (precision.drop_terms(), precision.drop_terms().with_inverses(), precision.solver()):
        bands = packed.pack_factors(whole)
        assert isinstance(bands, packed.Factors)
        if bands.left:
            close(bands.sample(vector), precision.sample(vector))
        if bands.inverse_left:
            close(bands.solve(vector), precision.solve(vector))
        back = bands.unpacked()
        assert type(back) is type(whole)
        assert back.tensors().keys() == whole.tensors().keys()
        for name, tensor in whole.tensors().items():
            close(back.tensors()[name], tensor)


def test_factors_in_an_eigenbasis_stay_as_they_are(small):
    statistics = kronecker.Statistics(matrices(9)[0], matrices(8)[0])
    prior = kronecker.Prior.from_columns(torch.full((9,), 0.3, dtype=torch.float64), 8)
    exact = statistics.factorise(prior, 0.0, "exact").drop_terms()
    assert packed.pack_factors(exact) is exact


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
        nn.Linear(64, 12),
        nn.Linear(12, 3),
    ).double()


def train_on(optimizer: ng.NoisyKFAC, replicas: tuple[int, ...], seed: int, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn((*replicas, 8, 5) if replicas else (8, 2, 4, 4), generator=generator, dtype=torch.float64)
        y = torch.randint(3, (*replicas, 8), generator=generator)
        optimizer.step(lambda x=x, y=y: (optimizer.model(x), y))


def made(replicas: tuple[int, ...] = (), **more: object) -> ng.NoisyKFAC:
    settings = {"num_data": 100, "stats_every": 1, "factor_every": 2, "seed": 1, **more}
    return ng.NoisyKFAC(network(replicas), ng.Categorical(), **settings)


def in_bands(optimizer: ng.NoisyKFAC) -> int:
    return sum(isinstance(each, packed.Statistics) for each in optimizer.covariance.statistics.values())


CASES = [
    {"damping": 0.0},
    {"damping": 0.1},
    {"damping": 0.1, "noise": False},
    {"damping": 0.1, "damping_mode": "exact"},
    {"damping": 0.1, "fisher_floor": 0.01},
    {"damping": 0.1, "replicas": (2,)},
]


@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_training_in_bands_is_a_training(settings, stacked, small, monkeypatch):
    """The same weights, state and posterior, from the same noise; and each goes on from the other's state."""
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"} if stacked else set())
    bands = made(**settings)
    assert in_bands(bands) >= 4
    monkeypatch.setattr(triangles, "LARGE", 1 << 20)
    whole = made(**settings)
    assert in_bands(whole) == 0
    replicas = settings.get("replicas", ())

    def both(seed: int) -> None:
        for large, optimizer in (5, bands), (1 << 20, whole):
            monkeypatch.setattr(triangles, "LARGE", large)
            train_on(optimizer, replicas, seed)
        close(bands.weights.mean.flat, whole.weights.mean.flat, rtol=1e-9, atol=1e-11)

    both(2)
    saved, other = tensors_of(whole.state_dict()), tensors_of(bands.state_dict())
    assert saved.keys() == other.keys()
    for name, tensor in saved.items():
        if "damping_mode" not in settings or "/factors/" not in name:  # eigenvectors have no sign of their own
            close(other[name], tensor, rtol=1e-9, atol=1e-11)
    whole_state, state_in_bands = whole.state_dict(), bands.state_dict()
    whole.load_state_dict(state_in_bands)
    monkeypatch.setattr(triangles, "LARGE", 5)
    bands.load_state_dict(whole_state)
    both(7)
    for name, theirs in whole.posterior().statistics.items():
        mine = bands.posterior().statistics[name]
        assert type(mine) is type(theirs)
        for part, tensor in theirs.tensors().items():
            close(mine.tensors()[part], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("replicas", [(), (2,)], ids=str)
def test_a_posterior_of_a_training_in_bands_is_saved_and_loaded(replicas, small, tmp_path):
    optimizer = made(replicas)
    assert in_bands(optimizer) >= 3
    train_on(optimizer, replicas, seed=2)
    posterior = optimizer.posterior()
    posterior.save(tmp_path / "p.safetensors")
    loaded = ng.load_posterior(tmp_path / "p.safetensors", network(replicas))
    close(loaded.kl(), posterior.kl())
    draws = [each.sample(torch.Generator().manual_seed(1)) for each in (posterior, loaded)]
    assert all(torch.equal(draws[1][name], tensor) for name, tensor in draws[0].items())
    again = made(replicas, prior=loaded.as_prior())
    train_on(again, replicas, seed=2)


@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_a_failed_refresh_leaves_bands_as_they_were(stacked, small, monkeypatch):
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"} if stacked else set())
    optimizer = made(damping=0.1)
    train_on(optimizer, (), seed=2)
    before = {name: tensor.clone() for name, tensor in tensors_of(optimizer.state_dict()).items()}
    optimizer.covariance.fisher.moments.mul_(1.5)  # all others would change
    (last,) = [block.name for block in optimizer.covariance.blocks if block.name.startswith("8")]
    optimizer.covariance.statistics[last].outputs[0].fill_(float("nan"))
    with pytest.raises(FactorisationError, match="layer 8"):
        optimizer.covariance.refresh_({0: 0.1})
    for name, tensor in tensors_of(optimizer.state_dict()).items():
        if "/factors/" in name:
            assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_whatever_ends_a_refresh_leaves_all_as_it_was(stacked, error, monkeypatch):
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"} if stacked else set())
    optimizer = made(damping=0.1, factor_every=6)
    train_on(optimizer, (), seed=2)
    before = tensors_of(optimizer.state_dict())
    calls = iter(range(100))

    def interrupted(*arguments, **keywords):
        if next(calls) == 3:
            raise error
        return factorise(*arguments, **keywords)

    factorise = optimizer.covariance._of
    monkeypatch.setattr(optimizer.covariance, "_of", interrupted)
    with pytest.raises(error):
        train_on(optimizer, (), seed=3, steps=1)
    for name, tensor in tensors_of(optimizer.state_dict()).items():
        assert torch.equal(tensor, before[name]), name


def test_bad_statistics_in_bands_are_noticed(small):
    optimizer = made(damping=0.1)
    x, y = torch.randn(8, 2, 4, 4, dtype=torch.float64), torch.zeros(8, dtype=torch.long)
    x[0, 0, 0, 0] = float("nan")
    before = optimizer.covariance.fisher.moments.clone()
    with pytest.raises(ng.NonFiniteError, match="0"):
        optimizer.step(lambda: (optimizer.model(x), y))
    assert torch.equal(optimizer.covariance.fisher.moments, before)
