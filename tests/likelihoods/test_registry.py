"""Likelihoods of a user's own: registered, saved and loaded, and every way in which that is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.likelihoods import by_name, check_saveable
from noisygrad.likelihoods.registry import _BY_NAME
from noisygrad.predictions import RegressionPrediction


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    before = dict(_BY_NAME)
    yield
    _BY_NAME.clear()
    _BY_NAME.update(before)


class LogNormal(ng.Likelihood):
    """log y is normal around the output, with a fixed width."""

    def __init__(self, width: float = 0.5) -> None:
        super().__init__()
        self.width = width

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        z = (target.log() - output) / self.width
        return self.sum_event(-0.5 * z.square() - target.log() - math.log(self.width * math.sqrt(2 * math.pi)))

    def sample(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        noise = self.per_replica(output, lambda part, g: part.new_empty(part.shape).normal_(generator=g), generators)
        return (output + self.width * noise).exp()

    def output_fisher_factor(self, output: Tensor) -> Tensor:
        return torch.diag_embed(torch.full_like(output, 1 / self.width)).movedim(-2, 0)

    def predictive(self, outputs: Tensor) -> RegressionPrediction:
        return RegressionPrediction(outputs, torch.full_like(outputs[0], self.width), None, 1)

    def config(self) -> dict[str, Any]:
        return {"width": self.width}


def trained() -> tuple[nn.Module, ng.Posterior]:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    optimizer = ng.NoisyKFAC(model, LogNormal(0.7), num_data=8, stats_every=1, seed=0)
    for _ in range(3):
        optimizer.step(lambda: (model(x), x[:, :1].exp()))
    return model, optimizer.posterior()


def test_a_posterior_with_it_is_saved_and_loaded(tmp_path: Path) -> None:
    assert ng.register_likelihood(LogNormal) is LogNormal
    model, posterior = trained()
    posterior.save(tmp_path / "p")
    loaded = ng.load_posterior(tmp_path / "p", model)
    assert type(loaded.likelihood) is LogNormal
    assert loaded.likelihood.width == 0.7


def test_it_is_a_decorator() -> None:
    @ng.register_likelihood
    class Renamed(LogNormal):
        pass

    assert by_name("Renamed") is Renamed


def test_an_unregistered_one_is_not_saved_and_not_loaded(tmp_path: Path) -> None:
    model, posterior = trained()
    with pytest.raises(ValueError, match=r"'LogNormal'.*noisygrad\.register_likelihood\(LogNormal\)"):
        posterior.save(tmp_path / "p")
    assert not (tmp_path / "p").exists()
    ng.register_likelihood(LogNormal)
    posterior.save(tmp_path / "p")
    del _BY_NAME["LogNormal"]
    with pytest.raises(ValueError, match=r"p: no likelihood is called 'LogNormal'.*register_likelihood\(LogNormal\)"):
        ng.load_posterior(tmp_path / "p", model)


class Abstract(ng.Likelihood):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return output


class Forgetful(LogNormal):
    config = ng.Likelihood.config


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Forgetful, TypeError, r"Forgetful takes width, which its config\(\) leaves out"),
        (LogNormal(), TypeError, r"subclass of noisygrad\.Likelihood; got LogNormal"),
        (nn.Linear, TypeError, "got <class 'torch.nn.*Linear'>"),
        ("Gaussian", TypeError, "got 'Gaussian'"),
        (Abstract, TypeError, "Abstract has no output_fisher_factor, predictive, sample"),
        (ng.Likelihood, TypeError, "Likelihood has no log_prob, output_fisher_factor, predictive, sample"),
        (ng.Gaussian, ValueError, "'Gaussian' is registered already"),
        (type("Gaussian", (LogNormal,), {}), ValueError, "'Gaussian' is registered already"),
    ],
)
def test_registration_refuses(kind: Any, error: type[Exception], message: str) -> None:
    before = dict(_BY_NAME)
    with pytest.raises(error, match=message):
        ng.register_likelihood(kind)
    assert before == _BY_NAME


class Wordy(LogNormal):
    def config(self) -> dict[str, Any]:
        return {"width": self.width, "sigma": self.width}


class Part(LogNormal):
    """Its config() is that of its base, which does not know the second argument."""

    def __init__(self, width: float = 0.5, zero: float = 0.1) -> None:
        super().__init__(width)
        self.zero = zero


class Heavy(LogNormal):
    def config(self) -> dict[str, Any]:
        return {"width": torch.tensor(self.width)}


class Doubling(LogNormal):
    def __init__(self, width: float = 0.5) -> None:
        super().__init__(2 * width)


@pytest.mark.parametrize(
    ("likelihood", "message"),
    [
        (Wordy(0.7), r"Wordy: config\(\) gives \{.*'sigma': 0.7\}.*unexpected keyword.*constructor's arguments"),
        (Part(0.7, 0.2), r"Part: config\(\) leaves out zero, which a file would lose"),
        (Heavy(0.7), r"Heavy: config\(\) gives \{'width': tensor.*not JSON serializable"),
        (
            Doubling(0.25),
            r"Doubling: config\(\) gives \{'width': 0.5\}, but after from_config it gives \{'width': 1.0\}",
        ),
    ],
)
def test_a_configuration_that_is_not_the_constructors_is_refused_when_saved(
    likelihood: ng.Likelihood, message: str
) -> None:
    ng.register_likelihood(type(likelihood))
    with pytest.raises(ValueError, match=message):
        check_saveable(likelihood)


def test_one_of_another_class_of_that_name_is_not_saved() -> None:
    ng.register_likelihood(LogNormal)
    other = type("LogNormal", (LogNormal,), {})
    with pytest.raises(ValueError, match="not the registered one of that name"):
        check_saveable(other())


def test_every_likelihood_of_the_library_can_be_saved() -> None:
    for likelihood in (ng.Gaussian(), ng.HeteroscedasticGaussian(), ng.Categorical(), ng.Bernoulli(), ng.Poisson()):
        check_saveable(likelihood)
        assert json.dumps(likelihood.config())


NOTEBOOK = """
import noisygrad as ng
from noisygrad.likelihoods import by_name, check_saveable

def cell():
    @ng.register_likelihood
    class Mine(ng.Gaussian):
        pass
    return Mine

first, second = cell(), cell()
assert first is not second and by_name("Mine") is second
check_saveable(first(0.5))
try:
    ng.register_likelihood(second)
except ValueError as error:
    assert "registered already" in str(error)
else:
    raise AssertionError("one class was registered twice")
"""


def test_a_notebooks_cell_may_be_run_again() -> None:
    subprocess.run([sys.executable, "-c", NOTEBOOK], check=True, timeout=120)


class FromElsewhere(LogNormal):
    """Made of its config by a function of its own, which knows what the config leaves out."""

    def config(self) -> dict[str, Any]:
        return {"w": self.width}

    @staticmethod
    def from_config(config: dict[str, Any]) -> FromElsewhere:
        return FromElsewhere(config["w"])


def test_a_from_config_of_its_own_may_be_a_function() -> None:
    ng.register_likelihood(FromElsewhere)
    check_saveable(FromElsewhere(0.7))
