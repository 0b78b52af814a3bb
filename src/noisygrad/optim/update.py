"""One step of Algorithm 1 or 2 of the paper from what draws have left: Fisher, factors, noise, mean; or nothing."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from noisygrad.algorithm.step import NoisyNaturalGradient, Written, write_
from noisygrad.curvature.capture import Capture
from noisygrad.distributed import GradientReduction, Ranks
from noisygrad.kernels.factorisation import capturing
from noisygrad.kernels.products import without_autocast
from noisygrad.likelihoods import Likelihood
from noisygrad.optim.accumulated import Accumulated, GradientWatch
from noisygrad.optim.draw import Draw, DrawnWeights, Interrupts
from noisygrad.optim.execution import DeviceScalars, Executor
from noisygrad.optim.finite import FiniteGuard, RunningStatistics, Scaling
from noisygrad.optim.measurement import BatchMeasurement
from noisygrad.optim.options import Options
from noisygrad.posterior.structure import Structure
from noisygrad.posterior.weights import FlatWeights

Result = TypeVar("Result")


@dataclass(frozen=True)
class ParamGroups:
    """The settings of each param group, with its number among the blocks and its part of the flat vector."""

    settings: Sequence[dict[str, Any]]
    numbers: Sequence[int]
    parts: Sequence[slice]

    def dampings(self) -> dict[int, float]:
        """γ_ex of each param group, by the number that its blocks know it by."""
        return {number: group["damping"] for number, group in zip(self.numbers, self.settings, strict=True)}


@dataclass(kw_only=True)
class Update:
    """What a step is made of, and how it is made: all of it, or nothing.

    Until it is known what is to be written nothing has changed, or what has is known to `undo`; then there is only
    `finish`. New averages are made in the memory of what was measured. Factors, which the step itself uses, are
    overwritten, and copies of the old ones kept.
    """

    algorithm: NoisyNaturalGradient
    weights: DrawnWeights
    measurement: BatchMeasurement
    guard: FiniteGuard
    running: RunningStatistics
    likelihood: Likelihood
    options: Options
    gradient: FlatWeights
    groups: ParamGroups
    ranks: Ranks
    executor: Executor

    def __post_init__(self) -> None:
        self.scalars = DeviceScalars(self.algorithm.mean, len(self.groups.parts))
        self._fisher = self.algorithm.covariance.fisher
        self._ways_back: list[Callable[[], object]] = []
        self._noise_modules = list(self.likelihood.modules())  # `buffers()` takes longer than to copy them
        self._noise: list[Tensor] = []
        self._noise_before: list[Tensor] = []
        self.moved: int | None = None
        """The number of the step that is to be finished, or has been."""
        self._written: Written | None = None
        self.reduction = GradientReduction(self.ranks)
        self._begun, self._refreshed = False, 0

    def undo(self) -> None:
        """Everything as before the step, of which the mean has not moved."""
        for way_back in reversed(self._ways_back):
            way_back()
        self._ways_back, self._written = [], None
        self._fisher.prepared = None
        self.algorithm.momentum.taken()

    def finish(self) -> None:
        """What is left to do: done twice, it is done once."""
        self._ways_back = []
        if self._written is not None:
            write_(self._written)
            self._written = None
        if self._fisher.prepared is not None:
            self._fisher.commit_()
        self.weights.end()

    def apply(self, step: int, found: Accumulated, scaling: Scaling, between: Callable[[], object]) -> None:
        """Fisher, factors, observation noise and mean from what was accumulated, in this order.

        `between` is called between pieces of long work. `finish` or `undo` must follow.
        """
        decay, clip = self.options.decay_at(step), self.options.clip_at(step)
        if not self._begun or self.options.factors_due(step):
            self.ranks.check_current()
            self._begun = True
        self.gradient.read_gradients_()
        if found.unscaled is not None:
            found.weight = found.weight / found.unscaled
        if self.ranks.active:
            scaling = self._share(step, found, scaling)
        found.check_weight(skipped=scaling.found_inf is not None)
        weight, parts = found.weight, found.parts_per_example()
        loss = found.mean_loss()
        if self.executor.deferred:
            # As tensors, so that a step that is recorded now reads the numbers of the step that replays it.
            scalars = self.scalars
            scalars.set(self.groups.settings, clip, 1.0 - decay)
            if loss is not None:
                scalars.loss.copy_(loss)
            scalars.parts.copy_(parts) if isinstance(parts, Tensor) else scalars.parts.fill_(parts)
            if isinstance(weight, Tensor):
                weight = scalars.weight.copy_(weight)
            if self._is_plain(step, found, scaling):
                move = partial(self._watch_and_move, step, found, scaling, weight)
                self._run(step, "step", move, *(["weighted"] if isinstance(weight, Tensor) else []))
                return
            if loss is not None:
                self.guard.divergence.add(step, scalars.loss)
            mask = self._watch_and_measure(step, found, scaling, weight, scalars.rate, between)
            assert mask is not None
            scalars.mask.copy_(mask)
            work = lambda: self._move(scalars.groups, scalars.scaled_clip, scalars.mask)  # noqa: E731
            self._run(step, "move", work)
        else:
            mask = self._watch_and_measure(step, found, scaling, float(weight), 1.0 - decay, between)
            self._written = self._next(self.groups.settings, None if clip is None else clip * parts, mask)
            if loss is not None:
                self.guard.divergence.add(step, loss, self._written[1][-len(self.groups.parts) :])
            if self._fisher.prepared is not None:
                self._written[0].extend(self._fisher.prepared[0])
                self._written[1].extend(self._fisher.prepared[1])
            self.weights.stale = True
            self.moved, self._fisher.prepared = step, None

    def _run(self, step: int, name: str, work: Callable[[], None], *kind: str) -> None:
        """The move of the mean, perhaps as a recorded graph."""
        self.executor.run(name, (*self.replay_key(), *kind), work)
        self.weights.stale = False
        self.moved = step

    def _share(self, step: int, found: Accumulated, scaling: Scaling) -> Scaling:
        """Bring together what the ranks have, with the gradients where nobody has reduced them yet."""
        flat, others = self.gradient.flat, list[Tensor]()
        look = self.options.factors_due(step)
        reduced = self.reduction.is_done(self._parts(flat), self._parts(self.algorithm.mean), found.mean_loss(), look)
        if not reduced:
            others.append(flat)
            if scaling.scale is not None:  # each rank has its own
                flat.div_(scaling.scale)
                found.weight = found.weight / scaling.scale
        if scaling.found_inf is not None:
            skip = scaling.found_inf.to(flat).reshape(()).clone()
            others.append(skip)
            scaling = replace(scaling, found_inf=skip)
        found.sum_over(self.ranks, self.algorithm.covariance.statistics, others)
        if not reduced:
            flat.div_(self.ranks.size)
        return scaling

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """A flat vector layer by layer."""
        sizes = [unit.size for block in self.algorithm.covariance.blocks for unit in block.units]
        return list(flat.split(sizes, dim=-1))

    def replay_key(self) -> tuple[Any, ...]:
        """Changes whenever a recorded step would do something else."""
        return (self.weights.memory(), self.scalars.key())

    def _watch_and_measure(
        self,
        step: int,
        found: Accumulated,
        scaling: Scaling,
        weight: float | Tensor,
        rate: float | Tensor,
        between: Callable[[], object],
    ) -> Tensor | None:
        """Whatever there is to measure and to refresh before the mean moves, and the mask of the step."""
        # Ranks must agree on what is finite, and each has a loss of its own.
        mask = self._watched(found, None if self.ranks.active else found.loss, scaling, weight)
        if found.statistics:
            self.measurement.warn_uncalled_layers(found)
            self._fisher.prepare(found.statistics, rate, mask=found.used_by_ranks(mask), used=found.units)
            found.statistics = {}
        if self.options.factors_due(step):
            self.algorithm.covariance.parts = found.parts_per_example()
            self.algorithm.covariance.epochs = (step - self._refreshed) * found.examples / self.options.num_data
            self._refreshed = step
            self.guard.check()
            if not capturing():  # nothing can fail where nothing is looked at
                self.guard.divergence.look(step)
                self._ways_back.append(self._fisher.backup().restore)
            self._fisher.commit_()
            self._ways_back.append(back := self.algorithm.covariance.way_back())
            self.algorithm.covariance.refresh_(self.groups.dampings(), between, back)
        if found.noise is not None:
            self._update_noise(found.noise / found.noise_weight, mask)
        return mask

    def _is_plain(self, step: int, found: Accumulated, scaling: Scaling) -> bool:
        """Whether this step is one draw and one loss without anything to measure or to refresh."""
        return (
            not self.ranks.active
            and found.draws == 1
            and found.calls == 1
            and not found.statistics
            and found.noise is None
            and not self.options.factors_due(step)
            and scaling.found_inf is None
        )

    def _watched(
        self, found: Accumulated, loss: Tensor | None, scaling: Scaling, weight: float | Tensor
    ) -> Tensor | None:
        """The mean gradient, with Γ (w − m₀) at the sampled weights, and whether the step may go on."""
        gradient = self.gradient.flat
        if isinstance(weight, Tensor) or weight != 1.0:
            gradient.div_(weight)
        self.algorithm.add_prior_(gradient, found.mean_weights())
        doubtful = {} if found.known_finite else found.statistics
        return self.guard.watch(gradient, loss, doubtful, found.traces, scaling.found_inf)

    def _next(self, settings: Sequence[Mapping[str, Any]], clip: float | Tensor | None, mask: Tensor | None) -> Written:
        groups = list(zip(settings, self.groups.parts, strict=True))
        return self.algorithm.next(self.gradient.flat, groups, clip=clip, mask=mask)[0]

    def _watch_and_move(self, step: int, found: Accumulated, scaling: Scaling, weight: float | Tensor) -> None:
        self.guard.divergence.add(step, self.scalars.loss)
        mask = self._watched(found, self.scalars.loss, scaling, weight)
        self._move(self.scalars.groups, self.scalars.scaled_clip, mask)

    def _move(self, settings: Sequence[Mapping[str, Any]], clip: float | Tensor | None, mask: Tensor | None) -> None:
        write_(self._next(settings, clip, mask))
        self.weights.show_mean_()

    def _update_noise(self, statistic: Tensor, mask: Tensor | None) -> None:
        likelihood, options = self.likelihood, self.options
        now = [buffer for module in self._noise_modules for buffer in module._buffers.values() if buffer is not None]
        if len(now) != len(self._noise) or any(a is not b for a, b in zip(now, self._noise, strict=True)):
            self._noise, self._noise_before = now, [torch.empty_like(buffer) for buffer in now]
        torch._foreach_copy_(self._noise_before, now)
        self._ways_back.append(lambda: torch._foreach_copy_(list(likelihood.buffers()), self._noise_before))
        likelihood.update_noise_(statistic, options.num_data, options.kl_weight)
        if mask is not None:
            for buffer, old in zip(likelihood.buffers(), self._noise_before, strict=True):
                buffer.copy_(torch.where(mask > 0, buffer, old))


class Transaction:
    """A step and the draws before it: all of it happens, or none, whatever comes in between.

    Signals wait while the library works (`draw.Interrupts`). What another thread throws in does not: what it has left,
    if it was faster than `give_up`, is given up at the next use.
    """

    def __init__(self, update: Update, structure: Structure) -> None:
        self.steps = 0
        self.accumulated = Accumulated(update.guard.deferred)
        self.watch = GradientWatch(list(structure.parameters.values()))
        self.interrupts = Interrupts(self.give_up)
        self.in_closure = False
        self._update, self._weights, self._running = update, update.weights, update.running
        self._parameters = structure.parameters
        self._capture = Capture(structure.layers)
        self._generators_before: list[Tensor] = []
        self._here: Callable[[], object] = lambda: self
        self._context: Callable[[], object] = self._here
        """What returns None once the context of the draw was lost."""

    def is_drawing(self) -> bool:
        """Whether there are drawn weights in the model, for somebody to use."""
        if self._weights.current is not None and self._context() is None:
            self.give_up()
        return self._weights.current is not None

    def begin(self) -> None:
        """Signals wait from here on."""
        if self.interrupts.active:  # an exception from another thread was faster than the last `give_up`
            self.give_up()
        self.interrupts.hold()
        self._context = self._here

    def enter(self, context: object) -> Draw:
        """The draw of a context of the user's."""
        try:
            self.begin()
            self._context = weakref.ref(context)
            draw, _ = self.begin_draw(True)
            self.interrupts.allow()
        except BaseException:
            self.give_up()
            raise
        return draw

    def leave(self, draw: Draw, failed: bool) -> None:
        """The end of that context."""
        if self._weights.current is not draw:
            if not failed:
                raise RuntimeError("this draw was given up when a signal came, whose exception was then caught")
            return
        try:
            self.interrupts.hold()
            if failed:
                self.give_up()
            else:
                self.end_draw()
                draw.check_differentiated()
                self.watch.note(has_loss=draw.has_loss, steps=self.steps)
                self.interrupts.release()
        except BaseException:
            self.give_up()
            raise

    def begin_draw(self, with_statistics: bool) -> tuple[Draw, Capture | None]:
        """A draw, with the layers recorded where statistics are due."""
        due = with_statistics and self._update.options.stats_due(self.steps + 1)
        capture = self._capture if due else None
        draw = Draw(partial(self._loss, capture), lambda: self.accumulated.pending)
        if self.accumulated.draws == 0:
            self._running.keep()
            self._generators_before = self._weights.generator_states()
        self._weights.begin(draw, capture, self.accumulated.own_buffer)
        self.accumulated.expected_statistics |= due
        return draw, capture

    def end_draw(self, *, restore: bool = True) -> None:
        """Without `restore` the mean comes back with the step."""
        self._weights.end(restore=restore)
        self.accumulated.add_draw(self._weights.flat)

    def _loss(self, capture: Capture | None, *given: Any) -> Tensor:
        self.interrupts.hold()
        try:
            self.watch.check_kept(self.accumulated.pending)
            return self._update.measurement.loss(self.accumulated, capture, *given, observe=True)
        finally:
            self.interrupts.allow()

    def run(self, closure: Callable[[], Result]) -> Result:
        """Run what is the user's, which signals may end."""
        try:
            self.in_closure = True
            self.interrupts.allow()
            return closure()
        finally:
            self.interrupts.hold()
            self.in_closure = False

    def make(self, scaling: Scaling) -> None:
        """Make the step."""
        self.accumulated.check_complete()
        self.watch.check_step()
        with without_autocast(self._weights.flat.device.type):  # in which Lightning calls `step`
            self._update.apply(self.steps + 1, self.accumulated, scaling, self.interrupts.deliver)
        self._finish()

    def _finish(self) -> None:
        """Everything as after the step whose mean is there."""
        if self._update.moved is not None:
            self._update.finish()
            self.consume()
            self.steps, self._update.moved = self._update.moved, None

    def give_up(self) -> None:
        """Everything as before the first draw of the step; as after it where the mean has moved."""
        self.interrupts.hold()
        self.in_closure = False
        if self._update.moved is None:
            self._update.undo()
            self._weights.end()
            self._weights.set_generator_states(self._generators_before)
            self._running.restore(all_layers=True)
            self.consume()
        self._finish()
        self.interrupts.release()

    def drop(self) -> None:
        """Give up what is pending, and what it did to running statistics."""
        if self._running.kept:
            self._running.restore()
        self.consume()

    def consume(self) -> None:
        """Nothing is pending any more: `zero_grad` without its profiling, since it runs in every step."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self.accumulated = Accumulated(self._update.guard.deferred)
        self._generators_before = []
        self._running.forget()
