"""What all replicas with a Gaussian posterior over the weights of perceptrons share: drawing, prediction, the ELBO."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from noisygrad.families.base import FactoredCovariance
from noisygrad.likelihoods import Gaussian
from noisygrad.predictions import RegressionPrediction
from noisygrad.replicas.learner import Learner
from noisygrad.replicas.perceptrons import Perceptrons

_AT_ONCE = 1 << 24
"""Up to this many hidden units are evaluated at a time when predicting."""


class VariationalLearner(Learner):
    """R perceptrons with a posterior over their weights and Gaussian noise, of which each replica has its own.

    The `likelihood` must be fresh: it is bound to the replicas. The initial weights of each are drawn from its own of
    the `generators`, which are on the CPU. `num_data` is that of each replica.
    """

    def __init__(
        self,
        network: Perceptrons,
        likelihood: Gaussian,
        *,
        num_data: int,
        kl_weight: float,
        mc_samples: int,
        generators: Sequence[torch.Generator],
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        for name, value in (("num_data", num_data), ("kl_weight", kl_weight), ("mc_samples", mc_samples)):
            if not value > 0:
                raise ValueError(f"{name} must be positive; got {value!r}")
        if likelihood.per_output:
            raise ValueError("replicas have one noise for all outputs of a network: give Gaussian(per_output=False)")
        self.network = network
        self.replicas = len(generators)
        self.device, self.dtype = torch.device(device), dtype
        self.num_data, self.kl_weight, self.mc_samples = num_data, kl_weight, mc_samples
        self.anneal = torch.ones(1, dtype=dtype, device=self.device)
        self.mean = network.initial(generators, dtype, self.device)
        self.likelihood = likelihood
        likelihood.bind([self.replicas], self.device, dtype)
        self._learns_noise = likelihood.fixed_variance is None
        # The likelihood learns from its first output how many share a noise.
        likelihood.observe(*torch.zeros(2, self.replicas, 1, network.sizes[-1], dtype=dtype, device=self.device))

    @abstractmethod
    def weights(self, noise: Tensor) -> Tensor:
        """Draws from the posterior, `[R, S, n]`, from standard normal noise of that shape."""

    @abstractmethod
    def kl(self) -> Tensor:
        """KL in nats from the posterior of the weights to their prior, `[R]`."""

    @abstractmethod
    def layer_covariances(self, replica: int) -> list[FactoredCovariance | Tensor]:
        """The covariance of each layer's weights [W | b] in one replica, as factors or as variances `[out, in]`.

        Raises ValueError where it has no such form.
        """

    def noise_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Noise of the weights."""
        return {"weights": (self.mc_samples, self.network.num_weights)}

    def precision(self) -> Tensor:
        """E[τ], `[R, 1, 1, 1]`."""
        return (2.0 * self.likelihood.half_precision)[..., None, None]

    def update_noise_(self, errors: Tensor) -> None:
        """Move the observation noise towards its optimum, given errors y − f, `[R, S, B, outputs]`."""
        if self._learns_noise:
            error = errors.square().sum(-1).mean((1, 2)).unsqueeze(-1)
            statistic = torch.stack([error, torch.full_like(error, errors.shape[-1])])
            self.likelihood.update_noise_(statistic, self.num_data, self.kl_weight)

    def draws(self, num_samples: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Weights `[R, num_samples, n]`, each replica from its own generator."""
        noise = torch.empty(self.replicas, num_samples, self.network.num_weights, dtype=self.dtype, device=self.device)
        for row, generator in zip(noise, generators, strict=True):
            row.normal_(generator=generator)
        return self.weights(noise)

    @torch.no_grad()
    def outputs(self, x: Tensor, weights: Tensor) -> Tensor:
        """`[S, R, n, outputs]` for x `[R, n, inputs]`, a few samples at a time."""
        size = max(1, _AT_ONCE // (self.replicas * x.shape[1] * max(self.network.sizes[1:])))
        parts = [self.network.forward(part, x)[1] for part in weights.split(size, dim=1)]
        return torch.cat(parts, dim=1).transpose(0, 1)

    @torch.no_grad()
    def predict(self, x: Tensor, num_samples: int, generators: Sequence[torch.Generator]) -> RegressionPrediction:
        """The predictive distribution of the targets; see `Learner.predict`."""
        return self.likelihood.predictive(self.outputs(x, self.draws(num_samples, generators)))

    @torch.no_grad()
    def elbo(self, x: Tensor, y: Tensor, num_samples: int, generators: Sequence[torch.Generator]) -> Tensor:
        """The bound −N·E[nll] − KL of the weights − KL of the noise in nats, `[R]`, for the data trained on."""
        outputs = self.outputs(x, self.draws(num_samples, generators))
        log_prob = torch.stack([self.likelihood.log_prob(output, y).mean(-1) for output in outputs]).mean(0)
        return self.num_data * log_prob - self.kl() - self.likelihood.kl()

    def tensors(self) -> dict[str, Tensor]:
        """The mean and the noise."""
        return {"mean": self.mean, **{f"likelihood.{name}": b for name, b in self.likelihood.named_buffers()}}

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """The KL of the weights in nats."""
        return {"kl": self.kl()}
