"""The one training loop of estimators, experiments and baselines.

It knows epochs, batches, checkpoints and progress. What a step is, it does not know: `optimizer.step` of a noisy
optimiser by default, or any function of a batch (a baseline's step, a compiled or captured one).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from noisygrad.distributed import all_gather_object, processes
from noisygrad.optim import NoisyOptimizer
from noisygrad.optim.generators import seeds_of
from noisygrad.posterior.faults import whole_number
from noisygrad.posterior.inputs import Call, Inputs
from noisygrad.training.batches import Data, LoaderBatches, TensorBatches
from noisygrad.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)
from noisygrad.training.history import EpochRecord, History
from noisygrad.training.progress import Reporter, Show, reporter

Step = Callable[..., Tensor]
"""From a batch (x, y) to its loss, having made the step; a loader's weights and masks are further arguments."""
OnEpoch = Callable[[EpochRecord], Mapping[str, float] | None]


def train(
    optimizer: NoisyOptimizer | torch.optim.Optimizer,
    data: Data,
    *,
    epochs: int,
    batch_size: int | None = None,
    model: nn.Module | None = None,
    step: Step | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    schedule_every: Literal["epoch", "step"] = "epoch",
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int | Sequence[int] | None = None,
    on_epoch: OnEpoch | None = None,
    progress: Show = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1,
    resume: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> History:
    """Train for a number of epochs and say how it went.

    Args:
        optimizer: A noisy optimiser; with `step`, any optimiser.
        data: A pair of tensors (x, y) in memory, or an iterable of such pairs (a DataLoader), whose batches are moved
            to the optimiser's device. With replicas a tensor is `[*replicas, N, ...]`, or `[N, ...]` if they share it.
            A model with several inputs takes an iterable, with a tuple or a dictionary of tensors in place of x. Its
            batches may end in weights of examples and a mask of what counts, (x, y, weight, mask), as in `draw.nll`.
        epochs: How many epochs there are in all, those before a resume included.
        batch_size: For tensors: examples per batch; None takes all at once.
        model: What `step` calls; by default the model as the optimiser was given it, wrapped or compiled. Its
            mode (training or evaluation) is left as it is.
        step: From a batch, `step(x, y)`, to its loss; `optimizer.step(lambda: (model(x), y))` by default.
        scheduler: A learning-rate scheduler, stepped after every epoch or every step (`schedule_every`).
        schedule_every: "epoch" or "step".
        shuffle: For tensors: a new order every epoch, each replica its own.
        drop_last: For tensors: leave out a last batch that is not full.
        seed: Of the order; an integer (replica i then has `seed + i`), or one per replica. None draws one.
        on_epoch: Called after each epoch with an `EpochRecord`; numbers it returns are kept in `History.metrics`.
        progress: True, False, None (a bar where there is a terminal) or a function of an `EpochRecord`.
        checkpoint: A file to save to after every `checkpoint_every` epochs (after `on_epoch`) and at the end.
        checkpoint_every: In epochs.
        resume: Whether to go on from `checkpoint` if it exists; the result is bit-equal to never having stopped.
        settings: What else makes this run what it is, by name (numbers, strings, lists): kept in the checkpoint, and
            one of other settings is refused.

    Raises:
        ValueError: Where an argument or a shape is wrong; `CheckpointError` where the checkpoint is of another run.
    """
    for name, value in (("epochs", epochs), ("checkpoint_every", checkpoint_every), ("batch_size", batch_size)):
        if value is not None:
            whole_number(name, value)
    if schedule_every not in ("epoch", "step"):
        raise ValueError(f'schedule_every must be "epoch" or "step", got {schedule_every!r}')
    model, step = _called(optimizer, model, step)
    replicas = optimizer.structure.replicas if isinstance(optimizer, NoisyOptimizer) else ()
    device = next(model.parameters()).device
    batches = _batches(data, batch_size, replicas, shuffle, drop_last, device)
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run = _Run(states, batches, dict(settings or {}), _seeds(seed, replicas))
    history = History()
    if checkpoint is not None and resume and Path(checkpoint).is_file():
        history = run.load(Path(checkpoint), seed is not None, epochs)
    every_step = scheduler if schedule_every == "step" else None
    with reporter(progress, epochs, history.epochs) as report:
        for epoch in range(history.epochs + 1, epochs + 1):
            start = time.perf_counter()
            loss = _epoch(batches, run.seeds, epoch, step, every_step, report, optimizer)
            loss /= max(1, torch.Size(replicas).numel())
            if scheduler is not None and schedule_every == "epoch":
                scheduler.step()
            record = EpochRecord(epoch, epochs, loss, time.perf_counter() - start)
            metrics = on_epoch(record) if on_epoch is not None else None
            history.append(record, {name: float(value) for name, value in (metrics or {}).items()})
            due = epoch % checkpoint_every == 0 or epoch == epochs
            if checkpoint is not None and due:  # the ranks of a run share one file
                random = all_gather_object(run.random())
                if processes().rank == 0:
                    run.save(Path(checkpoint), history, random)
            report.finished(record)
    return history


def _epoch(
    batches: TensorBatches | LoaderBatches,
    seeds: Sequence[int],
    epoch: int,
    step: Step,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    report: Reporter,
    optimizer: NoisyOptimizer | torch.optim.Optimizer,
) -> float:
    """One pass over the data; the mean loss per example, which alone waits for the device."""
    length = len(batches)
    total: Tensor | None = None
    examples = 0
    noisy = optimizer if isinstance(optimizer, NoisyOptimizer) else None
    # A loader may give examples several times.
    most = math.inf if noisy is None or batches.num_data <= noisy.options.num_data else noisy.options.num_data
    for number, (batch, count) in enumerate(batches.epoch(seeds, epoch), start=1):
        loss = step(*batch).detach() * count
        total = loss if total is None else total + loss
        examples += count
        if noisy is not None and examples > most:
            noisy.measurement.warn_num_data(f"an epoch has more than {most} examples")
        if scheduler is not None:
            scheduler.step()
        if length:
            report.within(epoch - 1 + number / length)
    if total is None:
        raise ValueError("the data yielded no batch")
    return float(total) / examples


@dataclass
class _Run:
    """What a checkpoint of a run holds."""

    states: dict[str, Any]
    """The model, the optimiser and the scheduler."""
    batches: TensorBatches | LoaderBatches
    own: dict[str, Any]
    """Settings that the user gave."""
    seeds: list[int]

    @property
    def generators(self) -> dict[str, Sequence[torch.Generator]]:
        """What numbers are drawn from, but for torch's own generators."""
        optimizer, loader = self.states["optimizer"], self.batches.generator
        return {
            "optimizer": optimizer.generators if isinstance(optimizer, NoisyOptimizer) else [],
            "loader": [] if loader is None else [loader],
        }

    def random(self) -> dict[str, Any]:
        """The states of all that this process draws numbers from."""
        own = {name: [generator.get_state() for generator in some] for name, some in self.generators.items()}
        return {**own, "torch": random_state(self.batches.device)}

    def save(self, path: Path, history: History, random: list[dict[str, Any]]) -> None:
        extra = {"history": history.to_dict(), "seeds": self.seeds, "settings": self.batches.settings, "own": self.own}
        save_checkpoint(path, **self.states, extra={**extra, "random": random})

    def load(self, path: Path, seeded: bool, epochs: int) -> History:
        try:
            extra = load_checkpoint(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; delete it (or give resume=False) to start afresh") from error
        if "history" not in extra or "seeds" not in extra:
            raise CheckpointError(f"{path} was not saved by `train`; load it with `load_checkpoint`")
        if not isinstance(extra["random"], list):
            raise CheckpointError(f"{path} was saved by an earlier noisygrad; delete it to start afresh")
        ours: dict[str, Any] = {**self.batches.settings, **({"seed": self.seeds} if seeded else {})}
        theirs = {**extra["settings"], "seed": extra["seeds"]}
        _compare(path, ours, {name: theirs.get(name) for name in ours})
        _compare(path, self.own, extra.get("own", {}))
        history = History.from_dict(extra["history"])
        if history.epochs > epochs:
            raise CheckpointError(
                f"{path} has {history.epochs} epochs, more than the {epochs} of this run: give as many, or delete it "
                "(or give resume=False) to start afresh"
            )
        load_checkpoint(path, **self.states)
        self.seeds = list(extra["seeds"])
        self._set_random(extra["random"])
        return history

    def _set_random(self, saved: list[dict[str, Any]]) -> None:
        """As this process was; among another number of processes as the first was, but for the optimiser's noise."""
        here = processes()
        same = len(saved) == here.size
        states = saved[here.rank if same else 0]
        set_random_state(states["torch"], self.batches.device)
        for name, generators in self.generators.items():
            if same or name != "optimizer":  # whose own state has seen to it that no two draw the same
                for generator, state in zip(generators, states[name], strict=False):
                    generator.set_state(state.cpu())


def _compare(path: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for name in dict.fromkeys((*ours, *theirs)):
        if theirs.get(name) != ours.get(name):
            raise CheckpointError(
                f"{path} is of a run with {name} = {theirs.get(name)}, this one has {ours.get(name)}: give the same, "
                "or delete it (or give resume=False) to start afresh"
            )


def _called(
    optimizer: NoisyOptimizer | torch.optim.Optimizer, model: nn.Module | None, step: Step | None
) -> tuple[nn.Module, Step]:
    """The model and the step; those of a noisy optimiser, where they are not given."""
    if isinstance(optimizer, NoisyOptimizer):
        own = optimizer.module if model is None else model

        def noisy_step(x: Inputs, y: Tensor, *counted: Tensor | None) -> Tensor:
            call = Call.of(x)
            return optimizer.step(lambda: (call(own), y, *counted))

        return own, noisy_step if step is None else step
    if model is None:
        raise ValueError(f"a {type(optimizer).__name__} does not know its model: give `model` and `step`")
    if step is None:
        raise ValueError(
            f"a {type(optimizer).__name__} does not know its loss: give `step`, a function from a batch (x, y) to the "
            "loss that also makes the step"
        )
    return model, step


def _batches(
    data: Data, batch_size: int | None, replicas: Sequence[int], shuffle: bool, drop_last: bool, device: torch.device
) -> TensorBatches | LoaderBatches:
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        for name, tensor in (("x", x), ("y", y)):
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, the model on {device}: move the data there once")
        return TensorBatches(x, y, batch_size=batch_size, replicas=replicas, shuffle=shuffle, drop_last=drop_last)
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor):
        raise ValueError(
            f"data is a pair of a {type(data[0]).__name__} and a tensor: for a model with several inputs give an "
            "iterable of such batches, a DataLoader or [(x, y)] for example"
        )
    if batch_size is not None or drop_last or not shuffle:
        raise ValueError(
            "batch_size, shuffle and drop_last are for a pair of tensors; a loader has its own: set them there"
        )
    if not hasattr(data, "__iter__"):
        raise ValueError(f"data must be a pair of tensors (x, y) or an iterable of such; got {type(data).__name__}")
    return LoaderBatches(data, device, len(replicas))


def _seeds(seed: int | Sequence[int] | None, replicas: Sequence[int]) -> list[int]:
    count = max(1, torch.Size(replicas).numel())
    seeds = seeds_of(seed, count)
    if min(seeds) < 0:
        raise ValueError(f"seed must be an integer of at least 0, or {count} of them, one per replica; got {seed!r}")
    return seeds
