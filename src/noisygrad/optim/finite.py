"""Steps that are not finite: refused at once on a CPU, masked on a GPU and reported at the next refresh.

A refused batch has already changed the running statistics of norm layers: they are taken back. Weights that grow while
the loss rises are warned of before it comes to that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from noisygrad.curvature.passes import Pass
from noisygrad.families.base import Statistics
from noisygrad.optim.user_warning import warn_user
from noisygrad.posterior.faults import format_names
from noisygrad.posterior.structure import Structure

AT_ONCE = 10
"""This many losses are averaged, for their noise."""
GROWN = 10.0
"""In ordinary trainings weights were seen to double while the loss was high."""
LUCK = 100.0
"""The first loss may be smaller than others by this; two or three are by its second or third root."""
SMALL = 0.1
"""From a start with smaller weights than usual they may grow to this."""


class NonFiniteError(ArithmeticError):
    """A gradient or a statistic was NaN or infinite; mean, Fisher and step count are as they were before."""


@dataclass
class FiniteTrace:
    """One number for what came into each layer and one for what came back, each finite if all of that was.

    A bad number spreads forward to all later inputs and back to all earlier gradients, so the statistics of most layers
    go bad together. The places, in the order of the forward pass, tell where it began.
    """

    places: tuple[tuple[str, str], ...]
    sizes: Tensor

    @classmethod
    def of(cls, passes: Mapping[str, Pass]) -> list[FiniteTrace]:
        """That of one backward pass; none where there was nothing to look at."""
        found = {(name, kind): tensor for name, one in passes.items() for kind, tensor in one.carried().items()}
        if not found:
            return []
        tensors = list(found.values())
        return [cls(tuple(found), torch.stack(torch._foreach_norm(tensors, 1)))]


def known_finite(statistics: Statistics) -> bool:
    """Whether all its numbers are, as far as that is known without waiting: of a GPU's, it is not."""
    tensors = statistics.tensors().values()
    return all(tensor.device.type == "cpu" and math.isfinite(tensor.sum().item()) for tensor in tensors)


class RunningStatistics:
    """Running statistics of a model's norm layers before the draws of a step: a refused batch leaves no bad numbers.

    On a GPU, where a bad batch is noticed only later, none are kept: what has gone bad is then named.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        modules = model.modules() if device.type == "cpu" else ()
        self._norms = [
            m for m in modules if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None
        ]
        self.kept: list[tuple[nn.Module, list[Tensor]]] = []
        self._finite_before = {name for name, buffer in model.named_buffers() if _is_finite(buffer)}
        """Buffers that may well hold an infinity, such as a mask, are none of ours."""

    def keep(self) -> None:
        """Before the first draw of a step."""
        self.kept = [(m, [b.clone() for b in m.buffers(recurse=False)]) for m in self._norms if m.training]

    def forget(self) -> None:
        """After a step: there is nothing to take back."""
        self.kept = []

    def restore(self, *, all_layers: bool = False) -> None:
        """Give norm layers with bad numbers what was kept, or all of them."""
        for module, kept in self.kept:
            now = list(module.buffers(recurse=False))
            if all_layers or not all(map(_is_finite, now)):
                for buffer, old in zip(now, kept, strict=True):
                    buffer.copy_(old)

    def nonfinite_buffers(self) -> list[str]:
        """The names of the buffers that have gone bad; waits for a GPU."""
        return [
            name
            for name, buffer in self._model.named_buffers()
            if name in self._finite_before and not _is_finite(buffer)
        ]


@dataclass(frozen=True)
class Scaling:
    """What a GradScaler says of the gradients: the scale they have, and whether one of them is infinite."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any], unscaled: Tensor | None) -> Self:
        """From the attributes that a GradScaler sets; raises where it has unscaled gradients and nobody said so.

        `unscaled` is the scale that somebody has told.
        """
        if unscaled is None and "grad_scale" in told and told["grad_scale"] is None:
            raise RuntimeError(
                "a GradScaler has unscaled the gradients, so the factor that the losses were scaled by is not known "
                "any more: call optimizer.unscale_(scaler) in place of scaler.unscale_(optimizer), then clip. Where a "
                "framework unscales by itself, bound the step by kl_clip and let it leave the gradients as they are"
            )
        return cls(told.get("grad_scale"), told.get("found_inf"))


class DivergenceWatch:
    """Warns, once, when weights have grown tenfold since the loss was lowest, and the loss is clearly worse.

    While the loss falls weights may grow as far as they like: from a small start, or to targets of another scale. A CPU
    looks in every step, a GPU where the factors are refreshed.
    """

    def __init__(self, mean: Tensor, *, deferred: bool) -> None:
        self._mean, self._deferred = mean, deferred
        self._sums = mean.new_zeros(3)
        """Of a GPU's losses since the last look: how many, their sum, the sum of their squares."""
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Forget what was seen: the weights are others now."""
        self._sums.zero_()
        self._losses: list[float] = []
        self._lowest, self._lowest_at, self._high = math.inf, 0, math.inf
        self._warned, self._early = False, True
        self._largest = self._largest_now()

    def _largest_now(self) -> float:
        return float(self._mean.abs().max())

    def add(self, step: int, loss: Tensor, moved: Sequence[Tensor] = ()) -> None:
        """The loss of a step, and the mean that it leads to; what is done to a GPU's can be recorded."""
        if self._deferred:
            one = torch.ones_like(self._sums[0])
            powers = torch.stack([one, loss.to(one.dtype), loss.to(one.dtype).square()])
            self._sums.add_(torch.where(powers[2].isfinite(), powers, 0.0))
            return
        value = loss.item()
        if value > self._high:
            self._compare(step, value, moved)
        self._losses.append(value)
        if len(self._losses) == AT_ONCE:
            found, self._losses = self._losses, []
            self._average(step, AT_ONCE, sum(found), sum(value * value for value in found))
        elif self._early and not self._grown(self._largest_now()):  # until there are ten, those of the first weights
            self._take(step, len(self._losses), sum(self._losses) / len(self._losses), 0.0)

    def look(self, step: int) -> None:
        """At what a GPU has added since the last time; waits for it."""
        if self._deferred:
            count, total, squares = self._sums.tolist()
            self._sums.zero_()
            if count:
                self._average(step, int(count), total, squares)
                if total / count > self._high:
                    self._compare(step, total / count)

    def _average(self, step: int, count: int, total: float, squares: float) -> None:
        """See whether the mean of some losses is the lowest: what is compared with later, as the weights there are.

        The first may be higher than the very first losses, unless the weights have grown already.
        """
        mean, largest = total / count, self._largest_now()
        deviation = math.sqrt(max(0.0, squares / count - mean * mean))
        if mean < self._lowest or (self._early and not self._grown(largest)):
            self._largest = max(self._largest, largest) if self._early else largest
            self._take(step, count, mean, deviation)
        self._early = False

    def _take(self, step: int, count: int, mean: float, deviation: float) -> None:
        """Losses twice their mean, and five deviations more, are high; few may all be small by luck."""
        few = 1.0 if count >= AT_ONCE else LUCK ** (1.0 / count)
        self._lowest, self._lowest_at = mean, step
        self._high = mean + max(1.0, few * abs(mean), 5.0 * deviation)

    def _compare(self, step: int, loss: float, moved: Sequence[Tensor] = ()) -> None:
        """With a high loss weights should not be larger than they were."""
        largest = max([self._largest_now(), *(float(part.abs().max()) for part in moved)])
        if self._warned or not self._grown(largest):
            return
        self._warned = True
        warn_user(
            f"the training seems to diverge: from step {self._lowest_at} to {step} the loss has risen from "
            f"{self._lowest:.3g} to {loss:.3g} and the largest weight from {self._largest:.3g} to {largest:.3g}. Lower "
            "lr, set kl_clip (1e-3 is a good start) or raise damping; scale inputs and targets, and look for outliers"
        )

    def _grown(self, largest: float) -> bool:
        return not largest <= GROWN * max(self._largest, SMALL)

    def said(self) -> str:
        """What to add to the news that the mean is as it was, where it is too large already."""
        if not self._grown(largest := self._largest_now()):
            return ""
        return (
            f". But the largest weight had grown from {self._largest:.3g} (step {self._lowest_at}) to {largest:.3g} "
            "before: the training has diverged, and should go on from an earlier state"
        )


class FiniteGuard:
    """Watches gradient and statistics; remembers on the device which of them went bad."""

    def __init__(
        self,
        structure: Structure,
        statistics: Mapping[str, Statistics],
        running: RunningStatistics,
        divergence: DivergenceWatch,
        *,
        deferred: bool,
        device: torch.device,
    ) -> None:
        self._structure = structure
        self._running, self.divergence = running, divergence
        self.deferred, self._device = deferred, device
        self._owners = [name for block in structure.blocks for name, _ in block.pieces(statistics[block.name])]
        self._counts = {block.name: len(block.pieces(statistics[block.name])) for block in structure.blocks}
        # Each flag stands for the gradient (the first), a piece of the statistics or the targets (the last).
        self._bad = torch.zeros(len(self._owners) + 2, dtype=torch.bool, device=device)
        self._bad_targets = self._bad[-1]
        self._bad_places: dict[tuple[tuple[str, str], ...], Tensor] = {}

    def note_targets(self, invalid: Tensor) -> None:
        """Remember a batch with impossible targets, found on the device; the step is masked and `check` raises."""
        self._bad_targets.logical_or_(invalid)

    def watch(
        self,
        gradient: Tensor,
        loss: Tensor | None,
        statistics: Mapping[str, Statistics],
        traces: Sequence[FiniteTrace],
        found_inf: Tensor | None,
    ) -> Tensor | None:
        """None for a step that may go on (CPU), or 1.0 / 0.0 to mask it with (GPU, and under a GradScaler).

        `statistics` are those that are not known to be finite. `found_inf` is a GradScaler's verdict: such a step is
        skipped without complaint. The gradient is zeroed in place where the step is masked.
        """
        plain = not self.deferred and found_inf is None
        total = gradient.sum()
        if plain and not statistics and math.isfinite(total.item()) and (loss is None or math.isfinite(loss.item())):
            return None
        total = total if loss is None else total + loss
        bad = ~self._sizes(total, statistics).isfinite()
        if plain:
            if bool(bad.any()):
                self._note_traces(traces, None)
                self._raise(bad)
            return None
        skip = None if found_inf is None else found_inf.to(self._device).reshape(()) > 0
        self._bad[: len(bad)].logical_or_(bad if skip is None else bad & ~skip)
        self._note_traces(traces, skip)
        if not self.deferred:
            self.check()
            if skip is not None and bool(skip):
                self._running.restore()
        stop = bad.any() | self._bad_targets
        if skip is not None:
            stop |= skip
        gradient.masked_fill_(stop, 0.0)
        return (~stop).to(gradient.dtype)

    def _note_traces(self, traces: Sequence[FiniteTrace], skip: Tensor | None) -> None:
        for trace in traces:
            bad = ~trace.sizes.isfinite()
            if skip is not None:
                bad &= ~skip
            if trace.places in self._bad_places:
                self._bad_places[trace.places] |= bad
            else:
                self._bad_places[trace.places] = bad

    def _sizes(self, total: Tensor, statistics: Mapping[str, Statistics]) -> Tensor:
        """The total of gradient and loss, and a number for each piece which is finite if everything in it is."""
        if not statistics:
            return total.unsqueeze(0)
        known = [block for block in self._structure.blocks if block.name in statistics]
        norms = iter(torch._foreach_norm([p for b in known for _, p in b.pieces(statistics[b.name])], 1))
        zero, sizes = torch.zeros_like(total), [total]
        for block in self._structure.blocks:
            count = self._counts[block.name]
            sizes += [next(norms) if block.name in statistics else zero for _ in range(count)]
        return torch.stack(sizes)

    def check(self) -> None:
        """Raise for a step masked since the last check; waits for the device, so only where the factors do."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if bool(self._bad.any()):
            bad = self._bad.clone()
            self._bad.zero_()
            self._raise(bad)
        self._forget()

    def _forget(self) -> None:
        # In place: a recorded step goes on writing to these.
        for flags in self._bad_places.values():
            flags.zero_()

    def _raise(self, bad: Tensor) -> None:
        origin = self._origin()
        self._forget()
        if bool(bad[-1]) and len(bad) == len(self._bad):
            raise NonFiniteError(
                "a batch had targets that its likelihood cannot have (labels out of range, NaN, …); the steps since "
                "then were left out. Check the targets: on a CPU the message is exact"
            )
        owners = [name for name, wrong in zip(self._owners, bad[1:].tolist(), strict=False) if wrong]
        parameters = self._structure.parameters.items()
        gradients = [name for name, p in parameters if p.grad is not None and not _is_finite(p.grad)]
        if owners:
            where = f"the statistics of {format_names(origin or list(dict.fromkeys(owners)))} went bad"
        else:
            itself = "the loss itself, or what it was multiplied by (not finite, zero or negative)"
            where = f"the gradient of {format_names(gradients)} went bad" if gradients else itself
        self._running.restore()
        buffers = self._running.nonfinite_buffers()
        reset = f". But {format_names(buffers)} took bad numbers from the batch: reset them" if buffers else ""
        raise NonFiniteError(
            f"a loss or gradient was NaN or infinite: {where}. Mean, Fisher and step count are as they were"
            f"{self.divergence.said()}. "
            f"Look for bad inputs, lower lr, set kl_clip (1e-3 is a good start) or raise damping{reset}"
        )

    def _origin(self) -> list[str]:
        """The layers where bad numbers began, as far as the traces tell.

        Those whose weights are bad; else the layer in front of the first bad inputs, for it made them (or the first
        layer of all, which was given them); else the last layer with bad gradients.
        """
        bad = {
            place
            for places, flags in self._bad_places.items()
            for place, flag in zip(places, flags.tolist(), strict=True)
            if flag
        }
        order = list(dict.fromkeys(name for places in self._bad_places for name, _ in places))
        if not bad:
            return []
        parameters = self._structure.parameters
        units = [unit for unit in self._structure.units if unit.name in order]
        weights = [u.name for u in units if any(not _is_finite(parameters[slot.parameter]) for slot in u.slots)]
        if weights:
            return weights
        for before, name in zip([None, *order], order, strict=False):
            if (name, "inputs") in bad:
                return [before or name]
        return [name for name in order if (name, "gradients") in bad][-1:]


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
