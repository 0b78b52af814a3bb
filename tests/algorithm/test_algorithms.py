"""Level 4: equality with a naive transcription of Algorithms 1 and 2.

The transcriptions loop over examples and layers and know nothing of the package but the order of its random numbers:
weight noise first, then sampled targets, for each draw.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.posterior.weights import parameter_order
from support.truth import close, normal

NUM_DATA, KL_WEIGHT, PRIOR_VARIANCE, LR, DECAY = 60, 0.5, 0.3, 0.05, 0.6
GAMMA_IN = KL_WEIGHT / (NUM_DATA * PRIOR_VARIANCE)
STEPS = 12


class NaiveNetwork:
    """[W | b] matrices with tanh between; one example at a time, gradients by the chain rule."""

    def __init__(self, likelihood: str) -> None:
        self.likelihood = likelihood

    def forward(self, weights: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        inputs, out = [], x
        for index, matrix in enumerate(weights):
            inputs.append(torch.cat([torch.tanh(out) if index else out, torch.ones(1, dtype=x.dtype)]))
            out = matrix @ inputs[-1]
        return inputs, out

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """d log p(target | output) / d output."""
        if self.likelihood == "gaussian":
            return (target - output) / 0.4
        return nn.functional.one_hot(target, len(output)) - torch.softmax(output, 0)

    def output_gradients(self, weights: list[Tensor], inputs: list[Tensor], score: Tensor) -> list[Tensor]:
        found = [score]
        for matrix, a in zip(weights[:0:-1], inputs[:0:-1], strict=True):
            found.insert(0, (matrix[:, :-1].mT @ found[0]) * (1 - a[:-1] ** 2))
        return found

    def sample_targets(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        if self.likelihood == "gaussian":
            return outputs + math.sqrt(0.4) * torch.empty_like(outputs).normal_(generator=generator)
        clocks = torch.empty_like(outputs).exponential_(generator=generator)
        return (outputs - clocks.log()).argmax(-1)

    def pass_over(
        self, weights: list[Tensor], x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[list[Tensor], list[list[tuple[Tensor, Tensor]]]]:
        """Mean gradient of log p(y) by each matrix; (a, g) of each example and layer with sampled targets, if any."""
        kept = [self.forward(weights, example) for example in x]
        total = [torch.zeros_like(w) for w in weights]
        for (inputs, output), target in zip(kept, y, strict=True):
            gradients = self.output_gradients(weights, inputs, self.score(output, target))
            for t, g, a in zip(total, gradients, inputs, strict=True):
                t.add_(torch.outer(g, a) / len(x))
        if generator is None:
            return total, []
        sampled = self.sample_targets(torch.stack([output for _, output in kept]), generator)
        pairs = []
        for (inputs, output), target in zip(kept, sampled, strict=True):
            gradients = self.output_gradients(weights, inputs, self.score(output, target))
            pairs.append(list(zip(inputs, gradients, strict=True)))
        return total, pairs


def damped(A: Tensor, S: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Equation (11)."""
    pi = math.sqrt((A.trace() / len(A)) / (S.trace() / len(S)))
    eye_a, eye_s = torch.eye(len(A), dtype=A.dtype), torch.eye(len(S), dtype=S.dtype)
    return A + pi * math.sqrt(gamma) * eye_a, S + math.sqrt(gamma) / pi * eye_s


def average(measured: list[Tensor]) -> Tensor:
    """Of all measurements, each counting `DECAY` times as much as the next one."""
    weights = [DECAY**age for age in reversed(range(len(measured)))]
    return sum(weight * one for weight, one in zip(weights, measured, strict=True)) / sum(weights)


def steadied(F: Tensor, one: Tensor, updates: int) -> Tensor:
    """What factors are made of: a share of the identity, or of a diagonal of ones, that measurements push aside."""
    share = 1 / (updates + 1) ** 2
    return (1 - share) * F + share * one


def clip_of(case: dict, likelihood: str) -> float | None:
    """For a Gaussian of two outputs twice as much as for one number of classes."""
    return case["kl_clip"] * (2 if likelihood == "gaussian" else 1) if "kl_clip" in case else None


def clip_factor(pairs: list[tuple[Tensor, Tensor]], clip: float | None) -> float:
    if clip is None:
        return 1.0
    return min(1.0, math.sqrt(clip / (LR**2 * sum(float((g * v).sum()) for g, v in pairs))))


def make_network(likelihood: str) -> tuple[nn.Sequential, list[nn.Linear], ng.Likelihood]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    likelihoods = {"gaussian": ng.Gaussian(noise_variance=0.4), "categorical": ng.Categorical()}
    return model, [model[0], model[2], model[4]], likelihoods[likelihood]


def batch_at(step: int, likelihood: str) -> tuple[Tensor, Tensor]:
    size = 4 + step % 3
    x = normal(size, 3, seed=step)
    return x, normal(size, 2, seed=step + 100) if likelihood == "gaussian" else (x[:, 0] > 0).long()


def due(step: int, every: int, factor_every: int) -> bool:
    return step % every == 0 or (step < factor_every and step in {1, 2, 4, 8, 16})


CASES = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.7},
    "damping": {"momentum": 0.7, "damping": 0.2},
    "schedule": {"momentum": 0.0, "damping": 0.1, "stats_every": 2, "factor_every": 3},
    "long schedule": {"momentum": 0.5, "stats_every": 5, "factor_every": 9},
    "clip": {"momentum": 0.7, "kl_clip": 1e-4},
    "heavy ball": {"momentum": 0.7, "momentum_mode": "heavy_ball", "kl_clip": 3e-4, "damping": 0.05},
    "samples": {"momentum": 0.7, "mc_samples": 3, "stats_every": 2},
    "no noise": {"momentum": 0.7, "noise": False, "damping": 0.1},
}


def make_optimizer(kind: type, model: nn.Module, likelihood: ng.Likelihood, case: dict) -> ng.NoisyOptimizer:
    options = {"stats_every": 1, "factor_every": 1} | case
    return kind(
        model, likelihood, num_data=NUM_DATA, kl_weight=KL_WEIGHT, prior_variance=PRIOR_VARIANCE, lr=LR,
        fisher_decay=DECAY, seed=11, **options,
    )  # fmt: skip


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_noisy_kfac_is_algorithm_2(case: dict, likelihood: str) -> None:
    model, layers, distribution = make_network(likelihood)
    optimizer = make_optimizer(ng.NoisyKFAC, model, distribution, case)
    generator = torch.Generator()
    generator.set_state(optimizer.generators[0].get_state())
    naive = NaiveNetwork(likelihood)

    M = [torch.cat([m.weight, m.bias[:, None]], 1).detach().clone() for m in layers]
    one_A = [torch.eye(w.shape[1], dtype=torch.float64) for w in M]
    one_S = [torch.eye(w.shape[0], dtype=torch.float64) for w in M]
    A, S = [0 * a for a in one_A], [0 * s for s in one_S]
    every_A, every_S = [], []
    momentum = [torch.zeros_like(w) for w in M]
    gamma = GAMMA_IN + case.get("damping", 0.0)
    samplers = [damped(a, s, GAMMA_IN) for a, s in zip(one_A, one_S, strict=True)]
    steppers = [damped(a, s, gamma) for a, s in zip(one_A, one_S, strict=True)]
    beta, heavy = case["momentum"], case.get("momentum_mode") == "heavy_ball"
    for step in range(1, STEPS + 1):
        x, y = batch_at(step, likelihood)
        draws = case.get("mc_samples", 1)
        stats = due(step, case.get("stats_every", 1), case.get("factor_every", 1))
        V = [torch.zeros_like(w) for w in M]
        new_A, new_S = [torch.zeros_like(a) for a in A], [torch.zeros_like(s) for s in S]
        for _ in range(draws):
            W = [w.clone() for w in M]
            if case.get("noise", True):
                noise = torch.empty(sum(w.numel() for w in M), dtype=torch.float64).normal_(generator=generator)
                for w, z, (a, s) in zip(W, noise.split([w.numel() for w in M]), samplers, strict=True):
                    root_s = torch.linalg.inv(torch.linalg.cholesky(s)).mT
                    root_a = torch.linalg.inv(torch.linalg.cholesky(a)).mT
                    w.add_(math.sqrt(KL_WEIGHT / NUM_DATA) * root_s @ z.reshape(w.shape) @ root_a.mT)
            gradients, pairs = naive.pass_over(W, x, y, generator if stats else None)
            for v, g, w in zip(V, gradients, W, strict=True):
                v.add_((g - GAMMA_IN * w) / draws)
            for example in pairs:
                for i, (a, g) in enumerate(example):
                    new_A[i] += torch.outer(a, a) / (len(x) * draws)
                    new_S[i] += torch.outer(g, g) / (len(x) * draws)
        if stats:
            every_A.append(new_A)
            every_S.append(new_S)
            A = [average(list(measured)) for measured in zip(*every_A, strict=True)]
            S = [average(list(measured)) for measured in zip(*every_S, strict=True)]
        if due(step, case.get("factor_every", 1), case.get("factor_every", 1)):
            near_A = [steadied(a, one, len(every_A)) for a, one in zip(A, one_A, strict=True)]
            near_S = [steadied(s, one, len(every_S)) for s, one in zip(S, one_S, strict=True)]
            samplers = [damped(a, s, GAMMA_IN) for a, s in zip(near_A, near_S, strict=True)]
            steppers = [damped(a, s, gamma) for a, s in zip(near_A, near_S, strict=True)]
        if not heavy and beta:
            momentum = [beta * m + (1 - beta) * v for m, v in zip(momentum, V, strict=True)]
            V = [m / (1 - beta**step) for m in momentum]
        U = [torch.linalg.inv(s) @ v @ torch.linalg.inv(a) for v, (a, s) in zip(V, steppers, strict=True)]
        factor = clip_factor(list(zip(V, U, strict=True)), clip_of(case, likelihood))
        U = [factor * u for u in U]
        if heavy:
            momentum = U = [beta * m + u for m, u in zip(momentum, U, strict=True)]
        M = [w + LR * u for w, u in zip(M, U, strict=True)]
        if "kl_clip" in case and step == 1:
            assert factor < 1, "the trust region must matter for this to be a test"

        optimizer.step(lambda x=x, y=y: (model(x), y))
        for i, (layer, name) in enumerate(zip(layers, ("0", "2", "4"), strict=True)):
            close(torch.cat([layer.weight, layer.bias[:, None]], 1).detach(), M[i], rtol=1e-9, atol=1e-11)
            close(optimizer.covariance.statistics[name].inputs, A[i], rtol=1e-9, atol=1e-11)
            close(optimizer.covariance.statistics[name].outputs, S[i], rtol=1e-9, atol=1e-11)
    assert torch.equal(generator.get_state(), optimizer.generators[0].get_state())


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_noisy_adam_is_algorithm_1(case: dict, likelihood: str) -> None:
    model, layers, distribution = make_network(likelihood)
    optimizer = make_optimizer(ng.NoisyAdam, model, distribution, case)
    generator = torch.Generator()
    generator.set_state(optimizer.generators[0].get_state())
    naive = NaiveNetwork(likelihood)
    order = parameter_order(optimizer.structure)

    def matrices(vector: Tensor) -> list[Tensor]:
        """A vector in the order of the parameters as [W | b] matrices."""
        parts = vector.split([p.numel() for p in model.parameters()])
        return [
            torch.cat([w.reshape(layer.weight.shape), b[:, None]], 1)
            for w, b, layer in zip(parts[::2], parts[1::2], layers, strict=True)
        ]

    def vector(found: list[Tensor]) -> Tensor:
        return torch.cat([part for w in found for part in (w[:, :-1].flatten(), w[:, -1])])

    mean = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    one, m = torch.ones_like(mean), torch.zeros_like(mean)
    f, factor_f, every_f = 0 * one, one, []
    gamma, beta = GAMMA_IN + case.get("damping", 0.0), case["momentum"]
    for step in range(1, STEPS + 1):
        x, y = batch_at(step, likelihood)
        draws = case.get("mc_samples", 1)
        stats = due(step, case.get("stats_every", 1), case.get("factor_every", 1))
        v, squares = torch.zeros_like(mean), torch.zeros_like(mean)
        for _ in range(draws):
            w = mean
            if case.get("noise", True):
                noise = torch.empty_like(mean).normal_(generator=generator)[order]
                w = mean + noise * (KL_WEIGHT / NUM_DATA / (factor_f + GAMMA_IN)).sqrt()
            gradients, pairs = naive.pass_over(matrices(w), x, y, generator if stats else None)
            v = v + (vector(gradients) - GAMMA_IN * w) / draws
            for example in pairs:
                squares += vector([torch.outer(g, a) for a, g in example]) ** 2 / (len(x) * draws)
        if stats:
            every_f.append(squares)
            f = average(every_f)
        if due(step, case.get("factor_every", 1), case.get("factor_every", 1)):
            factor_f = steadied(f, one, len(every_f))
        heavy = case.get("momentum_mode") == "heavy_ball"
        if not heavy and beta:
            m = beta * m + (1 - beta) * v
            v = m / (1 - beta**step)
        u = v / (factor_f + gamma)
        u = u * clip_factor([(v, u)], clip_of(case, likelihood))
        if heavy:
            m = u = beta * m + u
        mean = mean + LR * u

        optimizer.step(lambda x=x, y=y: (model(x), y))
        close(nn.utils.parameters_to_vector(model.parameters()).detach(), mean, rtol=1e-9, atol=1e-11)
        close(optimizer.covariance.statistics["all"].fisher[order], f, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------- Bayesian linear regression


@pytest.mark.parametrize("noise", [True, False])
def test_the_draw_of_a_fresh_pass_is_for_statistics_alone(noise: bool) -> None:
    """Between statistics nothing is left of it: the step's gradient is at the weights of the step's own draw."""
    torch.manual_seed(0)
    x, y, found = torch.randn(6, 2), torch.randn(6, 1), []
    for fisher_pass in ("same", "fresh"):
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        optimizer = ng.NoisyFull(
            model, ng.Gaussian(0.5), num_data=6, lr=0.1, prior_variance=0.1, fisher="exact", noise=noise, seed=0,
            fisher_pass=fisher_pass, stats_every=1, factor_every=1,
        )  # fmt: skip
        optimizer.step(lambda model=model: (model(x), y))  # the Fisher of a linear model does not depend on its weights
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found)
