"""The optimiser: draw weights from the posterior, take a natural-gradient step on its mean, keep its Fisher.

Algorithms 1 and 2 of the paper are one algorithm, `NoisyOptimizer.step`; the families differ only in their blocks.
Nothing in a step waits for a GPU: what a CPU checks at once, a GPU masks on the device and checks at the next refresh
of the factors. Conventions: `docs/conventions.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from noisygrad.curvature.capture import Capture, unwrapped
from noisygrad.curvature.fisher import FisherKind
from noisygrad.distributed import Ranks
from noisygrad.families.base import DampingMode
from noisygrad.likelihoods import Likelihood
from noisygrad.optim.closures import Closure, evaluate
from noisygrad.optim.draws import Draw, Pending
from noisygrad.optim.execution import GraphCache
from noisygrad.optim.factors import Factors
from noisygrad.optim.finite import FiniteGuard
from noisygrad.optim.generators import fill_normal_, make_generators, undone_on_failure
from noisygrad.optim.groups import GroupPatterns, check_rates
from noisygrad.optim.losses import measure_loss
from noisygrad.optim.mean import DeviceScalars, MeanStep
from noisygrad.optim.options import FisherPass, FisherStart, MomentumMode, Options, Schedule, check_arguments
from noisygrad.optim.running import RunningStatistics
from noisygrad.optim.state import load_state, save_state
from noisygrad.optim.stepping import apply_step, dampings
from noisygrad.posterior.blocks import Family
from noisygrad.posterior.coverage import Coverage
from noisygrad.posterior.posterior import Posterior
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import build_structure, copied
from noisygrad.posterior.weights import FlatWeights
from noisygrad.priors import FittedPrior, PriorVariance


class NoisyOptimizer(torch.optim.Optimizer):
    """What the four optimisers share, with all their arguments; use one of the four.

    Args:
        model: the network, perhaps inside DistributedDataParallel or `torch.compile`.
        likelihood: what its outputs mean; its noise, where it has any, is learned along.
        num_data: N, the size of the training set.
        lr: α̃, the step size of the mean; a tensor follows a captured graph.
        kl_weight: λ; 1 is Bayes, below 1 a sharper posterior.
        prior_variance: η, for all weights (1 by default) or by patterns of parameter names; inf for no prior.
        prior: `posterior.as_prior()` of an earlier fit, in place of `prior_variance`.
        damping: γ_ex, added to the Fisher for the step only.
        damping_mode: how a Kronecker block adds the prior: "factored" (eq. 11) or "exact" (eigenbasis, dearer).
        fisher_decay: 1 − β̃, or a function from the step to it.
        fisher_floor: added to the diagonal of the Fisher, as measured: bounds the noise of a network that is sure.
        fisher_start: what becomes of the identity that the Fisher starts from: "forgotten" as soon as there are
            statistics, or "fading" as `fisher_decay` lets it, which gives a deep network a gentle start.
        momentum: decay of the moving average of gradients, or of the velocity.
        momentum_mode: "average" (before preconditioning, bias-corrected) or "heavy_ball" (after clipping).
        stats_every: T_stats, steps between statistics; None for the family's own default.
        factor_every: T_inv, steps between factorisations; None for the family's own default.
        stats_batch: statistics from at most so many examples of a batch (its first); None for all.
        kl_clip: c of the trust region, or a function from the step to it; None for none.
        mc_samples: weight samples of `step(closure)`.
        noise: False gives the point-estimate method (K-FAC, natural Adam) with γ_in as weight decay.
        fisher: "sampled" targets, "exact" output Fisher or "empirical".
        fisher_pass: "same" forward as the loss, or a "fresh" one with new weights and BatchNorm in evaluation mode.
        groups: patterns of parameter names with their own lr, momentum, damping or noise.
        seed: of the optimiser's own generator; one for each replica, or for the first of them.
        same_draw_on_all_ranks: draw the same weights in all processes of a distributed training.
        capturable: keep every group's lr as a tensor on the device, as torch.optim does, so that a captured step
            follows a scheduler. Schedules of `kl_clip` and `fisher_decay` are read when the step is captured.
    """

    family: ClassVar[Family]
    default_stats_every: ClassVar[int] = 1
    default_factor_every: ClassVar[int] = 1
    stats_limit: int | None = None
    forward_limit: int | None = None
    """How many examples of a batch there was memory for: for statistics, and for a forward pass of their own."""
    warned_uncalled_layers = False
    _step_supports_amp_scaling = True  # a GradScaler hands over its scale and its verdict instead of waiting for them

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        num_data: int,
        lr: float | Tensor = 1e-2,
        kl_weight: float = 1.0,
        prior_variance: PriorVariance | None = None,
        prior: FittedPrior | None = None,
        damping: float = 0.0,
        damping_mode: DampingMode = "factored",
        fisher_decay: Schedule = 0.99,
        fisher_start: FisherStart = "forgotten",
        fisher_floor: float = 0.0,
        momentum: float = 0.9,
        momentum_mode: MomentumMode = "average",
        stats_every: int | None = None,
        factor_every: int | None = None,
        stats_batch: int | None = None,
        kl_clip: Schedule | None = None,
        mc_samples: int = 1,
        noise: bool = True,
        fisher: FisherKind = "sampled",
        fisher_pass: FisherPass = "same",
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int | Sequence[int] | None = None,
        same_draw_on_all_ranks: bool = False,
        capturable: bool = False,
    ) -> None:
        self.options = Options(
            num_data=num_data,
            kl_weight=kl_weight,
            fisher_decay=fisher_decay,
            fisher_start=fisher_start,
            fisher_floor=fisher_floor,
            stats_every=self.default_stats_every if stats_every is None else stats_every,
            factor_every=self.default_factor_every if factor_every is None else factor_every,
            stats_batch=stats_batch,
            kl_clip=kl_clip,
            mc_samples=mc_samples,
            momentum_mode=momentum_mode,
            fisher=fisher,
            fisher_pass=fisher_pass,
            damping_mode=damping_mode,
        )
        prior_variance = check_arguments(model, likelihood, prior_variance, prior, damping_mode, self.family)
        defaults = {"lr": lr, "momentum": momentum, "damping": damping, "noise": noise}
        patterns = GroupPatterns(groups, defaults)
        self.ranks = Ranks(model)
        self.module = model
        """The model as it was given: wrapped, where it was."""
        self.model = unwrapped(model)
        noisy = [bool(settings["noise"]) for settings in patterns.settings]
        self.canonical_structure = build_structure(self.model, self.family, patterns.of, noisy)
        self.structure = self.canonical_structure.in_memory_order()
        used = sorted({block.group for block in self.structure.blocks})
        super().__init__(patterns.param_groups(self.structure.parameters, used), defaults)
        if capturable:
            for group in self.param_groups:
                device = group["params"][0].device
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
        self._used, self._parts = used, [self.structure.group_part(index) for index in used]
        parameters = list(self.structure.parameters.values())
        self.device = parameters[0].device
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        self._narrow = any(p.dtype != self.dtype for p in parameters)
        self.likelihood = likelihood
        likelihood.bind(self.structure.replicas, self.device, self.dtype)

        self.mean = self._zeros()
        self.mean.read_parameters_()
        self._gradient = self._zeros()
        self.mean_step = MeanStep(momentum_mode, self.mean.flat, len(used))
        self._pending = Pending()
        self._scale = (self.options.kl_weight / self.options.num_data) ** 0.5
        usual = BlockPriors.build(self.canonical_structure, prior_variance, prior, self.dtype, self.device)
        self.priors = usual.to_memory(self.structure)
        gamma = self.priors.scaled(self.options.kl_weight / self.options.num_data)
        self.factors = Factors(self.structure, gamma, self.options, self.ranks, self.dtype, self.device)
        self.factors.refresh(dampings(self))
        self._noise, self._sample = self._place_for_draws()
        self._others = [
            (unit, self.structure.parameters[unit.slots[0].parameter])
            for unit in self.structure.units
            if unit.kind == "other"
        ]
        self.running = RunningStatistics(self.model, self.device)
        self.guard = FiniteGuard(self.structure, self.device, self.running)
        self._replays = GraphCache(self.device, differentiates=False)
        self._scalars = DeviceScalars(self.mean.flat)
        self._draw: Draw | None = None
        self._steps, self._in_closure = 0, False
        self._same_draw = same_draw_on_all_ranks
        count = max(1, torch.Size(self.structure.replicas).numel())
        self.generators = make_generators(seed, count, self.device, self.ranks, same_draw=same_draw_on_all_ranks)

    # ---------------------------------------------------------------- what a user calls

    @contextmanager
    def sampled(self) -> Iterator[Draw]:
        """Weights drawn from the posterior inside, the mean again outside, whatever happens.

        `draw.nll(model(x), y).backward()` inside; `optimizer.step()` outside. Several contexts before a step are
        several weight samples.
        """
        if self.options.fisher_pass == "fresh":
            raise RuntimeError('fisher_pass="fresh" runs the model by itself: use step(closure) instead of sampled()')
        self._check_still_valid()
        with self._drawn(True) as (draw, _):
            yield draw

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Closure) -> Tensor: ...

    # A step changes far too much beside tensors to be compiled along with what calls it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | None:
        """Update the mean and the Fisher from the draws since the last step.

        With a closure that returns `(output, target)`, the draws are made here, `mc_samples` of them, and the mean loss
        is returned. A closure that calls `backward` itself and returns a loss works too, with the empirical Fisher.
        Gradients are consumed: no `zero_grad` is needed. Raises `NonFiniteError` and changes nothing if the loss was
        not finite (on a GPU: masks the step, and raises at the next refresh of the factors).
        """
        if self._draw is not None:
            raise RuntimeError("step() inside sampled(): leave the context first, which ends the draw")
        self._check_still_valid()
        if closure is not None:
            self._drop()
            self._in_closure = True
            try:
                evaluate(self, closure)
            finally:
                self._in_closure = False
        pending = self._pending
        if pending.draws == 0:
            raise RuntimeError("step() has nothing to work with: no sampled() context was entered since the last step")
        if pending.expected_statistics and pending.calls == 0:
            raise RuntimeError(
                "this step was due to take statistics, but no loss was computed by draw.nll(output, target): the "
                "Fisher, and so the width of the posterior, would be wrong"
            )
        loss = None if closure is None else pending.mean_loss()
        try:
            apply_step(self, self._steps + 1)
        except BaseException:
            self.mean.write_parameters_()
            for name in ("grad_scale", "found_inf"):  # a GradScaler's, which takes them away after a success only
                vars(self).pop(name, None)
            raise
        finally:
            self._consume()
        self.running.forget()
        self._steps += 1
        return loss

    def _check_still_valid(self) -> None:
        """Raise if a parameter was frozen, or a learning rate made senseless, since the optimiser was made."""
        self.structure.check_trainable()
        check_rates(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients and everything pending from draws since the last step.

        Inside a closure it does nothing: `step` has done it before, and there may be several draws. Inside `sampled()`
        it raises once there is a loss, whose statistics it would drop.
        """
        if self._in_closure:
            return
        if self._draw is not None and self._draw.has_loss:
            raise RuntimeError(
                "zero_grad() inside sampled() would drop what the loss has left for the step. Take it out: step() "
                "consumes gradients, so that none is needed; to give up earlier draws, call it before sampled()"
            )
        self._drop()
        super().zero_grad(set_to_none)

    def _consume(self) -> None:
        """`zero_grad` without its profiling: it runs in every step."""
        for parameter in self.structure.parameters.values():
            parameter.grad = None
        self._pending = Pending()

    def _drop(self) -> None:
        """Give up what is pending, and what it did to running statistics."""
        self.running.restore()
        self._consume()

    def posterior(self) -> Posterior:
        """A snapshot of the posterior: mean, covariance, prior, the noise of the likelihood. Later steps leave it.

        Raises `NonFiniteError` if a GPU has masked a step since the last refresh.
        """
        self.guard.check()
        if self._draw is None:  # else the parameters are a sample, and the mean was read before
            self._read_mean()
        return Posterior(
            self.model,
            self.likelihood,
            self.canonical_structure,
            copied(self.mean.flat, self.structure),
            self.factors.snapshot(),
            self.priors.from_memory(self.structure),
            num_data=self.options.num_data,
            kl_weight=self.options.kl_weight,
            damping_mode=self.options.damping_mode,
        )

    def register_with(self, graph: torch.cuda.CUDAGraph) -> None:
        """Before capturing a step in a CUDA graph: let its replays draw new numbers from the optimiser's generators."""
        for generator in self.generators:
            graph.register_generator_state(generator)

    def coverage(self) -> Coverage:
        """Which block each parameter got and why; print it."""
        return self.structure.coverage(self.factors.statistics)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides the model, as tensors and numbers in nested dictionaries."""
        return save_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; raises before anything changes if it is of another family or model."""
        load_state(self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported after construction: the posterior's blocks are fixed then. Use `groups`."""
        if hasattr(self, "_steps"):
            raise RuntimeError("param groups are fixed at construction; use the argument `groups`")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Neither copied nor pickled: its parameters are those of a model, which would not come along."""
        raise TypeError(
            "a noisy optimiser can be neither copied nor pickled. Copy or save the model and state_dict(), make a new "
            "optimiser of the other model and give it the state with load_state_dict()"
        )

    # ---------------------------------------------------------------- drawing

    @contextmanager
    def _drawn(self, with_statistics: bool, *, restore: bool = True) -> Iterator[tuple[Draw, Capture | None]]:
        """A draw; without `restore` the mean comes back only after a failure, since a step is to write it anyway."""
        if self._draw is not None:
            raise RuntimeError("sampled() contexts cannot be nested")
        due = with_statistics and self.options.stats_due(self._steps + 1)
        capture = Capture(self.structure.layers) if due else None
        draw = Draw(lambda output, target: measure_loss(self, capture, output, target))
        if self._pending.draws == 0:
            self.running.keep()
        with undone_on_failure(self.generators, self._drop):
            if self.factors.noisy:
                self._pending.own_buffer()
                fill_normal_(self._noise, self.generators)
            self._draw_weights()  # where this fails, the user's weights are still there
            self._draw, failed = draw, True
            try:
                if capture is None:
                    yield draw, None
                else:
                    with capture:
                        yield draw, capture
                failed = False
            finally:
                self._draw = None
                draw.close()
                if self.factors.noisy and (restore or failed):
                    self.mean.write_parameters_()
            draw.check_differentiated()
        self._pending.add_draw(self.mean.flat if self._sample is None else self._sample.flat)
        self._pending.expected_statistics |= due

    def _draw_weights(self) -> None:
        """M from the parameters, and W = M + sqrt(λ/N) P^(−1/2) ε into them."""
        if not self.factors.noisy:
            self._read_mean()
            return
        self.mean.find_parameters()
        self._replays.run("draw", self._memory(), self._perturb)

    def _perturb(self) -> None:
        self._read_mean()
        assert self._sample is not None
        self.factors.perturb(self.mean.flat, self._noise, self._scale, out=self._sample.flat)
        self._sample.write_parameters_()

    def _memory(self) -> tuple[int, ...]:
        """Changes whenever factors or parameters have moved to another place of memory."""
        return (self.factors.generation, self.structure.generation)

    def _read_mean(self) -> None:
        """The parameters are the mean; the digits that narrow parameters cannot hold are kept as long as they agree."""
        if not self._narrow:
            self.mean.read_parameters_()
            return
        kept, shown = self.mean.flat.clone(), self.mean.rounded()
        self.mean.read_parameters_()
        self.mean.flat.copy_(torch.where(self.mean.flat == shown, kept, self.mean.flat))

    def _place_for_draws(self) -> tuple[Tensor, FlatWeights | None]:
        """Noise and the weights drawn with it, in one place where they can be: each is done with before the other."""
        if not self.factors.noisy:
            return self.mean.flat[..., :0], None
        noise = self.mean.flat.new_zeros(*self.structure.replicas, self.factors.noise_size)
        shared = noise[..., : self.structure.size]
        return noise, FlatWeights(self.structure, shared) if shared.is_contiguous() else self._zeros()

    def _zeros(self) -> FlatWeights:
        return FlatWeights.zeros(self.structure, self.dtype, self.device)
