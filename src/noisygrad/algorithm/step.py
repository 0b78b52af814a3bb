"""One step of noisy natural gradient: Algorithm 2 of the paper, and Algorithm 1 where the family is diagonal.

A momentum mode is a subclass of `Momentum` with a name: it changes the gradient before it is preconditioned, or the
step after it was clipped.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from noisygrad.algorithm.covariance import Covariance
from noisygrad.families.base import Statistics
from noisygrad.kernels.tensors import inner_product, scale_unless_one_

Groups = Sequence[tuple[Mapping[str, Any], slice]]
"""The settings of each param group (`lr`, `momentum`), with its part of the flat vector."""
Written = tuple[list[Tensor], list[Tensor]]
"""Tensors, and what is to be in them."""


def is_early(step: int, every: int) -> bool:
    """Whether a step is one of 1, 2, 4, … below T_inv: the first factors grow old soon."""
    return step < every and step.bit_count() == 1


def refresh_due(step: int, every: int) -> bool:
    """Whether factors are rebuilt in a step (1, 2, …): every T_inv, and early ones."""
    return step % every == 0 or is_early(step, every)


class NoisyNaturalGradient:
    """The posterior N(M, λ/N P⁻¹) that is fitted, and the parts of a step in their order.

    The gradient and the Fisher at the drawn weights are the caller's to find. It may mask, compile or record each part.
    A part that fails has changed nothing.

    Args:
        mean: M, a flat vector `[*replicas, n]`, which is moved in place.
        covariance: F̄, Γ and P of every block.
        scale: √(λ/N).
        prior_mean: m₀; None for 0.
        momentum_mode: A name in `MOMENTUM_MODES`.
        groups: How many param groups there are.
    """

    def __init__(
        self,
        mean: Tensor,
        covariance: Covariance,
        *,
        scale: float,
        prior_mean: Tensor | None = None,
        momentum_mode: str = "average",
        groups: int = 1,
    ) -> None:
        self.mean, self.covariance = mean, covariance
        self.momentum = MOMENTUM_MODES[momentum_mode](mean, groups)
        self._scale, self._prior_mean = scale, prior_mean

    def draw(self, noise: Tensor, out: Tensor | None = None) -> Tensor:
        """W = M + √(λ/N) P^(−1/2) ε."""
        return self.covariance.perturb(self.mean, noise, self._scale, out)

    def add_prior_(self, gradient: Tensor, weights: Tensor) -> None:
        """g ← ∇ + Γ (W − m₀)."""
        self.covariance.add_prior_gradient_(gradient, weights, self._prior_mean)

    def measure_(self, measured: Mapping[str, Statistics], rate: float | Tensor, *, mask: Tensor | None = None) -> None:
        """F̄ ← F̄ + β̃ (F̂ − F̄), every T_stats steps."""
        self.covariance.fisher.update_(measured, rate, mask=mask)

    def move_(
        self, gradient: Tensor, groups: Groups, *, clip: float | Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | None:
        """`next` and `write_` in one; returns the factor."""
        written, factor = self.next(gradient, groups, clip=clip, mask=mask)
        write_(written)
        return factor

    def next(
        self, gradient: Tensor, groups: Groups, *, clip: float | Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Written, Tensor | None]:
        """M − α̃ (P + γ_ex I)⁻¹ m̂, shortened to the trust region; with a mask of 0 everything as it was.

        Returns what is to be written of the mean and the momentum, and the factor by which the trust region shortened
        the step, `[*replicas, 1]`; None without one. The gradient's memory is used.
        """
        gradient = self.momentum.of_gradient(gradient, groups, mask)
        step = self.covariance.solve(gradient)
        factor = None
        if clip is not None:
            factor = clip_factor(gradient, step, groups, clip)
            step = scale_unless_one_(step, factor)
        step = self.momentum.of_step(step, groups, mask)
        old, new = self.momentum.taken()
        for group, part in groups:
            lr, mean = group["lr"], _of(self.mean, part)
            if mask is None and not isinstance(lr, Tensor):
                moved = torch.add(mean, _of(step, part), alpha=-lr)
            else:
                moved = mean - _of(step, part) * (lr if mask is None else lr * mask)
            old.append(mean)
            new.append(moved)
        return (old, new), factor


def write_(written: Written) -> None:
    """By one operation; it may be done again."""
    torch._foreach_copy_(*written)


def clip_factor(gradient: Tensor, step: Tensor, groups: Groups, clip: float | Tensor) -> Tensor:
    """min(1, sqrt(c / Σ lr² gᵀv)): the step's length in the Fisher metric is at most sqrt(c); one per replica."""
    inner = [inner_product(_of(gradient, part), _of(step, part)) for _, part in groups]
    length = sum(product * group["lr"] ** 2 for product, (group, _) in zip(inner, groups, strict=True))
    # Below 0 only by rounding, which must not become the root of a negative number.
    return (clip / torch.as_tensor(length).clamp_min(0.0)).sqrt().clamp(max=1.0)


class Momentum:
    """What a mode keeps, and what it does.

    It may run once and be replayed: what it keeps is in tensors that stay where they are, and it reads none of them on
    the host. It writes to none either, but says by `keep` what each is to be once the step is made. A mask of 0, which
    comes with a gradient of zeros, leaves all of them as they were.
    """

    name: ClassVar[str] = ""

    def __init__(self, like: Tensor, groups: int) -> None:
        self.average = torch.zeros_like(like)
        """Of the gradient, or of the steps."""
        self.weight = like.new_zeros(groups)
        """1 − β₁ᵏ of each param group, kept as a recursion so that a captured graph counts by itself."""
        self._one = like.new_ones(1)
        self._kept: Written = [], []

    def keep(self, tensor: Tensor, new: Tensor) -> None:
        """Once the step is made, `tensor`, of this mode or a part of one, is to be what `new` is then."""
        self._kept[0].append(tensor)
        self._kept[1].append(new)

    def taken(self) -> Written:
        """What there is to write; then there is nothing more."""
        kept, self._kept = self._kept, ([], [])
        return kept

    def tensors(self) -> dict[str, Tensor]:
        """What a resumed training goes on with: every tensor among the attributes whose name has no underscore."""
        return {name: kept for name, kept in vars(self).items() if isinstance(kept, Tensor) and name[0] != "_"}

    def of_gradient(self, gradient: Tensor, groups: Groups, mask: Tensor | None) -> Tensor:
        """What takes the gradient's place before it is preconditioned."""
        return gradient

    def of_step(self, step: Tensor, groups: Groups, mask: Tensor | None) -> Tensor:
        """What takes the place of the preconditioned and clipped step."""
        return step


MOMENTUM_MODES: dict[str, type[Momentum]] = {}
"""What `momentum_mode` may be."""


def register_momentum_mode(mode: type[Momentum]) -> type[Momentum]:
    """Make a mode known by its name; a decorator of a class.

    Raises:
        TypeError: It is not a subclass of `Momentum`, or has no name.
        ValueError: There is a mode of that name.
    """
    if not (isinstance(mode, type) and issubclass(mode, Momentum) and mode.name):
        raise TypeError(f'a momentum mode is a subclass of Momentum with a name = "..."; got {mode!r}')
    if mode.name in MOMENTUM_MODES:
        raise ValueError(f"there is a momentum mode {mode.name!r} already ({MOMENTUM_MODES[mode.name].__name__})")
    MOMENTUM_MODES[mode.name] = mode
    return mode


@register_momentum_mode
class GradientAverage(Momentum):
    """A bias-corrected moving average of the gradient, as in the paper's regression code and in Adam."""

    name: ClassVar[str] = "average"

    def of_gradient(self, gradient: Tensor, groups: Groups, mask: Tensor | None) -> Tensor:
        """m ← β₁ m + (1 − β₁) g, divided by 1 − β₁ᵏ."""
        if all(group["momentum"] == 0 for group, _ in groups):
            return gradient
        for index, (group, part) in enumerate(groups):
            beta, old_weight = group["momentum"], self.weight[index : index + 1] if len(groups) > 1 else self.weight
            rate = 1.0 - beta if mask is None else (1.0 - beta) * mask
            old, here = _of(self.average, part), _of(gradient, part)
            if mask is None:
                average, weight = torch._foreach_lerp([old, old_weight], [here, self._one], rate)
            else:
                average, weight = torch.lerp(old, here, rate), torch.lerp(old_weight, self._one, rate)
            self.keep(old, average)
            self.keep(old_weight, weight)
            torch.div(average, weight if mask is None else weight.clamp_min(1e-30), out=here)
        return gradient


@register_momentum_mode
class HeavyBall(Momentum):
    """A velocity, as in the released CIFAR-10 code."""

    name: ClassVar[str] = "heavy_ball"

    def of_step(self, step: Tensor, groups: Groups, mask: Tensor | None) -> Tensor:
        """v ← β₁ v + step."""
        velocity = torch.empty_like(step)
        for group, part in groups:
            old, new = _of(self.average, part), _of(velocity, part)
            torch.add(_of(step, part), old, alpha=group["momentum"], out=new)
            if mask is not None:
                new.copy_(torch.where(mask > 0, new, old))
        self.keep(self.average, velocity)
        return velocity


def _of(tensor: Tensor, part: slice) -> Tensor:
    """A group's part of a flat tensor, without a view where that is all of it."""
    return tensor if part.stop - part.start == tensor.shape[-1] else tensor[..., part]
