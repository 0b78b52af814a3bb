"""The engine and the optimisers are one algorithm: several replicas, 50 steps, every family, to 1e-9."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import noisygrad as ng
from noisygrad.families import FAMILIES
from noisygrad.optim import NoisyOptimizer, optimizers
from noisygrad.posterior.weights import FlatWeights
from noisygrad.replicas.noisy import NoisyLearner, NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons
from replicas.test_engine import posterior_kl
from support.truth import normal

NETWORK = Perceptrons((3, 5, 4, 1))
TWO_OUTPUTS = Perceptrons((3, 5, 4, 2))
REPLICAS, BATCH, SAMPLES, STEPS, NUM_DATA = 3, 8, 2, 50, 23
"""More examples than a layer has inputs: equal eigenvalues would leave the eigenvalue-corrected basis to rounding."""
OPTIMIZERS: dict[str, type[NoisyOptimizer]] = {
    kind.family: kind
    for kind in vars(optimizers).values()
    if isinstance(kind, type) and issubclass(kind, NoisyOptimizer) and kind is not NoisyOptimizer
}
SAME_ROOT = {"diagonal", "kronecker", "tridiagonal"}
"""Families whose square root is the same in any order of the weights, and has no signs of its own."""

CASES = [
    {"kl_clip": 1e-3},
    {"kl_clip": 1e-3, "noise_prior": None, "safeguard": "fading"},
    {"damping": 0.05, "factor_every": 3, "momentum": 0.5},
    {"damping": 0.05, "damping_mode": "exact", "kl_clip": 1e-4},
    {"noise": False, "kl_clip": 1e-4, "kl_weight": 1.0},
]
RUNS = [
    (family, case) for family in FAMILIES for case in CASES
    if case.get("damping_mode", "factored") in FAMILIES[family].damping_modes
]  # fmt: skip


def annealed(step: int) -> float:
    return 1.0 if step <= STEPS // 2 else 0.1 + 1.0 / step


def covariance(sample: Tensor) -> Tensor:
    """P⁻¹ of each replica, from what becomes of each unit vector, `[n, R, n]`."""
    return torch.einsum("kri,krj->rij", sample, sample)


class Pair:
    """A learner, and an optimiser of the same replicas as one network, with the same start."""

    def __init__(self, family: str, case: dict, network: Perceptrons = NETWORK) -> None:
        self.network = network
        case = dict(case)
        prior = case.pop("noise_prior", (6.0, 6.0))
        common = {"lr": 0.05, "kl_weight": 0.7, "prior_variance": 0.5, "mc_samples": SAMPLES, **case}
        self.settings = NoisySettings(family=family, fisher_decay=0.7, **common)
        self.samples = SAMPLES if self.settings.noise else 1
        starts = [torch.Generator().manual_seed(seed) for seed in range(REPLICAS)]
        self.learner = NoisyLearner(
            network, ng.Gaussian(noise_prior=prior), self.settings, num_data=NUM_DATA, generators=starts,
            dtype=torch.float64,
        )  # fmt: skip
        self.model = ng.networks.ReplicatedMLP((REPLICAS,), 3, (5, 4), network.sizes[-1]).double()
        with torch.no_grad():
            for name, tensor in self.of_parameters(self.learner.mean).items():
                self.model.get_parameter(name).copy_(tensor)
        self.optimizer = OPTIMIZERS[family](
            self.model, ng.Gaussian(noise_prior=prior), num_data=NUM_DATA, stats_every=1, seed=[5, 6, 7],
            fisher_decay=lambda step: 1.0 - 0.3 * annealed(step),
            **common | {"factor_every": self.settings.factor_every, "mc_samples": self.samples},
        )  # fmt: skip
        self.optimizer.weights.mean.read_parameters_()
        self.generators = [torch.Generator() for _ in range(REPLICAS)]
        for mine, theirs in zip(self.generators, self.optimizer.generators, strict=True):
            mine.set_state(theirs.get_state())
        # Where each number of the optimiser's flat vector lies in the learner's.
        numbers = torch.arange(network.num_weights, dtype=torch.float64).repeat(REPLICAS, 1)
        flat = FlatWeights.zeros(self.optimizer.structure, torch.float64, torch.device("cpu"))
        flat.load_dict_(self.of_parameters(numbers))
        self.places = flat.flat[0].long()
        assert sorted(self.places.tolist()) == list(range(network.num_weights))

    def of_parameters(self, vector: Tensor) -> dict[str, Tensor]:
        """A learner's vector `[R, n]` by the names of the parameters."""
        found: dict[str, Tensor] = {}
        for index, matrix in enumerate(self.network.matrices(vector)):
            found |= {f"layers.{2 * index}.weight": matrix[..., :-1], f"layers.{2 * index}.bias": matrix[..., -1]}
        return found

    def in_learners_order(self, flat: Tensor) -> Tensor:
        return torch.empty_like(flat).index_copy_(-1, self.places, flat)

    def units(self) -> Tensor:
        size = self.network.num_weights
        return torch.eye(size, dtype=torch.float64).unsqueeze(1).expand(size, REPLICAS, size)

    def draw(self) -> dict[str, Tensor]:
        """The numbers that the optimiser is going to draw, as the learner takes them."""
        size, outputs = self.network.num_weights, self.network.sizes[-1]
        weights = torch.zeros(REPLICAS, self.samples, size, dtype=torch.float64)
        targets = torch.empty(REPLICAS, self.samples, BATCH, outputs, dtype=torch.float64)
        for replica, generator in enumerate(self.generators):
            for sample in range(self.samples):
                if self.settings.noise:
                    weights[replica, sample] = torch.zeros_like(weights[0, 0]).normal_(generator=generator)
                targets[replica, sample] = torch.zeros(BATCH, outputs, dtype=torch.float64).normal_(generator=generator)
        return {"weights": self.as_the_learner_draws(weights), "targets": -targets}

    def as_the_learner_draws(self, noise: Tensor) -> Tensor:
        family = FAMILIES[self.settings.family]
        if not self.settings.noise:
            return noise
        if family.name in SAME_ROOT:
            return noise if family.layout == "matrix" else self.in_learners_order(noise)
        # Another square root of the same matrix: the noise that gives the same draw.
        spread = self.in_learners_order(self.optimizer.covariance.sample(noise.transpose(0, 1)))
        root = self.learner.covariance.sample(self.units()).permute(1, 2, 0)
        return torch.linalg.solve(root, spread.permute(1, 2, 0)).transpose(1, 2)

    def step(self, step: int) -> None:
        x = normal(REPLICAS, BATCH, 3, seed=step)
        y = normal(REPLICAS, BATCH, self.network.sizes[-1], seed=step + 500)
        self.learner.anneal.fill_(annealed(step))
        self.learner.step_(x, y, self.draw())
        if self.learner.refresh_due(step):
            self.learner.refresh_()
        self.learner.move_()
        self.optimizer.param_groups[0]["lr"] = 0.05 * annealed(step)
        self.optimizer.step(lambda: (self.model(x), y))

    def check(self) -> None:
        for name, tensor in self.of_parameters(self.learner.mean).items():
            close(self.model.get_parameter(name).detach(), tensor)
        theirs = self.learner.likelihood.state_dict()
        for name, tensor in self.optimizer.likelihood.state_dict().items():
            close(tensor.flatten(), theirs[name].flatten())

    def check_covariance(self) -> None:
        """Of draws and of steps; the momentum; F̄, which only the posterior is made of alone, and its KL."""
        ours, theirs = self.optimizer.covariance, self.learner.covariance
        if self.settings.noise:
            close(
                covariance(self.in_learners_order(ours.sample(self.units()))), covariance(theirs.sample(self.units()))
            )
        gradient = normal(REPLICAS, self.network.num_weights, seed=3)
        solved = ours.solve(gradient[:, self.places])
        close(self.in_learners_order(solved), theirs.solve(gradient))
        momentum = self.optimizer.algorithm.momentum.average
        close(self.in_learners_order(momentum), self.learner.tensors()["momentum"])
        if self.settings.noise:
            close(posterior_kl(self.learner), self.optimizer.posterior().kl())


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, check_stride=False)


@pytest.mark.parametrize(("family", "case"), RUNS, ids=str)
def test_fifty_steps_of_several_replicas_are_the_same(family: str, case: dict) -> None:
    pair = Pair(family, case)
    start = pair.learner.mean.clone()
    for step in range(1, STEPS + 1):
        pair.step(step)
        pair.check()
    pair.check_covariance()
    assert (pair.learner.mean - start).abs().max() > 1e-2
    assert (pair.learner.mean[0] - pair.learner.mean[1]).abs().max() > 1e-2
    if "kl_clip" in case:
        assert bool((pair.learner.clipped > 0).all())
        assert bool((pair.learner.rejected == 0).all())


@pytest.mark.parametrize("family", ["diagonal", "kronecker"])
def test_the_trust_region_grows_with_the_outputs_in_both(family: str) -> None:
    pair = Pair(family, {"kl_clip": 1e-4}, TWO_OUTPUTS)
    for step in range(1, 21):
        pair.step(step)
        pair.check()
    pair.check_covariance()
    assert bool((pair.learner.clipped == 20).all())


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 8, 10, 50, 64, 100, 1000])
def test_factors_are_due_in_the_same_steps(every: int) -> None:
    pair = Pair("diagonal", {"factor_every": every})
    due = [step for step in range(1, 201) if pair.learner.refresh_due(step)]
    assert due == [step for step in range(1, 201) if pair.optimizer.options.factors_due(step)]
    early = {2**power for power in range(10) if 2**power < every}
    assert set(due) == {step for step in range(1, 201) if step % every == 0 or step in early}
