"""Whether the per-example gradients of a user's layer are those that autograd finds: tried once for each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from noisygrad.curvature.passes import Batch
from noisygrad.curvature.registry import Layer
from noisygrad.curvature.units import Unit
from noisygrad.kernels.factorisation import capturing

EXAMPLES = 2
"""How many examples of a batch are looked at."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Relative errors that rounding may explain, TF32 included."""
COARSE_TOLERANCE = 0.1
"""The same where some of it is computed in a narrower type."""

_VERIFIED: WeakSet[nn.Module] = WeakSet()


def needs_verification(module: nn.Module, layer: Layer) -> bool:
    """Whether this is a user's layer that has not been compared with autograd yet."""
    return not layer.builtin and module not in _VERIFIED


def verify_layer(
    module: nn.Module,
    layer: Layer,
    units: Sequence[Unit],
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Compare the gradients that `layer` gives for a call of `module` with those of autograd.

    The call is repeated with a few of its examples, with copies of the parameters and buffers, so that nothing of the
    network changes. A weight is multiplied by random factors: one that happens to be 0 or 1 must not hide a mistake.

    Raises:
        ValueError: they differ, which says that the layer is not what it was registered as.
    """
    if capturing() or module in _VERIFIED:
        return
    few = _first_examples(args, kwargs, len(units[0].replicas))
    try:
        seen = _gradients(module, layer, units, forward, few or (args, kwargs), EXAMPLES if few else 1)
    except RuntimeError:
        if few is None:
            raise
        # A forward that wants the whole batch, or a batch that is not in front. Gradients are summed over examples and
        # positions alike, so all may count as one example.
        seen = _gradients(module, layer, units, forward, (args, kwargs), 1)
    conclusive = True
    for name, (found, true, tolerance) in seen.items():
        scale = true.norm()
        if not bool(found.isfinite().all() & true.isfinite().all()) or not bool(scale + found.norm()):
            conclusive = False  # of an input that is 0 everywhere, or not finite, nothing can be told
            continue
        error = float((found - true).norm() / torch.maximum(scale, found.norm()))
        if error > tolerance:
            raise ValueError(
                f"layer {units[0].name!r} ({type(module).__name__}): the gradient of {name!r} by its registered layer "
                f"differs from autograd's, by {error:.1%} of its norm. If it was registered with like=, its forward "
                "does not compute what that layer does, from a weight and a bias alone: register it with a "
                "Layer(units, observe) of its own, or not at all, which gives its parameters a diagonal block. If "
                "with a Layer, correct `units` or `observe`"
            )
    if conclusive:
        _VERIFIED.add(module)


def _first_examples(
    args: Sequence[Any], kwargs: Mapping[str, Any], dim: int
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """The arguments with a few examples only; None for an input without a batch."""
    inputs = args[0] if args else next(iter(kwargs.values()))
    if inputs.dim() < dim + 1 + inputs.is_floating_point():
        return None

    def cut(value: Any) -> Any:
        alike = isinstance(value, Tensor) and value.shape[dim : dim + 1] == inputs.shape[dim : dim + 1]
        return value.narrow(dim, 0, EXAMPLES) if alike else value

    return [cut(value) for value in args], {name: cut(value) for name, value in kwargs.items()}


def _gradients(
    module: nn.Module,
    layer: Layer,
    units: Sequence[Unit],
    forward: Callable[..., Any],
    call: tuple[Sequence[Any], Mapping[str, Any]],
    size: int,
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """For each parameter of the units the layer's gradient, autograd's, and by how much they may differ."""
    args, kwargs = [_copied(value) for value in call[0]], {name: _copied(value) for name, value in call[1].items()}
    inputs = args[0] if args else next(iter(kwargs.values()))
    device = inputs.device
    generator = torch.Generator().manual_seed(0)
    forked = [device] if device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(forked), _copies(module, generator) as parameters:
        output = forward(*args, **kwargs)
        gradient = torch.randn(output.shape, generator=generator).to(output)
        found = torch.autograd.grad(output, list(parameters.values()), gradient, materialize_grads=True)
    true = dict(zip(parameters, found, strict=True))
    types = {tensor.dtype for tensor in (inputs, output, *parameters.values()) if tensor.is_floating_point()}
    narrow = torch.is_autocast_enabled(device.type) or not types <= TOLERANCES.keys()
    tolerance = COARSE_TOLERANCE if narrow else max(TOLERANCES[kind] for kind in types)
    dtype = torch.promote_types(output.dtype, torch.float32)
    seen = {}
    for unit in units:
        plain = replace(unit, slots=tuple(replace(slot, memory_layout=None) for slot in unit.slots))
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            rows = layer.observe(plain, module, inputs.detach(), gradient, Batch(size, size, dtype)).rows()
        if rows.shape[-1] != unit.size:
            raise ValueError(
                f"layer {unit.name!r} ({type(module).__name__}): `observe` gives per-example gradients of "
                f"{rows.shape[-1]} numbers, but `units` says that there are {unit.size}"
            )
        own = {slot.parameter: _own_name(slot.parameter, parameters) for slot in unit.slots}
        shapes = {name: parameters[local].shape for name, local in own.items()}
        for slot, part in plain.views(rows.sum(dim=-2), shapes):
            local = own[slot.parameter]
            by_autograd = true[local]
            seen[slot.parameter] = part, slot.of(by_autograd, len(unit.replicas)).to(part), tolerance
    return seen


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _own_name(parameter: str, own: Mapping[str, Tensor]) -> str:
    """A module's own name for a parameter that has this one in the network."""
    return max((name for name in own if parameter == name or parameter.endswith(f".{name}")), key=len)


@contextmanager
def _copies(module: nn.Module, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Inside, the module has copies of its buffers, and of its parameters times random factors; yields the latter."""
    made: dict[str, Tensor] = {}
    kept = []
    for prefix, part in module.named_modules():
        kept.append((part, dict(part._parameters), dict(part._buffers)))
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                factors = torch.rand(parameter.shape, generator=generator).to(parameter).add_(0.5)
                copied = part._parameters[name] = nn.Parameter(parameter.detach() * factors)
                made[f"{prefix}.{name}" if prefix else name] = copied
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.detach().clone()
    try:
        yield made
    finally:
        for part, parameters, buffers in kept:
            part._parameters.update(parameters)
            part._buffers.update(buffers)
