"""`step()`: what becomes of the draws. One step of Algorithm 1 or 2 of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from noisygrad.optim.statistics import warn_uncalled_layers

if TYPE_CHECKING:
    from noisygrad.optim.optimizer import NoisyOptimizer


def apply_step(optimizer: NoisyOptimizer, step: int) -> None:
    """Fisher, factors, mean and observation noise from what is pending, in this order."""
    pending, options = optimizer._pending, optimizer.options
    decay, clip = options.decay_at(step), options.clip_at(step)
    pending.sum_over(optimizer.ranks, optimizer.factors.statistics)
    optimizer._gradient.read_gradients_()
    if optimizer.device.type == "cuda":
        # As tensors, so that a step that is recorded now reads the numbers of the step that replays it.
        numbers = optimizer._scalars
        numbers.set(optimizer.param_groups, clip, decay)
        if (loss := pending.mean_loss()) is not None:
            numbers.loss.copy_(loss)
        if _is_plain(optimizer, step):
            _replay(optimizer, "step", lambda: _move_on_device(optimizer, _watched(optimizer, numbers.loss)))
            return
        mask = _watch_and_measure(optimizer, step, numbers.decay)
        assert mask is not None
        numbers.mask.copy_(mask)
        _replay(optimizer, "move", lambda: _move_on_device(optimizer, numbers.mask))
    else:
        mask = _watch_and_measure(optimizer, step, decay)
        _move(optimizer, optimizer.param_groups, clip, mask)
    if pending.noise is not None:
        _update_noise(optimizer, pending.noise / pending.noise_examples, mask)


def _replay(optimizer: NoisyOptimizer, name: str, work: Callable[[], None]) -> None:
    """Do what reads no numbers but those that are tensors on the device, as a graph once it has settled."""
    key = (optimizer._memory(), optimizer._scalars.key(optimizer.param_groups))
    optimizer._replays.run(name, key, work)


def _watch_and_measure(optimizer: NoisyOptimizer, step: int, decay: float | Tensor) -> Tensor | None:
    """Whatever there is to scale, to measure and to refresh before the mean moves, and the mask of the step."""
    pending, options = optimizer._pending, optimizer.options
    _scale_gradient(optimizer)
    # Ranks must agree on what is finite, and each has a loss of its own.
    mask = _watched(optimizer, None if optimizer.ranks.active else pending.loss)
    with optimizer.factors.unchanged_on_failure() if options.factors_due(step) else nullcontext():
        if pending.statistics:
            warn_uncalled_layers(optimizer)
            optimizer.factors.update(pending.statistics, pending.examples, decay, mask)
            pending.statistics = {}  # as large as the moving averages, and done with
        if options.factors_due(step):
            optimizer.guard.check()
            optimizer.factors.refresh(dampings(optimizer))
    return mask


def dampings(optimizer: NoisyOptimizer) -> dict[int, float]:
    """γ_ex of each param group, by the number that its blocks know it by."""
    return {index: group["damping"] for index, group in zip(optimizer._used, optimizer.param_groups, strict=True)}


def _is_plain(optimizer: NoisyOptimizer, step: int) -> bool:
    """Whether this step, on a GPU, is one draw and one loss without anything to scale, to measure or to refresh."""
    pending = optimizer._pending
    return (
        not optimizer.ranks.active
        and pending.draws == 1
        and pending.calls == 1
        and not pending.statistics
        and pending.noise is None
        and not optimizer.options.factors_due(step)
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
    )


def _scale_gradient(optimizer: NoisyOptimizer) -> None:
    """Undo a GradScaler's scale, and make the sum over losses their mean."""
    gradient, scale = optimizer._gradient.flat, getattr(optimizer, "grad_scale", None)
    if scale is not None:
        gradient.div_(scale)
    if (count := optimizer._pending.calls or optimizer._pending.draws) > 1:
        gradient.div_(count)


def _watched(optimizer: NoisyOptimizer, loss: Tensor | None) -> Tensor | None:
    """Add Γ (w − m₀), at the sampled weights, to the gradient, and see whether the step may go on."""
    pending, gradient = optimizer._pending, optimizer._gradient.flat
    optimizer.factors.add_prior_gradient_(gradient, pending.mean_weights(), optimizer.priors.centre)
    found_inf = getattr(optimizer, "found_inf", None)
    doubtful = {} if pending.known_finite else pending.statistics
    return optimizer.guard.watch(gradient, loss, doubtful, pending.trails, found_inf)


def _move_on_device(optimizer: NoisyOptimizer, mask: Tensor | None) -> None:
    numbers = optimizer._scalars
    _move(optimizer, numbers.groups, numbers.clip, mask)


def _move(
    optimizer: NoisyOptimizer, groups: Sequence[dict[str, Any]], clip: float | Tensor | None, mask: Tensor | None
) -> None:
    mean, gradient, parts = optimizer.mean, optimizer._gradient.flat, list(zip(groups, optimizer._parts, strict=True))
    optimizer.mean_step.move_(mean.flat, gradient, optimizer.factors.solve, parts, clip, mask)
    mean.write_parameters_()


def _update_noise(optimizer: NoisyOptimizer, statistic: Tensor, mask: Tensor | None) -> None:
    likelihood, options = optimizer.likelihood, optimizer.options
    before = [buffer.clone() for buffer in likelihood.buffers()] if mask is not None else []
    likelihood.update_noise_(statistic, options.num_data, options.kl_weight)
    if mask is not None:
        for buffer, old in zip(likelihood.buffers(), before, strict=True):
            buffer.copy_(torch.where(mask > 0, buffer, old))
