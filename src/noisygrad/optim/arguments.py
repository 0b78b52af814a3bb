"""What the constructor of an optimiser answers those who give it what torch's optimisers are given."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from torch import nn

Arguments = ParamSpec("Arguments")
OF_TORCH = {
    "params": "the model itself is the first argument, and groups={...} sets some of its parameters apart",
    "betas": "momentum is β₁ and fisher_decay is β₂",
    "eps": "damping is added to the Fisher for the step",
    "weight_decay": "it is the prior's: prior_variance = kl_weight / (num_data * weight_decay) pulls as much",
    "dampening": 'momentum_mode="average" has it, "heavy_ball" has not',
    "nesterov": 'leave it out, or take momentum_mode="heavy_ball"',
    "amsgrad": "leave it out; kl_clip bounds a step",
    "maximize": "leave it out: the likelihood is what grows, and the loss of a step is its negative",
    "foreach": "leave it out: layers are stacked where that is faster",
    "fused": "leave it out: layers are stacked where that is faster",
    "differentiable": "leave it out: steps cannot be differentiated",
}
"""Arguments of torch's optimisers, and what stands for them."""


def explain_arguments(
    init: Callable[Concatenate[Any, Arguments], None],
) -> Callable[Concatenate[Any, Arguments], None]:
    """Let the constructor of an optimiser answer arguments that it has not with those that it has."""
    known = list(inspect.signature(init).parameters)

    @wraps(init)
    def explained(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        name, unknown = type(self).__name__, [name for name in kwargs if name not in known]
        if args or "model" in kwargs:
            check_model(args[0] if args else kwargs["model"])
        if found := [each for each in unknown if each in OF_TORCH]:
            advice = "; ".join(f"{each}: {OF_TORCH[each]}" for each in found)
            raise TypeError(f"{name} has no {', '.join(found)}, unlike torch's optimisers. {advice}")
        if unknown:
            meant = "".join(f". Did you mean {each!r}?" for each in get_close_matches(unknown[0], known, 1))
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}{meant}")
        init(self, *args, **kwargs)

    return explained


def check_model(model: object) -> None:
    """Raise TypeError for what other optimisers are given, such as `model.parameters()`."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            "the first argument must be the model itself, an nn.Module, since the posterior is made of its layers; got "
            f"{type(model).__name__}. Give NoisyKFAC(model, ng.Categorical(), num_data=n); freeze what is not to be "
            'trained (requires_grad_(False)), and set some parameters apart by groups={"head.*": {"lr": 1e-3}}'
        )
