"""Small trainings whose numbers are stored (`golden_make.py`) and compared for ever after (`test_golden.py`).

`record(name)` trains one of `RUNS` for 50 steps in float64 from fixed seeds, and gives what can be seen of it from
outside: arrays by name. Nothing here may change, or the stored numbers say nothing; `engine_record` alone reads a
learner, and is what to adapt where its attributes are renamed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import noisygrad as ng
from noisygrad.likelihoods import Gaussian
from noisygrad.networks import ReplicatedLinear
from noisygrad.replicas.engine import ReplicaGenerators, train_replicas
from noisygrad.replicas.noisy import NoisyLearner, NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons

STEPS = 50
DRAWS_AT = (1, 2, 10, 50)
MEANS_AT = (1, 10, 50)
EPOCHS_AT = (1, 2, 10)
"""Of five steps each."""
LARGEST_DENSE = 60
"""Of more weights than this, standard deviations are kept and no matrix."""

Arrays = dict[str, np.ndarray]
Batch = tuple[Tensor, Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# ---------------------------------------------------------------- networks


class Attention(nn.Module):
    """Tokens to classes: a table, self-attention with a shortcut around it, a norm, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x.mean(dim=1))


def perceptron() -> nn.Module:
    """Two of its four layers have the same shape."""
    sizes = itertools.pairwise((2, 3, 3, 3, 1))
    return nn.Sequential(*[part for a, b in sizes for part in (nn.Linear(a, b), nn.Tanh())][:-1])


def replicated() -> nn.Module:
    """Three networks at once."""
    return nn.Sequential(
        ReplicatedLinear((3,), 2, 3), nn.Tanh(), ReplicatedLinear((3,), 3, 2), nn.Tanh(), ReplicatedLinear((3,), 2, 1)
    )


def convolutions() -> nn.Module:
    model = nn.Sequential()
    parts = {
        "first": nn.Conv2d(2, 4, 2),
        "batch_norm": nn.BatchNorm2d(4),
        "relu": nn.ReLU(),
        "grouped": nn.Conv2d(4, 4, 2, groups=2, padding=1),
        "group_norm": nn.GroupNorm(2, 4),
        "tanh": nn.Tanh(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "head": nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 3)),
    }
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def curve_batches() -> list[Batch]:
    x = normal(5, 6, 2, seed=1)
    return list(zip(x, torch.sin(x.sum(-1, keepdim=True)) + 0.1 * normal(5, 6, 1, seed=2), strict=True))


def replica_batches() -> list[Batch]:
    x = normal(5, 3, 6, 2, seed=3)
    return list(zip(x, torch.sin(x.sum(-1, keepdim=True)) + 0.1 * normal(5, 3, 6, 1, seed=4), strict=True))


def image_batches() -> list[Batch]:
    y = torch.randint(3, (5, 6), generator=generator(5))
    return list(zip(normal(5, 6, 2, 4, 4, seed=6) + y[..., None, None, None], y, strict=True))


def token_batches() -> list[Batch]:
    x = torch.randint(5, (5, 6, 3), generator=generator(7))
    return list(zip(x, x.sum(-1) % 3, strict=True))


@dataclass(frozen=True)
class Problem:
    model: Callable[[], nn.Module]
    likelihood: Callable[[], ng.Likelihood]
    batches: Callable[[], list[Batch]]


PROBLEMS = {
    "perceptron": Problem(perceptron, ng.Gaussian, curve_batches),
    "convolutions": Problem(convolutions, ng.Categorical, image_batches),
    "attention": Problem(Attention, ng.Categorical, token_batches),
    "replicas": Problem(replicated, ng.Gaussian, replica_batches),
}


def started(problem: Problem, nudge: float) -> nn.Module:
    """The model with its first weights, moved by `nudge` relative to their size."""
    model = problem.model().double()
    start = parameters_to_vector(model.parameters()).detach()
    # Norms start near their scale of 1, all else near 0: what a constructor draws is left out.
    scales = [torch.full_like(p, float("norm" in n and n.endswith("weight"))) for n, p in model.named_parameters()]
    start = parameters_to_vector(scales) + 0.4 * normal(len(start), seed=8)
    vector_to_parameters(start * (1.0 + nudge * normal(len(start), seed=9).sign()), model.parameters())
    return model


# ---------------------------------------------------------------- optimisers


@dataclass(frozen=True)
class Run:
    """One training by an optimiser: `continued` takes the posterior of ten steps as its prior."""

    kind: type[ng.NoisyOptimizer]
    problem: str
    options: Mapping[str, Any] = field(default_factory=dict)
    form: str = "closure"
    continued: bool = False

    def record(self, nudge: float, changes: Mapping[str, Any]) -> Arrays:
        options = {"num_data": 60, "lr": 0.05, "prior_variance": 0.5, "damping": 0.01, "fisher_decay": 0.9, "seed": 11}
        options |= self.options
        if self.continued:
            first = replace(self, continued=False)
            trained, _ = first._train({**options, "seed": 12}, nudge, steps=10)
            options = {**options, "prior": trained.posterior().as_prior(), "prior_variance": None}
        optimizer, found = self._train({**options, **_changed(options, changes)}, nudge, steps=STEPS)
        return found | posterior_record(optimizer.posterior(), PROBLEMS[self.problem].batches()[0])

    def _train(self, options: Mapping[str, Any], nudge: float, steps: int) -> tuple[ng.NoisyOptimizer, Arrays]:
        problem = PROBLEMS[self.problem]
        model, batches = started(problem, nudge), problem.batches()
        optimizer = self.kind(model, problem.likelihood(), **options)
        weights: dict[str, list[Tensor]] = {"draws": [], "means": []}

        def keep(what: str) -> None:
            weights[what].append(parameters_to_vector(model.parameters()).detach().clone())

        losses = []
        for step in range(1, steps + 1):
            x, y = batches[step % len(batches)]

            def drawn(x: Tensor = x, step: int = step) -> Tensor:
                if step in DRAWS_AT:
                    keep("draws")
                return model(x)

            losses.append(_step(optimizer, drawn, y, self.form))
            if step in MEANS_AT:
                keep("means")
        found = {name: torch.stack(parts) for name, parts in weights.items()} | {"losses": torch.stack(losses)}
        found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        return optimizer, arrays(found)


def _step(optimizer: ng.NoisyOptimizer, output: Callable[[], Tensor], y: Tensor, form: str) -> Tensor:
    """One step as a closure, or in a loop of one's own (of two losses for each draw, where it is "two losses")."""
    if form == "closure":
        return optimizer.step(lambda: (output(), y)).detach()
    with optimizer.sampled() as draw:
        losses = [draw.nll(output(), y) for _ in range(2 if form == "two losses" else 1)]
        for loss in losses:
            loss.backward()
    optimizer.step()
    return torch.stack(losses).detach().mean(0)


def _changed(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: change(options[name]) if callable(change) else change for name, change in changes.items()}


def posterior_record(posterior: ng.Posterior, batch: Batch) -> Arrays:
    mean = posterior.mean
    size = sum(tensor.numel() for tensor in mean.values())
    found = {
        "posterior mean": _flat(mean),
        "sample": _flat(posterior.sample(generator(21))),
        "outputs": posterior.outputs(batch[0], 2, generator=generator(22)),
    }
    # The other buffers of a likelihood follow from these.
    found |= {f"likelihood {n}": b for n, b in posterior.likelihood.named_buffers() if n.startswith("noise_")}
    try:
        found["kl"] = posterior.kl()
    except ValueError:  # a point estimate has no density
        return arrays(found)
    point = {name: 0.3 * torch.arange(t.numel()).to(t).sin().view(t.shape) for name, t in mean.items()}
    found |= {"log_prob": posterior.log_prob(point), "objective": posterior.objective([batch], 2, generator(23))}
    if size <= LARGEST_DENSE:
        found["covariance"] = posterior.covariance()
    else:
        found["std"] = _flat(posterior.std())
    return arrays(found)


def _flat(weights: Mapping[str, Tensor]) -> Tensor:
    return parameters_to_vector(weights.values())


# ---------------------------------------------------------------- the engine of replicas

NETWORK = Perceptrons((2, 3, 3, 1))
SEEDS = (5, 17, 3)


@dataclass(frozen=True)
class EngineRun:
    """One training by `train_replicas`, ten epochs of five steps, the rates annealed."""

    settings: Mapping[str, Any]
    likelihood: Mapping[str, Any] = field(default_factory=dict)

    def record(self, nudge: float, changes: Mapping[str, Any]) -> Arrays:
        options = {"lr": 0.05, "fisher_decay": 0.9, "prior_variance": 0.5, "mc_samples": 2, "damping": 0.01}
        options |= {"kl_weight": 0.8, **self.settings}
        streams = ReplicaGenerators.of(SEEDS)
        learner = NoisyLearner(
            NETWORK, Gaussian(**self.likelihood), NoisySettings(**options | _changed(options, changes)),
            num_data=20, generators=streams.start, dtype=torch.float64,
        )  # fmt: skip
        learner.mean.mul_(1.0 + nudge * normal(*learner.mean.shape, seed=9).sign())
        x = normal(3, 20, 2, seed=31)
        y = torch.sin(x.sum(-1, keepdim=True)) + 0.1 * normal(3, 20, 1, seed=32)
        found: dict[str, Tensor] = {}

        def keep(epoch: int) -> None:
            if epoch in EPOCHS_AT:
                found.update({f"epoch {epoch} {name}": t.clone() for name, t in engine_weights(learner).items()})

        train_replicas(
            learner, x, y, epochs=10, batch_size=4, streams=streams, anneal=lambda epoch: 1.0 if epoch < 7 else 0.3,
            execution="eager", on_epoch=keep,
        )  # fmt: skip
        prediction = learner.predict(x[:, :4], 3, streams.test)
        found |= {"prediction mean": prediction.mean, "prediction variance": prediction.variance}
        found["prediction log_prob"] = prediction.log_prob(y[:, :4])
        return arrays(found | engine_record(learner))


def engine_weights(learner: NoisyLearner) -> dict[str, Tensor]:
    """The mean, and what is drawn around it with noise that is always the same."""
    return {"mean": learner.mean, "weights": learner.weights(normal(len(SEEDS), 2, NETWORK.num_weights, seed=33))}


def engine_record(learner: NoisyLearner) -> dict[str, Tensor]:
    """Moments, noise and the rest of what a learner goes on from, its figures, and the KL of one that has noise."""
    state = {f"state {name}": tensor for name, tensor in learner.tensors().items()}
    figures = {f"figure {name}": tensor for name, tensor in learner.diagnostics().items()}
    return state | figures | ({"kl": learner.kl()} if learner.settings.noise else {})


# ---------------------------------------------------------------- all runs

PRECISE = {"stats_every": 1, "factor_every": 1}
SELDOM = {"stats_every": 3, "factor_every": 5}
POINTS = {"groups": {"*norm*": {"noise": False}, "head.*": {"lr": 0.01, "momentum": 0.5, "damping": 0.05}}}
CLIPPED = {"kl_clip": 3e-3, "momentum_mode": "heavy_ball", "momentum": 0.8, "damping": 0.05}
SCHEDULED = {"kl_clip": lambda step: 1e-4 * (1.0 + step), "fisher_decay": lambda step: 1.0 - 1.0 / (step + 2.0)}


def _optimizer_runs() -> Iterator[tuple[str, Run]]:
    """Those that every optimiser has; the options alternate, so that each meets each family somewhere."""
    for kind in (ng.NoisyAdam, ng.NoisyKFAC, ng.NoisyBlockTridiagonal, ng.NoisyFull):
        name = kind.__name__
        yield f"{name} plain", Run(kind, "perceptron", PRECISE)
        yield f"{name} clipped", Run(kind, "perceptron", {**CLIPPED, **SELDOM, "fisher": "exact"}, "sampled")
        yield f"{name} continued", Run(kind, "perceptron", {**SELDOM, "kl_weight": 0.7}, continued=True)
        yield f"{name} replicas", Run(kind, "replicas", {**SELDOM, **CLIPPED, "mc_samples": 2})
        fading = {**SELDOM, **POINTS, "safeguard": "fading", "fisher": "exact"}
        yield f"{name} convolutions", Run(kind, "convolutions", fading, "sampled")
        yield f"{name} attention", Run(kind, "attention", {**SELDOM, "fisher_floor": 0.02, "mc_samples": 2})


def _kronecker_runs() -> Iterator[tuple[str, Run]]:
    exact = {"damping_mode": "exact", **SELDOM}
    yield "exact damping", Run(ng.NoisyKFAC, "perceptron", exact)
    yield "exact damping continued", Run(ng.NoisyKFAC, "perceptron", {**exact, "fisher": "exact"}, continued=True)
    yield "exact damping convolutions", Run(ng.NoisyKFAC, "convolutions", {**exact, **CLIPPED}, "sampled")
    yield "exact damping attention", Run(ng.NoisyKFAC, "attention", {**exact, **POINTS})
    yield "defaults convolutions", Run(ng.NoisyKFAC, "convolutions", {"damping": 0.0})
    yield "scheduled convolutions", Run(ng.NoisyKFAC, "convolutions", {**SELDOM, **SCHEDULED})
    fresh = {**SELDOM, "fisher_pass": "fresh", "stats_batch": 4}
    yield "fresh pass attention", Run(ng.NoisyKFAC, "attention", fresh)
    yield "empirical attention", Run(ng.NoisyKFAC, "attention", {**SELDOM, "fisher": "empirical"}, "two losses")
    yield "point estimate", Run(ng.NoisyKFAC, "perceptron", {**SELDOM, "noise": False})


def _engine_runs() -> Iterator[tuple[str, EngineRun]]:
    for family in ("diagonal", "kronecker", "tridiagonal", "full"):
        yield f"engine {family}", EngineRun({"family": family, "kl_clip": 2e-3})
    exact = {"family": "kronecker", "damping_mode": "exact", "factor_every": 3}
    yield "engine exact damping", EngineRun(exact)
    yield "engine slow start", EngineRun({"family": "kronecker", "safeguard": "fading", "factor_every": 2})
    yield "engine slow diagonal", EngineRun({"family": "diagonal", "safeguard": "fading"}, {"noise_prior": None})
    yield "engine undamped tridiagonal", EngineRun({"family": "tridiagonal", "factor_every": 4, "damping": 0.0})
    yield "engine point estimate", EngineRun({"family": "kronecker", "noise": False, "mc_samples": 1})


RUNS: dict[str, Run | EngineRun] = dict(
    itertools.chain(_optimizer_runs(), ((f"NoisyKFAC {name}", run) for name, run in _kronecker_runs()), _engine_runs())
)


def record(name: str, *, nudge: float = 0.0, **changes: Any) -> Arrays:
    """All arrays of a run. `nudge` moves the first weights by so much of their size; `changes` replace options.

    A change that is a function is given the option that it replaces.
    """
    return RUNS[name].record(nudge, changes)


def arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in tensors.items()}
