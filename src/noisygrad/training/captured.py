"""A whole training step as CUDA graphs: the batch, the model, its gradient, statistics and the move of the mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from noisygrad.kernels.factorisation import capturing
from noisygrad.optim import execution
from noisygrad.optim.draw import Interrupts
from noisygrad.optim.measurement import Closure
from noisygrad.optim.optimizer import NoisyOptimizer

_LOOK_EVERY = 100


class CapturedStep:
    """`optimizer.step(closure)` without Python between the kernels; call it once for each step.

    Steps that only move the mean, steps that take statistics and, of a diagonal posterior, steps that refresh the
    factors are recorded apart and replayed. Matrices are factorised by steps that run as they are, one in
    `factor_every`; so is one refresh of a diagonal in a hundred, which reports what went bad meanwhile. Learning rates,
    the trust region and the decay may change from step to step; the model's mode may too, and is recorded anew.

    On a CPU, and in a distributed training, every step runs as it is.

    Args:
        optimizer: A noisy optimiser.
        closure: Returns (output, target), computed from tensors that stay where they are. What is in them may change.
        prepare: Run before each step, as part of it: fills those tensors, by counters that are tensors too.

    Example:
        step = CapturedStep(optimizer, lambda: (model(x), y))
        for batch in loader:
            x.copy_(batch[0]), y.copy_(batch[1])
            loss = step()
    """

    def __init__(self, optimizer: NoisyOptimizer, closure: Closure, prepare: Callable[[], None] | None = None) -> None:
        self._optimizer = optimizer
        self._closure = closure
        self._prepare = prepare
        self._executor = execution.executor_for(optimizer.device, optimizer.generators)
        self._captures = self._executor.deferred and not optimizer.ranks.active
        self._refreshes = 0
        self._interrupts = Interrupts(lambda: None)

    def __call__(self) -> Tensor:
        """One step; returns its loss, in a tensor that the next step may overwrite."""
        try:
            self._interrupts.hold()  # else a signal might come between a replay and its count
            with torch.no_grad():
                loss = self._step()
            self._interrupts.release()
        except BaseException:
            self._interrupts.release()
            raise
        return loss

    def _step(self) -> Tensor:
        optimizer, options = self._optimizer, self._optimizer.options
        step = optimizer.steps + 1
        statistics, refresh = options.stats_due(step), options.factors_due(step)
        if not self._captures or (refresh and self._must_look()):
            return self._as_it_is()
        optimizer.check_still_valid()
        update, measurement = optimizer.update, optimizer.measurement
        update.scalars.set(optimizer.param_groups, options.clip_at(step), 1.0 - options.decay_at(step))
        optimizer.weights.mean.parameters.current()
        dampings = [group["damping"] for group in optimizer.param_groups]
        limits = (measurement.statistics_limit, measurement.forward_limit)
        key = (update.replay_key(), self._mode(), *limits, *dampings)
        self._executor.run(f"{statistics} {refresh}", key, self._as_it_is)
        optimizer.steps = step  # which a replay does not count
        return update.scalars.loss

    def _must_look(self) -> bool:
        """Whether this refresh waits for the GPU: every one of matrices, one in a hundred of diagonals."""
        self._refreshes += 1
        return self._optimizer.structure.family.factors_wait or self._refreshes % _LOOK_EVERY == 1

    def _as_it_is(self) -> Tensor:
        if capturing():
            return self._run()
        self._interrupts.release()  # the optimiser holds signals by itself
        try:
            return self._run()
        finally:
            self._interrupts.hold()

    def _run(self) -> Tensor:
        if self._prepare is not None:
            self._prepare()
        return self._optimizer.step(self._closure)

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._optimizer.model.modules())
