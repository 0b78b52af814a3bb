"""The page "Extending" is a program, section by section, and does what it says."""

from __future__ import annotations

import copy
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import noisygrad as ng
from noisygrad.algorithm.step import MOMENTUM_MODES, HeavyBall, Momentum, register_momentum_mode
from noisygrad.curvature.registry import REGISTRY
from noisygrad.families import FAMILIES, Family, diagonal, register_family
from noisygrad.families.family import Part
from noisygrad.likelihoods.registry import _BY_NAME
from support.truth import close, exact_fisher, measured_fisher, normal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


def blocks(section: str) -> list[str]:
    """The Python blocks under a heading of the second or third level."""
    text = PAGE.read_text(encoding="utf-8")
    _, level, found = re.split(rf"^(###?) {section}\n", text, flags=re.MULTILINE)
    found = re.split(rf"^#{{2,{len(level)}}} ", found, flags=re.MULTILINE)[0]
    return re.findall(r"^```python\n(.*?)^```", found, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _own_registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    kept = [(registry, dict(registry)) for registry in (REGISTRY, _BY_NAME, FAMILIES, MOMENTUM_MODES)]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)


def run(section: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the blocks of a section define, one after another, in one program."""
    module = types.ModuleType("extending")
    names = vars(module)
    names.update(known or {})
    with pytest.MonkeyPatch.context() as patch:  # mock.patch.dict would take away what is imported inside
        patch.setitem(sys.modules, "extending", module)  # where dataclasses look for their module
        for number, block in enumerate(blocks(section)):
            exec(compile(block, f"{PAGE.name}, {section}, block {number + 1}", "exec"), names)
    return names


def kronecker(model: torch.nn.Module) -> list[str]:
    structure = ng.NoisyKFAC(model, ng.Gaussian(), num_data=8).structure
    return [block.name for block in structure.blocks if block.family.name == "kronecker"]


def test_layers(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("A layer")
    assert "kronecker" in capsys.readouterr().out
    assert "layer '0' (Activated): the gradient of '0.weight'" in names["message"]
    nn, gaussian = torch.nn, ng.Gaussian(0.5)
    for kind, arguments in (("MyLinear", (3, 2)), ("RandomFeatures", (3, 5, 2)), ("Transposed", (3, 2))):
        model = nn.Sequential(names[kind](*arguments), nn.Tanh(), nn.Linear(2, 2)).double()
        found = measured_fisher(model, gaussian, normal(6, 3), "diagonal")
        close(found.diagonal(), exact_fisher(model, gaussian, normal(6, 3)).diagonal())
        assert kronecker(model) == ["0.weight" if kind == "Transposed" else "0", "2"]


def test_likelihood() -> None:
    known = {"torch": torch, "nn": torch.nn, "ng": ng, "x": torch.randn(64, 4), "y": torch.randn(64, 1)}
    names = run("A likelihood", known)
    likelihood, posterior, loaded = names["StudentT"](0.7, 5), names["posterior"], names["loaded"]
    assert loaded.likelihood.config() == posterior.likelihood.config() == {"scale": 0.5, "degrees": 4}
    assert names["low"].shape == names["high"].shape == (64, 1)
    assert (names["low"] < names["high"]).all()
    f, y = normal(6, 2), normal(6, 2, seed=2)
    distribution = torch.distributions.StudentT(5.0, f, 0.7)
    close(likelihood.log_prob(f, y), distribution.log_prob(y).sum(-1))
    close(likelihood.predictive(f.unsqueeze(0)).log_prob(y), distribution.log_prob(y).sum(-1))
    many = likelihood.sample(torch.zeros(200_000, 1, dtype=torch.float64), [torch.Generator().manual_seed(0)])
    levels = torch.tensor([-1.5, -0.3, 0.2, 2.0], dtype=torch.float64)
    expected = torch.tensor(stats.t(5).cdf((levels / 0.7).numpy()))
    torch.testing.assert_close((many < levels).double().mean(0), expected, rtol=0, atol=4e-3)
    # The Fisher is the variance of the score, by a sum over a fine grid of targets.
    grid = torch.linspace(-400, 400, 2_000_001, dtype=torch.float64).unsqueeze(-1)
    score = likelihood.score(torch.zeros_like(grid), grid)
    density = likelihood.log_prob(torch.zeros_like(grid), grid).exp().unsqueeze(-1)
    fisher = (density * score.square()).sum() * (grid[1] - grid[0])
    columns = likelihood.output_fisher_factor(f)
    assert columns.shape == (2, 6, 2)
    torch.testing.assert_close(columns[0, 0, 0].square().unsqueeze(0), fisher.reshape(1), rtol=1e-5, atol=0)
    assert columns[0, 0, 1] == 0


def test_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"torch": torch, "nn": torch.nn, "ng": ng, "x": torch.randn(64, 4), "y": torch.randn(64, 1)}
    names = run("A change of one that exists", known)
    assert "determine" in capsys.readouterr().out
    posterior, model = names["posterior"], names["model"]
    (statistics,) = posterior.statistics.values()
    assert len(statistics.fisher[:80].unique()) == 1  # weights and biases of the first layer share one
    assert len(statistics.fisher.unique()) == 2
    posterior.save(tmp_path / "posterior")
    assert ng.load_posterior(tmp_path / "posterior", model).family == "one-variance"
    with pytest.raises(ValueError, match="there is a family 'one-variance' already"):
        register_family(names["OneVariance"]())
    FAMILIES.pop("one-variance")
    with pytest.raises(ValueError, match="which this noisygrad has not"):
        ng.load_posterior(tmp_path / "posterior", model)


def test_a_whole_family(tmp_path: Path) -> None:
    known = {"torch": torch, "nn": torch.nn, "ng": ng, "x": torch.randn(64, 4), "y": torch.randn(64, 1)}
    names = run("A covariance family", known)
    model, second, learner = names["model"], names["second_fit"], names["learner"]
    assert [block.name for block in second.structure.blocks] == ["0", "2"]
    prior = second.priors.blocks["0"]
    (first, *_) = (precision for _, precision in names["optimizer"].posterior().noisy_blocks())
    close(prior.matrix(), first.matrix * 64)
    x = names["x"]
    inputs = torch.cat([x, torch.ones(64, 1, dtype=x.dtype)], dim=1)
    close(names["optimizer"].covariance.statistics["0"].second_moment, inputs.mT @ inputs / 64)
    second.step(lambda: (model(x), names["y"]))
    second.posterior().save(tmp_path / "posterior")
    loaded = ng.load_posterior(tmp_path / "posterior", model)
    assert float(loaded.kl()) == float(second.posterior().kl())
    dense = [precision.to_dense() for _, precision in second.posterior().noisy_blocks()]
    assert [len(matrix) for matrix in dense] == [80, 34]
    assert learner.mean.shape == (3, 114)
    assert learner.kl().isfinite().all()


def momentum_modes() -> dict[str, Any]:
    model = torch.nn.Linear(4, 1)
    known = {"torch": torch, "nn": torch.nn, "ng": ng, "x": torch.randn(64, 4), "y": torch.randn(64, 1), "model": model}
    before = model.weight.detach().clone()
    names = run("A momentum mode", known)
    assert not torch.equal(model.weight, before)
    return names


def test_nesterov() -> None:
    mode = momentum_modes()["Nesterov"](torch.zeros(5), 1)
    mode.average.fill_(1.0)
    ahead = mode.of_step(torch.ones(5), [({"momentum": 0.5}, slice(0, 5))], None)
    torch.testing.assert_close(ahead, torch.full((5,), 1.75))  # v = 1 + 0.5 · 1; step + 0.5 v


def test_a_mode_with_a_count() -> None:
    mode = momentum_modes()["PlainAverage"](torch.zeros(5), 1)
    given = torch.randn(4, 5)
    for gradient, taken in zip(given, (1.0, 0.0, 1.0, 1.0), strict=True):
        found = mode.of_gradient(gradient * taken, [], torch.tensor(taken))
        torch._foreach_copy_(*mode.taken())
    torch.testing.assert_close(found, given[[0, 2, 3]].mean(0))


def test_what_a_mode_keeps_is_resumed() -> None:
    names = momentum_modes()
    model, x, y = names["model"], names["x"], names["y"]

    def train(optimizer: ng.NoisyKFAC, network: torch.nn.Module, steps: int) -> None:
        for _ in range(steps):
            optimizer.step(lambda: (network(x), y))

    def made(network: torch.nn.Module) -> ng.NoisyKFAC:
        return ng.NoisyKFAC(network, ng.Gaussian(), num_data=64, momentum_mode="plain_average", seed=1)

    optimizer = made(model)
    train(optimizer, model, 3)
    again = copy.deepcopy(model)
    resumed = made(again)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.algorithm.momentum.count == 3
    train(optimizer, model, 3)
    train(resumed, again, 3)
    assert torch.equal(model.weight, again.weight)


@pytest.mark.parametrize("mode", [HeavyBall, object, type("Nameless", (Momentum,), {}), "average"])
def test_a_momentum_mode_that_cannot_be_registered(mode: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"momentum mode (is a subclass of|'heavy_ball' already)"):
        register_momentum_mode(mode)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda units: [units[:1]], r"1 \(LayerNorm\) is in 0 blocks; 2 \(Linear\) is in 0 blocks"),
        (lambda units: [units, units[1:]], r"1 \(LayerNorm\) is in 2 blocks"),
    ],
    ids=["left out", "twice"],
)
def test_a_partition_that_forgets_or_repeats_layers(wrong: Any, message: str) -> None:
    class Odd(diagonal.Diagonal):
        name = "odd"

        def partition(self, units: Any, every_unit: Any) -> Iterator[Part]:
            for index, some in enumerate(wrong(units)):
                yield Part(f"part {index}", self, tuple(some))

    register_family(Odd())
    optimizer = type("NoisyOdd", (ng.NoisyOptimizer,), {"family": "odd"})
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1))
    with pytest.raises(ValueError, match=message):
        optimizer(model, ng.Gaussian(), num_data=8)


@pytest.mark.parametrize(
    ("family", "error", "message"),
    [
        (diagonal.DIAGONAL, ValueError, "there is a family 'diagonal' already"),
        (Family, TypeError, "it lacks cost, identity, measure, partition, pieces, prior"),
        (diagonal.Diagonal, TypeError, r"register an object of it: Diagonal\(\)"),
        ("diagonal", TypeError, "an object of a subclass of Family, not a str"),
        (
            type("Odd", (diagonal.Diagonal,), {"name": "odd", "reads": "nonsense"})(),
            TypeError,
            "reads = 'nonsense'; it may be",
        ),
        (type("Odd", (diagonal.Diagonal,), {"name": "odd", "layout": 3})(), TypeError, "layout = 3; it may be matrix"),
        (type("Nameless", (diagonal.Diagonal,), {"name": ""})(), TypeError, "Nameless has no name"),
        (type("Odd", (diagonal.Diagonal,), {"name": "a/b c"})(), TypeError, "Odd has no name of letters"),
        (
            type("Odd", (diagonal.Diagonal,), {"name": "odd", "damping_modes": "exact"})(),
            TypeError,
            "damping_modes = 'exact'; it must be a tuple",
        ),
        (
            type("Odd", (diagonal.Diagonal,), {"name": "odd", "measure": lambda self, units, passes: None})(),
            TypeError,
            "measure of the family 'odd' must take units, passes, current",
        ),
    ],
)
def test_a_family_that_cannot_be_registered(family: object, error: type[Exception], message: str) -> None:
    before = dict(FAMILIES)
    with pytest.raises(error, match=message):
        register_family(family)
    assert before == FAMILIES
