"""Variational matrix Gaussian with pseudo-data (VMG; Louizos and Welling 2016), for regression.

A layer maps x, with a constant 1 appended and divided by √(n_in + 1), to Wᵀx. The posterior of its weight W,
`[n_in + 1, n_out]`, is a matrix Gaussian with mean M and diagonal row and column variances u and v: the outputs of a
layer are Gaussian processes with covariance x diag(u) xᵀ. Each layer also has pairs of pseudo-data (x̃, ỹ), and its
outputs are drawn *given* that x̃ is mapped to ỹ. Each element of x̃ and ỹ has a factor 1 + σε, drawn once a batch, with
one σ for x̃ and one for ỹ in a layer.

The bound has four parts: the expected log-likelihood, KL(q(W) ‖ p(W | τ_r, τ_c)) with p(w) = N(0, 1/(τ_r τ_c)),
the KL of the factors by the polynomial of variational dropout, and the KLs of the Gamma posteriors of τ_r, τ_c (a pair
per layer) and of the noise precision τ (one per output). q(W) there is the matrix Gaussian without pseudo-data, as in
the published code. All is trained by Adam; predictions use a moving average of the parameters.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from noisygrad.optim.options import positive
from noisygrad.predictions import RegressionPrediction
from noisygrad.replicas.learner import Learner
from noisygrad_paper.baselines.adam import Adam

_LOG_2PI = math.log(2 * math.pi)
_DROPOUT = (1.16145124, -1.50204118, 0.58629921)  # c₁, c₂, c₃: −KL ≈ ½ log α + c₁α + c₂α² + c₃α³ + constant
_JITTER = 1e-6  # pseudo-outputs are seen through this variance
_LEAST_VARIANCE = 1e-12  # the square root has no slope at 0
_WEIGHT_PRIOR = (1.0, 0.5)  # shape and rate of τ_r and of τ_c
_LEAST_LOG_NOISE = -4.0
_SMALL = 0.01  # spread of log-deviations and pseudo-data at the start
_BIAS_LOG_STD = -4.0
_AVERAGE_DECAY = 0.999


def conditional(
    x: Tensor, mean: Tensor, row_variance: Tensor, pseudo_inputs: Tensor, pseudo_outputs: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs at x given the pseudo-data: their mean `[..., B, n_out]` and row variance `[..., B]`.

    With U = diag(u), S = x̃Ux̃ᵀ + 10⁻⁶I and A = xUx̃ᵀS⁻¹: mean xM + A(ỹ − x̃M), row variance diag(xUxᵀ − Ax̃Uxᵀ). The
    variance of output j is the row variance times v_j. x is `[..., B, n_in + 1]`, x̃ `[..., P, n_in + 1]`.
    """
    count = x.shape[-2]
    rows = torch.cat([x, pseudo_inputs], dim=-2)
    # In float64: the jitter makes condition numbers of 10⁶ and more, and the variance is a difference.
    wide, variance = rows.double(), row_variance.double()[..., None, :]
    cross, gram = (wide @ (wide[..., count:, :] * variance).mT).split([count, rows.shape[-2] - count], dim=-2)
    attention = _divided(cross, gram + _JITTER * torch.eye(gram.shape[-1], dtype=wide.dtype, device=x.device))
    remaining = (wide[..., :count, :].square() * variance).sum(-1) - (attention * cross).sum(-1)
    at_x, at_pseudo = (rows @ mean).split([count, rows.shape[-2] - count], dim=-2)
    location = at_x + attention.to(x.dtype) @ (pseudo_outputs - at_pseudo)
    return location, remaining.clamp_min(_LEAST_VARIANCE).to(x.dtype)


def _divided(cross: Tensor, matrix: Tensor) -> Tensor:
    """C S⁻¹ by Cholesky.

    With A = C S⁻¹ held constant, A + (C − A S) S⁻¹ is A once more, refined, and has its derivative (dC − A dS) S⁻¹.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.cholesky_ex(matrix.detach())[0]
    root = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    # Two products rather than one with S⁻¹ = RᵀR: rounding is magnified by the root of the condition number only.
    quotient = cross.detach() @ root.mT @ root
    refined: Tensor = quotient + (cross - quotient @ matrix) @ root.mT @ root
    return refined


def matrix_kl(
    mean: Tensor, log_row_std: Tensor, log_col_std: Tensor, precision: Tensor | float, log_precision: Tensor | float
) -> Tensor:
    """KL(MN(M, U, V) ‖ N(0, 1/τ)) in nats, `[...]`, averaged over q(τ): E[τ] is `precision`, E[log τ] `log_precision`.

    `½[E[τ] (‖M‖² + Σu Σv) − n (1 + E[log τ]) − n_out Σ log u − n_in Σ log v]`, with n = n_in · n_out.
    """
    rows, columns = mean.shape[-2:]
    spread = (2 * log_row_std).exp().sum(-1) * (2 * log_col_std).exp().sum(-1)
    logdet = 2 * (columns * log_row_std.sum(-1) + rows * log_col_std.sum(-1))
    return 0.5 * (precision * (mean.square().sum((-2, -1)) + spread) - rows * columns * (1 + log_precision) - logdet)


def dropout_kl(log_std: Tensor, max_noise: float) -> Tensor:
    """KL of a factor 1 + σε to the log-uniform prior, by its polynomial in α = σ², from 0 at α = `max_noise`."""

    def negative(alpha: Tensor) -> Tensor:
        c1, c2, c3 = _DROPOUT
        return 0.5 * alpha.log() + alpha * (c1 + alpha * (c2 + alpha * c3))

    return negative(torch.full_like(log_std, max_noise)) - negative((2 * log_std).exp())


def gamma_kl(shape: Tensor, rate: Tensor, prior_shape: Tensor, prior_rate: Tensor) -> Tensor:
    """KL(Gamma(shape, rate) ‖ Gamma(prior_shape, prior_rate)) in nats, element by element."""
    return (
        (shape - prior_shape) * torch.digamma(shape)
        - torch.lgamma(shape)
        + torch.lgamma(prior_shape)
        + prior_shape * (rate / prior_rate).log()
        + shape * (prior_rate / rate - 1)
    )


class VMG(Learner):
    """R networks with rectified units and the posterior above, for standardised targets.

    The likelihood is that of the targets before they were standardised, as Louizos and Welling have it: the noise
    prior is in their units. Only `y_std` matters to it, since the mean cancels; 1 puts the prior on the standardised
    targets. Where their code differs from this: the predictive here is a mixture of Student-t distributions, the exact
    integral over q(τ), not a Gaussian with E[τ] and E[log τ].

    Args:
        num_data: N, the size of one replica's training set.
        y_std: Standard deviation of the targets, a number, `[R]` or `[R, outputs]`.
        generators: One per replica, for its initial values.
        pseudo_pairs: P, in every layer.
        max_noise: The greatest variance of the factors on pseudo-data, where they also start.
        kl_weight: λ, of all KL terms.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int = 1,
        *,
        num_data: int,
        y_std: float | Tensor,
        replicas: int,
        generators: Sequence[torch.Generator],
        pseudo_pairs: int = 10,
        max_noise: float = 0.005,
        noise_prior: tuple[float, float] = (6.0, 6.0),
        lr: float = 1e-3,
        kl_weight: float = 1.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        counts = {"inputs": inputs, "outputs": outputs, "num_data": num_data, "replicas": replicas}
        counts |= {"pseudo_pairs": pseudo_pairs} | {f"hidden[{i}]": width for i, width in enumerate(hidden)}
        for name, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be an integer of at least 1; got {count!r}.")
        for name, value in (("lr", lr), ("noise_prior[0]", noise_prior[0]), ("noise_prior[1]", noise_prior[1])):
            positive(name, value)
        if not (math.isfinite(kl_weight) and kl_weight >= 0):
            raise ValueError(f"kl_weight must be at least 0 and finite; got {kl_weight}.")
        if not math.exp(2 * _LEAST_LOG_NOISE) < max_noise <= 1:
            raise ValueError(
                f"max_noise must lie between {math.exp(2 * _LEAST_LOG_NOISE):.2g}, the least variance, and 1; "
                f"got {max_noise}."
            )
        if len(generators) != replicas:
            raise ValueError(f"{replicas} replicas need as many generators; got {len(generators)}.")
        self.replicas, self.device, self.dtype = replicas, torch.device(device), dtype
        self.anneal = torch.ones(1, dtype=dtype, device=self.device)
        self.num_data, self.kl_weight = num_data, kl_weight
        self.pseudo_pairs, self.max_noise = pseudo_pairs, max_noise
        self.widths = (inputs, *hidden, outputs)
        self._layers = [(fan_in + 1, fan_out) for fan_in, fan_out in itertools.pairwise(self.widths)]
        self._depth = len(self._layers)
        self.y_std = self._target_scale(y_std)
        priors = [_WEIGHT_PRIOR] * (2 * self._depth) + [noise_prior] * outputs
        # Gamma posteriors in float64: the terms of their KL are of size N log N and cancel.
        self._prior_shape, self._prior_rate = torch.tensor(priors, dtype=torch.float64, device=self.device).unbind(-1)
        self._layout = self._shapes()
        self._sizes = [math.prod(shape) for shape in self._layout.values()]
        self.parameters = torch.stack([self._initial(generator) for generator in generators]).to(self.device, dtype)
        self.average = self.parameters.clone()
        self._adam = Adam(self.parameters, lr)
        self.average_weight = torch.zeros(replicas, dtype=dtype, device=self.device)

    def _target_scale(self, y_std: float | Tensor) -> Tensor:
        scale = torch.as_tensor(y_std, dtype=self.dtype, device=self.device)
        outputs = self.widths[-1]
        if scale.ndim > 2 or scale.shape not in ((), (self.replicas,), (self.replicas, 1), (self.replicas, outputs)):
            raise ValueError(
                f"y_std must be a number or of shape [{self.replicas}] or [{self.replicas}, {outputs}]; "
                f"got shape {list(scale.shape)}."
            )
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError(f"y_std must be positive and finite; got {y_std!r}.")
        return scale.expand(self.replicas, 1, 1) if scale.ndim == 0 else scale.reshape(self.replicas, 1, -1)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one replica's parameters, by name, in the order in which they lie in `parameters`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for i, (rows, columns) in enumerate(self._layers):
            shapes[f"mean.{i}"] = (rows, columns)
            shapes[f"log_row_std.{i}"] = (rows,)
            shapes[f"log_col_std.{i}"] = (columns,)
            shapes[f"pseudo_inputs.{i}"] = (self.pseudo_pairs, rows)
            shapes[f"pseudo_outputs.{i}"] = (self.pseudo_pairs, columns)
        gammas = 2 * self._depth + self.widths[-1]
        # Of x̃ and ỹ in each layer; of τ_r and τ_c in each layer and then of τ for each output.
        return shapes | {"log_noise_std": (2 * self._depth,), "log_shape": (gammas,), "log_rate": (gammas,)}

    def _initial(self, generator: torch.Generator) -> Tensor:
        """One replica's parameters: means by He's rule with both fans, q(τ) at the prior, noise at its greatest."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float64).cpu()

        def uniform(*shape: int) -> Tensor:
            draw = torch.rand(*shape, generator=generator, device=generator.device, dtype=torch.float64)
            return _SMALL * (2 * draw.cpu() - 1)

        parts: list[Tensor] = []
        for rows, columns in self._layers:
            weights = normal(rows - 1, columns) * math.sqrt(4 / (rows - 1 + columns))
            log_row_std = _SMALL * normal(rows)
            log_row_std[-1] += _BIAS_LOG_STD
            parts += [F.pad(weights, (0, 0, 0, 1)), log_row_std, _SMALL * normal(columns)]
            parts += [uniform(self.pseudo_pairs, rows), uniform(self.pseudo_pairs, columns)]
        parts.append(torch.full(self._layout["log_noise_std"], 0.5 * math.log(self.max_noise), dtype=torch.float64))
        parts += [self._prior_shape.log().cpu(), self._prior_rate.log().cpu()]
        return torch.cat([part.flatten() for part in parts])

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """The parts of `parameters`, or of a tensor like it, by name: `[R, *shape]`."""
        parts = parameters.split(self._sizes, dim=-1)
        pairs = zip(self._layout.items(), parts, strict=True)
        return {name: part.unflatten(-1, shape) for (name, shape), part in pairs}

    def noise_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """One vector: layer by layer the factors of x̃ and of ỹ, then the outputs."""
        return {"normal": (sum(self._noise_sizes(batch_size)),)}

    def _noise_sizes(self, batch_size: int) -> list[int]:
        pairs = self.pseudo_pairs
        return [
            size for rows, columns in self._layers for size in (pairs * rows, pairs * columns, batch_size * columns)
        ]

    def forward(self, parameters: Tensor, x: Tensor, normal: Tensor) -> Tensor:
        """Standardised outputs `[R, B, outputs]`: one draw of the pseudo-data, and of each example's outputs given it.

        Outputs of different examples are drawn independently (local reparameterisation): only marginals are right.
        """
        named = self.named(parameters)
        parts = normal.split(self._noise_sizes(x.shape[-2]), dim=-1)
        noise_std = named["log_noise_std"].exp()
        hidden = x
        for i, (rows, columns) in enumerate(self._layers):
            factor_x, factor_y, eps = (
                part.unflatten(-1, (-1, size))
                for part, size in zip(parts[3 * i : 3 * i + 3], (rows, columns, columns), strict=True)
            )
            std_x, std_y = (noise_std[:, 2 * i + j, None, None] for j in (0, 1))
            pseudo_inputs = named[f"pseudo_inputs.{i}"] * (1 + std_x * factor_x) / math.sqrt(rows)
            location, remaining = conditional(
                F.pad(hidden, (0, 1), value=1.0) / math.sqrt(rows),
                named[f"mean.{i}"],
                (2 * named[f"log_row_std.{i}"]).exp(),
                pseudo_inputs,
                named[f"pseudo_outputs.{i}"] * (1 + std_y * factor_y),
            )
            hidden = location + remaining.sqrt()[..., None] * named[f"log_col_std.{i}"].exp()[:, None] * eps
            if i + 1 < self._depth:
                hidden = hidden.relu()
        return hidden

    def _gammas(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes and rates of the Gamma posteriors, `[R, 2 · layers + outputs]`, in float64."""
        named = self.named(parameters)
        return named["log_shape"].double().exp(), named["log_rate"].double().exp()

    def kl(self, parameters: Tensor) -> Tensor:
        """All KL terms of the bound in nats, `[R]`, in float64."""
        named = self.named(parameters)
        shape, rate = self._gammas(parameters)
        precision, log_precision = shape / rate, torch.digamma(shape) - rate.log()
        total = gamma_kl(shape, rate, self._prior_shape, self._prior_rate).sum(-1)
        per_factor = dropout_kl(named["log_noise_std"], self.max_noise).double()
        for i, (rows, columns) in enumerate(self._layers):
            row, column = 2 * i, 2 * i + 1
            total = total + matrix_kl(
                named[f"mean.{i}"],
                named[f"log_row_std.{i}"],
                named[f"log_col_std.{i}"],
                precision[:, row] * precision[:, column],
                log_precision[:, row] + log_precision[:, column],
            )
            total = total + self.pseudo_pairs * rows * per_factor[:, row]
            total = total + self.pseudo_pairs * columns * per_factor[:, column]
        return total

    def loss(self, parameters: Tensor, x: Tensor, y: Tensor, normal: Tensor) -> Tensor:
        """Minus the bound per datum, estimated from a batch, `[R]`: expected nll of the unscaled targets + λ/N · KL."""
        shape, rate = (part[:, 2 * self._depth :] for part in self._gammas(parameters))
        squared = (self.y_std * (y - self.forward(parameters, x, normal))).square().mean(-2)
        log_lik = torch.digamma(shape) - rate.log() - _LOG_2PI - shape / rate * squared
        return self.kl_weight / self.num_data * self.kl(parameters) - 0.5 * log_lik.sum(-1)

    def step_(self, x: Tensor, y: Tensor, noise: Mapping[str, Tensor]) -> None:
        """One step of Adam on all parameters, and of their moving average, which is freed of its start."""
        gradient = torch.func.grad(lambda parameters: self.loss(parameters, x, y, noise["normal"]).sum())(
            self.parameters
        )
        self._adam.step_(gradient, self.anneal)
        log_noise_std = self.named(self.parameters)["log_noise_std"]
        log_noise_std.clamp_(_LEAST_LOG_NOISE, 0.5 * math.log(self.max_noise))
        # The weights of the past sum to 1 − 0.999ᵏ: divided by it, the average has no share of a start.
        self.average_weight.mul_(_AVERAGE_DECAY).add_(1 - _AVERAGE_DECAY)
        self.average.lerp_(self.parameters, ((1 - _AVERAGE_DECAY) / self.average_weight)[:, None])

    @torch.no_grad()
    def predict(self, x: Tensor, num_samples: int, generators: Sequence[torch.Generator]) -> RegressionPrediction:
        """A mixture of Student-t distributions of the standardised targets, from the averaged parameters."""
        size = sum(self._noise_sizes(x.shape[-2]))
        outputs: list[Tensor] = []
        for _ in range(num_samples):
            draws = [torch.randn(size, generator=g, device=g.device, dtype=self.dtype) for g in generators]
            outputs.append(self.forward(self.average, x, torch.stack(draws).to(self.device)))
        shape, rate = (part[:, None, 2 * self._depth :] for part in self._gammas(self.average))
        return RegressionPrediction(torch.stack(outputs), (rate / shape).sqrt() / self.y_std, 2 * shape)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, their average with the weight it has gathered, and the moments of Adam."""
        averages = {"average": self.average, "average_weight": self.average_weight}
        moments = {f"adam.{name}": tensor for name, tensor in self._adam.tensors().items()}
        return {"parameters": self.parameters, **averages, **moments}

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """All KL terms in nats, of the averaged parameters."""
        return {"kl": self.kl(self.average)}
