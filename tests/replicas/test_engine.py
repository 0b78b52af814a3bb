"""Replicas: the same arithmetic as the optimisers, equal to lone trainings, however the step is executed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from noisygrad.families.base import Precision
from noisygrad.families.kl import kl_divergence
from noisygrad.kernels.factorisation import unchecked
from noisygrad.likelihoods import Gaussian
from noisygrad.replicas.engine import ReplicaGenerators, compiler_available, train_replicas
from noisygrad.replicas.noisy import NoisyLearner, NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad_paper.baselines.bbb import BBB, BBBSettings
from support.replay_executor import replayed
from support.truth import OPTIMIZERS, normal

NETWORK = Perceptrons((3, 5, 4, 1))
NUM_DATA = 23
FAMILIES = ("diagonal", "kronecker", "tridiagonal", "full")


def make_data(replicas: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.stack([normal(NUM_DATA, 3, seed=seed + index) for index in range(replicas)])
    return x, x.sum(-1, keepdim=True).sin()


def make_learner(kind: str, streams: ReplicaGenerators, **settings: object) -> NoisyLearner | BBB:
    options: dict = {"num_data": NUM_DATA, "generators": streams.start, "dtype": torch.float64}
    if kind == "bbb":
        return BBB(NETWORK, Gaussian(), BBBSettings(mc_samples=3, **settings), **options)
    return NoisyLearner(NETWORK, Gaussian(), NoisySettings(family=kind, mc_samples=3, **settings), **options)


def train(kind: str, seeds: list[int], *, epochs: int = 10, execution: str = "eager", **settings: object) -> dict:
    streams = ReplicaGenerators.of(seeds)
    learner = make_learner(kind, streams, **settings)
    x, y = make_data(100)
    train_replicas(
        learner, x[seeds], y[seeds], epochs=epochs, batch_size=4, streams=streams, execution=execution,
        anneal=lambda epoch: 1.0 if epoch <= epochs // 2 else 0.1,
    )  # fmt: skip
    prediction = learner.predict(x[seeds], 5, streams.test)
    return {**learner.tensors(), "kl": learner.kl(), "prediction": prediction.mean, "scale": prediction.scale[0]}


def test_forward_and_backward_are_those_of_autograd():
    weights = normal(2, 3, NETWORK.num_weights, seed=1).requires_grad_()
    x = normal(2, 6, 3, seed=2)
    inputs, outputs = NETWORK.forward(weights, x)
    at_output = normal(2, 3, 6, 1, seed=3)
    found = NETWORK.backward(weights, inputs, at_output)
    (truth,) = torch.autograd.grad((outputs * at_output).sum(), weights)
    layers = [
        torch.cat([g.mT @ a, g.sum(-2).unsqueeze(-1)], dim=-1).flatten(2) for g, a in zip(found, inputs, strict=True)
    ]
    torch.testing.assert_close(torch.cat(layers, dim=-1), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise_prior", [(6.0, 6.0), None], ids=["gamma", "point"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("diagonal", {}),
        ("kronecker", {}),
        ("kronecker", {"damping": 0.05, "momentum": 0.0}),
        ("kronecker", {"kl_clip": 1e-4}),
        ("diagonal", {"kl_clip": 1e-4, "safeguard": "fading"}),
        ("kronecker", {"safeguard": "fading"}),
        ("kronecker", {"damping_mode": "exact", "factor_every": 3}),
        ("tridiagonal", {"factor_every": 2}),
        ("full", {"noise": False, "mc_samples": 1}),
    ],
    ids=str,
)
def test_a_learner_follows_the_optimiser(family: str, settings: dict, noise_prior: tuple | None) -> None:
    """The same noise, targets and batches through `NoisyAdam` … `NoisyFull`: the same mean, noise and KL to 1e-9."""
    samples = settings.get("mc_samples", 3)
    chosen = NoisySettings(
        **{"family": family, "lr": 0.05, "fisher_decay": 0.7, "kl_weight": 0.7, "prior_variance": 0.5, "mc_samples": 3}
        | settings
    )
    learner = NoisyLearner(
        NETWORK, Gaussian(noise_prior=noise_prior), chosen, num_data=NUM_DATA, generators=[torch.Generator()],
        dtype=torch.float64,
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    linears = [module for module in model if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for linear, matrix in zip(linears, NETWORK.matrices(learner.mean[0]), strict=True):
            linear.weight.copy_(matrix[:, :-1])
            linear.bias.copy_(matrix[:, -1])
    optimizer = OPTIMIZERS[family](
        model, Gaussian(noise_prior=noise_prior), num_data=NUM_DATA, lr=0.05, fisher_decay=0.7, kl_weight=0.7,
        prior_variance=0.5, mc_samples=samples, stats_every=1, factor_every=chosen.factor_every, seed=3,
        damping=chosen.damping, momentum=chosen.momentum, damping_mode=chosen.damping_mode, noise=chosen.noise,
        kl_clip=chosen.kl_clip, safeguard=chosen.safeguard,
    )  # fmt: skip
    generator = torch.Generator()
    generator.set_state(optimizer.generators[0].get_state())
    places = [place for matrix in layer_places() for place in matrix]
    for step in range(1, 9):
        x, y = normal(4, 3, seed=step), normal(4, 1, seed=step + 50)
        drawn = []
        for _ in range(samples):
            weights = torch.zeros(NETWORK.num_weights, dtype=torch.float64)
            if chosen.noise:
                weights.normal_(generator=generator)
            targets = torch.empty(4, 1, dtype=torch.float64).normal_(generator=generator)
            # The optimiser's flat vector has all of W, then b; a diagonal takes its noise in that order.
            drawn.append((weights[places] if family == "diagonal" else weights, -targets))
        noise = {"weights": torch.stack([w for w, _ in drawn]), "targets": torch.stack([t for _, t in drawn])}
        learner.step_(x[None], y[None], {name: tensor[None] for name, tensor in noise.items()})
        if learner.refresh_due(step):
            learner.refresh_()
        learner.move_()
        optimizer.step(lambda x=x, y=y: (model(x), y))
        for linear, matrix in zip(linears, NETWORK.matrices(learner.mean[0]), strict=True):
            torch.testing.assert_close(
                torch.cat([linear.weight, linear.bias[:, None]], 1), matrix, rtol=1e-9, atol=1e-9
            )
        if noise_prior is None:
            torch.testing.assert_close(learner.likelihood.noise_point[0], optimizer.likelihood.noise_point)
        else:
            torch.testing.assert_close(learner.likelihood.noise_rate[0], optimizer.likelihood.noise_rate)
    if chosen.noise:
        torch.testing.assert_close(posterior_kl(learner)[0], optimizer.posterior().kl(), rtol=1e-9, atol=1e-9)


def posterior_kl(learner: NoisyLearner) -> Tensor:
    """The KL of the posterior that F̄ says, without what steadies the first draws, `[R]`."""
    covariance, scale = learner.covariance, learner.num_data / learner.kl_weight
    parts = [
        kl_divergence(precision, covariance.priors[block.name], block.vector(learner.mean), scale)
        for block, precision in zip(covariance.blocks, learner.precisions(), strict=True)
    ]
    return torch.stack(parts).sum(0)


def layer_places() -> list[list[int]]:
    """For each layer, where the entries of [W | b], row by row, lie in a vector of all of W and then b."""
    places, start = [], 0
    for rows, columns in NETWORK.shapes:
        inner = columns - 1
        places.append(
            [
                start + (row * inner + column if column < inner else rows * inner + row)
                for row in range(rows)
                for column in range(columns)
            ]
        )
        start += rows * columns
    return places


@pytest.mark.parametrize("kind", [*FAMILIES, "bbb"])
def test_a_replica_is_a_lone_training(kind: str) -> None:
    together = train(kind, [3, 7, 5])  # 50 steps
    for index, seed in enumerate([3, 7, 5]):
        alone = train(kind, [seed])
        for name, tensor in alone.items():
            difference = (together[name][index] - tensor[0]).abs().max() / tensor.abs().max().clamp_min(1e-30)
            assert difference < 1e-10, (name, float(difference))


@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "bbb"])
@pytest.mark.skipif(not compiler_available(), reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_is_the_eager_one(kind: str) -> None:
    with warnings.catch_warnings():
        if torch.__version__ < "2.12":  # whose compiler is wrong about Kronecker factors, and is found out
            warnings.simplefilter("ignore", UserWarning)
        eager, compiled = (train(kind, [0, 1], epochs=3, execution=how) for how in ("eager", "compiled"))
    for name, tensor in eager.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def test_bbb_follows_the_gradient_of_the_elbo():
    streams = ReplicaGenerators.of([0, 1])
    learner = make_learner("bbb", streams)
    assert isinstance(learner, BBB)
    x, y = make_data(2)
    x, y = x[:, :6], y[:, :6]
    noise = normal(2, 3, NETWORK.num_weights, seed=9)
    parameters = learner._parameters.clone().requires_grad_()
    mean, log_std = parameters.unbind(0)
    weights = mean.unsqueeze(1) + log_std.exp().unsqueeze(1) * noise
    outputs = NETWORK.forward(weights, x)[1]
    nll = 0.5 * learner.precision() * (outputs - y.unsqueeze(1)).square()
    q = torch.distributions.Normal(mean, log_std.exp())
    kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(-1)
    (truth,) = torch.autograd.grad((nll.sum(-1).mean((1, 2)) + kl / NUM_DATA).sum(), parameters)
    learner.step_(x, y, {"weights": noise})
    # The first step of Adam has the first moment (1 − β₁) g.
    torch.testing.assert_close(learner._adam.first, 0.1 * truth, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        make_learner("bbb", ReplicaGenerators.of([0, 1])).kl(), kl.detach(), rtol=1e-10, atol=1e-10, check_stride=False
    )


def test_adam_is_torchs():
    start, gradients = normal(3, 4, seed=0), [normal(3, 4, seed=index) for index in range(1, 8)]
    from noisygrad_paper.baselines.adam import Adam

    mine, theirs = start.clone(), nn.Parameter(start.clone())
    adam, reference = Adam(mine, lr=0.03), torch.optim.Adam([theirs], lr=0.03)
    for gradient in gradients:
        adam.step_(gradient, torch.tensor(1.0, dtype=torch.float64))
        theirs.grad = gradient
        reference.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-10, atol=1e-12)


def test_elbo_is_the_posteriors():
    """−N·E[nll] − KL by hand, from the same draws; λ has no part in it."""
    streams = ReplicaGenerators.of([4])
    learner = make_learner("kronecker", streams, kl_weight=0.7)
    x, y = make_data(1)
    draws = learner.draws(6, ReplicaGenerators.of([4]).test)
    outputs = NETWORK.forward(draws, x)[1]
    log_prob = learner.likelihood.log_prob(outputs[0].flatten(0, 1)[None], y.repeat(1, 6, 1))
    truth = NUM_DATA * log_prob.mean() - learner.kl()[0] - learner.likelihood.kl()[0]
    torch.testing.assert_close(learner.elbo(x, y, 6, streams.test)[0], truth)


def with_a_fisher_of_one(learner: NoisyLearner) -> None:
    """After so many measurements that nothing steadies the factors any more."""
    fisher = learner.covariance.fisher
    fisher.updates.fill_(1e9)
    fisher.seen.fill_(1.0)
    for statistics in fisher.statistics.values():
        ones = statistics.with_identity(1.0).averages()
        for name, average in statistics.averages().items():
            average.copy_(ones[name])


def samplers(learner: NoisyLearner) -> list[Precision]:
    return [learner.covariance.factors[block.name].sampler for block in learner.covariance.blocks]


def test_a_factorisation_that_fails_keeps_the_old_one():
    learner = make_learner("kronecker", ReplicaGenerators.of([0, 1]))
    assert isinstance(learner, NoisyLearner)
    with_a_fisher_of_one(learner)
    before = {name: tensor.clone() for name, tensor in samplers(learner)[0].tensors().items()}
    first = next(iter(learner.covariance.statistics.values()))
    first.inputs[1] = torch.diag(torch.tensor([9.0, -5.0, 1.0, 1.0], dtype=torch.float64))
    first.inputs[0] *= 2.0
    learner.refresh_()
    after = samplers(learner)[0].tensors()
    assert learner.rejected.tolist() == [0.0, 1.0]
    for name, tensor in before.items():
        torch.testing.assert_close(after[name][1], tensor[1])
    assert not torch.equal(after["right"][0], before["right"][0])


def spoil_undamped(learner: NoisyLearner) -> None:
    """Give the last replica a Fisher in the first block that is not positive before the damping is added."""
    found = learner.covariance.statistics[learner.covariance.blocks[0].name].tensors()
    moment = found.get("fisher", found.get("inputs"))[-1]
    (moment if moment.dim() == 1 else moment.diagonal())[2] = -0.3


@pytest.mark.parametrize("family", ["diagonal", "kronecker", "full"])
def test_draws_and_steps_are_refused_apart(family: str) -> None:
    """Where only the damping makes P positive, steps have new factors, and draws keep the ones they had."""
    learner = make_learner(family, ReplicaGenerators.of([0, 1]), damping=0.5)
    assert isinstance(learner, NoisyLearner)
    with_a_fisher_of_one(learner)
    factors, before = learner.covariance.factors, {}
    for name, own in factors.items():
        before[name] = {"stepper": own.stepper.logdet().clone(), "sampler": own.sampler.clone().tensors()}
        learner.covariance.statistics[name].map(lambda tensor: tensor.mul_(2.0))
    spoil_undamped(learner)
    learner.refresh_()
    assert learner.rejected.tolist() == [0.0, 1.0]
    for block in learner.covariance.blocks:
        statistics, prior = learner.covariance.statistics[block.name], learner.covariance.priors[block.name]
        with unchecked():  # nor is there anything to repair
            stepper = statistics.factorise(prior, 0.5).drop_terms().tensors()
        first = statistics.map(lambda tensor: tensor[:1]).factorise(prior.map(lambda tensor: tensor[:1]))
        sampler = first.drop_terms().tensors()
        for key, tensor in factors[block.name].stepper.tensors().items():
            torch.testing.assert_close(tensor, stepper[key], rtol=1e-9, atol=1e-12)
        assert bool((factors[block.name].stepper.logdet() != before[block.name]["stepper"]).all())
        for key, tensor in factors[block.name].sampler.tensors().items():
            torch.testing.assert_close(tensor[:1], sampler[key], rtol=1e-9, atol=1e-12)
            assert torch.equal(tensor[1], before[block.name]["sampler"][key][1])


@pytest.mark.parametrize("damping", [0.0, 0.05])
@pytest.mark.parametrize(("family", "settings"), [("tridiagonal", {}), ("kronecker", {"damping_mode": "exact"})])
def test_one_bad_replica_does_not_stop_the_others(family: str, settings: dict, damping: float) -> None:
    learner = make_learner(family, ReplicaGenerators.of([0, 1]), damping=damping, **settings)
    assert isinstance(learner, NoisyLearner)
    with_a_fisher_of_one(learner)
    before = [{name: t.clone() for name, t in each.tensors().items()} for each in samplers(learner)]
    for statistics in learner.covariance.statistics.values():
        for name, tensor in statistics.tensors().items():
            if not name.startswith("cross"):
                tensor[1] *= 2.0
                tensor[0] = torch.nan
    learner.refresh_()
    assert learner.rejected.tolist() == [2.0 if damping else 1.0, 0.0]  # those of draws, and of steps
    for old, new in zip(before, samplers(learner), strict=True):
        for name, tensor in new.tensors().items():
            torch.testing.assert_close(tensor[0], old[name][0])
        assert not torch.equal(new.tensors()["log_determinant"][1], old["log_determinant"][1])


@pytest.mark.skipif(not compiler_available(), reason="torch.compile needs a C++ compiler")
def test_many_trainings_compile_in_one_process() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        for count in (1, 2):
            train("diagonal", list(range(count)), epochs=1, execution="compiled")


def test_a_step_that_cannot_be_compiled_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InductorError

    def broken(function: object, **options: object) -> Callable[[], None]:
        def fail() -> None:
            raise InductorError(RuntimeError("no such kernel"), "inductor")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    found = []
    for execution in ("eager", "compiled"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.append(train("diagonal", [3], epochs=2, execution=execution)["mean"])
        assert bool(said) == (execution == "compiled")
    assert torch.equal(*found)


def test_bad_arguments_are_named():
    streams = ReplicaGenerators.of([0, 1])
    learner = make_learner("kronecker", streams)
    x, y = make_data(2)
    good: dict = {"epochs": 1, "batch_size": 4, "streams": streams, "execution": "eager"}
    with pytest.raises(ValueError, match="epochs and batch_size"):
        train_replicas(learner, x, y, **good | {"epochs": 0})
    with pytest.raises(ValueError, match=r"\[2, N, …\]"):
        train_replicas(learner, x[:1], y, **good)
    with pytest.raises(ValueError, match="streams of 1"):
        train_replicas(learner, x, y, **good | {"streams": ReplicaGenerators.of([0])})
    with pytest.raises(ValueError, match="needs a GPU"):
        train_replicas(learner, x, y, **good | {"execution": "captured"})
    with pytest.raises(ValueError, match="execution must be"):
        train_replicas(learner, x, y, **good | {"execution": "fast"})
    with pytest.raises(ValueError, match="one noise for all outputs"):
        NoisyLearner(NETWORK, Gaussian(per_output=True), NoisySettings(), num_data=9, generators=[torch.Generator()])
    with pytest.raises(ValueError, match="damping_mode"):
        NoisySettings(damping_mode="some")
    with pytest.raises(ValueError, match="mc_samples must be an integer"):
        NoisySettings(mc_samples=2.5)
    with pytest.raises(ValueError, match="family"):
        NoisySettings(family="banded")
    with pytest.raises(ValueError, match="lr must be a positive number"):
        NoisySettings(lr=math.nan)
    with pytest.raises(ValueError, match="sizes"):
        Perceptrons((3,))


def test_a_step_that_is_compiled_wrongly_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor of torch 2.11 does with Kronecker factors: no error, other numbers."""

    def wrong(function: Callable[[], None], **options: object) -> Callable[[], None]:
        def work() -> None:
            function()
            learners[-1].mean.mul_(1.001)

        return work

    learners: list[NoisyLearner] = []
    made = NoisyLearner.__init__

    def remembered(self: NoisyLearner, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        learners.append(self)

    monkeypatch.setattr(NoisyLearner, "__init__", remembered)
    right = train("kronecker", [0, 1], epochs=1, execution="eager")
    monkeypatch.setattr(torch, "compile", wrong)
    monkeypatch.setattr("noisygrad.replicas.engine.compiler_available", lambda: True)
    with pytest.warns(UserWarning, match=r"computes something else when it is compiled \(mean"):
        found = train("kronecker", [0, 1], epochs=1, execution="compiled")
    for name, tensor in right.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("every", [1, 4], ids=["one piece", "three pieces"])
@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
def test_a_captured_step_is_the_eager_one(kind: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With executors that replay on a CPU what a GPU would."""
    eager = train(kind, [0, 1], factor_every=every)
    made = replayed(monkeypatch)
    captured = train(kind, [0, 1], execution="captured", factor_every=every)
    assert sum(executor.replays > 0 for executor in made) == (1 if every == 1 else 3)
    for name, tensor in eager.items():
        torch.testing.assert_close(captured[name], tensor, rtol=1e-9, atol=1e-12)
