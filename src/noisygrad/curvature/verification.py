"""Whether the per-example gradients of a user's layer are those that autograd finds: tried once for each module."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from noisygrad.curvature.passes import Batch
from noisygrad.curvature.registry import Layer
from noisygrad.families.units import Unit
from noisygrad.kernels.factorisation import capturing

EXAMPLES = 2
"""How many examples of a batch are looked at."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Relative errors that rounding may explain, TF32 included."""
COARSE_TOLERANCE = 0.1
"""The same where some of it is computed in a narrower type."""

FAR = 100.0
"""The size of parameters that are far from where a network has them."""

_VERIFIED: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class LayerCall:
    """One call of a user's layer, which can be repeated."""

    module: nn.Module
    layer: Layer
    units: Sequence[Unit]
    forward: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The layer's name and class, for messages."""
        return f"layer {self.units[0].name!r} ({type(self.module).__name__})"

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The argument that `observe` is given."""
        first: Any = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(first, Tensor):
            raise TypeError(f"{self.title}: the first argument must be a tensor; got {type(first).__name__}")
        return first

    def repeat(
        self, dim: int | None, far: bool = False
    ) -> tuple[list[tuple[Unit, Tensor]], list[dict[str, Tensor]], float]:
        """The gradients of a call like this one, by the layer and by autograd, and how much they may differ.

        With `dim`, the dimension of the batch, of each of a few examples. With None summed over all: gradients are
        summed over examples and positions alike, so all may count as one example. By the layer they are
        `[*replicas, examples, numbers]` of each unit, by autograd by the parameter's name in the module.
        """
        args, kwargs = self._arguments(dim)
        inputs = self.inputs(args, kwargs)
        device, size = inputs.device, 1 if dim is None else EXAMPLES
        generator = torch.Generator().manual_seed(0)
        with _undisturbed(device), _copies(self.module, generator, far) as parameters:
            output = self.forward(*args, **kwargs)
            starts, leaves = _starts(output, dim, generator), list(parameters.values())
            options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
            found = [torch.autograd.grad(output, leaves, start, **options) for start in starts]
            by_autograd = [dict(zip(parameters, gradients, strict=True)) for gradients in found]
            batch = Batch(size, size, torch.promote_types(output.dtype, torch.float32))
            gradient = torch.stack(starts).sum(dim=0)
            rows = []
            for unit in self.units:
                plain = replace(unit, slots=tuple(replace(slot, memory_layout=None) for slot in unit.slots))
                with torch.no_grad(), torch.autocast(device.type, enabled=False):
                    # With the same parameters: a gradient may depend on those of another unit.
                    one = self.layer.observe(plain, self.module, inputs.detach(), gradient, batch)
                if getattr(one, "grouped", False) != (unit.groups > 1):
                    raise ValueError(
                        f"{self.title}: `units` says that {unit.name!r} has groups={unit.groups}, so the pass that "
                        f"`observe` makes of it must {'' if unit.groups > 1 else 'not '}be grouped"
                    )
                rows.append((plain, one.rows()))
        types = {tensor.dtype for tensor in (inputs, output, *leaves) if tensor.is_floating_point()}
        narrow = torch.is_autocast_enabled(device.type) or not types <= TOLERANCES.keys()
        return rows, by_autograd, COARSE_TOLERANCE if narrow else max(TOLERANCES[kind] for kind in types)

    def comparisons(
        self, by_layer: Sequence[tuple[Unit, Tensor]], by_autograd: Sequence[dict[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The name of each parameter, its gradient by the layer and by autograd, for each example."""
        size = len(by_autograd)
        for unit, rows in by_layer:
            if rows.shape[-2:] != (size, unit.size):
                raise ValueError(
                    f"{self.title}: `observe` gives gradients of unit {unit.name!r} for {rows.shape[-2]} examples with "
                    f"{rows.shape[-1]} numbers each, but the batch keeps {size}, and `units` says {unit.size} numbers"
                )
            for row, true in zip(rows.unbind(dim=-2), by_autograd, strict=True):
                own = {slot.parameter: true[_own_name(slot.parameter, true)] for slot in unit.slots}
                for slot, part in unit.views(row, {name: tensor.shape for name, tensor in own.items()}):
                    yield slot.parameter, part, slot.of(own[slot.parameter], len(unit.replicas)).to(part)

    def _arguments(self, dim: int | None) -> tuple[list[Any], dict[str, Any]]:
        """Copies of the arguments; with `dim`, of a few examples."""
        size = None if dim is None else self.inputs(self.args, self.kwargs).shape[dim]

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if dim is not None and value.dim() > dim and value.shape[dim] == size:
                value = value.narrow(dim, 0, EXAMPLES)
            return value.detach().clone()

        return [copied(value) for value in self.args], {name: copied(value) for name, value in self.kwargs.items()}


def verify(call: LayerCall) -> None:
    """Compare the gradients that a layer gives for a call with those of autograd.

    The call is repeated with a few of its examples, with copies of the parameters and buffers, so that nothing of the
    network changes. A weight is multiplied by random factors: one that happens to be 0 or 1 must not hide a mistake.
    Then large random numbers take its place: what is linear in it is so everywhere, and a ReLU or a clamp is not.

    Raises:
        ValueError: they differ, which says that the layer is not what it was registered as.
    """
    if call.module in _VERIFIED or capturing():
        return
    conclusive = True
    usual: dict[str, Tensor] = {}
    checks = [(far, one) for far in (False, True) for one in _comparisons(call, far)]
    for far, (name, found, true, tolerance) in checks:
        scale = torch.maximum(true.norm(), found.norm())
        if far:  # where a layer of one's own saturates, there is nothing but rounding
            scale = torch.maximum(scale, usual[name])
        else:
            usual[name] = torch.maximum(scale, usual.get(name, scale))
        if not bool(scale.isfinite()) or not bool(scale):
            conclusive = conclusive and far  # an input that is 0 everywhere, or not finite, shows nothing
            continue
        error = float((found - true).norm() / scale)
        if error > tolerance:
            raise ValueError(
                f"{call.title}: the gradient of {name!r} by its registered layer "
                f"differs from autograd's, by {error:.1%} of its norm. If it was registered with like=, its forward "
                "does not compute what that layer does, from a weight and a bias alone: register it with a "
                "Layer(units, observe) of its own, or not at all, which gives its parameters a diagonal block. If "
                "with a Layer, correct `units` or `observe`"
            )
    if conclusive:
        _VERIFIED.add(call.module)


def _comparisons(call: LayerCall, far: bool) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """The name of each parameter, its gradient by the layer and by autograd, and how much these may differ."""
    dim = len(call.units[0].replicas) + call.units[0].sequence_first
    inputs = call.inputs(call.args, call.kwargs)
    # A forward may want the whole batch, or have its batch elsewhere.
    ways = (dim, None) if inputs.dim() > dim + inputs.is_floating_point() else (None,)
    for way in ways:
        try:
            rows, by_autograd, tolerance = call.repeat(way, far)
        except Exception:
            if way is None and not far:  # far from where they were, parameters may be impossible
                raise
            continue
        for name, found, true in call.comparisons(rows, by_autograd):
            yield name, found, true, tolerance
        return


def _starts(output: Tensor, dim: int | None, generator: torch.Generator) -> list[Tensor]:
    """Random gradients of the output: one, or with the dimension of the batch one that is of each example alone."""
    if not isinstance(output, Tensor):
        raise TypeError(f"a registered layer must return a tensor; got {type(output).__name__}")
    gradient = torch.randn(output.shape, generator=generator).to(output)
    if dim is None:
        return [gradient]
    alone = torch.eye(EXAMPLES).to(output).reshape(EXAMPLES, *(1,) * dim, EXAMPLES, *(1,) * (output.dim() - dim - 1))
    return list(gradient * alone)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Autograd is on inside, and neither random numbers nor hooks on saved tensors, as of checkpoints, are affected."""
    with (
        torch.enable_grad(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        yield


def _own_name(parameter: str, own: Mapping[str, Tensor]) -> str:
    """A module's own name for a parameter that has this one in the network."""
    return max((name for name in own if parameter == name or parameter.endswith(f".{name}")), key=len)


@contextmanager
def _copies(module: nn.Module, generator: torch.Generator, far: bool) -> Iterator[dict[str, Tensor]]:
    """Inside, the module has copies of its buffers, and of its parameters times random factors; yields the latter.

    With `far` these are large numbers of their own.
    """
    made: dict[str, Tensor] = {}
    kept = []
    for prefix, part in module.named_modules():
        kept.append((part, dict(part._parameters), dict(part._buffers)))
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                factors = torch.rand(parameter.shape, generator=generator).to(parameter).add_(0.5)
                values = torch.randn(parameter.shape, generator=generator).to(parameter) * FAR
                copied = part._parameters[name] = nn.Parameter(values if far else parameter.detach() * factors)
                made[f"{prefix}.{name}" if prefix else name] = copied
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.detach().clone()
    try:
        yield made
    finally:
        for part, parameters, buffers in kept:
            part._parameters.update(parameters)
            part._buffers.update(buffers)
