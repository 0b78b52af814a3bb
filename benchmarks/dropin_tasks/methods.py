"""The methods that are compared: how each makes a step and what it predicts. All see the same batches."""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.predictions import Prediction

from .measures import Predict
from .outcomes import Outcome
from .store import UnavailableError
from .task import Part

SAMPLES = 30


class Training(Protocol):
    """One network being trained."""

    def step(self, batch: Part) -> None:
        """One update."""

    def finish(self, validation: Part) -> tuple[Predict, Predict]:
        """The predictive, and that of the mean weights alone (the same for a point estimate)."""


class Method(Protocol):
    """What makes a training; it has a name and needs no more than what a user must say."""

    @property
    def name(self) -> str:
        """What its results are kept by."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What it is given beyond what it requires."""

    def start(self, model: nn.Module, outcome: Outcome, rows: int, seed: int) -> Training:
        """Begin to train `model` on this many rows."""


def forward(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Outputs in evaluation mode."""
    model.eval()
    with torch.no_grad():
        output: Tensor = model(*inputs)
    return output


def forward_all(model: nn.Module, part: Part, size: int = 500) -> Tensor:
    """Outputs of many rows."""
    return torch.cat([forward(model, part.rows(slice(i, i + size)).inputs) for i in range(0, len(part), size)])


@dataclass
class PointTraining:
    """An optimiser of torch's, on the mean loss."""

    model: nn.Module
    outcome: Outcome
    optimizer: torch.optim.Optimizer

    def step(self, batch: Part) -> None:
        self.optimizer.zero_grad()
        self.outcome.loss(self.model(*batch.inputs), batch.targets, batch.mask).backward()
        self.optimizer.step()

    def finish(self, validation: Part) -> tuple[Predict, Predict]:
        predict = point_predict(self.model, self.outcome, validation)
        return predict, predict


def point_predict(model: nn.Module, outcome: Outcome, validation: Part) -> Predict:
    """One network, with the noise that its residuals on validation rows show."""
    noise = outcome.noise(forward_all(model, validation), validation.targets)
    return lambda inputs: outcome.prediction(forward(model, inputs).unsqueeze(0), noise)


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW with a learning rate and nothing else."""

    name: str
    lr: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    def start(self, model: nn.Module, outcome: Outcome, rows: int, seed: int) -> Training:
        return PointTraining(model, outcome, torch.optim.AdamW(trainable(model), lr=self.lr))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What is not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class IVONTraining:
    """IVON as its own introduction says."""

    model: nn.Module
    outcome: Outcome
    optimizer: Any
    seed: int

    def step(self, batch: Part) -> None:
        with self.optimizer.sampled_params(train=True):
            self.optimizer.zero_grad()
            self.outcome.loss(self.model(*batch.inputs), batch.targets, batch.mask).backward()
        self.optimizer.step()

    def _outputs(self, inputs: tuple[Tensor, ...]) -> Tensor:
        outputs = []
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            for _ in range(SAMPLES):
                with self.optimizer.sampled_params():
                    outputs.append(forward(self.model, inputs))
        return torch.stack(outputs)

    def finish(self, validation: Part) -> tuple[Predict, Predict]:
        mean = torch.cat(
            [self._outputs(validation.rows(slice(i, i + 500)).inputs).mean(0) for i in range(0, len(validation), 500)]
        )
        noise = self.outcome.noise(mean, validation.targets)
        return (
            lambda inputs: self.outcome.prediction(self._outputs(inputs), noise),
            point_predict(self.model, self.outcome, validation),
        )


@dataclass(frozen=True)
class IVONMethod:
    """The package ivon-opt with its own defaults."""

    name: str = "ivon"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def start(self, model: nn.Module, outcome: Outcome, rows: int, seed: int) -> Training:
        if importlib.util.find_spec("ivon") is None:
            raise UnavailableError("IVON is not installed: pip install ivon-opt")
        import ivon

        return IVONTraining(model, outcome, ivon.IVON(trainable(model), lr=0.1, ess=rows), seed)


@dataclass
class NoisyTraining:
    """One of ours."""

    model: nn.Module
    optimizer: ng.NoisyOptimizer
    seed: int

    def step(self, batch: Part) -> None:
        if batch.mask is None:
            self.optimizer.step(lambda: (self.model(*batch.inputs), batch.targets))
        else:
            self.optimizer.step(lambda: (self.model(*batch.inputs), batch.targets, None, batch.mask))

    def finish(self, validation: Part) -> tuple[Predict, Predict]:
        self.model.eval()
        posterior = self.optimizer.posterior()
        likelihood = posterior.likelihood

        def predict(inputs: tuple[Tensor, ...]) -> Prediction:
            draws = torch.Generator().manual_seed(self.seed)
            return posterior.predict(inputs, num_samples=SAMPLES, generator=draws)

        return predict, lambda inputs: likelihood.predictive(forward(self.model, inputs).unsqueeze(0))


@dataclass(frozen=True)
class NoisyMethod:
    """One of ours, with what it requires and the settings that a tuning run gives it."""

    name: str
    optimizer: type[ng.NoisyOptimizer]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def start(self, model: nn.Module, outcome: Outcome, rows: int, seed: int) -> Training:
        optimizer = self.optimizer(model, outcome.likelihood(), num_data=rows, seed=seed, **self.settings)
        return NoisyTraining(model, optimizer, seed)


RATES = {"3e-4": 3e-4, "1e-3": 1e-3, "3e-3": 3e-3, "1e-2": 1e-2}
ADAMW = tuple(f"adamw-{rate}" for rate in RATES)
NOISY: Mapping[str, type[ng.NoisyOptimizer]] = {
    "noisy-kfac": ng.NoisyKFAC,
    "noisy-adam": ng.NoisyAdam,
    "noisy-ekfac": ng.NoisyEKFAC,
}
USUAL = (*ADAMW, "ivon", "noisy-kfac", "noisy-adam")
"""What is run when nothing is said."""
NAMES = (*ADAMW, "ivon", *NOISY)


def method_named(name: str, settings: Mapping[str, Any] | None = None, label: str | None = None) -> Method:
    """A method; settings and label go to ours only."""
    if name in ADAMW:
        return AdamW(name, RATES[name.removeprefix("adamw-")])
    if name == "ivon":
        return IVONMethod()
    settings = dict(settings or {})
    given = label or ",".join(f"{key}={value}" for key, value in settings.items())
    return NoisyMethod(f"{name}[{given}]" if given else name, NOISY[name], settings)


def choose(patterns: Sequence[str], names: Sequence[str], what: str) -> list[str]:
    """The names that match any of the patterns; raises ValueError for a pattern that matches none."""
    found: list[str] = []
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ValueError(f"no {what} is called {pattern!r}; there are {', '.join(names)}")
        found += [name for name in matching if name not in found]
    return found
