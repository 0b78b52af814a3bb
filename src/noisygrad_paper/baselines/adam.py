"""Adam on tensors with replicas in front, in place and without a look at the host: a step that can be captured."""

import torch
from torch import Tensor

from noisygrad.optim.options import positive


class Adam:
    """Adam for one tensor, which it moves in place and which may hold many parameters side by side."""

    def __init__(self, parameters: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8):
        self.parameters = parameters
        self._lr, self._betas, self._epsilon = positive("lr", lr), betas, epsilon
        self.first, self.second = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self.powers = torch.ones(2, dtype=parameters.dtype, device=parameters.device)
        """βᵏ of both moments, for the bias correction."""
        self._decays = torch.tensor(betas, dtype=parameters.dtype, device=parameters.device)

    def step_(self, gradient: Tensor, anneal: Tensor) -> None:
        """One step, with the step size multiplied by `anneal`."""
        self.powers.mul_(self._decays)
        first, second = 1.0 - self.powers
        self.first.lerp_(gradient, 1.0 - self._betas[0])
        self.second.lerp_(gradient.square(), 1.0 - self._betas[1])
        deviation = (self.second / second).sqrt() + self._epsilon
        self.parameters.sub_(anneal * self._lr * (self.first / first) / deviation)

    def tensors(self) -> dict[str, Tensor]:
        """The moments."""
        return {"first": self.first, "second": self.second}
