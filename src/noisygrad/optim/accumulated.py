"""What draws leave for a step: sums over losses, each weighted by the factor that the caller scaled it by.

The factor is seen, not assumed: a zero is added to the loss (its `witness`), whose gradient sums the factors over
backward passes exactly as the gradients of the parameters are summed. Losses of different batches are averaged with
these weights, gradients and Fisher alike; losses of one forward pass, such as those of several heads, add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import is_not

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from noisygrad.distributed import Ranks
from noisygrad.families.base import Statistics
from noisygrad.likelihoods import Counted
from noisygrad.optim.finite import FiniteTrace, NonFiniteError
from noisygrad.optim.graph import LossCall, behind
from noisygrad.optim.user_warning import warn_user

TINY = 1e-30


@dataclass
class Accumulated:
    """Sums over the draws, losses and statistics since the last step."""

    deferred: bool = False
    """Whether factors stay tensors on the device, which is not waited for."""
    weights: Tensor | None = None
    """Σ over draws of the sampled weights, a flat vector."""
    draws: int = 0
    calls: int = 0
    """How many losses were computed."""
    loss: Tensor | None = None
    weight: float | Tensor = 0.0
    """Σ over forward passes of the factor: the gradient divided by it is the mean over losses."""
    examples: float | Tensor = 0.0
    """How many were seen, over draws and ranks."""
    parts: float | Tensor = 0.0
    """Σ over losses of the weight of the forward pass × the parts of a target that count of an example."""
    negative: bool = False
    """Whether a factor was; on a device that is not waited for it makes the weight NaN."""
    infinite: bool = False
    """Whether a factor was infinite or NaN; on a device that is not waited for the gradient goes bad."""
    unscaled: Tensor | None = None
    """A scale that losses had and gradients have no longer."""
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """The mean of the moments with the same weights, by block."""
    fisher_weight: float | Tensor = 0.0
    """Σ of the factors of the losses that they were measured of: a tensor once summed over ranks."""
    units: set[str] = field(default_factory=set)
    """The names of those that were measured."""
    known_finite: bool = True
    """Whether all statistics were looked at and are finite; a GPU is not waited for."""
    traces: list[FiniteTrace] = field(default_factory=list)
    """Of each pass that is not known to be finite, where its numbers were."""
    noise: Tensor | None = None
    """Σ over losses of factor × the likelihood's own statistic: heads add, as outputs of one loss do."""
    noise_weight: float | Tensor = 0.0
    """Σ over their forward passes of the factor."""
    expected_statistics: bool = False
    pending: list[LossCall] = field(default_factory=list)
    """The losses of this draw that are not in the sums yet."""

    def __post_init__(self) -> None:
        self._unwalked: list[LossCall] = []
        self._owners: dict[Node, LossCall] = {}
        self._leaves: dict[Node, LossCall] = {}
        self._counted: list[tuple[Tensor, int]] = []

    # ---------------------------------------------------------------- draws

    def add_draw(self, weights: Tensor) -> None:
        """Count one draw of the weights, which is over. The first is kept by reference: see `own_buffer`."""
        self._count_differentiated()
        if any(gradient._version != version for gradient, version in self._counted):
            raise RuntimeError(
                "a loss was differentiated again after another loss was computed: call backward() on all losses of one "
                "forward pass before the next draw.nll"
            )
        self._counted, self._unwalked, self._owners, self._leaves = [], [], {}, {}
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

    # ---------------------------------------------------------------- losses

    def begin_call(self, output: Tensor, counted: Counted | None = None) -> LossCall:
        """A loss that is about to be computed; whether it is a further one of an earlier forward pass is found out."""
        self._count_differentiated()
        call = LossCall(output.grad_fn, counted)
        call.first = self._first_head(call)
        if call.first is not None:
            call.first.further.append(call)
        return call

    def add_call(self, call: LossCall, loss: Tensor, *, observe: bool = False) -> Tensor:
        """Count a loss of factor 1, or return it so that it tells its factor, and count it when that is known."""
        self.calls += 1
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        if not observe:
            self._count([call])
            return loss
        self.pending.append(call)
        self._unwalked.append(call)
        call.witness = torch.zeros_like(loss, requires_grad=True)
        return loss + call.witness

    def mean_loss(self) -> Tensor | None:
        """The mean of the losses, if there was one."""
        return self.loss if self.loss is None or self.calls == 1 else self.loss / self.calls

    def parts_per_example(self) -> float | Tensor:
        """How many parts of its targets count of an example, on average: what a trust region grows with."""
        return self.parts / self.weight if isinstance(self.weight, Tensor) or self.weight else 1.0

    def check_complete(self) -> None:
        """Raise where there is nothing to make a step of, or where statistics are missing."""
        if self.draws == 0:
            raise RuntimeError(
                "step() has nothing to work with: no sampled() context was entered since the last step. Gradients that "
                "were made outside of one are those of the mean, not of a draw"
            )
        if self.calls == 0:
            raise RuntimeError(
                "no loss was computed by draw.nll(output, target): the factor that the gradient is scaled by is not "
                "known and, where this step was due to take statistics, the Fisher, and so the width of the posterior, "
                "would be wrong"
            )

    def _first_head(self, call: LossCall) -> LossCall | None:
        """The first loss of this draw whose output comes from the same forward pass: it shares a node of the graph."""
        if not self._unwalked and not self._owners:
            return None
        for earlier in self._unwalked:
            nodes, leaves = behind(earlier.root)
            self._owners |= dict.fromkeys(nodes, earlier.first or earlier)
            self._leaves |= dict.fromkeys(leaves, earlier.first or earlier)
        self._unwalked = []
        nodes, leaves = behind(call.root)
        owner = next((self._owners[node] for node in nodes if node in self._owners), None)
        if owner is None and not any(leaf in self._leaves for leaf in leaves):
            warn_user(
                "two losses of one draw have no parameter in common, so they are averaged, as those of different "
                "batches are. If they are heads of one batch on a frozen trunk they should add: let the trunk's output "
                "require a gradient (features.requires_grad_()), so that it shows"
            )
        if owner is not None and owner not in self.pending:
            raise RuntimeError(
                "two losses are of one forward pass (a trunk with two heads, say), of which the first was "
                "differentiated already: compute all of them before backward()"
            )
        return owner

    def _count_differentiated(self) -> None:
        """Bring what was differentiated into the sums; statistics of several batches need not be kept side by side."""
        if not self.pending:
            return
        for call in self.pending:
            heads = [call, *call.further]
            if call.first is None and not any(head.waits for head in heads):
                self._count(heads)
                self.pending = [other for other in self.pending if other not in heads]
                call.further = []  # which would keep all of them alive, with their statistics

    def _count(self, heads: Sequence[LossCall]) -> None:
        factors = [self._factor_of(head) for head in heads]
        weight = reduce(_larger, factors)
        self.weight = self.weight + weight
        for head in heads:
            self.parts = self.parts + weight * head.parts
        for head, factor in zip(heads, factors, strict=True):
            if head.noise is not None:
                noise = head.noise * factor
                self.noise = noise if self.noise is None else self.noise + noise
        if any(head.noise is not None for head in heads):
            self.noise_weight = self.noise_weight + weight
        if heads[0].statistics:
            self.add_statistics(heads, factors, weight)

    def _factor_of(self, call: LossCall) -> float | Tensor:
        if call.witness is None:
            return 1.0
        assert call.witness.grad is not None
        factor = call.witness.grad.detach()
        self._counted.append((call.witness.grad, factor._version))
        if self.deferred:
            return torch.where(factor < 0, torch.nan, factor)
        number = factor.item()
        self.negative |= -math.inf < number < 0
        self.infinite |= not math.isfinite(number)
        return number

    # ---------------------------------------------------------------- statistics

    @torch.no_grad()
    def add_statistics(
        self, heads: Sequence[LossCall], factors: Sequence[float | Tensor], weight: float | Tensor
    ) -> None:
        """Add those of one forward pass; of several losses the sum, with their factors over the `weight` of the pass.

        The moments of the first are overwritten.
        """
        first = heads[0].statistics
        for index, head in enumerate(heads[1:], start=1):
            own = factors[0] / _positive(weight) if index == 1 else 1.0
            for name, kept in first.items():
                kept.sum_losses_(own, head.statistics[name], factors[index] / _positive(weight))
        total = self.fisher_weight + weight
        for name, measured in first.items():
            kept = self.statistics.setdefault(name, measured)
            if kept is not measured:
                kept.average_with_(measured, self.fisher_weight / _positive(total))
        self.fisher_weight = total

    def sum_over(self, ranks: Ranks, statistics: Mapping[str, Statistics], others: Sequence[Tensor]) -> None:
        """Add up what all ranks have; batches may differ in size, and layers unused on one rank may be used on others.

        `statistics` are those of the optimiser: every rank must send tensors for the same blocks in the same order.
        `others` are summed in place along with it.
        """
        assert self.weights is not None
        self.weights = self.weights.clone()
        numbers = [self.weight, self.parts, self.fisher_weight, self.noise_weight]
        numbers += [self.negative, self.infinite, self.examples]
        counts = self.weights.new_zeros(len(numbers))
        for place, number in zip(counts, numbers, strict=True):
            place.copy_(number) if isinstance(number, Tensor) else place.fill_(float(number))
        noise = [] if self.noise is None else [self.noise]
        sums: list[Tensor] = []
        inputs: list[Tensor] = []
        if self.expected_statistics:
            self.known_finite = False  # this rank's may be, and another's not
            mine = self.statistics or {n: s.map_averages(torch.zeros_like) for n, s in statistics.items()}
            self.statistics = {n: mine[n].map_averages(lambda tensor: tensor * self.fisher_weight) for n in statistics}
            named = [pair for s in self.statistics.values() for pair in s.averages().items()]
            sums = [tensor for _, tensor in named]
            inputs = [tensor for name, tensor in named if name.startswith("inputs")]
        # A moment of inputs is 0 where no example has used the layer yet: then it is that of the other ranks.
        used = self.weights.new_zeros(len(inputs))
        for place, tensor in zip(used, inputs, strict=True):
            place.copy_(tensor.any() * self.fisher_weight)
        ranks.sum_([self.weights, *sums, counts, used, *noise, *others])
        self.weights /= ranks.size
        weight, parts, self.fisher_weight, self.noise_weight, negative, infinite, examples = counts.unbind()
        self.examples = examples
        for tensor in sums:
            tensor.div_(self.fisher_weight.clamp_min(TINY))
        for tensor, share in zip(inputs, used, strict=True):
            tensor.mul_(self.fisher_weight / share.clamp_min(TINY))
        self.weight, self.parts = (
            each / ranks.size if self.deferred else each.item() / ranks.size for each in (weight, parts)
        )
        if not self.deferred:
            self.negative, self.infinite = bool(negative), bool(infinite)

    def used_by_ranks(self, mask: Tensor | None) -> Tensor | None:
        """The mask of an update of the Fisher: that of the step, and 0 where no rank has used a layer."""
        if not isinstance(self.fisher_weight, Tensor):
            return mask
        used = (self.fisher_weight > 0).to(self.fisher_weight.dtype)
        return used if mask is None else mask * used

    def check_weight(self, *, skipped: bool) -> None:
        """Raise where losses have no mean; on a device that is not waited for the gradient goes bad instead.

        `skipped` where a GradScaler decides about steps that are not finite.
        """
        if self.infinite and not skipped:
            raise NonFiniteError(
                "a loss was multiplied by a number that is infinite or NaN before backward(). Mean, Fisher and step "
                "count are as they were. Look at what is multiplied with the loss that draw.nll returns"
            )
        if self.negative or (isinstance(self.weight, float) and self.weight == 0.0):
            raise ValueError(
                f"{'a loss was' if self.negative else 'all losses were'} multiplied by "
                f"{'a negative number' if self.negative else 'zero'} before backward(): losses are averaged with these "
                "factors as their weights, which must not be negative and must not add up to zero"
            )


class GradientWatch:
    """Whose gradients there are: a step takes those of draws alone, and all of them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._left, self._versions = list[Tensor | None](), list[int]()
        self._added, self._hooks = list[Tensor](), list[RemovableHandle]()

    def check(self, found: Accumulated) -> None:
        """Before a draw: raise if gradients were made outside of draws, or were unscaled already."""
        self._unhook()
        if found.unscaled is not None:
            raise RuntimeError(_UNSCALED)
        if not found.draws:
            self._left = []
            foreign = any(parameter.grad is not None for parameter in self._parameters)
        else:
            foreign = any(map(is_not, self._left, self._now())) or self._written()
        if foreign:
            raise RuntimeError(f"there are gradients that were made, or changed, {_OUTSIDE}")

    def check_kept(self, losses: Sequence[LossCall] = ()) -> None:
        """In a draw: raise if gradients of earlier draws are gone, or of earlier ones of its `losses`."""
        gone = bool(self._left) and any(
            left is not None and one.grad is not left for left, one in zip(self._left, self._parameters, strict=True)
        )
        if losses and not gone and not all(loss.waits for loss in losses):
            gone = all(gradient is None for gradient in self._now())
        if gone:
            raise RuntimeError(f"the gradients of an earlier loss of this step are gone: {_DROPPED}")

    def note(self, *, has_loss: bool = False, steps: int = 0) -> None:
        """After a draw. In steps 1, 2, 4, … what is added to gradients from now on is noticed."""
        self._left = left = self._now()
        if has_loss and left[0] is None and all(gradient is None for gradient in left):
            raise RuntimeError(f"the gradients of this draw are gone: {_DROPPED}")
        self._versions = [0 if gradient is None else gradient._version for gradient in left]
        if has_loss and not steps & (steps + 1):  # a loop is the same in every step, and hooks take time
            self._added = list[Tensor]()
            self._hooks = [p.register_post_accumulate_grad_hook(self._added.append) for p in self._parameters]

    def check_step(self) -> None:
        """Before the step: raise if gradients of draws are gone, or others were made since the last draw."""
        if self._left and (self._hooks or any(map(is_not, self._left, self._now()))):
            self._check_changed()
        self._left = []

    def _check_changed(self) -> None:
        looked, added = bool(self._hooks), self._added
        self._unhook()
        for gradient, now in zip(self._left, self._now(), strict=True):
            if now is not gradient and gradient is not None:
                what = "gone" if now is None else "others (to change them, write into them)"
                raise RuntimeError(f"gradients that the draws of this step have left are {what}: {_DROPPED}")
            if now is not gradient or added:
                raise RuntimeError(f"there are gradients that were made, after the last draw, {_OUTSIDE}")
        zeroed = not any(gradient.is_cuda or bool(gradient.any()) for gradient in self._left if gradient is not None)
        if looked and zeroed and self._written():
            raise RuntimeError(f"the gradients that the draws of this step have left were zeroed: {_DROPPED}")

    def _now(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _written(self) -> bool:
        """Whether somebody has written into what was left."""
        pairs = zip(self._left, self._versions, strict=True)
        return any(gradient is not None and gradient._version != version for gradient, version in pairs)

    def _unhook(self) -> None:
        for hook, parameter in zip(self._hooks, self._parameters, strict=False):
            hook.remove()
            if not parameter._post_accumulate_grad_hooks:  # which autograd would call all the same
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._added, self._hooks = [], []


_OUTSIDE = (
    "outside sampled(): they do not belong to a draw, so a step neither mixes them in nor drops them. Call backward() "
    "inside sampled(), each batch in a context of its own (a framework that accumulates batches by itself needs its "
    "manual form), or optimizer.zero_grad() to give them up"
)
_DROPPED = (
    "zero_grad() of the model or of another optimiser, a closure's perhaps, has dropped them, and a step without them "
    "would be that of other batches, or of the prior alone. Take zero_grad out: step() consumes gradients"
)
_UNSCALED = (
    "optimizer.unscale_(scaler) was called before this draw, whose gradients would have the scale still: call it once, "
    "after the last draw of a step. optimizer.zero_grad() gives up what there is"
)


def _larger(one: float | Tensor, other: float | Tensor) -> float | Tensor:
    return torch.maximum(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else max(one, other)


def _positive(weight: float | Tensor) -> float | Tensor:
    return weight.clamp_min(TINY) if isinstance(weight, Tensor) else max(weight, TINY)
