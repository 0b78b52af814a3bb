"""What one batch says: its loss at drawn weights and, where a step is due to take them, its Fisher statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from noisygrad.algorithm.fisher import FisherAverage
from noisygrad.curvature import summaries
from noisygrad.curvature.capture import Capture, Record
from noisygrad.curvature.fisher import depends_on, fisher_passes, passes_after_backward
from noisygrad.curvature.passes import Pass
from noisygrad.distributed import Ranks
from noisygrad.kernels.factorisation import capturing
from noisygrad.likelihoods import Likelihood
from noisygrad.optim.accumulate import Accumulated
from noisygrad.optim.finite import FiniteGuard
from noisygrad.optim.options import Options
from noisygrad.optim.user_warning import warn_user
from noisygrad.posterior.structure import Structure

Closure = Callable[[], tuple[Tensor, Tensor] | Tensor]
"""Returns (output, target); or, having called `backward`, the mean loss."""

_OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "unable to find an engine to execute")


class BatchMeasurement:
    """Losses and Fisher statistics of batches; its state is how many examples there was memory for.

    Args:
        model: The user's own module.
        structure: Its blocks.
        fisher: The moving averages, which a measurement may have to know.
        likelihood: What the outputs mean.
        options: Which Fisher is taken, and of how many examples.
        generators: Of the sampled targets.
        guard: Is told of impossible targets, where nothing may wait for a check.
        ranks: The processes that train together.
        deferred: Whether checks are left to the guard.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        fisher: FisherAverage,
        likelihood: Likelihood,
        options: Options,
        *,
        generators: list[torch.Generator],
        guard: FiniteGuard,
        ranks: Ranks,
        deferred: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.statistics_limit: int | None = None
        self.forward_limit: int | None = None
        """How many examples of a batch there was memory for: for statistics, and for a forward pass of their own."""
        self._model, self._structure, self._fisher, self._likelihood = model, structure, fisher, likelihood
        self._options, self._generators, self._guard, self._ranks = options, generators, guard, ranks
        self._deferred, self._dtype, self._device = deferred, dtype, device
        self._warned = False
        self._others = [
            (unit, structure.parameters[unit.slots[0].parameter]) for unit in structure.units if unit.kind == "other"
        ]

    # ---------------------------------------------------------------- losses

    def loss(self, accumulated: Accumulated, capture: Capture | None, output: Tensor, target: Tensor) -> Tensor:
        """Check the batch, take statistics if layers were recorded, and return the loss."""
        likelihood, device = self._likelihood, self._device.type
        likelihood.check(output, target)
        if not torch.is_grad_enabled():
            return likelihood.nll(output, target)
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.loss(accumulated, capture, output, target)
        output = output if output.dtype in {torch.float32, torch.float64} else output.float()
        if self._deferred:
            self._guard.note_targets(likelihood.invalid(output, target))
            target = likelihood.clamp_invalid_targets(output, target)
        if capture is not None:
            self.take(accumulated, capture, output, target)
        loss = likelihood.nll(output, target)
        accumulated.add_loss(loss)
        accumulated.add_noise(likelihood.observe(output.detach(), target), output.shape[len(likelihood.replicas)])
        return loss

    # ---------------------------------------------------------------- statistics

    def take(self, accumulated: Accumulated, capture: Capture, output: Tensor, target: Tensor) -> None:
        """Add what a batch says of the Fisher.

        Where a GPU's memory does not suffice, half of the examples are taken, with a warning, from now on.
        """
        batch = output.shape[len(self._likelihood.replicas)]
        records = capture.take()
        shared = {record.edge.node for record in records}
        if depends_on(output, capture.consumed_nodes) and depends_on(output, shared):
            raise RuntimeError(
                "two losses share a part of one forward pass (a trunk with two heads, say), of which the statistics "
                "were already taken for the first: call the model once for each draw.nll"
            )
        keep = min(batch, self._options.stats_batch or batch, self.statistics_limit or batch)
        first = not accumulated.statistics
        while True:
            try:
                self._take(accumulated, records, output, target, keep)
                capture.consume(records)
                return
            except RuntimeError as error:
                # While a graph is recorded nothing can be tried again, and sums with earlier draws may be half done.
                if not is_out_of_memory(error) or keep == 1 or not first or capturing():
                    raise
            accumulated.drop_statistics()
            self.statistics_limit = keep = half_of(keep, f"stats_batch={keep // 2} says so from the start")

    def _take(self, accumulated: Accumulated, records: list[Record], output: Tensor, target: Tensor, keep: int) -> None:
        block_of = self._structure.block_of
        scarce = self._device.type in summaries.DEVICES
        passes = fisher_passes(
            self._options.fisher,
            self._likelihood,
            output,
            target,
            records=records,
            others=self._others,
            generators=self._generators,
            dtype=self._dtype,
            keep=keep,
            summarise=(lambda unit, one: block_of[unit.name].summarise(unit, one)) if scarce else None,
        )
        for one in passes:  # only relative weights count
            accumulated.add_statistics(self._structure.blocks, one, keep, self._fisher.statistics)
            del one  # before the next is made

    def take_empirical(self, accumulated: Accumulated, capture: Capture) -> None:
        """Add what a backward pass of the user's own says, of a mean loss: the empirical Fisher."""
        batch, passes = self._passes_of_backward(capture.take())
        accumulated.add_statistics(self._structure.blocks, passes, batch, self._fisher.statistics)

    def _passes_of_backward(self, records: list[Record]) -> tuple[int, dict[str, Pass]]:
        """How many examples a batch had that the user has differentiated, and its passes.

        Nobody says how many, so it is the size of a layer's input that suits all of them: of the last layer's, if it
        does, since the first may look positions up, or have the sequence in front.
        """
        seen = [record for record in records if record.kept]
        measure = partial(passes_after_backward, seen, self._others, dtype=self._dtype)
        lead = len(self._structure.replicas)
        *likely, last = dict.fromkeys(record.inputs.shape[lead] for record in reversed(seen)) or [1]
        for size in likely:
            with suppress(ValueError):
                return size, measure(size)
        return last, measure(last)

    def take_fresh(self, accumulated: Accumulated, capture: Capture, run: Closure) -> None:
        """`fisher_pass="fresh"`: statistics of a forward pass of their own, BatchNorm in evaluation mode."""
        # In evaluation mode to the end: statistics of a norm's scale ask what it was normalised by.
        with evaluating_norms(self._model):
            output, target = self._fresh_forward(capture, run)
            self._likelihood.check(output, target)
            with torch.autocast(self._device.type, enabled=False):
                output = output if output.dtype in {torch.float32, torch.float64} else output.float()
                clean = self._likelihood.clamp_invalid_targets(output, target)
                self.take(accumulated, capture, output, clean)

    def _fresh_forward(self, capture: Capture, run: Closure) -> tuple[Tensor, Tensor]:
        """Output and target; of half of the examples, with a warning, where memory does not suffice for all."""
        while True:
            first = FirstExamples(self.forward_limit)
            try:
                with first.of(self._model):
                    result = run()
                break
            except RuntimeError as error:
                # The ranks of a distributed training call their models together, or wait for each other for ever.
                alone = not (self._ranks.active or self._structure.replicas or capturing())
                if not (is_out_of_memory(error) and alone and first.given > 1):
                    raise
            capture.take()
            advice = "A closure that cannot work on part of a batch needs smaller ones"
            self.forward_limit = half_of(first.given, advice)
        if not isinstance(result, tuple):
            raise TypeError('fisher_pass="fresh" needs a closure that returns (output, target)')
        output, target = result
        return output, target[: first.given] if first.cut else target

    def warn_uncalled_layers(self, accumulated: Accumulated) -> None:
        """Warn, once, of layers with a gradient but no statistics: their posterior would quietly become the prior."""
        if self._warned or self._ranks.active:  # what one rank has not used another may have
            return
        parameters, seen = self._structure.parameters, accumulated.units
        uncalled = [
            unit.name
            for unit in self._structure.units
            if unit.name not in seen and any(parameters[slot.parameter].grad is not None for slot in unit.slots)
        ]
        if not uncalled:
            return
        self._warned = True
        names = ", ".join(repr(name) for name in uncalled[:4]) + (", …" if len(uncalled) > 4 else "")
        warn_user(
            f"{names}: the loss depends on the weights of {'this layer' if len(uncalled) == 1 else 'these layers'}, "
            "but not by calling the layer (F.linear(x, layer.weight) does so, for example). The Fisher sees layers "
            "that are called, so the posterior of these weights will be the prior. Call the layer, or make the weight "
            "an nn.Parameter of a module of your own, which gets a diagonal block"
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Also where a library of the GPU's has not found the memory that it works in, and says so in its own way."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _OUT_OF_MEMORY)


def half_of(examples: int, advice: str) -> int:
    """How many examples statistics are taken from when memory did not suffice for this many; with a warning."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warn_user(
        f"out of memory while taking statistics: from now on they are taken from {examples // 2} examples of a batch. "
        f"{advice}"
    )
    return examples // 2


@contextmanager
def evaluating_norms(model: nn.Module) -> Iterator[None]:
    """Layers of batch normalisation are in evaluation mode inside."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


class FirstExamples:
    """Lets a model see the first examples of a batch: of every tensor it is called with that is as long as the first.

    Args:
        limit: How many; None for all.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.given = 0
        """How many examples the model was last called with."""
        self.cut = False
        """Whether they were fewer than it was to be called with."""

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Inside, calls of the model are watched, before any hook of the user's."""
        handle = model.register_forward_pre_hook(self._watch, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _watch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        batches = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        if not batches:
            return None
        batch = batches[0]
        self.given = batch if self._limit is None else min(batch, self._limit)
        self.cut = self.given < batch
        if not self.cut:
            return None

        def part(value: Any) -> Any:
            return value[: self.given] if isinstance(value, Tensor) and value.dim() and len(value) == batch else value

        return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}
