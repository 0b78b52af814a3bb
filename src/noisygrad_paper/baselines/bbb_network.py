"""Bayes by Backprop (Blundell et al. 2015) for any `nn.Module`: what `NoisyAdam` is compared with on large networks.

The same posterior family, prior and prediction as `NoisyAdam`; the fit is Adam on the gradient through the draw
w = μ + σ ε of one weight sample per step, with the KL in closed form. `baselines.bbb` is the same method for many small
networks at once.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from noisygrad.families import diagonal
from noisygrad.likelihoods import Likelihood
from noisygrad.optim.options import positive
from noisygrad.posterior.posterior import Posterior
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import build_structure
from noisygrad.posterior.weights import FlatWeights
from noisygrad.priors import PriorVariance, check_prior_variance
from noisygrad_paper.baselines.adam import Adam


class BayesByBackprop(torch.optim.Optimizer):
    """A factorised Gaussian over the weights of a network, fitted by Adam.

    The model's parameters are the posterior's mean between steps. The likelihood's noise must not be one that is
    learned. `initial_std` is σ of every weight at the start; the other arguments are those of `NoisyAdam`.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        num_data: int,
        lr: float = 1e-3,
        kl_weight: float = 1.0,
        prior_variance: PriorVariance = 1.0,
        initial_std: float = 0.01,
        seed: int | None = None,
    ) -> None:
        for name, value in (("num_data", num_data), ("lr", lr), ("kl_weight", kl_weight), ("initial_std", initial_std)):
            positive(name, value)
        check_prior_variance(prior_variance)
        self.structure = build_structure(model, "diagonal")
        super().__init__(list(self.structure.parameters.values()), {"lr": lr})
        self.model, self.likelihood = model, likelihood
        self.num_data, self.kl_weight = num_data, kl_weight
        self._fixed_noise = False
        parameter = next(iter(self.structure.parameters.values()))
        self.device, dtype = parameter.device, torch.float32
        likelihood.bind(self.structure.replicas, self.device, dtype)
        self._priors = BlockPriors.build(self.structure, prior_variance, None, dtype, self.device)
        (block,) = self.structure.blocks
        gamma = self._priors.scaled(kl_weight / num_data)[block.name]
        assert isinstance(gamma, diagonal.Prior)
        self._block, self._gamma = block.name, gamma.precision
        self._mean, self._weights, self._gradient = (
            FlatWeights.zeros(self.structure, dtype, self.device) for _ in range(3)
        )
        self._mean.read_parameters_()
        self._state = torch.stack([self._mean.flat, torch.full_like(self._mean.flat, math.log(initial_std))])
        self._adam = Adam(self._state, 1.0)
        seed = int(torch.randint(2**62, ()).item()) if seed is None else seed
        self.generator = torch.Generator(self.device).manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:  # type: ignore[override]
        """Draw the weights, run the closure, which returns (output, target), and move; returns the mean nll."""
        self._mean.read_parameters_()
        mean, log_std = self._state
        mean.copy_(self._mean.flat)
        noise = torch.empty_like(mean).normal_(generator=self.generator)
        std = log_std.exp()
        torch.addcmul(mean, std, noise, out=self._weights.flat)
        self._weights.write_parameters_()
        try:
            with torch.enable_grad():
                output, target = closure()
                self.likelihood.check(output, target)
                if not self._fixed_noise and self.likelihood.observe(output.detach(), target) is not None:
                    raise ValueError(
                        "the noise is not learned here: give it a value, such as ng.Gaussian(noise_variance=0.1)"
                    )
                self._fixed_noise = True
                loss = self.likelihood.nll(output.float(), target)
                loss.backward()
            self._gradient.read_gradients_()
        finally:
            self._mean.write_parameters_()
            self.zero_grad()
        gradient = self._gradient.flat
        ratio = self.kl_weight / self.num_data
        of_mean = gradient + self._gamma * (mean - self._priors.mean)
        of_log_std = gradient * noise * std + self._gamma * std.square() - ratio
        self._adam.step_(torch.stack([of_mean, of_log_std]), self.param_groups[0]["lr"])
        self._mean.flat.copy_(mean)
        self._mean.write_parameters_()
        return loss.detach()

    def posterior(self) -> Posterior:
        """The posterior as it is, of the diagonal family: its Fisher is what makes σ² = (λ/N) / (F + Γ)."""
        self._mean.read_parameters_()
        fisher = (self.kl_weight / self.num_data) * torch.exp(-2.0 * self._state[1]) - self._gamma
        return Posterior(
            self.model,
            self.likelihood,
            self.structure,
            self._mean.flat.clone(),
            {self._block: diagonal.Statistics(fisher)},
            self._priors,
            num_data=self.num_data,
            kl_weight=self.kl_weight,
            damping_mode="factored",
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {"state": self._state, "powers": self._adam.powers, **self._adam.tensors()}

    def state_dict(self) -> dict[str, Any]:
        """Mean, widths, Adam's moments and the generator."""
        return {
            "tensors": {name: tensor.clone() for name, tensor in self._tensors().items()},
            "generator": self.generator.get_state(),
            "lr": self.param_groups[0]["lr"],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same network."""
        tensors = self._tensors()
        for name, tensor in tensors.items():
            if state_dict["tensors"][name].shape != tensor.shape:
                raise ValueError(f"the state belongs to another network: {name} has another shape")
        for name, tensor in tensors.items():
            tensor.copy_(state_dict["tensors"][name])
        self.generator.set_state(state_dict["generator"].cpu())
        self.param_groups[0]["lr"] = state_dict["lr"]
        self._mean.flat.copy_(self._state[0])
        self._mean.write_parameters_()
