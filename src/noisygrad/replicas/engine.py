"""Replicas: independent trainings done at once, each equal to a lone training with its seed.

The engine draws the random numbers of many steps ahead, each replica from its own generator, and hands a `Learner` what
one step needs, by counters that are tensors. So one step is a function of tensors alone, and is compiled on a CPU, or
captured as a CUDA graph and replayed on a GPU, without the learner knowing.
"""

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from noisygrad.kernels.random import epoch_generator
from noisygrad.optim import execution as executors
from noisygrad.replicas.learner import Learner

Execution = Literal["auto", "eager", "compiled", "captured"]
OnEpoch = Callable[[int], None]

_NOISE_AHEAD = 1 << 19
"""So many random numbers of a replica are drawn at a time. It must not depend on the number of replicas."""
_WORTH_COMPILING = {"cpu": 5000, "cuda": 100_000}
"""From this many steps on, a compiled step pays for its compilation."""
_CHECKS = 2
"""So many runs of compiled work are compared with the same work uncompiled: what the first writes, the second reads."""


@dataclass(frozen=True)
class ReplicaGenerators:
    """The random numbers of each replica: `start` for initial weights, `noise` for training, `test` for prediction."""

    seeds: tuple[int, ...]
    start: tuple[torch.Generator, ...]
    noise: tuple[torch.Generator, ...]
    test: tuple[torch.Generator, ...]

    @classmethod
    def of(cls, seeds: Sequence[int], device: torch.device | str = "cpu") -> Self:
        """Of these seeds, one for each replica; initial weights are drawn on the CPU, the same for every device."""
        words = [np.random.SeedSequence(seed).generate_state(3, np.uint64) >> np.uint64(1) for seed in seeds]

        def generators(index: int, where: torch.device | str) -> tuple[torch.Generator, ...]:
            return tuple(torch.Generator(where).manual_seed(int(word[index])) for word in words)

        return cls(tuple(seeds), generators(0, "cpu"), generators(1, device), generators(2, device))


def train_replicas(
    learner: Learner,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch_size: int,
    streams: ReplicaGenerators,
    anneal: Callable[[int], float] | None = None,
    execution: Execution = "auto",
    on_epoch: OnEpoch | None = None,
) -> None:
    """Train all replicas of a learner, in place.

    Args:
        learner: What is trained.
        x: Inputs `[R, N, inputs]`, on the learner's device.
        y: Targets `[R, N, outputs]`.
        epochs: Passes over the data. Each has ⌊N/B⌋ steps; the few examples left over are others in every epoch.
        batch_size: B; at most N are taken.
        streams: Each replica's random numbers.
        anneal: From the epoch (1, 2, …) to the factor of the learner's rates; 1 throughout by default.
        execution: "eager"; "captured", as CUDA graphs; "compiled" by `torch.compile`, on a GPU captured as well; or
            "auto": compiled where the run is long enough and there is a compiler, else captured or eager.
        on_epoch: Called with the number of each finished epoch.
    """
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs and batch_size must be at least 1; got {epochs} and {batch_size}")
    if x.dim() != 3 or y.dim() != 3 or x.shape[:2] != y.shape[:2] or x.shape[0] != learner.replicas:
        raise ValueError(
            f"x and y must be [{learner.replicas}, N, …], one set of examples for each replica; "
            f"got {list(x.shape)} and {list(y.shape)}"
        )
    if len(streams.seeds) != learner.replicas:
        raise ValueError(f"there are {learner.replicas} replicas, but the streams of {len(streams.seeds)}")
    engine = _Engine(learner, x, y, min(batch_size, x.shape[1]), streams)
    how = _execution(execution, learner.device, epochs * engine.steps_per_epoch) if learner.traceable else "eager"
    run = _Stepper(engine, how)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # of the compiler, about itself
        for epoch in range(1, epochs + 1):
            learner.anneal.fill_(1.0 if anneal is None else anneal(epoch))
            engine.begin_epoch(epoch)
            for _ in range(engine.steps_per_epoch):
                run.step(refresh=engine.begin_step())
            learner.end_epoch_()
            if on_epoch is not None:
                on_epoch(epoch)


class _Engine:
    """The data, the order of an epoch and the noise of the coming steps, and where in them the training is."""

    def __init__(self, learner: Learner, x: Tensor, y: Tensor, batch_size: int, streams: ReplicaGenerators) -> None:
        self.learner = learner
        self._streams = streams
        self._x, self._y = x.flatten(0, 1).contiguous(), y.flatten(0, 1).contiguous()
        replicas, self._num_data = x.shape[:2]
        self.steps_per_epoch = self._num_data // batch_size
        self._used = self.steps_per_epoch * batch_size
        device = learner.device
        self._first_row = (torch.arange(replicas, device=device) * self._num_data).unsqueeze(-1)
        first = torch.arange(self._used, device=device) + self._first_row
        self._order = first.view(replicas, self.steps_per_epoch, batch_size)
        self._shapes = learner.noise_shapes(batch_size)
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._ahead = max(1, _NOISE_AHEAD // max(1, sum(self._sizes)))
        self._noise = torch.zeros(replicas, self._ahead, sum(self._sizes), dtype=learner.dtype, device=device)
        self._noise_left = 0
        self._noise_row = torch.zeros_like(self._noise[:, :1])
        self._x_rows, self._y_rows = (rows[: replicas * batch_size].clone() for rows in (self._x, self._y))
        self._batch_number = torch.zeros(1, dtype=torch.long, device=device)
        self._noise_number = torch.zeros(1, dtype=torch.long, device=device)
        self._steps = 0

    def begin_epoch(self, epoch: int) -> None:
        """A new order for each replica, the same on every device; one batch of everything needs none."""
        self._batch_number.zero_()
        if self._order.shape[-1] == self._num_data:
            return
        seeds = self._streams.seeds
        rows = [torch.randperm(self._num_data, generator=epoch_generator(seed, epoch)) for seed in seeds]
        order = torch.stack(rows)[:, : self._used].to(self.learner.device)
        self._order.copy_((order + self._first_row).view_as(self._order))

    def begin_step(self) -> bool:
        """Draw the noise of the next steps where none is left; whether factors are due in this one."""
        self._steps += 1
        if self._noise_left == 0:
            for row, generator in zip(self._noise, self._streams.noise, strict=True):
                row.normal_(generator=generator)
            self._noise_number.zero_()
            self._noise_left = self._ahead
        self._noise_left -= 1
        return self.learner.refresh_due(self._steps)

    def gather(self) -> None:
        """The rows of the next step. Not compiled: Inductor spoils an index that it fuses with padding."""
        rows = self._order.index_select(1, self._batch_number).flatten()
        torch.index_select(self._x, 0, rows, out=self._x_rows)
        torch.index_select(self._y, 0, rows, out=self._y_rows)
        torch.index_select(self._noise, 1, self._noise_number, out=self._noise_row)
        self._batch_number.add_(1)
        self._noise_number.add_(1)

    def advance(self) -> None:
        """The first part of a step on these rows: a function of tensors alone."""
        replicas, _, batch = self._order.shape
        x, y = (rows.unflatten(0, (replicas, batch)) for rows in (self._x_rows, self._y_rows))
        numbers = self._noise_row.squeeze(1).split(self._sizes, dim=-1)
        noise = {
            name: part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for (name, shape), part in zip(self._shapes.items(), numbers, strict=True)
        }
        self.learner.step_(x, y, noise)

    def whole_step(self) -> None:
        """A step that refreshes the factors too."""
        self.advance()
        self.learner.refresh_()
        self.learner.move_()


class _Stepper:
    """One step, its parts compiled or captured as asked; a refresh that cannot be traced stays as it is."""

    def __init__(self, engine: _Engine, how: Execution) -> None:
        if how == "compiled":
            # Every training compiles anew, and what others have compiled would be kept for good.
            torch.compiler.reset()

        def prepared(*pieces: Callable[[], None]) -> Callable[[], None]:
            def work() -> None:
                for piece in pieces:
                    piece()

            if how == "eager":
                return work
            executor = executors.executor_for(engine.learner.device)
            return partial(executor.run, "step", None, work)

        def built(piece: Callable[[], None]) -> Callable[[], None]:
            if how != "compiled":
                return piece
            options = {**(engine.learner.compile_options or {}), "guard_filter_fn": _no_guards}
            whole = torch.compile(_with_own_code(piece), fullgraph=True, dynamic=False, options=options)
            return _CompiledOrPlain(whole, piece, dict(_tensors_in(vars(engine.learner))))

        learner = engine.learner
        if learner.refresh_traceable and learner.refresh_every == 1:
            self._advance = prepared(engine.gather, built(engine.whole_step))
            self._refresh: Callable[[], None] = lambda: None
            self._move: Callable[[], None] = lambda: None
            return
        self._advance = prepared(engine.gather, built(engine.advance))
        self._refresh = prepared(built(learner.refresh_)) if learner.refresh_traceable else learner.refresh_
        # An empty piece of work cannot be captured.
        moves = type(learner).move_ is not Learner.move_
        self._move = prepared(built(learner.move_)) if moves else learner.move_

    def step(self, refresh: bool) -> None:
        self._advance()
        if refresh:
            self._refresh()
        self._move()


def _no_guards(entries: Sequence[object]) -> list[bool]:
    """None of what compiled code checks before it runs is checked: nothing of it changes in a training."""
    return [False] * len(entries)


def _with_own_code(piece: Callable[[], None]) -> Callable[[], None]:
    """The same work in a code object of its own: compiled code is kept by these, and this is for one training alone."""

    def work() -> None:
        piece()

    return FunctionType(work.__code__.replace(), work.__globals__, closure=work.__closure__)


class _CompiledOrPlain:
    """Compiled work; where the compiler fails, or makes something else of it, the same work uncompiled, with a warning.

    The first runs are done both ways, from the same state, and compared: compilers have been wrong without a word.
    """

    def __init__(self, compiled: Callable[[], None], plain: Callable[[], None], state: Mapping[str, Tensor]) -> None:
        self._work, self._plain, self._state = compiled, plain, state
        self._checks = _CHECKS

    def __call__(self) -> None:
        if self._checks == 0:
            self._work()
            return
        self._checks -= 1
        before = self._copy()
        self._plain()
        right = self._copy()
        self._write(before)
        try:
            self._work()
        except RuntimeError as error:
            # The compiler fails before anything is run.
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            self._give_up(f"could not be compiled: {str(error).splitlines()[0]}", right)
            return
        if wrong := [name for name, now in self._state.items() if not _agree(before[name], right[name], now)]:
            self._give_up(f"computes something else when it is compiled ({', '.join(wrong)})", right)

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._state.items()}

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self._state.items():
            tensor.copy_(values[name])

    def _give_up(self, reason: str, right: dict[str, Tensor]) -> None:
        warnings.warn(f"the step stays as it is, which is slower; it {reason}", stacklevel=3)
        self._write(right)
        self._work, self._checks = self._plain, 0


def _tensors_in(value: object, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is reached through attributes and containers, by where it is."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, nn.Module):
        yield from _tensors_in(dict(value.named_buffers()), place)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{place}.{key}".strip("."))
    elif isinstance(value, list | tuple):
        yield from _tensors_in(dict(enumerate(value)), place)
    elif type(value).__module__.startswith("noisygrad") and hasattr(value, "__dict__"):
        yield from _tensors_in(vars(value), place)


def _agree(before: Tensor, right: Tensor, found: Tensor) -> bool:
    """Whether two changes of a tensor differ by rounding alone."""
    if not right.is_floating_point() or right.numel() == 0:
        return torch.equal(right, found)
    rounding = 1e3 * torch.finfo(right.dtype).eps * float(right.abs().max())
    allowed = 1e-3 * float((right - before).abs().max()) + rounding
    # Where the state is not finite, there is nothing to compare.
    return not float((found - right).abs().max()) > allowed


def _execution(asked: Execution, device: torch.device, steps: int) -> Execution:
    if asked not in ("auto", "eager", "compiled", "captured"):
        raise ValueError(f'execution must be "auto", "eager", "compiled" or "captured"; got {asked!r}')
    if asked == "captured" and not executors.executor_for(device).deferred:
        raise ValueError(f"a CUDA graph needs a GPU, and the learner is on {device}: use execution='auto'")
    if asked == "compiled" and not compiler_available():
        raise ValueError("execution='compiled' needs a C++ compiler (g++ or clang++); use 'eager'")
    if asked != "auto":
        return asked
    long = steps >= _WORTH_COMPILING.get(device.type, _WORTH_COMPILING["cpu"])
    if long and compiler_available():
        return "compiled"
    if device.type == "cuda":
        return "captured"
    if long:
        warnings.warn("no C++ compiler was found: the replicas are trained by the slower eager step", stacklevel=3)
    return "eager"


def compiler_available() -> bool:
    """Whether `torch.compile` finds a C++ compiler for the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
