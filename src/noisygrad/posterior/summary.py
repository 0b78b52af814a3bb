"""What a posterior has learned, piece by piece: how wide it is, what it cost, how much of it the data determine."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from noisygrad.families.base import Precision, Prior, Statistics
from noisygrad.families.kl import kl_divergence
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.coverage import format_table

_UNDETERMINED = 0.01
"""Below this share of its weights a piece is said to be as before the data."""

_TRUSTED = 0.01
"""A larger share of the identity in draws says that there were too few statistics."""


@dataclass(frozen=True, kw_only=True)
class PieceSummary:
    """A block, or a layer of a diagonal one; of several replicas the means."""

    name: str
    weights: int
    mean: float
    """The size of the mean weights: the root of their mean square."""
    width: float
    """The size of the noise: the root of the mean posterior variance."""
    kl: float
    """KL(q ‖ prior) in nats."""
    determined: float
    """How many of the weights the data determine: tr(F̄ P⁻¹). 0 where the posterior is the prior, n where neither the
    prior nor a bound on the noise matters."""

    @property
    def note(self) -> str:
        """A word on what may be wrong; empty where nothing strikes."""
        if self.determined < _UNDETERMINED * self.weights:
            return "as before the data"
        return "noise above signal" if self.width > self.mean else ""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All pieces of a posterior; `print` it."""

    pieces: tuple[PieceSummary, ...]
    num_data: int
    kl_weight: float
    noise_bound: float
    identity_share: float

    @property
    def kl(self) -> float:
        """Of all weights, in nats."""
        return sum(piece.kl for piece in self.pieces)

    def __str__(self) -> str:
        header = ("block", "weights", "mean", "width", "width/mean", "KL", "KL/weight", "determined", "")
        table = format_table([header, *map(_row, self.pieces)], aligned_right=range(1, len(header) - 1))
        weights, determined = (sum(getattr(p, name) for p in self.pieces) for name in ("weights", "determined"))
        counted = self.num_data / self.kl_weight
        last = (
            f"{weights} noisy weights, of which the data determine {determined:.4g}. KL to the prior: {self.kl:.4g} "
            f"nats, {self.kl / counted:.4g} for each of {counted:.6g} data (N/λ)."
        )
        bound = f" Noise is bounded by a floor of {self.noise_bound:.2g} under the Fisher." if self.noise_bound else ""
        share = (
            f" The Fisher was measured too seldom to be trusted: in training it had {self.identity_share:.1%} of the "
            "identity, which the posterior has not."
            if self.identity_share > _TRUSTED
            else ""
        )
        return f"{table}\n\n{last}{bound}{share}"

    __repr__ = __str__


def _row(piece: PieceSummary) -> tuple[str, ...]:
    return (
        piece.name,
        str(piece.weights),
        f"{piece.mean:.3g}",
        f"{piece.width:.3g}",
        f"{piece.width / piece.mean:.2f}" if piece.mean else "∞",
        f"{piece.kl:.4g}",
        f"{piece.kl / piece.weights:.3g}",
        f"{piece.determined / piece.weights:.1%}",
        piece.note,
    )


def summary_of(
    blocks: Iterable[tuple[Block, Statistics, Precision, Prior]],
    mean: Tensor,
    prior_mean: Tensor,
    *,
    num_data: int,
    kl_weight: float,
    noise_bound: float,
    identity_share: float,
) -> Summary:
    """The summary of noisy blocks, each with its F̄, its P and its Γ, around a mean."""
    scale = num_data / kl_weight
    difference = mean - prior_mean
    found = []
    for block, statistics, precision, gamma in _independent_pieces(blocks):
        identity = block.prior(lambda name: 1.0, mean)
        squares = block.total(block.vector(mean).square().sum(-1))
        variances = block.total(precision.trace(identity)) / scale
        kl = block.total(kl_divergence(precision, gamma, block.vector(difference), scale))
        piece = PieceSummary(
            name=block.name,
            weights=block.size,
            mean=math.sqrt(float(squares.mean()) / block.size),
            width=math.sqrt(float(variances.mean()) / block.size),
            kl=float(kl.mean()),
            determined=float(block.total(statistics.determined(precision)).mean()),
        )
        found.append(piece)
    return Summary(
        pieces=tuple(found),
        num_data=num_data,
        kl_weight=kl_weight,
        noise_bound=noise_bound,
        identity_share=identity_share,
    )


def _independent_pieces(
    blocks: Iterable[tuple[Block, Statistics, Precision, Prior]],
) -> Iterator[tuple[Block, Statistics, Precision, Prior]]:
    """The blocks in the pieces that their families find independent, each as a block of its own."""
    for block, statistics, precision, gamma in blocks:
        for piece in block.family.split(block.units, statistics, precision, gamma):
            name, start = piece.name or block.name, block.start + piece.start
            part = dataclasses.replace(block, name=name, units=piece.units, start=start)
            yield part, piece.statistics, piece.precision, piece.prior
