"""The information that the labels of several points bring together about the weights, one point at a time.

Both kinds of batch are made from draws of the function at a pool of points. A gain is the information, in nats, that
a point's label would add to that of the labels chosen so far. Labels are independent given the weights, so that their
information is submodular: no gain grows as the batch does, and to choose the best each time reaches at least 1 − 1/e of
the most that a batch of that size can have.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT = 10_000
"""Configurations are listed up to this many, the candidate's label included."""
_SAMPLED = 10_000
"""Beyond, this many are sampled, the candidate's label (which is always summed over) included..."""
_FEWEST_SAMPLED = 1000
"""... but without it at least this many."""
_LARGEST_ALPHABET = 1024
"""A point with several labels may have this many combinations of them."""
_AT_ONCE = 1 << 20
"""How many numbers are worked on at a time, to bound memory and to skip points that have no chance."""
_LEAST = -1e30
"""For the logarithm of a probability of 0: sums of −∞ have no softmax."""


def greedy(batch: GaussianBatch | LabelBatch, n: int, tolerance: float) -> tuple[Tensor, bool]:
    """`n` times the point that adds most, the lowest of those that tie, and whether the choice made a difference.

    It made none where, up to the relative `tolerance`, all gains are alike, and still are after the first choice,
    that of a second label of the chosen point among them.
    """
    bounds = torch.full((batch.points,), torch.inf, dtype=torch.float64)
    chosen: list[int] = []
    differ = False
    for place in range(n):
        # The last gain known of a point is a bound of it now: below the best found, the others stay unseen.
        best = -torch.inf
        for part in bounds.argsort(descending=True, stable=True)[: batch.points - place].split(batch.chunk_size):
            if float(bounds[part[0]]) < best:
                break
            bounds[part] = batch.gains(part).cpu()
            best = max(best, float(bounds[part].max()))
        if place == 0:
            most = best
            differ = _differ(bounds, tolerance * most)
        elif place == 1 and not differ:
            gains = [batch.gains(part).cpu() for part in torch.arange(batch.points).split(batch.chunk_size)]
            differ = _differ(torch.cat(gains), tolerance * most)
        chosen.append(int(bounds.argmax()))
        bounds[chosen[-1]] = -torch.inf
        batch.add(chosen[-1])
    return torch.tensor(chosen), differ


def _differ(values: Tensor, tolerance: float) -> bool:
    return float(values.max() - values.min()) > tolerance


class GaussianBatch:
    """½ log det(I + K/σ²) over the points and outputs chosen, by conditioning the draws on one output at a time.

    `functions` are draws `[draws, points, *outputs]`, `noise` the variances σ², which broadcast to one draw.

    The centred draws of an output over σ√S are a vector a of S numbers; K/σ² holds the products of these. To observe
    output u takes k kᵀ/(1 + a_u·a_u) from it, k its column u, which is what results when every a is shrunk along a_u
    by 1/√(1 + a_u·a_u). So the draws themselves are shrunk, and no variance can become negative.
    """

    def __init__(self, functions: Tensor, noise: Tensor) -> None:
        draws, self.points = functions.shape[:2]
        scaled = (functions - functions.mean(0)) / (draws * noise).sqrt()
        self._vectors = scaled.reshape(draws, -1).mT.contiguous()
        self._outputs = len(self._vectors) // self.points
        self.chunk_size = max(1, _AT_ONCE // (draws * self._outputs))
        """So many points have `_AT_ONCE` numbers."""

    def gains(self, points: Tensor) -> Tensor:
        """½ log det of each point's own block, given those chosen; of one of these, for a second label."""
        vectors = self._vectors.unflatten(0, (self.points, self._outputs))[points.to(self._vectors.device)]
        if self._outputs == 1:
            return 0.5 * torch.log1p(vectors.square().sum((1, 2)))
        covariance = vectors @ vectors.mT
        covariance.diagonal(dim1=1, dim2=2).add_(1)
        roots: Tensor = torch.linalg.cholesky(covariance)
        return roots.diagonal(dim1=1, dim2=2).log().sum(1)

    def add(self, point: int) -> None:
        """Condition all draws on the outputs of `point`."""
        for index in range(point * self._outputs, (point + 1) * self._outputs):
            along = self._vectors[index].clone()
            square = float(along @ along)
            if square > 0:
                self._vectors.addr_(self._vectors @ along, along, alpha=((1 + square) ** -0.5 - 1) / square)


class LabelBatch:
    """H(y₁ … yₙ) − Σ E_w H(y | w) over the points chosen, each gain being I(y; w | the labels chosen before).

    `log_probs` is `[draws, points, *positions, classes]`; the labels of a point's positions count as one.

    A configuration is a label for every point chosen. Given one, draw s has the weight r_s ∝ Π p_s(label), and the
    label of a candidate the probabilities Σ r_s p_s(y). The entropy of these, averaged over configurations, less
    E_w H(y | w), is the gain. Configurations count by their probability while all can be listed; beyond, they are
    sampled: a draw of the weights, and labels from it.
    """

    def __init__(self, log_probs: Tensor, generator: torch.Generator | None = None) -> None:
        self._log_probs = _joint_labels(log_probs).clamp_min(_LEAST)
        self._probs = self._log_probs.exp()
        self._conditional = _entropy(self._probs).mean(0)
        draws, self.points, self._labels = self._probs.shape
        self._generator = torch.Generator().manual_seed(0) if generator is None else generator
        self._chosen: list[int] = []
        self._origin: Tensor | None = None
        self._take(self._probs.new_zeros(draws, 1))

    def gains(self, points: Tensor) -> Tensor:
        """The entropy of each point's label given those chosen, less that given the weights."""
        points = points.to(self._probs.device)
        probs = (self._shares @ self._probs[:, points].flatten(1)).unflatten(1, (len(points), self._labels))
        return self._weights @ _entropy(probs) - self._conditional[points]

    def add(self, point: int) -> None:
        """Extend every configuration by a label of `point`: by each of them, or by one that is sampled."""
        self._chosen.append(point)
        draws, configurations = self._log_joint.shape
        if self._origin is not None:
            self._take(self._log_joint + self._sampled(self._origin, point))
        elif configurations * self._labels**2 <= _EXACT:
            extended = self._log_joint.unsqueeze(2) + self._log_probs[:, point].unsqueeze(1)
            self._take(extended.flatten(1))
        else:
            configurations = max(_SAMPLED // self._labels, _FEWEST_SAMPLED)
            places = torch.arange(configurations, device=self._probs.device) + self._uniform(1)
            origin = (places * draws / configurations).long().clamp_max(draws - 1)
            self._origin = origin
            self._take(torch.stack([self._sampled(origin, chosen) for chosen in self._chosen]).sum(0))

    def _take(self, log_joint: Tensor) -> None:
        """Take log Π p_s(label), `[draws, configurations]`, of configurations that are all there are, or a sample."""
        self._log_joint = log_joint
        self.chunk_size = max(1, _AT_ONCE // (log_joint.shape[1] * self._labels))
        """So many points have `_AT_ONCE` probabilities under the configurations."""
        self._shares = torch.softmax(log_joint, 0).mT.contiguous()
        if self._origin is None:
            self._weights = torch.logsumexp(log_joint, 0).exp() / len(log_joint)
        else:
            self._weights = torch.full_like(log_joint[0], 1 / log_joint.shape[1])

    def _sampled(self, origin: Tensor, point: int) -> Tensor:
        """log p_s of a label of `point` for each configuration, drawn under the weights that it began with."""
        cumulative = self._probs[origin, point].cumsum(1)
        labels = (cumulative < self._uniform(len(origin)).unsqueeze(1)).sum(1).clamp_max(self._labels - 1)
        return self._log_probs[:, point, labels]

    def _uniform(self, count: int) -> Tensor:
        generator = self._generator
        return torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64).to(self._probs)


def _entropy(probs: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probs).sum(-1)
    return entropy


def _joint_labels(log_probs: Tensor) -> Tensor:
    """`[draws, points, labels]`: all labels of a point as one, of an alphabet of their combinations."""
    classes = log_probs.shape[-1]
    first, *others = log_probs.reshape(*log_probs.shape[:2], -1, classes).unbind(2)
    count = 1 + len(others)
    if others and classes**count > _LARGEST_ALPHABET:
        raise ValueError(
            f"each point has {count} labels of {classes} classes, and {classes}^{count} combinations are more than "
            f'{_LARGEST_ALPHABET}: use strategy="bald", which takes labels one by one'
        )
    for part in others:
        first = (first.unsqueeze(3) + part.unsqueeze(2)).flatten(2)
    return first
