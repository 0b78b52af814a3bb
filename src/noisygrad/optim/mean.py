"""The mean's side of a step: momentum, trust region, learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from noisygrad.optim.options import MomentumMode

Groups = Sequence[tuple[dict[str, Any], slice]]
"""Each param group with its part of the flat vector."""


class MeanStep:
    """Moves a flat vector of means; its state is the momentum.

    - `average`: a bias-corrected moving average of the gradient, before preconditioning (the regression code, Adam);
    - `heavy_ball`: v ← momentum · v + clipped step, after preconditioning and clipping (the released CIFAR-10 code).
    """

    def __init__(self, mode: MomentumMode, like: Tensor, groups: int) -> None:
        self.mode = mode
        self.momentum = torch.zeros_like(like)
        self.weight = like.new_zeros(groups)
        """1 − β₁ᵏ of each param group, kept as a recursion so that a captured graph counts by itself."""
        self._one = like.new_ones(1)

    def move_(
        self,
        mean: Tensor,
        gradient: Tensor,
        solve: Callable[[Tensor], Tensor],
        groups: Groups,
        clip: float | Tensor | None,
        mask: Tensor | None,
    ) -> None:
        """mean ← mean − lr · P⁻¹ ĝ, in place; a mask of 0 leaves everything as it was."""
        if self.mode == "average":
            gradient = self._averaged(gradient, groups, mask)
        step = solve(gradient)
        if clip is not None:
            factor = clip_factor(gradient, step, groups, clip)
            # A pass over all weights, which a CPU need not make where nothing is shortened.
            if factor.device.type != "cpu" or not bool((factor == 1.0).all()):
                step.mul_(factor)
        if self.mode == "heavy_ball":
            step = self._accelerated(step, groups, mask)
        for group, part in groups:
            lr = group["lr"]
            if mask is None and not isinstance(lr, Tensor):
                _of(mean, part).add_(_of(step, part), alpha=-lr)
            else:
                _of(mean, part).sub_(_of(step, part) * (lr if mask is None else lr * mask))

    def _averaged(self, gradient: Tensor, groups: Groups, mask: Tensor | None) -> Tensor:
        if all(group["momentum"] == 0 for group, _ in groups):
            return gradient
        averages = []
        for index, (group, part) in enumerate(groups):
            beta, weight = group["momentum"], self.weight[index : index + 1] if len(groups) > 1 else self.weight
            rate = 1.0 - beta if mask is None else (1.0 - beta) * mask
            momentum = _of(self.momentum, part).lerp_(_of(gradient, part), rate)
            weight.lerp_(self._one, rate)
            averages.append(momentum / (weight if mask is None else weight.clamp_min(1e-30)))
        return averages[0] if len(averages) == 1 else torch.cat(averages, dim=-1)

    def _accelerated(self, step: Tensor, groups: Groups, mask: Tensor | None) -> Tensor:
        for group, part in groups:
            velocity = _of(self.momentum, part)
            if mask is None:
                torch.add(_of(step, part), velocity, alpha=group["momentum"], out=velocity)
            else:
                new = _of(step, part).add(velocity, alpha=group["momentum"])
                velocity.copy_(torch.where(mask > 0, new, velocity))
        return self.momentum


def _of(tensor: Tensor, part: slice) -> Tensor:
    """A group's part of a flat tensor, without a view where that is all of it."""
    return tensor if part.stop - part.start == tensor.shape[-1] else tensor[..., part]


def clip_factor(gradient: Tensor, step: Tensor, groups: Groups, clip: float | Tensor) -> Tensor:
    """min(1, sqrt(c / Σ lr² gᵀv)): the step's length in the Fisher metric is at most sqrt(c); one per replica."""
    inner = [_inner(_of(gradient, part), _of(step, part)) for _, part in groups]
    length = sum(product * group["lr"] ** 2 for product, (group, _) in zip(inner, groups, strict=True))
    # Below 0 only by rounding, which must not become the root of a negative number.
    return (clip / torch.as_tensor(length).clamp_min(0.0)).sqrt().clamp(max=1.0)


def _inner(first: Tensor, second: Tensor) -> Tensor:
    """Σ a b, `[..., 1]`; not by cuBLAS, which would keep some memory of its own for it."""
    of_cpu = first.device.type == "cpu"
    found: Tensor = torch.linalg.vecdot(first, second) if of_cpu else (first * second).sum(dim=-1)
    return found.unsqueeze(-1)


class DeviceScalars:
    """Learning rates, trust region, decay, loss and mask as tensors on the device, for a replayed step to read."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self.groups: list[dict[str, Any]] = []
        self.clip: Tensor | None = None
        self.decay = like.new_zeros(())
        self.loss = like.new_zeros(())
        self.mask = like.new_zeros(())
        self._known: dict[str, float] = {}

    def set(self, groups: Sequence[dict[str, Any]], clip: float | None, decay: float) -> None:
        """Bring the tensors up to date; only what has changed is sent, so a capture after it records nothing of it."""
        if not self.groups:
            self.groups = [{"lr": self._like.new_zeros(())} for _ in groups]
        for index, (mine, group) in enumerate(zip(self.groups, groups, strict=True)):
            mine["momentum"] = group["momentum"]
            if isinstance(group["lr"], Tensor):
                mine["lr"].copy_(group["lr"])
            else:
                self._send(f"lr {index}", mine["lr"], group["lr"])
        if clip is not None and self.clip is None:
            self.clip = self._like.new_zeros(())
            self._known.pop("clip", None)
        if clip is None:
            self.clip = None
        elif self.clip is not None:
            self._send("clip", self.clip, clip)
        self._send("decay", self.decay, decay)

    def _send(self, name: str, tensor: Tensor, value: float) -> None:
        if self._known.get(name) != value:
            self._known[name] = value
            tensor.fill_(value)

    def key(self, groups: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
        """Whatever a replayed step has as plain numbers."""
        return (self.clip is None, id(self.clip), *(group["momentum"] for group in groups))
