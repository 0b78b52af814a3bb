"""The regression experiments by the public optimiser: `NoisyKFAC` on one network with a replica for each split.

The replica engine makes the committed tables, because it is faster on small networks. Both run on the same algorithm;
this learner shows that they give the same results on whole trainings, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import ClassVar

import torch
from torch import Tensor

import noisygrad as ng
from noisygrad.likelihoods import Gaussian
from noisygrad.networks import ReplicatedMLP
from noisygrad.predictions import RegressionPrediction
from noisygrad.replicas.learner import Learner
from noisygrad.replicas.noisy import NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons


class OptimizerLearner(Learner):
    """`NoisyKFAC` with the settings of the engine, which gives it batches alone: it draws its own random numbers."""

    traceable: ClassVar[bool] = False

    def __init__(
        self,
        network: Perceptrons,
        likelihood: Gaussian,
        settings: NoisySettings,
        *,
        num_data: int,
        generators: Sequence[torch.Generator],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.replicas = len(generators)
        self.device, self.dtype = torch.device(device), dtype
        self.anneal = torch.ones(1, dtype=dtype, device=self.device)
        self._settings = settings
        inputs, *hidden, outputs = network.sizes
        model = ReplicatedMLP((self.replicas,), inputs, hidden, outputs)
        self.model = model.to(device=self.device, dtype=dtype)
        self._load_(network, network.initial(generators, dtype, self.device))
        seeds = [int(torch.randint(2**62, (), generator=generator).item()) for generator in generators]
        own = asdict(settings)
        del own["family"], own["noise"]
        own["fisher_decay"] = lambda step: 1.0 - (1.0 - settings.fisher_decay) * float(self.anneal)
        self.optimizer = ng.NoisyKFAC(self.model, likelihood, num_data=num_data, stats_every=1, seed=seeds, **own)

    def _load_(self, network: Perceptrons, flat: Tensor) -> None:
        """The weights of `network`, `[R, n]`, into the model."""
        parameters = dict(self.model.named_parameters())
        names = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
        with torch.no_grad():
            for name, matrix in zip(names, network.matrices(flat), strict=True):
                parameters[f"{name}.weight"].copy_(matrix[..., :-1])
                parameters[f"{name}.bias"].copy_(matrix[..., -1])

    def noise_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """None."""
        del batch_size
        return {}

    def step_(self, x: Tensor, y: Tensor, noise: Mapping[str, Tensor]) -> None:
        """One step of the optimiser."""
        del noise
        for group in self.optimizer.param_groups:
            group["lr"] = self._settings.lr * float(self.anneal)
        self.optimizer.step(lambda: (self.model(x), y))

    def predict(self, x: Tensor, num_samples: int, generators: Sequence[torch.Generator]) -> RegressionPrediction:
        """The predictive of the posterior, all replicas from the first generator."""
        found = self.optimizer.posterior().predict(x, num_samples, generator=generators[0])
        assert isinstance(found, RegressionPrediction)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """The mean, parameter by parameter."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def diagnostics(self) -> dict[str, Tensor]:
        """The KL of the weights in nats."""
        return {"kl": self.optimizer.posterior().kl()}
