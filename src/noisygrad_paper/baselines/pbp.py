"""Probabilistic backpropagation (PBP): a Gaussian for every weight, updated example by example by moment matching.

The method of Hernández-Lobato and Adams (2015). A pass sends a mean and a variance through the network, layer by
layer, to the evidence log Z = log N(y | m, v + b/(a−1)) of one example. Its derivatives give the next Gaussians
(assumed density filtering); the Gamma posterior of the noise precision moves by the same principle. After every pass
over the data, the prior's factors are refined by expectation propagation (`PBP.end_epoch_`).

The network is a chain of `Map`s, each of which knows its moments and their derivatives; `pbp_mv` adds rotations to it.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from noisygrad.predictions import RegressionPrediction
from noisygrad.replicas.learner import Learner

_GAMMA_PRIOR = (6.0, 6.0)  # shape and rate, of the weights' precision and of the noise's
_SMALLEST_VARIANCE = 1e-100
_LARGEST_CAVITY = 1e6  # a wider cavity says nothing, and its own rounding would be fitted

Number = TypeVar("Number", float, Tensor)


class Map(ABC):
    """One step of the network on moments: means `[R, B, k]`, and variances, or None where the value is certain.

    A map is made for one pass: it keeps what `forward` saw until the derivatives are asked for.
    """

    @abstractmethod
    def forward(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Mean and variance of the output."""

    @abstractmethod
    def input_gradients(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """From derivatives by the outputs' mean and variance to those by the inputs'."""

    def parameter_gradients(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, ...]:
        """From derivatives by the outputs' mean and variance to those by the map's own tensors, summed over B."""
        return ()


class Constant(Map):
    """Appends the certain value 1, whose weights are the biases."""

    def forward(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        pad = torch.nn.functional.pad
        return pad(mean, (0, 1), value=1.0), None if variance is None else pad(variance, (0, 1))

    def input_gradients(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return mean[..., :-1], None if variance is None else variance[..., :-1]


class Linear(Map):
    """z = W a / √n for independent Gaussian weights, `mean` and `variance` `[R, out, n]`, and independent inputs.

    m_z = M m_a / √n and v_z = (V (v_a + m_a²) + M² v_a) / n.
    """

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        self.mean = mean
        self.variance = variance
        self.share = 1.0 / mean.shape[-1]

    def forward(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self.input_mean, self.input_variance = mean, variance
        self.square = mean.square()
        self.second_moment = self.square if variance is None else self.square + variance
        output = self.second_moment @ self.variance.mT
        if variance is not None:
            output = output + variance @ self.mean.square().mT
        return (mean @ self.mean.mT) * math.sqrt(self.share), output * self.share

    def parameter_gradients(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, ...]:
        """By the weights' mean and by their variance."""
        assert variance is not None
        by_mean = (mean.mT @ self.input_mean) * math.sqrt(self.share)
        if self.input_variance is not None:
            by_mean = by_mean + (2.0 * self.share) * self.mean * (variance.mT @ self.input_variance)
        return by_mean, (variance.mT @ self.second_moment) * self.share

    def input_gradients(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As the base class says; None for the variance of certain inputs."""
        assert variance is not None
        spread = variance @ self.variance
        by_mean = (mean @ self.mean) * math.sqrt(self.share) + (2.0 * self.share) * self.input_mean * spread
        if self.input_variance is None:
            return by_mean, None
        return by_mean, (spread + variance @ self.mean.square()) * self.share


class Rectifier(Map):
    """max(0, z) of a Gaussian z, in forms that neither divide by a vanishing Φ nor branch.

    With α = m/s, k = φ(α) + α Φ(α) and h = φ(α) − α Φ(−α), the mean is s k and the variance v (Φ(α) − h k).
    """

    def forward(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert variance is not None
        self.scale = variance.sqrt()
        alpha = mean / self.scale
        half = 0.5 * alpha.square()
        self.density = torch.exp(-half - 0.5 * math.log(2.0 * math.pi))
        tail = 0.5 * torch.special.erfcx(half.sqrt()) * torch.exp(-half)
        self.above = torch.where(alpha > 0.0, 1.0 - tail, tail)
        self.below = torch.where(alpha > 0.0, tail, 1.0 - tail)
        self.upper = self.density + alpha * self.above
        lower = self.density - alpha * self.below
        self.output_mean = self.scale * self.upper
        # Rounding can leave less than nothing of a variance that has underflowed.
        return self.output_mean, variance * (self.above - lower * self.upper).clamp(min=0.0)

    def input_gradients(self, mean: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """∂m/∂m = Φ, ∂m/∂v = φ/2s, ∂v/∂m = 2 m_a Φ(−α), ∂v/∂v = Φ − k φ."""
        assert variance is not None
        by_mean = mean * self.above + variance * (2.0 * self.output_mean * self.below)
        by_variance = mean * (0.5 * self.density / self.scale) + variance * (self.above - self.upper * self.density)
        return by_mean, by_variance


def matched_gamma(shape: Number, rate: Number, first: Number, second: Number) -> tuple[Number, Number]:
    """Shape and rate of the Gamma with the mean and second moment of Gamma(shape, rate) times a factor.

    `first` is Z₁/Z and `second` is Z₂/Z₁, where Z_k is the factor's normaliser under Gamma(shape + k, rate).
    """
    new_shape = 1.0 / (second / first * (shape + 1.0) / shape - 1.0)
    new_rate = 1.0 / (second * (shape + 1.0) / rate - first * shape / rate)
    return new_shape, new_rate


class Moments(NamedTuple):
    """The network's output for a batch, each `[R, B, outputs]`: the function's mean and variance, without noise."""

    mean: Tensor
    variance: Tensor


class PBP(Learner):
    """R networks of rectified units by probabilistic backpropagation, in batches that are taken example by example.

    A batch of B examples is B updates in turn, so the batch size changes the speed and nothing else.

    The outputs share one noise precision. Each replica has one of the generators, for its initial means. Moment
    matching cancels, so a `dtype` narrower than float64 is not advised.

    Attributes:
        compile_options: What `torch.compile` must be given to compile `step_` for a CPU.
        means: Posterior means of the weights, per layer `[R, out, in + 1]`, the biases last.
        variances: Their variances.
        factor_precision: Precision of each weight's own prior factor, which is a Gaussian around 0, `[R, n]`: the
            weights layer by layer, row by row.
        factor_shape: That factor's share of the shape of the weights' precision.
        factor_rate: Its share of the rate.
        weight_shape: Shape a_w of the Gamma posterior of the weights' precision, `[R]`.
        weight_rate: Its rate b_w.
        noise_shape: Shape a of the Gamma posterior of the noise precision, `[R]`.
        noise_rate: Its rate b.
    """

    # Where Inductor (torch 2.13) fuses loops it may stop with a KeyError: it takes a later write to a tensor that they
    # read for another reader. Nothing is lost: what is elementwise is one loop without this.
    compile_options: ClassVar[dict[str, str | int | bool | Callable[..., object]] | None] = {"max_fusion_size": 1}

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int = 1,
        *,
        replicas: int,
        generators: Sequence[torch.Generator],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        sizes = (inputs, *hidden, outputs)
        if min(*sizes, replicas) < 1:
            raise ValueError(f"sizes and replicas must be at least 1; got sizes {sizes} and {replicas} replicas")
        if len(generators) != replicas:
            raise ValueError(f"got {len(generators)} generators for {replicas} replicas; give one per replica")
        self.replicas = replicas
        self.device = torch.device(device)
        self.dtype = dtype
        self.anneal = torch.ones(1, dtype=dtype, device=self.device)
        self.shapes = [(fan_out, fan_in + 1) for fan_in, fan_out in itertools.pairwise(sizes)]
        starts = zip(*(self._start(generator) for generator in generators), strict=True)
        self.means = [torch.stack(replicated) for replicated in starts]

        def full(shape: tuple[int, ...], value: float) -> Tensor:
            return torch.full((replicas, *shape), value, dtype=dtype, device=self.device)

        shape, rate = _GAMMA_PRIOR
        weights = (sum(fan_out * fan_in for fan_out, fan_in in self.shapes),)
        self.variances = [full(layer, rate / (shape - 1.0)) for layer in self.shapes]
        self.factor_precision = full(weights, (shape - 1.0) / rate)
        self.factor_shape = full(weights, 0.0)
        self.factor_rate = full(weights, 0.0)
        self.weight_shape, self.weight_rate = full((), shape), full((), rate)
        self.noise_shape, self.noise_rate = full((), shape), full((), rate)
        # The noise's variance under Gamma(a + k, b) is b / (a + k − 1), for k = 0, 1, 2.
        self._offsets = torch.tensor([-1.0, 0.0, 1.0], dtype=dtype, device=self.device)

    def _start(self, generator: torch.Generator) -> list[Tensor]:
        """One replica's first means, N(0, 1/n): with means of zero nothing would ever move."""
        draws = []
        for layer in self.shapes:
            draw = torch.randn(layer, dtype=self.dtype, device=generator.device, generator=generator)
            draws.append(draw.to(self.device) / math.sqrt(layer[1]))
        return draws

    def noise_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """None: the method is deterministic."""
        return {}

    def step_(self, x: Tensor, y: Tensor, noise: Mapping[str, Tensor]) -> None:
        """One update for each example of the batch, in turn."""
        for index in range(x.shape[1]):
            self._assimilate_(x[:, index : index + 1], y[:, index : index + 1])

    def _assimilate_(self, x: Tensor, y: Tensor) -> None:
        """Assumed density filtering with one example, x `[R, 1, inputs]` and y `[R, 1, outputs]`."""
        maps = self._maps()
        output = _propagate(maps, x)
        residual = y - output.mean
        noise = self.noise_rate[:, None] / (self.noise_shape[:, None] + self._offsets)
        total = output.variance[..., None] + noise[:, None, None, :]
        by_mean = residual / total[..., 0]
        by_variance = 0.5 * (by_mean.square() - 1.0 / total[..., 0])
        gradients = _backpropagate(maps, by_mean, by_variance)
        self._update_(maps, gradients)
        log_z = -0.5 * (total.log() + residual[..., None].square() / total).sum((1, 2))
        self._update_noise_(log_z)

    def _update_(self, maps: Sequence[Map], gradients: Sequence[tuple[Tensor, ...]]) -> None:
        """M ← M + V ∂M, V ← V − V² (∂M² − 2 ∂V), except where V would vanish."""
        layers = [pair for entry, pair in zip(maps, gradients, strict=True) if isinstance(entry, Linear)]
        for mean, variance, (by_mean, by_variance) in zip(self.means, self.variances, layers, strict=True):
            new_variance = variance - variance.square() * (by_mean.square() - 2.0 * by_variance)
            valid = new_variance > _SMALLEST_VARIANCE
            mean.copy_(torch.where(valid, mean + variance * by_mean, mean))
            variance.copy_(torch.where(valid, new_variance, variance))

    def _update_noise_(self, log_z: Tensor) -> None:
        """The Gamma of the noise from log Z_k `[R, 3]`, except where its mean variance would not exist."""
        first, second = (log_z[:, 1:] - log_z[:, :-1]).exp().unbind(1)
        shape, rate = matched_gamma(self.noise_shape, self.noise_rate, first, second)
        valid = (shape > 1.0) & (rate > 0.0) & (shape + rate < math.inf)
        self.noise_shape.copy_(torch.where(valid, shape, self.noise_shape))
        self.noise_rate.copy_(torch.where(valid, rate, self.noise_rate))

    def end_epoch_(self) -> None:
        """Refine the prior's factors by expectation propagation, weight by weight, on the CPU.

        The update multiplies a weight's cavity by N(0, b/(a−1)) of the Gamma's cavity at that moment, so the factor
        keeps its mean of 0 and its precision becomes (a−1)/b. Only the Gamma's chain from weight to weight must be
        followed in turn; the Gaussians follow from it all at once.
        """
        mean, variance = _flat(self.means), _flat(self.variances)
        cavity_precision = 1.0 / variance - self.factor_precision
        natural_mean = mean / variance
        cavity_variance = 1.0 / cavity_precision
        usable = (cavity_variance > 0.0) & (cavity_variance < _LARGEST_CAVITY)
        square = (natural_mean * cavity_variance).square()
        state = (self.weight_shape, self.weight_rate, self.factor_shape, self.factor_rate, self.factor_precision)
        chains = [_Chain(*values) for values in zip(*(tensor.tolist() for tensor in state), strict=True)]
        cavities = zip(square.tolist(), cavity_variance.tolist(), usable.tolist(), strict=True)
        refined = [_refine(chain, *cavity) for chain, cavity in zip(chains, cavities, strict=True)]
        for tensor, values in zip(state, zip(*refined, strict=True), strict=True):
            tensor.copy_(torch.tensor(values, dtype=self.dtype))
        new_variance = torch.where(usable, 1.0 / (cavity_precision + self.factor_precision), variance)
        self._unflatten_(self.means, torch.where(usable, natural_mean * new_variance, mean))
        self._unflatten_(self.variances, new_variance)

    def _unflatten_(self, layers: list[Tensor], flat: Tensor) -> None:
        parts = flat.split([fan_out * fan_in for fan_out, fan_in in self.shapes], dim=1)
        for layer, part in zip(layers, parts, strict=True):
            layer.copy_(part.view_as(layer))

    def moments(self, x: Tensor) -> Moments:
        """Mean and variance of the function at x `[R, n, inputs]`, each `[R, n, outputs]`."""
        return _propagate(self._maps(), x.to(self.dtype))

    def predict(self, x: Tensor, num_samples: int, generators: Sequence[torch.Generator]) -> RegressionPrediction:
        """One Gaussian: the propagated moments with the mean noise variance b/(a−1); nothing is drawn."""
        mean, variance = self.moments(x)
        noise = self.noise_rate / (self.noise_shape - 1.0)
        return RegressionPrediction(mean[None], (variance + noise[:, None, None]).sqrt()[None])

    def tensors(self) -> dict[str, Tensor]:
        """The posterior, the prior's factors and the two Gammas."""
        factors = ("factor_precision", "factor_shape", "factor_rate")
        gammas = ("weight_shape", "weight_rate", "noise_shape", "noise_rate")
        means = {f"mean.{index}": mean for index, mean in enumerate(self.means)}
        variances = {f"variance.{index}": variance for index, variance in enumerate(self.variances)}
        return means | variances | {name: getattr(self, name) for name in (*factors, *gammas)}

    def _maps(self) -> list[Map]:
        maps: list[Map] = []
        for mean, variance in zip(self.means, self.variances, strict=True):
            maps += [Constant(), Linear(mean, variance), Rectifier()]
        return maps[:-1]


def _flat(layers: Sequence[Tensor]) -> Tensor:
    return torch.cat([layer.flatten(1) for layer in layers], dim=1)


def _propagate(maps: Sequence[Map], x: Tensor) -> Moments:
    mean, variance = x, None
    for entry in maps:
        mean, variance = entry.forward(mean, variance)
    assert variance is not None
    return Moments(mean, variance)


def _backpropagate(maps: Sequence[Map], by_mean: Tensor, by_variance: Tensor | None) -> list[tuple[Tensor, ...]]:
    """The derivatives by each map's own tensors."""
    gradients: list[tuple[Tensor, ...]] = []
    for position in reversed(range(len(maps))):
        gradients.append(maps[position].parameter_gradients(by_mean, by_variance))
        if position > 1:  # the first is a `Constant`, which has no tensors, so nothing below the second is asked for
            by_mean, by_variance = maps[position].input_gradients(by_mean, by_variance)
    return gradients[::-1]


class _Chain(NamedTuple):
    """One replica's Gamma of the weights' precision after a refinement, and each weight's factor."""

    shape: float
    rate: float
    factor_shape: list[float]
    factor_rate: list[float]
    factor_precision: list[float]


def _refine(chain: _Chain, square: list[float], variance: list[float], usable: list[bool]) -> _Chain:
    """Follow the Gamma from weight to weight; `square` is the cavity mean's, `variance` the cavity's.

    In plain numbers: a thousand dependent updates of one value each cost more as tensors.
    """
    shape, rate, factor_shape, factor_rate, factor_precision = chain
    for index, included in enumerate(usable):
        a, b = shape - factor_shape[index], rate - factor_rate[index]
        if not (included and a > 1.0 and b > 0.0):
            continue
        v = variance[index]
        v0, v1, v2 = v + b / (a - 1.0), v + b / a, v + b / (a + 1.0)
        half = 0.5 * square[index]
        first = math.sqrt(v0 / v1) * math.exp(half / v0 - half / v1)
        second = math.sqrt(v1 / v2) * math.exp(half / v1 - half / v2)
        try:
            new_shape, new_rate = matched_gamma(a, b, first, second)
        except ZeroDivisionError:
            continue  # the mean is so far from its prior that the evidence underflows
        if new_shape > 0.0 and new_rate > 0.0:
            shape, rate = new_shape, new_rate
            factor_shape[index], factor_rate[index] = shape - a, rate - b
            factor_precision[index] = (a - 1.0) / b
    return _Chain(shape, rate, factor_shape, factor_rate, factor_precision)
