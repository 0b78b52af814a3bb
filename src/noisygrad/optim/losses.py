"""The loss of one batch at drawn weights, and what it leaves for the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noisygrad.curvature.capture import Capture
from noisygrad.optim.statistics import take_statistics

if TYPE_CHECKING:
    from noisygrad.optim.optimizer import NoisyOptimizer


def measure_loss(optimizer: NoisyOptimizer, capture: Capture | None, output: Tensor, target: Tensor) -> Tensor:
    """Check the batch, take statistics if they are due, and return the loss."""
    likelihood, pending, device = optimizer.likelihood, optimizer._pending, optimizer.device.type
    likelihood.check(output, target)
    if not torch.is_grad_enabled():
        return likelihood.nll(output, target)
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return measure_loss(optimizer, capture, output, target)
    output = output if output.dtype in {torch.float32, torch.float64} else output.float()
    if device != "cpu":
        optimizer.guard.note_targets(likelihood.invalid(output, target))
        target = likelihood.clamp_invalid_targets(output, target)
    if capture is not None:
        take_statistics(optimizer, capture, output, target)
    loss = likelihood.nll(output, target)
    pending.add_loss(loss)
    pending.add_noise(likelihood.observe(output.detach(), target), output.shape[len(likelihood.replicas)])
    return loss
