"""The hyper-parameters of a noisy natural-gradient optimiser, checked when made. Symbols: `docs/conventions.md`."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from torch import Tensor, nn

from noisygrad.algorithm.start import Safeguard
from noisygrad.algorithm.step import MOMENTUM_MODES, is_early, refresh_due
from noisygrad.curvature.fisher import FisherKind
from noisygrad.distributed import sharded_parameters
from noisygrad.families import family_named
from noisygrad.families.base import DampingMode
from noisygrad.likelihoods import Likelihood
from noisygrad.posterior.faults import format_names, one_of, whole_number
from noisygrad.priors import FittedPrior, PriorVariance, check_prior_variance, is_improper

FisherPass = Literal["same", "fresh"]
Schedule = float | Callable[[int], float]
"""A number, or a function from the step (1, 2, …) to one."""
LARGEST = 1e30
"""Beyond it single precision overflows soon, and no setting makes sense."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What holds for all param groups of an optimiser."""

    num_data: int
    """N"""
    kl_weight: float
    """λ"""
    fisher_decay: Schedule
    """1 − β̃"""
    safeguard: Safeguard
    noise_limit: float | None
    """What draws may cost, in nats for each example"""
    fisher_floor: float
    """Added to the diagonal of the Fisher that is measured"""
    stats_every: int
    """T_stats"""
    factor_every: int
    """T_inv"""
    stats_batch: int | None = None
    """Statistics from at most this many examples of a batch."""
    kl_clip: Schedule | None
    """c, the trust region"""
    mc_samples: int
    momentum_mode: str
    """A name in `algorithm.step.MOMENTUM_MODES`."""
    fisher: FisherKind
    fisher_pass: FisherPass
    damping_mode: DampingMode

    def __post_init__(self) -> None:
        if not isinstance(self.num_data, Integral) or isinstance(self.num_data, bool) or self.num_data <= 0:
            raise ValueError(
                f"num_data must be a positive integer, the size of the training set; got {self.num_data!r}"
            )
        positive("kl_weight", self.kl_weight)
        for name in ("stats_every", "factor_every", "mc_samples"):
            whole_number(name, getattr(self, name))
        if self.stats_batch is not None:
            whole_number("stats_batch", self.stats_batch)
        one_of("momentum_mode", self.momentum_mode, MOMENTUM_MODES)
        one_of("fisher", self.fisher, get_args(FisherKind))
        one_of("fisher_pass", self.fisher_pass, get_args(FisherPass))
        one_of("safeguard", self.safeguard, get_args(Safeguard))
        if self.noise_limit is not None:
            positive("noise_limit", self.noise_limit)
        one_of("damping_mode", self.damping_mode, get_args(DampingMode))
        not_negative("fisher_floor", self.fisher_floor)
        self.decay_at(1)
        self.clip_at(1)
        # Plain numbers, whatever they were given as: they go into files.
        object.__setattr__(self, "num_data", int(self.num_data))
        object.__setattr__(self, "kl_weight", float(self.kl_weight))

    def decay_at(self, step: int) -> float:
        """1 − β̃ at a step."""
        decay = self.fisher_decay(step) if callable(self.fisher_decay) else self.fisher_decay
        return fraction("fisher_decay", decay)

    def clip_at(self, step: int) -> float | None:
        """c at a step, or None without a trust region."""
        if self.kl_clip is None:
            return None
        return positive("kl_clip", self.kl_clip(step) if callable(self.kl_clip) else self.kl_clip)

    def stats_due(self, step: int) -> bool:
        """Whether this step takes statistics: every T_stats, and with the early factors."""
        return step % self.stats_every == 0 or is_early(step, self.factor_every)

    def factors_due(self, step: int) -> bool:
        """Whether this step refreshes the factors: every T_inv, and at 1, 2, 4, … below it."""
        return refresh_due(step, self.factor_every)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def positive(name: str, value: float) -> float:
    """`value` if it is a positive number up to `LARGEST`, else a ValueError that names it."""
    if not _is_number(value) or not 0 < value <= LARGEST:
        raise ValueError(f"{name} must be a positive number{_limit(value)}, got {value!r}")
    return value


def not_negative(name: str, value: float) -> None:
    """Raise a ValueError that names `value` if it is no number from 0 to `LARGEST`."""
    if not _is_number(value) or not 0 <= value <= LARGEST:
        raise ValueError(f"{name} must be at least 0{_limit(value)}, got {value!r}")


def _limit(value: Any) -> str:
    return f" and at most {LARGEST:g}" if _is_number(value) and value > LARGEST else ""


def fraction(name: str, value: float) -> float:
    """`value` if it lies in [0, 1), else a ValueError that names it."""
    if not _is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
    return value


def check_arguments(
    model: nn.Module,
    likelihood: object,
    prior_variance: PriorVariance | None,
    prior: object,
    damping_mode: DampingMode,
    family: str,
) -> PriorVariance:
    """The prior variance, 1 where none is said; raise for slips that would surface far from where they were made."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if found := [name for name, parameter in trained.items() if parameter.is_complex()]:
        raise ValueError(
            f"{format_names(found)}: complex parameters are not supported. Hold real and imaginary part as two real "
            "parameters (torch.view_as_complex joins them), or freeze them"
        )
    if found := [name for name in sharded_parameters(model) if name in trained]:
        raise ValueError(
            f"{format_names(found)}: parameters that are shared out among processes (DTensors: FSDP, tensor parallel) "
            "are not supported. Use DistributedDataParallel, where each process has all of them"
        )
    if not isinstance(likelihood, Likelihood):
        given = likelihood.__name__ if isinstance(likelihood, type) else type(likelihood).__name__
        raise TypeError(f"likelihood must be an instance of one of noisygrad's, such as ng.Gaussian(); got {given}")
    if prior is not None and prior_variance is not None:
        raise ValueError("give either prior or prior_variance: a fitted posterior has its own variances")
    prior_variance = 1.0 if prior_variance is None else prior_variance
    check_prior_variance(prior_variance)
    if prior is not None and not isinstance(prior, FittedPrior):
        raise TypeError(f"prior must come from posterior.as_prior(); got {type(prior).__name__}")
    if damping_mode not in (modes := family_named(family).damping_modes):
        raise ValueError(
            f"damping_mode={damping_mode!r} is not for the {family} family, which has {', '.join(modes)}. Only "
            "NoisyKFAC has the choice: leave the argument out. Diagonal, eigenvalue-corrected and full posteriors are "
            "always damped exactly, a chain of layers (NoisyBlockTridiagonal) never"
        )
    if family_named(family).proper_prior and prior is None and is_improper(prior_variance):
        raise ValueError(f"the {family} family needs a finite prior_variance: its basis is relative to the prior")
    if damping_mode == "exact" and prior is None and is_improper(prior_variance):
        raise ValueError('damping_mode="exact" needs a finite prior_variance: the eigenbasis is relative to the prior')
    return prior_variance


GROUP_OPTIONS = ("lr", "momentum", "damping", "noise")


class GroupPatterns:
    """Which group each parameter is in: that of the first pattern that matches its name, else 0, with the defaults."""

    def __init__(self, groups: Mapping[str, Mapping[str, Any]] | None, defaults: dict[str, Any]) -> None:
        groups = {} if groups is None else groups
        if not isinstance(groups, Mapping) or not all(isinstance(own, Mapping) for own in groups.values()):
            raise TypeError(
                'groups must map patterns of names to dictionaries of settings, such as {"head.*": {"lr": 1e-3}}; '
                f"got {groups!r}"
            )
        named = [("*", {}), *groups.items()]
        self._patterns = [pattern for pattern, _ in named]
        self.settings = [_checked(pattern, {**defaults, **own}) for pattern, own in named]

    def of(self, name: str) -> int:
        """The number of the parameter's group."""
        return next((i for i, p in enumerate(self._patterns) if i and fnmatch.fnmatchcase(name, p)), 0)

    def param_groups(self, parameters: Mapping[str, nn.Parameter], used: Sequence[int]) -> list[dict[str, Any]]:
        """What `torch.optim.Optimizer` is given; raises for a pattern that is not among the groups that are used."""
        for index in set(range(1, len(self._patterns))) - set(used):
            raise ValueError(f"the pattern {self._patterns[index]!r} in groups matches no trainable parameter")
        mine = {name: self.of(name) for name in parameters}
        return [
            {"params": [parameters[name] for name in parameters if mine[name] == index], **self.settings[index]}
            for index in used
        ]


def check_groups(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise for a number that a user or a scheduler has made senseless since; a GPU's tensor is not waited for.

    An lr of 0 is a start that schedules have.
    """
    for group in groups:
        try:
            lr, momentum, damping = group["lr"], group["momentum"], group["damping"]
        except KeyError as error:
            raise ValueError(f"a param group has no {error} any more, or was never one of this optimiser") from error
        if not (
            type(lr) is type(momentum) is type(damping) is float
            and 0.0 <= lr <= LARGEST
            and 0.0 <= momentum < 1.0
            and 0.0 <= damping <= LARGEST
        ):
            not_negative("lr of a param group", _rate(lr))
            fraction("momentum of a param group", momentum)
            not_negative("damping of a param group", damping)


class FixedGroups:
    """What of param groups is fixed when an optimiser is made: their parameters, and whether they have noise."""

    def __init__(self, groups: Iterable[Mapping[str, Any]], model: nn.Module) -> None:
        self._fixed = [(group["noise"], *group["params"]) for group in groups]
        self._model = model

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise for a change of what is fixed, and for senseless numbers in the rest."""
        check_groups(groups)
        try:  # a comparison of tuples asks first whether objects are identical
            same = [(group["noise"], *group["params"]) for group in groups] == self._fixed
        except (KeyError, RuntimeError):  # there is no truth value of two tensors that are compared
            same = False
        if not same:
            self._raise(groups)

    def _raise(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if len(groups) != len(self._fixed):
            raise ValueError(
                f"there are {len(groups)} param groups, but the optimiser was made with {len(self._fixed)}: they are "
                "fixed then; use the argument `groups`"
            )
        for (noise, *parameters), group in zip(self._fixed, groups, strict=True):
            if group.get("noise") != noise:
                raise ValueError("noise of a param group is fixed when the optimiser is made: make a new one")
            now = list(group.get("params", ()))
            added, lost = (self._names(*pair) for pair in ((now, parameters), (parameters, now)))
            if added or lost:
                raise ValueError(
                    "the parameters of a param group are fixed when the optimiser is made: "
                    f"{format_names(added) or 'none'} added, {format_names(lost) or 'none'} lost. Make a new "
                    "optimiser of a model that holds them all"
                )
        raise ValueError("the parameters of a param group are in another order than when the optimiser was made")

    def _names(self, some: Iterable[Tensor], others: Sequence[Tensor]) -> list[str]:
        """What those that are not among the others are called in the model."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        left = [parameter for parameter in some if not any(parameter is other for other in others)]
        return [names.get(id(one), f"a {type(one).__name__} of shape {[*one.shape]}") for one in left]


def _rate(lr: Any) -> Any:
    """The number that a learning rate is, as far as that is known without waiting."""
    if not isinstance(lr, Tensor):
        return lr
    if lr.dim() or not lr.is_floating_point():
        raise ValueError(
            f"lr must be a number or a floating tensor without dimensions, got a {lr.dtype} of shape {[*lr.shape]}"
        )
    return lr.item() if lr.device.type == "cpu" else 0.0


def _checked(pattern: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` if they can be those of a param group, else a ValueError that names what is wrong."""
    unknown = set(settings) - set(GROUP_OPTIONS)
    if unknown:
        raise ValueError(
            f"group {pattern!r}: unknown options {sorted(unknown)}; possible are {', '.join(GROUP_OPTIONS)}"
        )
    lr = settings["lr"]
    _rate(lr)
    positive("lr", float(lr) if isinstance(lr, Tensor) else lr)
    fraction("momentum", settings["momentum"])
    not_negative("damping", settings["damping"])
    if not isinstance(settings["noise"], bool):
        raise ValueError(f"noise must be True or False, got {settings['noise']!r}")
    return settings
