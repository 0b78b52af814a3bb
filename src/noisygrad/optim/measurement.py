"""What batches leave for a step: losses at drawn weights and, where they are due, Fisher statistics."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from noisygrad.algorithm.fisher import FisherAverage
from noisygrad.curvature import summaries
from noisygrad.curvature.capture import Capture, Record
from noisygrad.curvature.fisher import fisher_passes, passes_after_backward
from noisygrad.curvature.passes import Pass
from noisygrad.distributed import Ranks
from noisygrad.families.units import Unit
from noisygrad.kernels.factorisation import capturing
from noisygrad.kernels.products import without_autocast
from noisygrad.likelihoods import Counted, Likelihood
from noisygrad.optim.accumulated import Accumulated
from noisygrad.optim.finite import FiniteGuard, FiniteTrace, known_finite
from noisygrad.optim.fresh_pass import FirstExamples, half_of, is_out_of_memory
from noisygrad.optim.graph import LOOKED_AT, LossCall, check_whole
from noisygrad.optim.options import Options
from noisygrad.optim.user_warning import warn_user
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
        self._warned = self._warned_of_size = False
        self._returned_examples = 0
        self._units, parameters = self.structure.units, self.structure.parameters
        self._coupled = any(b.family.reads == "rows" and len(b.units) > 1 for b in self.structure.blocks)
        self._weighs_inputs = any(b.family.reads in {"moments", "basis"} for b in self.structure.blocks)
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
        *,
        observe: bool,
    ) -> Tensor:
        """Check the batch, take statistics if layers were recorded, and return the loss.

        With `observe` it tells by which factor it is differentiated; else that is 1.
        """
        likelihood, device = self.likelihood, self.like.device.type
        counted, target = likelihood.counted(output, target, weight, mask)
        likelihood.check(output, target)
        if counted is not None:
            likelihood.check_counted(counted)
        nll = likelihood.nll if counted is None else partial(likelihood.counted_nll, counted=counted)
        if not (torch.is_grad_enabled() and output.requires_grad):
            return nll(output, target)
        node = output.grad_fn
        if node is not None and node.name().partition("Backward")[0] in LOOKED_AT and not likelihood.replicas:
            check_whole(output)
        if counted is None and (rows := output.shape[len(likelihood.replicas)]) > self.options.num_data:
            self.warn_num_data(f"a batch has {rows} examples")
        with without_autocast(device):
            call = accumulated.begin_call(output, counted)
            accumulated.examples += output.shape[len(likelihood.replicas)]
            call.parts = self._parts(target, counted)
            return accumulated.add_call(
                call, self._loss(accumulated, call, capture, output, target, nll), observe=observe
            )

    def _loss(
        self,
        accumulated: Accumulated,
        call: LossCall,
        capture: Capture | None,
        output: Tensor,
        target: Tensor,
        nll: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        likelihood = self.likelihood
        output = output if output.dtype in {torch.float32, torch.float64} else output.float()
        if self.guard.deferred:
            self.guard.note_targets(likelihood.invalid(output, target))
            target = likelihood.clamp_invalid_targets(output, target)
            if call.counted is not None:
                self.guard.note_targets(~(call.counted.total > 0).all())
        if capture is not None:
            self.take(accumulated, call, capture, output, target)
        loss = nll(output, target)
        call.noise = likelihood.observe(output.detach(), target, *([] if call.counted is None else [call.counted]))
        if capture is not None:  # until then another head may need what was recorded
            loss.register_hook(lambda gradient: capture.release())
        return loss

    def _parts(self, target: Tensor, counted: Counted | None) -> float | Tensor:
        """How many parts of its targets count of an example, on average."""
        if counted is None:
            return target.numel() / target.shape[: len(self.likelihood.replicas) + 1].numel()
        parts = counted.parts_per_example()
        return parts if self.guard.deferred else parts.item()

    def warn_num_data(self, seen: str) -> None:
        """Warn, once, that the training set is larger than was said; accumulation and draws may repeat examples."""
        if not self._warned_of_size:
            self._warned_of_size = True
            warn_user(
                f"{seen}, but num_data={self.options.num_data}: the posterior is wider, and the prior pulls more, than "
                "the data justify. Give the number of examples, as len(loader.dataset) does; len(loader) is batches"
            )

    # ---------------------------------------------------------------- statistics

    def take(self, accumulated: Accumulated, call: LossCall, capture: Capture, output: Tensor, target: Tensor) -> None:
        """Take what a batch says of the Fisher.

        Where a GPU's memory does not suffice, half of the examples are taken, with a warning, from now on.
        """
        records = capture.take(again=call.first is not None)
        keep = self._keep(output)
        while True:
            try:
                self._take(accumulated, call, records, output, target, keep)
                capture.consume(records)
                return
            except RuntimeError as error:
                if not is_out_of_memory(error) or keep == 1 or capturing():  # a graph cannot try again
                    raise
            call.statistics, call.passes = {}, 0
            self.statistics_limit = keep = half_of(keep, f"stats_batch={keep // 2} says so from the start")

    def _keep(self, output: Tensor) -> int:
        """How many examples statistics are taken from; more where none of these counts."""
        batch = output.shape[len(self.likelihood.replicas)]
        return min(batch, self.options.stats_batch or batch, self.statistics_limit or batch)

    def _take(
        self,
        accumulated: Accumulated,
        call: LossCall,
        records: list[Record],
        output: Tensor,
        target: Tensor,
        keep: int,
    ) -> None:
        def summarise(unit: Unit, one: Pass) -> Pass:
            block = self.structure.block_of[unit.name]
            return block.summarise(unit, one, self.fisher.statistics[block.name])

        scarce, counted = self.like.device.type in summaries.DEVICES, call.counted
        if counted is not None and keep < counted.examples.shape[-1] and not counted.total.is_cuda:
            counted = counted.enough(keep)
            keep = counted.examples.shape[-1]
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
            paired=self._coupled or (counted is not None and self._weighs_inputs),
        )
        for one in passes:
            self._add_pass(accumulated, call, one)
            del one  # before the next is made

    @torch.no_grad()
    def _add_pass(self, accumulated: Accumulated, call: LossCall, passes: Mapping[str, Pass]) -> None:
        """Count one backward pass among those of a loss."""
        if not passes:
            return
        finite = True
        accumulated.units.update(passes)
        # What a further head does not reach counts as the heads before it have seen it.
        current = {} if call.first is None else [call.first, *call.first.further][-2].statistics
        for block in self.structure.blocks:
            known = current.get(block.name, self.fisher.statistics[block.name])
            measured = block.family.measure(block.units, passes, known)
            finite = finite and known_finite(measured)
            kept = call.statistics.setdefault(block.name, measured)
            if kept is not measured:
                kept.update_(measured, call.passes / (call.passes + 1))
        call.passes += 1
        if not finite:
            accumulated.known_finite = False
            accumulated.traces += FiniteTrace.of(passes)

    def take_returned_loss(self, accumulated: Accumulated, capture: Capture | None, loss: object) -> None:
        """A closure has called `backward` by itself and returned its mean loss: take the empirical Fisher.

        By which factor it was scaled is not to be seen: the loss that is returned counts as the one differentiated.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"the closure must return (output, target), or a loss; it returned {type(loss).__name__}")
        warn_user(
            "the closure returned a loss, not (output, target): the Fisher is then the empirical one, which is a worse "
            "approximation. Return (model(x), y) for the true Fisher"
        )
        if all(parameter.grad is None for parameter in self.structure.parameters.values()):
            raise RuntimeError("the closure returned a loss without having called backward() on it")
        call = accumulated.begin_call(loss.detach())
        if capture is not None:
            passes = self._passes_of_backward(capture.take())
            self._returned_examples = max((one.examples for one in passes.values()), default=0)
            self._add_pass(accumulated, call, passes)
        accumulated.examples += self._returned_examples
        accumulated.add_call(call, loss)

    def _passes_of_backward(self, records: list[Record]) -> dict[str, Pass]:
        """The passes of a batch that the user has differentiated.

        Nobody says how many, so it is the size of a layer's input that suits all of them: of the last layer's, if it
        does, since the first may look positions up, or have the sequence in front.
        """
        seen = [record for record in records if record.kept]
        measure = partial(passes_after_backward, seen, self._others, dtype=self.like.dtype)
        lead = len(self.structure.replicas)
        *likely, last = dict.fromkeys(record.inputs.shape[lead] for record in reversed(seen)) or [1]
        for size in likely:
            with suppress(ValueError):
                return measure(size)
        return measure(last)

    def take_fresh(self, accumulated: Accumulated, capture: Capture, run: Closure) -> None:
        """`fisher_pass="fresh"`: statistics of a forward pass of their own, BatchNorm in evaluation mode.

        Where memory does not suffice for all examples, half of them are taken, with a warning, from now on.
        """
        # In evaluation mode to the end: statistics of a norm's scale ask what it was normalised by.
        norms = [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        while True:
            first = FirstExamples(self.forward_limit)
            try:
                with with_attributes(norms, training=False):
                    self._take_fresh(accumulated, capture, run, first)
                return
            except RuntimeError as error:
                # The ranks of a distributed training call their models together, or wait for each other for ever.
                alone = not (self.ranks.active or self.structure.replicas or capturing())
                if not (is_out_of_memory(error) and alone and first.given > 1):
                    raise
            capture.take()
            advice = "A closure that cannot work on part of a batch needs smaller ones"
            self.forward_limit = half_of(first.given, advice)

    def _take_fresh(self, accumulated: Accumulated, capture: Capture, run: Closure, first: FirstExamples) -> None:
        with first.of(self.model):
            result = run()
        if not isinstance(result, tuple):
            raise TypeError('fisher_pass="fresh" needs a closure that returns (output, target)')
        output, *rest = unpacked(result)
        lead = len(self.likelihood.replicas)
        rest = [part if part is None or not first.cut else part.narrow(lead, 0, first.given) for part in rest]
        counted, target = self.likelihood.counted(output, *rest)
        self.likelihood.check(output, target)
        with torch.autocast(self.like.device.type, enabled=False):
            output = output if output.dtype in {torch.float32, torch.float64} else output.float()
            clean = self.likelihood.clamp_invalid_targets(output, target)
            call, records = accumulated.begin_call(output, counted), capture.take()
            self._take(accumulated, call, records, output, clean, self._keep(output))
            capture.consume(records)
            accumulated.add_statistics([call], [1.0], 1.0)

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
