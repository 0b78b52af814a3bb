"""The optimiser: draw weights from the posterior, take a natural-gradient step on its mean, keep its Fisher.

Here is the shell that a user holds: param groups, `step`, `sampled`, the state. What a step is made of belongs to small
objects: the weights that are drawn (`draw`), what batches leave (`measurement`), the step itself (`update`). Nothing in
it waits for a GPU: what a CPU checks at once, a GPU masks and checks at the next refresh. See `docs/conventions.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from noisygrad.algorithm.start import Safeguard
from noisygrad.curvature.capture import not_compiled, unwrapped
from noisygrad.curvature.fisher import FisherKind
from noisygrad.distributed import Group, Ranks
from noisygrad.families.base import DampingMode
from noisygrad.likelihoods import Likelihood
from noisygrad.optim.accumulated import Accumulated
from noisygrad.optim.arguments import explain_arguments
from noisygrad.optim.assembly import assemble
from noisygrad.optim.draw import Draw, Drawing
from noisygrad.optim.finite import Scaling
from noisygrad.optim.measurement import Closure, unpacked
from noisygrad.optim.options import FisherPass, FixedGroups, GroupPatterns, Options, Schedule, check_arguments
from noisygrad.optim.state import OptimizerState, blocks_of_parameters
from noisygrad.optim.update import ParamGroups, Transaction
from noisygrad.posterior.coverage import Coverage
from noisygrad.posterior.posterior import Posterior
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import build_structure, copied
from noisygrad.posterior.weights import ModelParts
from noisygrad.priors import FittedPrior, PriorVariance


class NoisyOptimizer(torch.optim.Optimizer):
    """What the optimisers share, with all their arguments; use one of them.

    Args:
        model: the network, perhaps inside DistributedDataParallel or `torch.compile`.
        likelihood: what its outputs mean; its noise, where it has any, is learned along.
        num_data: N, the size of the training set.
        lr: α̃, the step size of the mean; a tensor follows a captured graph.
        kl_weight: λ; 1 is the Bayesian posterior; smaller is narrower.
        prior_variance: η, for all weights (1 by default) or by patterns of parameter names; inf for none.
        prior: `posterior.as_prior()` of an earlier fit, in its place.
        damping: γ_ex, added to the Fisher for the step only.
        damping_mode: how a Kronecker block adds the prior: "factored" (eq. 11) or "exact" (eigenbasis, slower).
        fisher_decay: 1 − β̃, or a function from the step to it.
        fisher_floor: added to the diagonal of the Fisher, as measured.
        safeguard: how the identity fades that steadies the first draws: "brief" or, slower, "fading".
        noise_limit: nats that draws may cost for each part of a target; bounds the noise of networks large for their
            data, without effect on models that their data determine. None for no bound.
        momentum: decay of the moving average of gradients, or of the velocity.
        momentum_mode: "average" (before preconditioning, bias-corrected) or "heavy_ball" (after clipping).
        stats_every: T_stats, steps between statistics; None for the family's own default.
        factor_every: T_inv, steps between factorisations; None for the family's own default.
        stats_batch: statistics from at most this many examples of a batch (its first); None for all.
        kl_clip: c of the trust region for each part of a target, or a function from the step to it; None for none.
        mc_samples: weight samples of `step(closure)`.
        noise: False gives the point-estimate method (K-FAC, natural Adam) with γ_in as weight decay.
        fisher: "sampled" targets, "exact" output Fisher or "empirical".
        fisher_pass: "same" forward as the loss, or a "fresh" one with new weights and BatchNorm in evaluation mode.
        groups: patterns of parameter names with their own lr, momentum, damping or noise.
        seed: of its own generator; one for each replica, or for the first of them.
        same_draw_on_all_ranks: draw the same weights in all processes.
        process_group: the processes that train together, all of which make the optimiser; None for those of the
            model's DistributedDataParallel, or else for all; "alone" for this process by itself.
        capturable: keep every group's lr as a tensor on the device, so that a captured step follows a scheduler;
            schedules of `kl_clip` and `fisher_decay` are read when the step is captured.
    """

    family: ClassVar[str] = ""
    """The name of the covariance family."""
    default_stats_every: ClassVar[int] = 1
    default_factor_every: ClassVar[int] = 1
    _step_supports_amp_scaling = True  # a GradScaler hands over its scale and its verdict instead of waiting for them

    @explain_arguments
    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        num_data: int,
        lr: float | Tensor = 0.1,
        kl_weight: float = 1.0,
        prior_variance: PriorVariance | None = None,
        prior: FittedPrior | None = None,
        damping: float = 0.0,
        damping_mode: DampingMode = "factored",
        fisher_decay: Schedule = 0.99,
        safeguard: Safeguard = "brief",
        noise_limit: float | None = 0.03,
        fisher_floor: float = 0.0,
        momentum: float = 0.9,
        momentum_mode: str = "average",
        stats_every: int | None = None,
        factor_every: int | None = None,
        stats_batch: int | None = None,
        kl_clip: Schedule | None = 1e-3,
        mc_samples: int = 1,
        noise: bool = True,
        fisher: FisherKind = "sampled",
        fisher_pass: FisherPass = "same",
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int | Sequence[int] | None = None,
        same_draw_on_all_ranks: bool = False,
        process_group: Group = None,
        capturable: bool = False,
    ) -> None:
        self.options = Options(
            num_data=num_data,
            kl_weight=kl_weight,
            fisher_decay=fisher_decay,
            safeguard=safeguard,
            noise_limit=noise_limit,
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
        self.ranks = Ranks(model, process_group)
        self.module = model
        """The model as it was given: wrapped, where it was."""
        self.model = unwrapped(model)
        noisy = [bool(settings["noise"]) for settings in patterns.settings]
        self._canonical_structure = build_structure(self.model, self.family, patterns.of, noisy)
        """Every parameter row by row, as a posterior has it."""
        self.structure = self._canonical_structure.in_memory_order()
        used = sorted({block.group for block in self.structure.blocks})
        super().__init__(patterns.param_groups(self.structure.parameters, used), defaults)
        if capturable:
            for group in self.param_groups:
                device = group["params"][0].device
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
        self.state.update(blocks_of_parameters(self.structure))
        parameters = list(self.structure.parameters.values())
        self.device = parameters[0].device
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        self.likelihood = likelihood
        likelihood.bind(self.structure.replicas, self.device, self.dtype)
        canonical = BlockPriors.build(self._canonical_structure, prior_variance, prior, self.dtype, self.device)
        self.priors = canonical.to_memory(self.structure)
        self.update = assemble(
            self.model,
            self.structure,
            self.priors,
            likelihood,
            self.options,
            ParamGroups(self.param_groups, used, [self.structure.group_part(index) for index in used]),
            seed=seed,
            ranks=self.ranks,
            same_draw=same_draw_on_all_ranks,
        )
        self.algorithm, self.weights = self.update.algorithm, self.update.weights
        self.generators = self.weights.generators
        self.measurement, self.guard, self.running = self.update.measurement, self.update.guard, self.update.running
        self.covariance = self.algorithm.covariance
        self.transaction = Transaction(self.update, self.structure)
        self._parts = ModelParts(self.model)
        self._groups = FixedGroups(self.param_groups, self.model)
        self._state = OptimizerState(
            kind=type(self).__name__,
            structure=self.structure,
            parts=self.update,
            priors=self.priors,
            same_draw=same_draw_on_all_ranks,
        )

    def sampled(self) -> Drawing:
        """Weights drawn from the posterior inside, the mean again outside, whatever happens.

        `draw.nll(model(x), y).backward()` inside; `optimizer.step()` outside. Several contexts before a step are
        several weight samples. Where one fails, all of them are given up: the step has not begun.
        """
        return Drawing(self._enter, self.transaction.leave)

    def _enter(self, drawing: Drawing) -> Draw:
        if self.options.fisher_pass == "fresh":
            raise RuntimeError('fisher_pass="fresh" runs the model by itself: use step(closure) instead of sampled()')
        if self.transaction.is_drawing():
            raise RuntimeError("sampled() contexts cannot be nested")
        self.check_still_valid()
        self.transaction.watch.check(self.accumulated)
        return self.transaction.enter(drawing)

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Closure) -> Tensor: ...

    # A step changes far too much beside tensors to be compiled along with what calls it.
    @not_compiled
    def step(self, closure: Closure | None = None) -> Tensor | None:
        """Update the mean and the Fisher from the draws since the last step.

        With a closure that returns `(output, target)`, the draws are made here, `mc_samples` of them, and the mean loss
        is returned; weights of examples and a mask may follow, as in `draw.nll`. A closure that calls `backward` itself
        and returns a loss works too, with the empirical Fisher; after draws it may only do what frameworks do before a
        step, such as clipping. Gradients are consumed: no `zero_grad` is needed. Raises `NonFiniteError` and changes
        nothing if the loss was not finite (on a GPU: masks the step, and raises at the next refresh of the factors).
        Whatever else ends it, all is as before the first draw, or as after the step.
        """
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        observed = hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or _profiler_enabled()
        # A class of the user's with a step of its own has torch's wrapper around that.
        observed = observed and type(self).step is NoisyOptimizer.step
        return (self._observed_step if observed else self._step)(closure)

    step.hooked = True  # type: ignore[attr-defined]  # no wrapper for hooks that are seldom there: 10 µs

    def _step(self, closure: Closure | None = None) -> Tensor | None:
        if self.transaction.is_drawing():
            raise RuntimeError("step() inside sampled(): leave the context first, which ends the draw")
        self.check_still_valid()
        transaction = self.transaction
        if closure is not None and not self.accumulated.draws:
            transaction.watch.check(self.accumulated)
        try:
            transaction.begin()
            with torch.no_grad():
                if closure is not None:
                    self._evaluate(closure)
                loss = None if closure is None else self.accumulated.mean_loss()
                transaction.make(Scaling.of(vars(self), self.accumulated.unscaled))
            transaction.interrupts.release()
        except BaseException:
            transaction.give_up()
            for name in ("grad_scale", "found_inf"):  # a GradScaler's, which takes them away after a success only
                vars(self).pop(name, None)
            raise
        return loss

    _observed_step = torch.optim.Optimizer.profile_hook_step(_step)

    def check_still_valid(self) -> None:
        """Raise if the model's parameters are others, or a param group has senseless numbers, since construction."""
        if self._parts.changed():
            self.structure.check_unchanged(self.model)
            self._parts.accept()
        self._groups.check(self.param_groups)

    def unscale_(self, scaler: torch.amp.GradScaler) -> None:
        """`scaler.unscale_(optimizer)`, to be called in its place: so the step knows what gradients lack."""
        scaler.unscale_(self)
        self.accumulated.unscaled = scaler.scale(torch.ones((), device=self.device))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients and everything pending from draws since the last step; does nothing inside a closure.

        Inside `sampled()` it raises once there is a loss, whose statistics it would drop.
        """
        if self.transaction.in_closure:
            return
        if self.transaction.is_drawing() and self.weights.current is not None and self.weights.current.has_loss:
            raise RuntimeError(
                "zero_grad() inside sampled() would drop what the loss has left for the step. Take it out: step() "
                "consumes gradients, so that none is needed; to give up earlier draws, call it before sampled()"
            )
        self.transaction.drop()
        super().zero_grad(set_to_none)

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return self.transaction.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.transaction.steps = steps

    @property
    def accumulated(self) -> Accumulated:
        """What the draws since the last step have left for the next."""
        return self.transaction.accumulated

    def posterior(self) -> Posterior:
        """A snapshot of the posterior: mean, covariance, prior, the noise of the likelihood. Later steps leave it.

        Raises `NonFiniteError` if a GPU has masked a step since the last refresh.
        """
        self.guard.check()
        if self.weights.current is None:  # else the parameters are a sample, and the mean was read before
            self.weights.check_alone()
            self.weights.read_mean_()
        return Posterior(
            self.model,
            self.likelihood,
            self._canonical_structure,
            copied(self.weights.mean.flat, self.structure),
            self.covariance.fisher.snapshot(),
            self.priors.from_memory(self.structure),
            **{name: getattr(self.options, name) for name in ("num_data", "kl_weight", "damping_mode")},
            noise_bound=float(self.covariance.bound),
            identity_share=float(self.covariance.identity_share),
        )

    def register_with(self, graph: torch.cuda.CUDAGraph) -> None:
        """Before capturing a step in a CUDA graph: let its replays draw new numbers from the optimiser's generators."""
        for generator in self.generators:
            graph.register_generator_state(generator)

    def coverage(self) -> Coverage:
        """Which block each parameter got and why; print it."""
        return self.structure.coverage(self.covariance.statistics)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides the model, as tensors and numbers in nested dictionaries.

        Raises RuntimeError inside a draw or a step, where the model holds drawn weights and the state may be half done.
        """
        if self.transaction.is_drawing() or self.transaction.interrupts.active:
            raise RuntimeError(
                "state_dict() inside a draw or a step: the model holds drawn weights there, which would be taken for "
                "the mean. Save after step(); a handler of a signal should only take note, for the loop to save"
            )
        self.guard.check()
        return self._state.save(self.param_groups, self.steps)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; raises before anything changes if it is of another family or model."""
        self.steps = self._state.load(state_dict, self.param_groups)
        self.transaction.consume()
        self.guard.divergence.restart()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported after construction: use `groups`."""
        if hasattr(self, "transaction"):
            raise RuntimeError("param groups are fixed at construction; use the argument `groups`")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Neither copied nor pickled: its parameters are those of a model, which would not come along."""
        raise TypeError(
            "a noisy optimiser can be neither copied nor pickled. Copy or save the model and state_dict(), make a new "
            "optimiser of the other model and give it the state with load_state_dict()"
        )

    @torch.enable_grad()
    def _evaluate(self, closure: Closure) -> None:
        """`mc_samples` draws with the closure and, where `fisher_pass="fresh"` asks for it, one for statistics."""
        if self.accumulated.draws:
            if self.transaction.run(closure) is not None:
                raise TypeError("after sampled(), the closure of step() must compute nothing and return None")
            return
        options = self.options
        fresh = options.fisher_pass == "fresh" and options.stats_due(self.steps + 1)
        again = options.mc_samples > 1 or fresh
        for _ in range(options.mc_samples):
            self._evaluate_once(closure)
            self.transaction.end_draw(restore=again)
            if again:
                self.transaction.watch.note()
        if not fresh:
            return
        found = self.accumulated
        found.own_buffer()
        draws, weights = found.draws, found.weights
        _, capture = self.transaction.begin_draw(True)
        assert capture is not None
        self.measurement.take_fresh(found, capture, lambda: self._run(closure))
        self.transaction.end_draw()
        # That draw has no gradient: the step must not count it.
        found.draws, found.weights = draws, weights

    def _evaluate_once(self, closure: Closure) -> None:
        _, capture = self.transaction.begin_draw(self.options.fisher_pass == "same")
        if capture is not None:
            capture.watch_backward = True
        result = self._run(closure)
        if isinstance(result, tuple):
            parts = unpacked(result)
            if capture is not None:
                capture.watch_backward = False
            self.measurement.loss(self.accumulated, capture, *parts, observe=False).backward()
            return
        self.measurement.take_returned_loss(self.accumulated, capture, result)

    def _run(self, closure: Closure) -> tuple[Tensor | None, ...] | Tensor:
        result = self.transaction.run(closure)
        if self.accumulated.draws:
            self.transaction.watch.check_kept()
        return result
