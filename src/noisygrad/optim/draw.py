"""The draw of the weights: W = μ + √(λ/N) P^(−1/2) ε into the model, and the mean back again, whatever happens.

Python runs the handler of a signal between any two operations of the main thread, and what it raises (on Ctrl-C, say)
may end a `with` or a `finally` before its first line. So while weights are drawn or a step is made, other handlers are
in the place of the user's: they only take note while the library works, and elsewhere they let nothing go on before the
mean is back. In other threads than the main one there are no signals.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from noisygrad.algorithm.step import NoisyNaturalGradient
from noisygrad.curvature.capture import Capture, not_compiled
from noisygrad.kernels.products import without_autocast
from noisygrad.kernels.threads import run_in_threads
from noisygrad.optim.execution import Executor
from noisygrad.optim.graph import LossCall
from noisygrad.posterior.structure import Structure
from noisygrad.posterior.weights import FlatWeights, ParameterViews

Handler = Callable[[int, Any], object]
PARTS, LARGE = 32, 1_000_000
"""A row of this many numbers is drawn in this many parts."""
SIGNALS = tuple(int(each) for each in signal.valid_signals() if each < getattr(signal, "SIGRTMIN", 64))
"""All but real-time signals, which are as many again and nobody's."""
PATIENCE = 3.0
"""Seconds after which a signal that is sent again no longer waits: a user's own function may never return."""


class Draw:
    """One draw of the weights, valid inside `with optimizer.sampled() as draw`."""

    def __init__(self, measure: Callable[..., Tensor], pending: Callable[[], Sequence[LossCall]]) -> None:
        self._measure, self._pending = measure, pending
        self.is_open = True
        self.has_loss = False
        """Whether a loss was computed that is to be differentiated."""

    # It leaves much beside tensors, so it is not compiled along with what calls it.
    @not_compiled
    def nll(
        self, output: Tensor, target: Tensor, *, weight: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The loss to differentiate: the mean negative log-likelihood over the batch.

        `weight` are weights of examples, `[batch]`, or of parts of the targets: an example of weight 2 counts like one
        given twice. `mask` is True where a position counts, `[batch, positions]`: of the targets where it has their
        shape, and in any case of layers with as many positions. Padding has no part in the loss or the Fisher then.

        Where this step takes statistics, they are taken here. Call `backward()` on the result before leaving the
        context. It may be scaled first, by a GradScaler or divided by a number of micro-batches: the factor is seen.
        Several losses are averaged by `step()` with their factors as weights; those of one forward pass, such as two
        heads', add.
        """
        if not self.is_open:
            raise RuntimeError(
                "this draw is over: its weights are gone. Compute the loss inside `with optimizer.sampled()`"
            )
        loss = self._measure(output, target, weight, mask)
        self.has_loss |= loss.requires_grad
        return loss

    def check_differentiated(self) -> None:
        """Raise if a loss was never differentiated."""
        if any(call.waits for call in self._pending()):
            raise RuntimeError(
                "leaving sampled() with a loss that was not differentiated: its graph belongs to weights that are now "
                "replaced by the mean. Call backward() inside the context, without inputs= (torch.autograd.grad leaves "
                "no gradients for the step), or compute it under torch.no_grad()"
            )


class Drawing(AbstractContextManager[Draw]):
    """The context of one draw: `enter` makes it, and `leave` ends it, told whether the context failed."""

    def __init__(self, enter: Callable[[Drawing], Draw], leave: Callable[[Draw, bool], None]) -> None:
        self._enter, self._leave = enter, leave
        self._draw: Draw | None = None

    def __enter__(self) -> Draw:
        """Draw."""
        self._draw = self._enter(self)
        return self._draw

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Bring the mean back."""
        if self._draw is not None:
            self._leave(self._draw, kind is not None)


class Interrupts:
    """The signals of the main thread, from `hold` to `release`.

    In between they may be allowed for a while; `give_up` is then called before what a handler raises goes on.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self.active = False
        """Whether there was a `hold` that no `release` has ended."""
        self._held = False
        self._waiting: dict[int, tuple[Handler, float]] = {}
        self._handlers: list[Any] = []
        self._replaced: list[tuple[int, _Replacement]] = []
        self._process = 0

    def hold(self) -> None:
        """From now on signals wait."""
        self._held = True
        if not self.active:
            self.active = True
            self._replace()

    def deliver(self) -> None:
        """Run the handlers of the signals that wait; what they raise comes from here."""
        while self._waiting:
            number, (handler, _) = self._waiting.popitem()
            handler(number, sys._getframe())

    def allow(self) -> None:
        """From now on signals are handled when they come; those that wait are handled now."""
        self._held = False
        if self._waiting:
            self.deliver()

    def release(self) -> None:
        """`allow`, and put the handlers back."""
        self.allow()
        self.active = False  # what is left of the replacements, if a handler raises here, only passes signals on
        for number, replacement in self._replaced:
            if getsignal(number) is replacement:
                set_handler(number, replacement.handler)

    def _replace(self) -> None:
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        handlers = list(map(getsignal, SIGNALS))
        if handlers != self._handlers:
            found = [(number, handler) for number, handler in zip(SIGNALS, handlers, strict=True) if callable(handler)]
            self._replaced = [(number, _Replacement(self, self._users(handler))) for number, handler in found]
            self._handlers = handlers
        for number, replacement in self._replaced:
            set_handler(number, replacement)

    def _users(self, handler: Handler) -> Handler:
        """The handler behind replacements that were left behind."""
        while isinstance(handler, _Replacement) and (handler.interrupts is self or not handler.interrupts.active):
            handler = handler.handler
        return handler

    def caught(self, number: int, frame: Any, handler: Handler) -> None:
        """What a replacement does."""
        if os.getpid() != self._process:  # forked meanwhile
            handler(number, frame)
            return
        if self.active and self._held:
            _, since = self._waiting.setdefault(number, (handler, time.monotonic()))
            if time.monotonic() - since < PATIENCE:
                return
            del self._waiting[number]
        try:
            handler(number, frame)
        except BaseException:
            if self.active:
                self._give_up()
            raise


class _Replacement:
    """A handler in place of another."""

    def __init__(self, interrupts: Interrupts, handler: Handler) -> None:
        self.interrupts, self.handler = interrupts, handler

    def __call__(self, number: int, frame: Any) -> None:
        self.interrupts.caught(number, frame, self.handler)


_LIVE: set[DrawnWeights] = set()
"""Those whose draw is in a model now."""


class DrawnWeights:
    """The mean, the weights that are drawn around it, and the random numbers: what is in the model's parameters.

    Flat vectors may be of a wider type than the parameters. There is a generator for each replica.
    """

    def __init__(
        self,
        structure: Structure,
        parameters: ParameterViews,
        mean: FlatWeights,
        algorithm: NoisyNaturalGradient,
        *,
        generators: Sequence[torch.Generator],
        executor: Executor,
    ) -> None:
        self.mean = mean
        self.generators = list(generators)
        self.current: Draw | None = None
        """The draw whose weights are in the model now."""
        self._capture: Capture | None = None
        self.stale = False
        """Whether the model's parameters are others than the mean: drawn, or those of an earlier mean."""
        self._parameters, self._algorithm, self._executor = parameters, algorithm, executor
        self._covariance = algorithm.covariance
        self._narrow = any(parameter.dtype != mean.flat.dtype for parameter in structure.parameters.values())
        self._noise, self.sample = self._place(structure)
        self._owned = {id(parameter) for parameter in structure.parameters.values()}

    def _place(self, structure: Structure) -> tuple[Tensor, FlatWeights | None]:
        """Noise and the weights drawn with it, in one place where they can be: each is done with before the other."""
        flat = self.mean.flat
        if not self._covariance.noisy:
            return flat[..., :0], None
        noise = flat.new_zeros(*structure.replicas, self._covariance.noise_size)
        shared = noise[..., : structure.size]
        place = shared if shared.is_contiguous() else torch.zeros_like(flat)
        return noise, FlatWeights(structure, place, self._parameters)

    @property
    def flat(self) -> Tensor:
        """The weights of the last draw: the mean, where there is no noise."""
        return self.mean.flat if self.sample is None else self.sample.flat

    def check_alone(self) -> None:
        """Raise where the model holds weights that another optimiser has drawn, which are not the mean."""
        if any(other is not self and not self._owned.isdisjoint(other._owned) for other in tuple(_LIVE)):
            raise RuntimeError(
                "another optimiser has drawn weights in this model, and they would be taken for the mean: leave its "
                "sampled() context first"
            )

    def memory(self) -> tuple[int, int]:
        """Changes whenever factors or parameters have moved to another place of memory."""
        return (self._covariance.generation, self._parameters.generation)

    def begin(self, draw: Draw, capture: Capture | None, before: Callable[[], None]) -> None:
        """Draw: from now on the weights are in the model, and `capture` records layers, if there is one.

        `before` is called when the numbers of the last draw are about to be overwritten.
        """
        self.check_alone()
        if self._covariance.noisy:
            before()
            fill_normal_(self._noise, self.generators)
            _LIVE.add(self)
        self._draw()  # where this fails, the user's weights are still there
        self.current, self._capture = draw, capture
        if capture is not None:
            capture.__enter__()

    def end(self, *, restore: bool = True) -> None:
        """The draw is over, if there is one; without `restore` a step is to bring the mean back (`show_mean_`)."""
        if self._capture is not None:
            self._capture.__exit__()
            self._capture = None
        if self.current is not None:
            self.current.is_open = False
            self.current = None
        if restore and self.stale:
            self.show_mean_()
        _LIVE.discard(self)

    def show_mean_(self) -> None:
        """The mean into the parameters."""
        self.mean.write_parameters_()
        self.stale = False

    def _draw(self) -> None:
        """M from the parameters, and W into them."""
        if not self._covariance.noisy:
            self.read_mean_()
            return
        self.mean.parameters.current()  # which may have been moved in memory: that counts in `memory`
        with without_autocast(self.mean.flat.device.type):
            if self._executor.deferred:
                self._executor.run("draw", self.memory(), self._perturb)
                self.stale = True
            else:
                self._perturb()

    def _perturb(self) -> None:
        self.read_mean_()
        assert self.sample is not None
        self._algorithm.draw(self._noise, out=self.sample.flat)
        self.stale = True
        self.sample.write_parameters_()

    def read_mean_(self) -> None:
        """The parameters are the mean; the digits that narrow parameters cannot hold are kept as long as they agree."""
        if not self._narrow:
            self.mean.read_parameters_()
            return
        kept, shown = self.mean.flat.clone(), self.mean.rounded()
        self.mean.read_parameters_()
        self.mean.flat.copy_(torch.where(self.mean.flat == shown, kept, self.mean.flat))

    def generator_states(self) -> list[Tensor]:
        """What the next draws are made of; nothing while a CUDA graph is recorded."""
        recording = self.mean.flat.is_cuda and torch.cuda.is_current_stream_capturing()
        return [] if recording else [generator.get_state() for generator in self.generators]

    def set_generator_states(self, states: Sequence[Tensor]) -> None:
        """Back to `generator_states`."""
        for generator, state in zip(self.generators, states, strict=False):
            generator.set_state(state)


def fill_normal_(noise: Tensor, generators: Sequence[torch.Generator]) -> None:
    """Standard normal numbers into `[*replicas, n]`, each replica's from its own generator."""
    rows = noise.view(len(generators), -1).unbind() if len(generators) > 1 else (noise.view(-1),)
    for row, generator in zip(rows, generators, strict=True):
        if row.numel() >= LARGE and row.device.type == "cpu":
            _fill_in_parts_(row, generator)
        else:
            row.normal_(generator=generator)


def _fill_in_parts_(row: Tensor, generator: torch.Generator) -> None:
    """Fill a long row on a CPU, where a generator keeps one core busy: each part has a generator of its own.

    There are as many parts on every machine, so that a seed means the same numbers however many threads there are.
    """
    # A generator on a CPU knows 32 bits of its seed. In a long training a few of its parts are drawn twice: no harm.
    seeds = torch.randint(2**32, (PARTS,), generator=generator, device=row.device).tolist()

    def fill(part: Tensor, seed: int) -> None:
        part.normal_(generator=torch.Generator(row.device).manual_seed(seed))

    run_in_threads([partial(fill, part, seed) for part, seed in zip(row.chunk(PARTS), seeds, strict=True)])
