"""What counts of a batch: examples have weights, and some positions, such as padding, have no part in it.

A target consists of parts, independent of each other given the output: positions, outputs. With v the weight of a part,
0 where it does not count, an example's weight is the mean of v over its parts that count, and the loss is
Σ v · nll / Σ (weights of examples). So a weight of 2 equals an example given twice, and what is padded equals what is
not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counted:
    """The weight of each part of the targets of a batch; see above."""

    weight: Tensor
    """v, `[*replicas, batch, *parts]`."""
    lead: int
    """How many dimensions of replicas there are."""
    inside: Tensor | None = None
    """Which positions count inside the network where targets have none, `[*replicas, batch, *positions]`."""
    axes: int = 0
    """How many dimensions of the targets, after the batch, are positions."""
    either: int | None = None
    """The size of a mask that was given as one of outputs, but would look the same as one of inputs' positions."""
    extents: tuple[int, ...] | None = None
    """Of each replica, how many of the first examples are looked at; None where that is the same for all."""

    @cached_property
    def examples(self) -> Tensor:
        """The weight of each example, `[*replicas, batch]`."""
        parts = self.weight.flatten(self.lead + 1) if self.weight.dim() > self.lead + 1 else self.weight.unsqueeze(-1)
        return parts.sum(-1) / (parts > 0).sum(-1).clamp_min(1)

    @cached_property
    def total(self) -> Tensor:
        """The sum of the weights of examples, `[*replicas]`."""
        return self.examples.sum(-1)

    @property
    def has_parts(self) -> bool:
        """Whether of some examples it may be that only a part counts."""
        return self.inside is not None or self.weight.dim() > self.lead + 1

    @cached_property
    def positions(self) -> Tensor | None:
        """Which positions count, `[*replicas, batch, positions]`; None where the targets say nothing of them."""
        if self.inside is not None:
            return self.inside.flatten(self.lead + 1)
        axes = min(self.axes, self.weight.dim() - self.lead - 1)
        if axes == 0:
            return None
        counts = (self.weight > 0).flatten(self.lead + 1, self.lead + axes)
        return counts if counts.dim() == self.lead + 2 else counts.flatten(self.lead + 2).any(-1)

    def check_layer(self, name: str, positions: int) -> None:
        """Raise ValueError where a mask of outputs could as well be one of the positions that a layer sees."""
        if positions == self.either:
            raise ValueError(
                f"a mask of shape {list(self.weight.shape)} may be one of the {positions} outputs, or of as many "
                f"positions that layer {name!r} sees. Say which: mask.unsqueeze(-2) is one of outputs, "
                "mask.unsqueeze(-1) one of positions of the inputs. If there is an output at each position, give "
                "output and target a dimension for it, [batch, positions, 1]"
            )

    def parts_per_example(self) -> Tensor:
        """How many parts count, on average over examples of which any does."""
        counts = self.weight.flatten(self.lead + 1) > 0 if self.weight.dim() > self.lead + 1 else self.weight > 0
        examples = counts.any(-1) if counts.dim() > self.lead + 1 else counts
        return counts.sum() / examples.sum().clamp_min(1)

    def first(self, kept: int) -> Counted:
        """That of the first examples."""
        inside = None if self.inside is None else self.inside.narrow(self.lead, 0, kept)
        return replace(self, weight=self.weight.narrow(self.lead, 0, kept), inside=inside)

    def enough(self, kept: int) -> Counted:
        """That of the first `kept` examples or, in a replica where none of these counts, of twice as many, and so on.

        There are as many as the most that a replica needs; of the others' last ones nothing counts. Reads on the host.
        """
        counts = (self.examples > 0).flatten(0, -2) if self.lead else (self.examples > 0).unsqueeze(0)
        size, extents = counts.shape[-1], []
        for first in counts.to(torch.uint8).argmax(-1).tolist():
            own = kept
            while own <= first:
                own *= 2
            extents.append(min(own, size))
        found = self.first(max(extents))
        if len(set(extents)) == 1:
            return found
        mine = torch.arange(max(extents)) < torch.tensor(extents).view(*self.weight.shape[: self.lead], 1)
        weight = found.weight * mine.reshape(*mine.shape, *[1] * (found.weight.dim() - mine.dim()))
        return replace(found, weight=weight, extents=tuple(extents))

    def over(self, values: Tensor) -> Tensor:
        """v in a shape that broadcasts to values `[*replicas, batch, *parts, ...]`."""
        return self.weight.reshape(*self.weight.shape, *[1] * (values.dim() - self.weight.dim()))

    def summed(self, terms: Tensor) -> Tensor:
        """Σ v · terms, `[*replicas]`; terms that do not count may be infinite."""
        weight = self.over(terms)
        return torch.where(weight > 0, terms * weight, 0.0).flatten(self.lead).sum(-1)

    def relative(self) -> Tensor:
        """v times what makes the sum of the weights of examples the size of the batch, so that means stay means."""
        share = self.weight.shape[self.lead] / self.total.clamp_min(1e-30)
        return self.weight * share.reshape(*share.shape, *[1] * (self.weight.dim() - self.lead))


def count_parts(
    name: str,
    lead: int,
    output: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None,
    mask: Tensor | None,
    own: Tensor | None,
) -> tuple[Counted, Tensor]:
    """What counts of a batch, and the targets, with 0 in place of those that do not.

    `own` is the weight that the likelihood gives each part. Raises ValueError or TypeError where `weight` or `mask`
    cannot belong to the targets.
    """
    dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
    factors = [] if own is None else [own.to(dtype)]
    inside, either, axes = None, None, max(output.dim() - lead - 2, 0)
    if weight is not None:
        factors.append(_placed(name, "weight", weight, lead, target).to(dtype))
        if not weight.is_cuda and not bool(((weight >= 0) & weight.isfinite()).all()):
            raise ValueError(
                f"{name}: weights must be finite and at least 0; they go from {weight.min()} to {weight.max()}."
            )
    if mask is not None:
        if isinstance(mask, Tensor) and (mask.is_floating_point() or mask.is_complex()):
            raise TypeError(f"{name}: a mask is True where a position counts; got {mask.dtype}: use mask.bool().")
        counts, inside, either = _read(name, mask, lead, target, axes)
        factors.append((counts if inside is None else inside.flatten(lead + 1).any(-1)).to(dtype))
    dims = max(factor.dim() for factor in factors)
    total = None
    for factor in factors:
        wide = factor.reshape(*factor.shape, *[1] * (dims - factor.dim()))
        total = wide if total is None else total * wide
    assert total is not None
    counted = Counted(total, lead, inside, axes, either)
    return counted, torch.where(counted.over(target) > 0, target, target.new_zeros(()))


def _read(name: str, mask: Tensor, lead: int, target: Tensor, axes: int) -> tuple[Tensor, Tensor | None, int | None]:
    """The mask as one of parts of the targets, or (second) of positions of the inputs; third `Counted.either`."""
    if axes:  # a mask of another shape is a slip
        return _placed(name, "mask", mask, lead, target) != 0, None, None
    counts = _placed(name, "mask", mask, lead, target, inside=True) != 0
    outputs, own = target.shape[lead + 1 :].numel(), counts.shape[lead + 1 :]
    if outputs == 1:  # that of the example, by whatever positions
        return (counts, None, None) if counts.shape == target.shape[: counts.dim()] else (counts, counts, None)
    if not own:
        return counts, None, None
    if own == target.shape[lead + 1 :]:
        return counts, None, outputs
    if own == (1, outputs):
        return counts.squeeze(-2), None, None
    if len(own) > 1 and own[-1] == 1:
        return counts, counts.squeeze(-1), None
    batch = target.shape[: lead + 1]
    raise ValueError(
        f"{name}: for targets of shape {list(target.shape)} a mask must be of shape {list(batch)} (examples), "
        f"{[*batch, 1, outputs]} (outputs; {[*batch, outputs]} will do) or {[*batch, 'positions', 1]} (positions of "
        f"the inputs: mask.unsqueeze(-1)); got {list(mask.shape)}."
    )


def _placed(name: str, what: str, given: Tensor, lead: int, target: Tensor, *, inside: bool = False) -> Tensor:
    """`given` as `[*replicas, batch, ...]`: one that all replicas share is repeated."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: {what} must be a tensor; got {type(given).__name__}.")
    if given.device != target.device:
        raise ValueError(f"{name}: {what} on {given.device}, target on {target.device}; move it there.")
    batch = target.shape[: lead + 1]
    if lead and given.dim() and given.shape[: lead + 1] != batch and given.shape[0] == batch[-1]:
        given = given.expand(*batch[:-1], *given.shape)
    fits = given.shape[: lead + 1] == batch
    if not (fits and (inside or given.shape == target.shape[: given.dim()])):
        raise ValueError(
            f"{name}: for targets of shape {list(target.shape)} a {what} must be of shape {list(batch)} or of the "
            f"first dimensions of the targets; got {list(given.shape)}."
        )
    return given.detach()
