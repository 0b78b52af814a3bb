"""Scikit-learn estimators: a table of numbers in, predictions with their uncertainty out.

`NoisyRegressor` and `NoisyClassifier` standardise the data, fit a multi-layer perceptron's posterior with one of the
four noisy optimisers, and average over draws of its weights to predict. What is not said adapts to the data: the rules
are those of `training.plan`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state
from torch import Tensor
from torch.func import functional_call

from noisygrad.estimators.plan import FitPlan
from noisygrad.estimators.tables import checked_inputs, moments
from noisygrad.kernels.threads import one_thread
from noisygrad.likelihoods import Categorical, Gaussian, Likelihood
from noisygrad.networks import MLP
from noisygrad.optim import NoisyAdam, NoisyBlockTridiagonal, NoisyEKFAC, NoisyFull, NoisyKFAC, NoisyOptimizer
from noisygrad.posterior import Posterior
from noisygrad.posterior.faults import one_of, whole_number
from noisygrad.predictions import CategoricalPrediction, RegressionPrediction
from noisygrad.training import CosineDecay, train

Floats = NDArray[np.float64]
PosteriorName = Literal["diagonal", "kronecker", "eigen", "tridiagonal", "full"]

OPTIMIZERS: dict[str, type[NoisyOptimizer]] = {
    "diagonal": NoisyAdam,
    "kronecker": NoisyKFAC,
    "eigen": NoisyEKFAC,
    "tridiagonal": NoisyBlockTridiagonal,
    "full": NoisyFull,
}
_ELBO_SAMPLES = 10
_LINEAR_TO = 3.0
"""Features grow with the logarithm beyond this many standard deviations: a 1 in a column of 999 zeros lies 32 of them
out, and no factorised Fisher knows that it was the only example to say anything of its weight."""
_OUTPUTS_AT_ONCE = 1 << 22
"""How many outputs (weight samples × rows × outputs) are predicted at a time, to bound memory."""
_CACHED_WEIGHTS = 1 << 24
"""Weight samples are kept between predictions up to this many numbers."""
_MANY_THREADS_FROM = 1 << 23
"""Rows × weights from which on several threads predict faster than one."""


class WeightDraws:
    """Samples of a posterior's weights: the same at every prediction, and drawn once if there is room for them."""

    def __init__(self, posterior: Posterior, seed: int) -> None:
        self.posterior, self.seed = posterior, seed
        self._kept: list[dict[str, Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": []}

    def outputs(self, x: Tensor, num_samples: int) -> Tensor:
        """The network's outputs, `[samples, rows, outputs]`, in float64: no row's depends on the others."""
        model = self.posterior.model
        with torch.no_grad(), one_thread(len(x) * self.posterior.structure.size < _MANY_THREADS_FROM):
            return torch.stack([functional_call(model, w, (x,)) for w in self._draws(num_samples)])

    def _draws(self, num_samples: int) -> Iterator[dict[str, Tensor]] | list[dict[str, Tensor]]:
        structure = self.posterior.structure
        if not any(block.noise for block in structure.blocks):
            num_samples = 1
        if len(self._kept) >= num_samples:
            return self._kept[:num_samples]
        generator = torch.Generator(next(iter(structure.parameters.values())).device).manual_seed(self.seed)
        draws = (
            {name: tensor.double() for name, tensor in self.posterior.sample(generator).items()}
            for _ in range(num_samples)
        )
        if structure.size * num_samples > _CACHED_WEIGHTS:
            return draws
        self._kept = list(draws)
        return self._kept


class _NoisyEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share."""

    posterior: str
    hidden: Sequence[int]
    epochs: int | None
    batch_size: int | None
    lr: float | None
    kl_weight: float
    prior_variance: float
    noise: bool
    mc_samples: int
    damping: float
    num_samples: int
    random_state: int | np.random.RandomState | None
    device: str
    verbose: bool

    def _keep(self, arguments: Mapping[str, Any]) -> None:
        """Each argument of the constructor under its name, as scikit-learn has it."""
        for name in self._get_param_names():
            setattr(self, name, arguments[name])

    def _fit(self, X: Floats, y: NDArray[Any], outputs: int, likelihood: Likelihood, elbo_shift: float) -> None:
        """Standardise X, train, and keep what predictions need."""
        self._check_settings()
        self._shift, self._scale = moments(X, "feature")
        device = torch.device(self.device)
        x = torch.from_numpy(self._standardised(X)).to(device, torch.float32)
        target = torch.from_numpy(y).to(device)
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=4).tolist()
        start, widths = torch.Generator().manual_seed(seeds[0]), [int(width) for width in self.hidden]
        network = MLP(x.shape[1], widths, outputs, generator=start).to(device)
        weights = sum(parameter.numel() for parameter in network.parameters())
        said: dict[str, Any] = {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr}
        plan = FitPlan.of(self.posterior, examples=len(x), weights=weights, **said)
        optimizer = OPTIMIZERS[self.posterior](
            network,
            likelihood,
            num_data=len(x),
            mc_samples=int(self.mc_samples),
            fisher="exact" if outputs == 1 else "sampled",  # one output: exact costs no more
            seed=seeds[1],
            process_group="alone",
            **plan.settings,
            **{name: getattr(self, name) for name in ("kl_weight", "prior_variance", "damping", "noise")},
        )
        steps = plan.epochs * math.ceil(len(x) / plan.batch_size)
        with one_thread(plan.small):
            self.history_ = train(
                optimizer,
                (x, target),
                epochs=plan.epochs,
                batch_size=plan.batch_size,
                scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, CosineDecay(1.0, steps, final=0.01)),
                schedule_every="step",
                seed=seeds[2],
                progress=bool(self.verbose),
            )
            self.posterior_ = optimizer.posterior()
            self._draws = WeightDraws(self.posterior_, seeds[3])
            self.elbo_ = math.nan
            if self.noise:
                batches = zip(x.split(8192), target.split(8192), strict=True)
                generator = torch.Generator(device).manual_seed(seeds[3])
                self.elbo_ = float(self.posterior_.elbo(batches, _ELBO_SAMPLES, generator)) + elbo_shift

    def _check_settings(self) -> None:
        one_of("posterior", self.posterior, OPTIMIZERS)
        for name in ("epochs", "batch_size", "num_samples", "mc_samples"):
            value = getattr(self, name)
            if value is not None or name not in {"epochs", "batch_size"}:
                whole_number(name, value)
        hidden = self.hidden
        if isinstance(hidden, str) or not (isinstance(hidden, Sequence | np.ndarray) and all(map(_is_count, hidden))):
            raise ValueError(f"hidden must be a sequence of layer widths such as (50,), got {hidden!r}")

    def _standardised(self, X: Floats) -> Floats:
        standardised: Floats = (X - self._shift) / self._scale
        beyond = np.abs(standardised) - _LINEAR_TO
        return np.where(
            beyond > 0, np.sign(standardised) * (_LINEAR_TO + np.log1p(np.maximum(beyond, 0))), standardised
        )

    def _outputs(self, X: ArrayLike, num_samples: int | None = None) -> Iterator[Tensor]:
        """The network's outputs for all rows, `[samples, rows, outputs]`, a part at a time."""
        check_is_fitted(self)
        checked = checked_inputs(self, X, reset=False)
        x = torch.from_numpy(self._standardised(checked)).to(torch.device(self.device))
        samples, outputs = int(num_samples or self.num_samples), self.posterior_.structure.units[-1].outputs
        for part in x.split(max(1, _OUTPUTS_AT_ONCE // (samples * outputs))):
            yield self._draws.outputs(part, samples)


class NoisyRegressor(MultiOutputMixin, RegressorMixin, _NoisyEstimator):  # type: ignore[misc]
    """Bayesian neural network regression; one target or several.

    Features and targets are standardised inside, features beyond three standard deviations on a logarithmic scale;
    everything predicted is in the targets' own units. The observation noise is learned, under a Gamma prior on its
    precision.

    Args:
        posterior: The family of the covariance: "diagonal", "kronecker", "eigen" (the Kronecker family with a spectrum
            of its own), "tridiagonal" or "full" (up to a few thousand weights: memory grows with their square).
        hidden: Widths of the hidden layers (ReLU); () for a linear model.
        epochs: Passes over the data. None: 250 + 2n steps in all (n rows), at most 20 000; for a full covariance of
            more than 1000 weights, 200 steps.
        batch_size: None: 32 for fewer than 256 rows, else n/8, at most 200.
        lr: Step size at the start; None: 0.3 (1 for such a large full covariance). It falls to a hundredth along a
            cosine, and T steps are each kept in a trust region (`kl_clip`) of 1/T (diagonal 0.3/T), in [1e-4, 5e-3].
        kl_weight: Weight λ of the KL term; below 1 the posterior is narrower than Bayes' rule has it.
        prior_variance: Variance η of each weight under the prior. With many features try 0.1 to 0.3: `elbo_` tells.
        noise: False fits a point estimate of the weights instead of a posterior.
        noise_prior: Shape and rate of the Gamma prior of the noise's precision, in standardised units; None learns the
            noise as a point.
        mc_samples: Draws of the weights per step.
        damping: Extra damping of the step; the posterior never sees it.
        num_samples: Draws of the weights per prediction.
        random_state: An int for the same result every time. Torch's global generator is never touched.
        device: Where to train, as torch names it.
        verbose: Whether to show progress.

    Attributes:
        posterior_: The fitted `Posterior`, over the weights of a network of standardised data.
        history_: Loss and seconds of every epoch.
        elbo_: The evidence lower bound of the training data in nats, in the targets' units, for every `kl_weight`; NaN
            without noise.
        n_features_in_: Number of features.
    """

    def __init__(
        self,
        posterior: PosteriorName = "kronecker",
        hidden: Sequence[int] = (50,),
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        kl_weight: float = 1.0,
        prior_variance: float = 1.0,
        noise: bool = True,
        noise_prior: tuple[float, float] | None = (6.0, 6.0),
        mc_samples: int = 1,
        damping: float = 0.0,
        num_samples: int = 100,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
        verbose: bool = False,
    ) -> None:
        self._keep(locals())

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit to features `[rows, features]` and targets `[rows]` or `[rows, outputs]`."""
        inputs, targets = checked_inputs(self, X, y, multi_output=True, y_numeric=True)
        self._flat = targets.ndim == 1
        columns = targets.astype(np.float64).reshape(len(targets), -1)
        self._y_shift, self._y_scale = moments(columns, "target")
        standardised = ((columns - self._y_shift) / self._y_scale).astype(np.float32)
        shift = -len(columns) * float(np.log(self._y_scale).sum())
        self._fit(inputs, standardised, columns.shape[1], Gaussian(noise_prior=self.noise_prior), shift)
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """The mean of the predictive distribution, `[rows]` or `[rows, outputs]`.

        With `return_std`, also its standard deviation: weights and observation noise together.
        """
        parts = [self._prediction(outputs) for outputs in self._outputs(X)]
        mean = _array(torch.cat([part.mean for part in parts]))
        if not return_std:
            return mean
        return mean, _array(torch.cat([part.variance.sqrt() for part in parts]))

    def predict_quantiles(self, X: ArrayLike, q: float | Sequence[float]) -> Floats:
        """Quantiles of the predictive distribution, in the shape of `predict`, or `[len(q), ...]` for several."""
        levels = torch.as_tensor(q, dtype=torch.float64)
        found = [self._prediction(outputs).quantile(levels) for outputs in self._outputs(X)]
        return _array(torch.cat(found, dim=levels.ndim))

    def predict_distribution(self, X: ArrayLike, num_samples: int | None = None) -> RegressionPrediction:
        """All that the model says of X, in the targets' units: moments, intervals, quantiles, `log_prob(y)`.

        `num_samples` draws of the weights stand in for the estimator's own number of them.
        """
        return self._prediction(torch.cat(list(self._outputs(X, num_samples)), dim=1))

    def _prediction(self, outputs: Tensor) -> RegressionPrediction:
        likelihood = self.posterior_.likelihood
        assert isinstance(likelihood, Gaussian)
        shift, scale = (torch.from_numpy(a).to(outputs.device) for a in (self._y_shift, self._y_scale))
        if self._flat:
            outputs, shift, scale = outputs.squeeze(-1), shift.squeeze(-1), scale.squeeze(-1)
        return likelihood.predictive(outputs).rescaled(shift, scale)


class NoisyClassifier(ClassifierMixin, _NoisyEstimator):  # type: ignore[misc]
    """Bayesian neural network classification; labels of any kind, two classes or more (one is accepted, and certain).

    Features are standardised inside, as by the regressor. Probabilities are averaged over draws of the weights. The
    arguments are those of `NoisyRegressor`, without the observation noise; so are the attributes, with `classes_`
    besides.
    """

    def __init__(
        self,
        posterior: PosteriorName = "kronecker",
        hidden: Sequence[int] = (50,),
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        kl_weight: float = 1.0,
        prior_variance: float = 1.0,
        noise: bool = True,
        mc_samples: int = 1,
        damping: float = 0.0,
        num_samples: int = 100,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
        verbose: bool = False,
    ) -> None:
        self._keep(locals())

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit to features `[rows, features]` and labels `[rows]`."""
        inputs, targets = checked_inputs(self, X, y)
        check_classification_targets(targets)
        self.classes_, labels = np.unique(targets, return_inverse=True)
        self._fit(inputs, labels.reshape(-1).astype(np.int64), len(self.classes_), Categorical(), 0.0)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class of each row."""
        chosen = self.predict_proba(X).argmax(axis=1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Probabilities `[rows, classes]`, in the order of `classes_`."""
        return _array(torch.cat([CategoricalPrediction(outputs).probs for outputs in self._outputs(X)]))

    def predict_distribution(self, X: ArrayLike, num_samples: int | None = None) -> CategoricalPrediction:
        """All that the model says of X, as of the regressor; a class is its place in `classes_`."""
        return CategoricalPrediction(torch.cat(list(self._outputs(X, num_samples)), dim=1))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.double().cpu().numpy()
    return array
