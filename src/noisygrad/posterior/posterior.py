"""A fitted posterior: draw from it, measure it, predict with it, keep it.

q(w) = N(mean, Σ) with Σ = (λ/N) P⁻¹ and P = F̄ + Γ, block by block; blocks without noise are points. All results are
in nats. Conventions: `docs/conventions.md`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noisygrad.archive import not_finite, write_archive
from noisygrad.families.base import DampingMode, Precision, Prior, Statistics
from noisygrad.families.dense import LARGEST as LARGEST_DENSE
from noisygrad.families.kl import kl_divergence, log_prob
from noisygrad.kernels.factorisation import FactorisationError, repairs
from noisygrad.kernels.products import without_autocast
from noisygrad.kernels.switches import full_precision
from noisygrad.likelihoods import Likelihood, check_saveable
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.coverage import Coverage
from noisygrad.posterior.faults import named_error, warn_repaired, whole_number
from noisygrad.posterior.inputs import Call, Inputs, moved
from noisygrad.posterior.modes import evaluating
from noisygrad.posterior.normalisation import norm_batches, own_statistics, running_norms
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import Structure
from noisygrad.posterior.summary import Summary, summary_of
from noisygrad.posterior.weights import FlatWeights, parameter_order
from noisygrad.predictions import Prediction
from noisygrad.priors import FittedPrior

FORMAT = 1
"""The format of a posterior's file."""


class Posterior:
    """The Gaussian posterior over a model's weights; made by `optimizer.posterior()` or `load_posterior`."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        structure: Structure,
        mean: Tensor,
        statistics: Mapping[str, Statistics],
        priors: BlockPriors,
        *,
        num_data: int,
        kl_weight: float,
        damping_mode: DampingMode,
        noise_bound: float = 0.0,
        identity_share: float = 0.0,
    ) -> None:
        self.model = model
        self.likelihood = copy.deepcopy(likelihood)
        self.num_data, self.kl_weight, self.damping_mode = num_data, kl_weight, damping_mode
        self.noise_bound, self.identity_share = noise_bound, identity_share
        """A floor under the Fisher where noise would cost too much; what draws in training had of the identity."""
        self.structure, self.priors = structure, priors
        self.statistics = dict(statistics)
        self._mean = FlatWeights(structure, mean)
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    @property
    def family(self) -> str:
        """The name of the covariance family: "diagonal", "kronecker", "eigen", "tridiagonal", "full" or your own."""
        return self.structure.family.name

    @cached_property
    def mean(self) -> dict[str, Tensor]:
        """The mean as parameter name → tensor."""
        return self._mean.as_dict()

    def coverage(self) -> Coverage:
        """Which block each parameter is in and why; print it."""
        return self.structure.coverage(self.statistics)

    # ---------------------------------------------------------------- the Gaussian

    @cached_property
    def _gammas(self) -> dict[str, Prior]:
        return self.priors.scaled(self.kl_weight / self.num_data)

    @cached_property
    def _precisions(self) -> list[tuple[Block, Precision]]:
        """P of each noisy block."""
        with full_precision(), without_autocast(self._mean.flat.device.type):
            return [(block, self._precision(block)) for block in self.structure.blocks if block.noise]

    def _precision(self, block: Block) -> Precision:
        try:
            with repairs() as found:
                statistics = self.statistics[block.name]
                statistics = statistics.with_floor(self.noise_bound) if self.noise_bound else statistics
                made = statistics.factorise(self._gammas[block.name], 0.0, self.damping_mode)
        except FactorisationError as error:
            raise named_error(error, block.units) from error
        if found:
            warn_repaired(found, block.units, set())
        return made

    def noisy_blocks(self) -> list[tuple[Block, Precision]]:
        """Each block that has noise, with its P: Σ = (λ/N) P⁻¹. Raises for a point estimate, which has none."""
        if not self._precisions:
            raise ValueError("this is a point estimate (noise=False): it has no density, no KL and no covariance")
        return self._precisions

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """One draw of the weights as parameter name → tensor; a point estimate gives its mean."""
        return FlatWeights(self.structure, self._draw(generator)).as_dict()

    def _draw(self, generator: torch.Generator | None) -> Tensor:
        noise = torch.empty_like(self._mean.flat).normal_(generator=generator)
        spread = torch.zeros_like(noise)
        with without_autocast(noise.device.type):
            for block, precision in self._precisions:
                block.write_(spread, precision.sample(block.batched(block.segment(noise))))
        return torch.add(self._mean.flat, spread, alpha=(self.kl_weight / self.num_data) ** 0.5)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Log density of a setting of all weights, as `sample` gives it; one number per replica."""
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        if shapes != self.structure.shapes:
            raise ValueError(
                "log_prob needs a tensor for each trainable parameter, of its name and shape, as sample() gives"
            )
        flat = FlatWeights(self.structure, torch.empty_like(self._mean.flat))
        flat.load_dict_(dict(weights))
        difference = flat.flat - self._mean.flat
        scale = self.num_data / self.kl_weight
        return self._sum(block.total(log_prob(p, block.vector(difference), scale)) for block, p in self.noisy_blocks())

    def kl(self) -> Tensor:
        """KL(q ‖ prior) of the weights in nats, in closed form; one number per replica."""
        return self._sum(self.kl_by_block().values())

    def kl_by_block(self) -> dict[str, Tensor]:
        """The KL of each block: a report of where the posterior has learned something."""
        difference = self._mean.flat - self.priors.mean
        scale = self.num_data / self.kl_weight
        return {
            block.name: block.total(kl_divergence(precision, self._gammas[block.name], block.vector(difference), scale))
            for block, precision in self.noisy_blocks()
        }

    def summary(self) -> Summary:
        """How wide the posterior is, what it cost and how much of it the data determine, block by block; print it."""
        blocks = [(b, self.statistics[b.name], precision, self._gammas[b.name]) for b, precision in self.noisy_blocks()]
        numbers = {name: getattr(self, name) for name in ("num_data", "kl_weight", "noise_bound", "identity_share")}
        return summary_of(blocks, self._mean.flat, self.priors.mean, **numbers)

    def std(self) -> dict[str, Tensor]:
        """Marginal standard deviation of each weight, for small networks (through the dense covariance)."""
        flat = FlatWeights(self.structure, torch.zeros_like(self._mean.flat))
        for block, precision in self.noisy_blocks():
            variance = precision.covariance(block.vector(self._mean.flat)).diagonal(dim1=-2, dim2=-1)
            block.write_(flat.flat, (variance * self.kl_weight / self.num_data).sqrt())
        return flat.as_dict()

    def precision(self) -> Tensor:
        """Dense precision, `[*replicas, n, n]`, in the order of `torch.nn.utils.parameters_to_vector`."""
        return self._dense(lambda block, p: p.to_dense() * (self.num_data / self.kl_weight), "precision")

    def covariance(self) -> Tensor:
        """Dense covariance, in the same order; weights without noise have variance 0."""
        flat, scale = self._mean.flat, self.kl_weight / self.num_data
        return self._dense(lambda block, p: p.covariance(block.vector(flat)) * scale, "covariance")

    def _dense(self, matrix_of: Callable[[Block, Precision], Tensor], what: str) -> Tensor:
        if what == "precision" and len(self.noisy_blocks()) < len(self.structure.blocks):
            raise ValueError("weights without noise have no finite precision; use covariance()")
        flat = self._mean.flat
        if flat.shape[-1] > LARGEST_DENSE:
            raise ValueError(f"a dense {what} over {flat.shape[-1]} weights does not fit in memory")
        dense = flat.new_zeros(*flat.shape, flat.shape[-1])
        places = torch.arange(flat.shape[-1], device=flat.device)
        for block, precision in self.noisy_blocks():
            where = block.vector(places)
            parts = matrix_of(block, precision)
            for index in range(block.num_groups):
                part, at = (parts[..., index, :, :], where[index]) if block.num_groups > 1 else (parts, where)
                dense[..., at.unsqueeze(-1), at] = part
        order = parameter_order(self.structure).to(flat.device)
        return dense[..., order, :][..., order]

    def as_prior(self) -> FittedPrior:
        """The prior of the next fit: `NoisyKFAC(..., prior=posterior.as_prior())`.

        The precision is kept in the structure that the family can have as a prior. Blocks of `NoisyEKFAC`, and of
        `NoisyKFAC` under exact damping, are approximated by a Kronecker product (`Precision.as_prior`), others are kept
        unchanged. Blocks without noise keep the prior they had.
        """
        scale = self.num_data / self.kl_weight
        fitted = {block.name: precision.as_prior().scaled(scale) for block, precision in self._precisions}
        blocks = {b.name: fitted.get(b.name, self.priors.blocks[b.name]) for b in self.structure.blocks}
        return FittedPrior(self.family, self._mean.as_dict(like_parameters=False), blocks)

    # ---------------------------------------------------------------- data

    @torch.no_grad()
    def elbo(
        self,
        loader: Iterable[tuple[Inputs, Tensor]],
        num_samples: int = 10,
        generator: torch.Generator | None = None,
        *,
        norm_data: Inputs | None = None,
    ) -> Tensor:
        """The evidence lower bound, −N · E_q[nll] − KL, in nats; `loader` yields (x, y) batches of the data.

        The KL is that of weights and noise, whatever `kl_weight` is. The expectation is over `num_samples` draws; one
        number per replica. `norm_data` is as in `predict`, all of it one batch. Batches may end in weights of examples
        and a mask. With weights, weights of classes or smoothed labels there is no likelihood that it bounds.
        """
        return self._fit_less_kl(1.0, loader, num_samples, generator, norm_data)

    @torch.no_grad()
    def objective(
        self,
        loader: Iterable[tuple[Inputs, Tensor]],
        num_samples: int = 10,
        generator: torch.Generator | None = None,
        *,
        norm_data: Inputs | None = None,
    ) -> Tensor:
        """−N · E_q[nll] − λ KL, which training climbs; arguments as in `elbo`, which it is for a `kl_weight` λ of 1.

        No bound of the evidence otherwise: do not compare different `kl_weight` by it.
        """
        return self._fit_less_kl(self.kl_weight, loader, num_samples, generator, norm_data)

    def _fit_less_kl(
        self,
        weight: float,
        loader: Iterable[tuple[Inputs, Tensor]],
        num_samples: int,
        generator: torch.Generator | None,
        norm_data: Inputs | None,
    ) -> Tensor:
        kl = self.kl() + self.likelihood.kl().to(self._mean.flat)
        nll = self.expected_nll(loader, num_samples, generator, norm_data=norm_data)
        return -self.num_data * nll - weight * kl

    @torch.no_grad()
    def expected_nll(
        self,
        loader: Iterable[tuple[Inputs, Tensor]],
        num_samples: int = 10,
        generator: torch.Generator | None = None,
        *,
        norm_data: Inputs | None = None,
    ) -> Tensor:
        """E_q of the negative log-likelihood per datum (not that of the predictive mixture), per replica.

        Batches may end in weights of examples and a mask, as closures of `step` do.
        """
        num_samples = whole_number("num_samples", num_samples)
        device = self._mean.flat.device
        total, count = torch.zeros(self.structure.replicas, device=device), torch.zeros((), device=device)
        likelihood, lead = self.likelihood, len(self.structure.replicas)
        with evaluating(self.model):
            draws = list(self._draws(num_samples, generator, norm_data, None))
            given: list[Tensor | None]
            for x, y, *given in loader:
                call, target = Call.of(x).moved(device), moved(y, device)
                given = [None if part is None else moved(part, device) for part in given]  # noqa: PLW2901
                for index, (weights, buffers) in enumerate(draws):
                    output = self._forward(weights, buffers, call)
                    counted, clean = likelihood.counted(output, target, *given)
                    likelihood.check(output, clean)
                    if counted is None:
                        log_prob = likelihood.log_prob(output, clean).sum(-1)
                        examples = torch.tensor(target.shape[lead], device=device)
                    else:
                        log_prob = counted.summed(likelihood.terms(output, clean))
                        examples = counted.total
                    total = total - log_prob
                    if index == 0:
                        count = count + examples
        if not bool((count > 0).all()):
            raise ValueError("the loader is empty")
        return total / (count * num_samples)

    @torch.no_grad()
    def predict(
        self,
        x: Inputs,
        num_samples: int = 100,
        *,
        batch_size: int | None = None,
        norm_data: Inputs | None = None,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """What the model says of `x`, averaged over `num_samples` draws of the weights, in evaluation mode.

        Args:
            x: Inputs: a tensor, or a tuple or dictionary of tensors for `model(*x)` or `model(**x)`.
            num_samples: Draws of the weights. A point estimate needs, and uses, one.
            batch_size: Examples at a time; every batch sees the same draws.
            norm_data: Some hundred inputs of the training set, drawn at random, for a model with batch normalisation:
                each draw is then normalised by the statistics that it has on them (the mean over batches of
                `batch_size`), as in training, and not by the running ones, which are averages over draws and may
                fit none of a wide posterior's. That goes for layers whose running statistics you have frozen, too.
            generator: Of the draws.
        """
        outputs = self.outputs(x, num_samples, batch_size=batch_size, norm_data=norm_data, generator=generator)
        return self.likelihood.predictive(outputs)

    @torch.no_grad()
    def outputs(
        self,
        x: Inputs,
        num_samples: int = 100,
        *,
        batch_size: int | None = None,
        norm_data: Inputs | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The network's raw outputs for each draw, `[num_samples, *replicas, batch, ...]`; else as `predict`."""
        num_samples = whole_number("num_samples", num_samples) if self._precisions else 1
        call, device = Call.of(x), self._mean.flat.device
        size = None if batch_size is None else whole_number("batch_size", batch_size)
        parts = [call] if size is None else list(call.batches(size, self._examples_dim))
        lead = len(self.structure.replicas)
        with evaluating(self.model):
            found = []
            for weights, buffers in self._draws(num_samples, generator, norm_data, size):
                outputs = [self._forward(weights, buffers, part.moved(device)) for part in parts]
                found.append(torch.cat(outputs, dim=lead))
        return torch.stack(found)

    def _draws(
        self, count: int, generator: torch.Generator | None, norm_data: Inputs | None, batch_size: int | None
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Weights and buffers of each draw: the model's own, or with statistics of the draw's."""
        norms, parts = {}, []
        if norm_data is not None:
            norms = running_norms(self.model)
            parts = norm_batches(Call.of(norm_data), batch_size, self._examples_dim)
        for _ in range(count):
            weights, buffers = self.sample(generator), self._buffers
            if norms:
                here = (part.moved(self._mean.flat.device) for part in parts)
                buffers = own_statistics(norms, buffers, here, partial(self._forward, weights))
            yield weights, buffers

    def _examples_dim(self, x: Tensor) -> int:
        return 0 if x.dim() <= 2 else len(self.structure.replicas)

    def _forward(self, weights: dict[str, Tensor], buffers: dict[str, Tensor], call: Call) -> Tensor:
        output = functional_call(self.model, (weights, buffers), call.args, call.kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(f"the model must return one tensor, got {type(output).__name__}")
        return output

    def _sum(self, values: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(values)).sum(dim=0)

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; read it with `load_posterior(path, model)`.

        Raises ValueError, and leaves a file that is there as it is, where anything is NaN or infinite: it could not be
        read back. A buffer may have infinite entries, as masks do, where the model that it is read for has them too.
        """
        check_saveable(self.likelihood)  # what could not be read back is not written
        blocks, priors = self.structure.blocks, self.priors.blocks
        tensors: dict[str, Tensor] = {"mean": self._mean.flat, "prior_mean": self.priors.mean}
        for part, records in (("statistics", self.statistics), ("prior", priors)):
            for block in blocks:
                found = records[block.name].tensors()
                tensors |= {f"{part}/{block.name}/{name}": tensor for name, tensor in found.items()}
        tensors |= {f"likelihood/{name}": tensor for name, tensor in self.likelihood.state_dict().items()}
        buffers = {f"buffer/{name}": tensor for name, tensor in self._buffers.items()}
        tensors |= buffers
        tensors |= {f"frozen/{name}": parameter for name, parameter in self.structure.frozen.items()}
        if bad := not_finite(tensors, buffers):
            raise ValueError(f"{bad!r} of the posterior has NaN or infinite entries: it is not written to {path}")
        noise = {block.group: block.noise for block in blocks}
        header = {
            "format": FORMAT,
            "family": self.family,
            "num_data": self.num_data,
            "kl_weight": self.kl_weight,
            "damping_mode": self.damping_mode,
            "noise_bound": self.noise_bound,
            "identity_share": self.identity_share,
            "likelihood": {"name": type(self.likelihood).__name__, "config": self.likelihood.config()},
            "parameters": {name: list(shape) for name, shape in self.structure.shapes.items()},
            "groups": {slot.parameter: b.group for b in blocks for u in b.units for slot in u.slots},
            "noise": [noise.get(group, True) for group in range(max(noise) + 1)],
            "blocks": [{"name": b.name, "prior": priors[b.name].settings(), "size": b.size} for b in blocks],
        }
        write_archive(path, "posterior", header, tensors)
