"""What batches leave for a step: losses at drawn weights and, where they are due, Fisher statistics."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from noisygrad.families.base import Statistics
from noisygrad.families.units import Unit
from noisygrad.kernels.factorisation import capturing
from noisygrad.likelihoods import Counted, Likelihood
from noisygrad.optim.finite import FiniteGuard, FiniteTrace, known_finite
from noisygrad.optim.fresh_pass import FirstExamples, half_of, is_out_of_memory
from noisygrad.optim.options import Options
from noisygrad.optim.user_warning import warn_user
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.modes import with_attributes
from noisygrad.posterior.structure import Structure

Closure = Callable[[], tuple[Tensor | None, ...] | Tensor]
"""Returns (output, target), perhaps with a weight and a mask; or, having called `backward`, the mean loss."""


def unpacked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Output, target, weight and mask of what a closure returned."""
    if not 2 <= len(result) <= 4:
        raise TypeError(
            "the closure must return (output, target), perhaps followed by the weights of examples and by a mask of "
            f"what counts; it returned {len(result)} things"
        )
    return result + (None,) * (4 - len(result))


@dataclass
class Accumulated:
    """Sums over the draws, losses and statistics since the last step."""

    weights: Tensor | None = None
    """Σ over draws of the sampled weights, a flat vector."""
    draws: int = 0
    calls: int = 0
    """How many losses were computed: the gradient is the mean over them."""
    loss: Tensor | None = None
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """The mean over examples of the moments, by block."""
    examples: float | Tensor = 0.0
    """How many examples they stand for: a tensor once summed over ranks."""
    units: set[str] = field(default_factory=set)
    """The names of those that were measured."""
    known_finite: bool = True
    """Whether all statistics were looked at and are finite; a GPU is not waited for."""
    traces: list[FiniteTrace] = field(default_factory=list)
    """Of each pass that is not known to be finite, where its numbers were."""
    noise: Tensor | None = None
    """Σ over losses of batch size × the likelihood's own statistic."""
    noise_examples: float | Tensor = 0.0
    expected_statistics: bool = False

    def add_draw(self, weights: Tensor) -> None:
        """Count one draw of the weights. The first is kept by reference: see `own_buffer`."""
        self.draws += 1
        self.weights = weights if self.weights is None else self.weights + weights

    def own_buffer(self) -> None:
        """Own the sum, since the buffer of the last draw is about to be overwritten."""
        if self.draws == 1 and self.weights is not None:
            self.weights = self.weights.clone()

    def mean_weights(self) -> Tensor:
        """The mean of the sampled weights over draws (and over ranks, once summed over them)."""
        assert self.weights is not None
        return self.weights if self.draws == 1 else self.weights / self.draws

    def check_complete(self) -> None:
        """Raise where there is nothing to make a step of, or where statistics are missing."""
        if self.draws == 0:
            raise RuntimeError("step() has nothing to work with: no sampled() context was entered since the last step")
        if self.expected_statistics and self.calls == 0:
            raise RuntimeError(
                "this step was due to take statistics, but no loss was computed by draw.nll(output, target): the "
                "Fisher, and so the width of the posterior, would be wrong"
            )

    def sum_over(self, ranks: Ranks, statistics: Mapping[str, Statistics]) -> None:
        """Add up what all ranks have; batches may differ in size, and layers unused on one rank may be used on others.

        `statistics` are those of the optimiser: every rank must send tensors for the same blocks in the same order.
        """
        if not ranks.active:
            return
        assert self.weights is not None
        self.weights = self.weights.clone()
        self.noise_examples = torch.as_tensor(self.noise_examples, dtype=self.weights.dtype, device=self.weights.device)
        noise = [] if self.noise is None else [self.noise]
        examples, sums = self.weights.new_tensor(self.examples), []
        if self.expected_statistics:
            self.known_finite = False  # this rank's may be, and another's not
            mine = self.statistics or {n: s.map_averages(torch.zeros_like) for n, s in statistics.items()}
            self.statistics = {n: mine[n].map_averages(lambda tensor: tensor * self.examples) for n in statistics}
            sums = [tensor for s in self.statistics.values() for tensor in s.averages().values()]
        ranks.sum_([self.weights, *sums, examples, self.noise_examples, *noise])
        self.weights /= ranks.size
        for tensor in sums:
            tensor.div_(examples.clamp_min(1e-30))
        self.examples = examples

    def used_by_ranks(self, mask: Tensor | None) -> Tensor | None:
        """The mask of an update of the Fisher: that of the step, and 0 where no rank has used a layer."""
        if not isinstance(self.examples, Tensor):
            return mask
        used = (self.examples > 0).to(self.examples.dtype)
        return used if mask is None else mask * used

    @torch.no_grad()
    def add_statistics(
        self, blocks: Sequence[Block], passes: Mapping[str, Pass], weight: float, current: Mapping[str, Statistics]
    ) -> None:
        """Add one pass, counted as `weight` examples; `current` are the moving averages."""
        finite = True
        self.units.update(passes)
        for block in blocks if passes else ():
            measured = block.family.measure(block.units, passes, current[block.name])
            finite = finite and known_finite(measured)
            kept = self.statistics.setdefault(block.name, measured)
            if kept is not measured:
                kept.update_(measured, self.examples / (self.examples + weight))
        self.examples += weight if passes else 0.0
        if not finite:
            self.known_finite = False
            self.traces += FiniteTrace.of(passes)

    def drop_statistics(self) -> None:
        """Give up what was measured, to measure again."""
        self.statistics, self.examples, self.traces, self.known_finite = {}, 0.0, [], True

    def add_loss(self, loss: Tensor) -> None:
        """Count one loss; the value is kept for reporting."""
        self.calls += 1
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    def mean_loss(self) -> Tensor | None:
        """The mean of the losses, if there was one."""
        return self.loss if self.loss is None or self.calls == 1 else self.loss / self.calls

    def add_noise(self, statistic: Tensor | None, batch: float | Tensor) -> None:
        """Add what one batch says about the observation noise; `batch` is the sum of its examples' weights."""
        if statistic is None:
            return
        self.noise = statistic * batch if self.noise is None else self.noise + statistic * batch
        self.noise_examples = self.noise_examples + batch


@dataclass(kw_only=True)
class BatchMeasurement:
    """Losses and Fisher statistics of batches; its state is how many examples there was memory for."""

    model: nn.Module
    structure: Structure
    fisher: FisherAverage
    likelihood: Likelihood
    options: Options
    generators: list[torch.Generator]
    """Of the targets that are sampled."""
    guard: FiniteGuard
    ranks: Ranks
    like: Tensor
    """Of the type of statistics, on the device."""
    statistics_limit: int | None = None
    forward_limit: int | None = None
    """How many examples of a batch there was memory for: for statistics, and for a forward pass of their own."""

    def __post_init__(self) -> None:
        self._warned = False
        self._units, parameters = self.structure.units, self.structure.parameters
        self._others = [(unit, parameters[unit.slots[0].parameter]) for unit in self._units if unit.kind == "other"]

    # ---------------------------------------------------------------- losses

    def loss(
        self,
        accumulated: Accumulated,
        capture: Capture | None,
        output: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Check the batch, take statistics if layers were recorded, and return the loss."""
        likelihood, device = self.likelihood, self.like.device.type
        counted, target = likelihood.counted(output, target, weight, mask)
        likelihood.check(output, target)
        if torch.is_grad_enabled() and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._loss(accumulated, capture, output, target, counted)
        return self._loss(accumulated, capture, output, target, counted)

    def _loss(
        self,
        accumulated: Accumulated,
        capture: Capture | None,
        output: Tensor,
        target: Tensor,
        counted: Counted | None,
    ) -> Tensor:
        likelihood = self.likelihood
        nll = likelihood.nll if counted is None else partial(likelihood.counted_nll, counted=counted)
        if not torch.is_grad_enabled():
            return nll(output, target)
        output = output if output.dtype in {torch.float32, torch.float64} else output.float()
        if self.guard.deferred:
            self.guard.note_targets(likelihood.invalid(output, target))
            target = likelihood.clamp_invalid_targets(output, target)
            if counted is not None:
                self.guard.note_targets(~(counted.total > 0).all())
        if capture is not None:
            self.take(accumulated, capture, output, target, counted)
        loss = nll(output, target)
        accumulated.add_loss(loss)
        seen = output.detach()
        if counted is None:
            accumulated.add_noise(likelihood.observe(seen, target), output.shape[len(likelihood.replicas)])
        else:
            accumulated.add_noise(likelihood.observe(seen, target, counted), counted.total.unsqueeze(-1))
        return loss

    # ---------------------------------------------------------------- statistics

    def take(
        self,
        accumulated: Accumulated,
        capture: Capture,
        output: Tensor,
        target: Tensor,
        counted: Counted | None = None,
    ) -> None:
        """Add what a batch says of the Fisher.

        Where a GPU's memory does not suffice, half of the examples are taken, with a warning, from now on.
        """
        batch = output.shape[len(self.likelihood.replicas)]
        records = capture.take()
        shared = {record.edge.node for record in records}
        if depends_on(output, capture.consumed_nodes) and depends_on(output, shared):
            raise RuntimeError(
                "two losses share a part of one forward pass (a trunk with two heads, say), of which the statistics "
                "were already taken for the first: call the model once for each draw.nll"
            )
        keep = min(batch, self.options.stats_batch or batch, self.statistics_limit or batch)
        first = not accumulated.statistics
        while True:
            try:
                self._take(accumulated, records, output, target, keep, counted)
                capture.consume(records)
                return
            except RuntimeError as error:
                # While a graph is recorded nothing can be tried again, and sums with earlier draws may be half done.
                if not is_out_of_memory(error) or keep == 1 or not first or capturing():
                    raise
            accumulated.drop_statistics()
            self.statistics_limit = keep = half_of(keep, f"stats_batch={keep // 2} says so from the start")

    def _take(
        self,
        accumulated: Accumulated,
        records: list[Record],
        output: Tensor,
        target: Tensor,
        keep: int,
        counted: Counted | None,
    ) -> None:
        def summarise(unit: Unit, one: Pass) -> Pass:
            block = self.structure.block_of[unit.name]
            return block.summarise(unit, one, self.fisher.statistics[block.name])

        scarce = self.like.device.type in summaries.DEVICES
        passes = fisher_passes(
            self.options.fisher,
            self.likelihood,
            output,
            target,
            records=records,
            others=self._others,
            generators=self.generators,
            dtype=self.like.dtype,
            keep=keep,
            summarise=summarise if scarce else None,
            counted=counted,
        )
        for one in passes:  # only relative weights count
            accumulated.add_statistics(self.structure.blocks, one, keep, self.fisher.statistics)
            del one  # before the next is made

    def take_returned_loss(
        self, accumulated: Accumulated, capture: Capture | None, loss: object, gradients: Sequence[Tensor | None]
    ) -> None:
        """A closure has called `backward` by itself and returned its mean loss: take the empirical Fisher."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"the closure must return (output, target), or a loss; it returned {type(loss).__name__}")
        warn_user(
            "the closure returned a loss, not (output, target): the Fisher is then the empirical one, which is a worse "
            "approximation. Return (model(x), y) for the true Fisher"
        )
        if all(gradient is None for gradient in gradients):
            raise RuntimeError("the closure returned a loss without having called backward() on it")
        accumulated.add_loss(loss)
        if capture is not None:
            batch, passes = self._passes_of_backward(capture.take())
            accumulated.add_statistics(self.structure.blocks, passes, batch, self.fisher.statistics)

    def _passes_of_backward(self, records: list[Record]) -> tuple[int, dict[str, Pass]]:
        """How many examples a batch had that the user has differentiated, and its passes.

        Nobody says how many, so it is the size of a layer's input that suits all of them: of the last layer's, if it
        does, since the first may look positions up, or have the sequence in front.
        """
        seen = [record for record in records if record.kept]
        measure = partial(passes_after_backward, seen, self._others, dtype=self.like.dtype)
        lead = len(self.structure.replicas)
        *likely, last = dict.fromkeys(record.inputs.shape[lead] for record in reversed(seen)) or [1]
        for size in likely:
            with suppress(ValueError):
                return size, measure(size)
        return last, measure(last)

    def take_fresh(self, accumulated: Accumulated, capture: Capture, run: Closure) -> None:
        """`fisher_pass="fresh"`: statistics of a forward pass of their own, BatchNorm in evaluation mode."""
        # In evaluation mode to the end: statistics of a norm's scale ask what it was normalised by.
        norms = [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        with with_attributes(norms, training=False):
            output, *rest = self._fresh_forward(capture, run)
            counted, target = self.likelihood.counted(output, *rest)
            self.likelihood.check(output, target)
            with torch.autocast(self.like.device.type, enabled=False):
                output = output if output.dtype in {torch.float32, torch.float64} else output.float()
                clean = self.likelihood.clamp_invalid_targets(output, target)
                self.take(accumulated, capture, output, clean, counted)

    def _fresh_forward(self, capture: Capture, run: Closure) -> tuple[Any, ...]:
        """What the closure returns; of half of the examples, with a warning, where memory does not suffice for all."""
        while True:
            first = FirstExamples(self.forward_limit)
            try:
                with first.of(self.model):
                    result = run()
                break
            except RuntimeError as error:
                # The ranks of a distributed training call their models together, or wait for each other for ever.
                alone = not (self.ranks.active or self.structure.replicas or capturing())
                if not (is_out_of_memory(error) and alone and first.given > 1):
                    raise
            capture.take()
            advice = "A closure that cannot work on part of a batch needs smaller ones"
            self.forward_limit = half_of(first.given, advice)
        if not isinstance(result, tuple):
            raise TypeError('fisher_pass="fresh" needs a closure that returns (output, target)')
        output, *rest = unpacked(result)
        lead = len(self.likelihood.replicas)
        return output, *(part if part is None or not first.cut else part.narrow(lead, 0, first.given) for part in rest)

    def warn_uncalled_layers(self, accumulated: Accumulated) -> None:
        """Warn, once, of layers with a gradient but no statistics: their posterior would quietly become the prior."""
        if self._warned or self.ranks.active:  # what one rank has not used another may have
            return
        parameters, seen = self.structure.parameters, accumulated.units
        uncalled = [
            unit.name
            for unit in self._units
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
