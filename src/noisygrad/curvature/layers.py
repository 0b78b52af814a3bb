"""The registry: how each kind of layer is a matrix, and how what passed through it becomes the canonical layout.

A `Unit` is the smallest piece of structure: a matrix (rows × columns) that holds one layer's trainable weights, or a
part of them (the three projections of attention are three units). `Slot` says where each parameter lies in it.
`register` teaches the registry a new layer; whatever it does not know becomes a diagonal block of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisygrad.curvature.convolution import ConvolutionPass, PatchedPass
from noisygrad.curvature.passes import ElementwisePass, EmbeddingPass, MatrixPass, Pass, SummedPass
from noisygrad.curvature.windows import patches
from noisygrad.families.units import Slot, Unit
from noisygrad.networks import ReplicatedLinear


@dataclass(frozen=True)
class Layer:
    """A registry entry: the units of a module, and the pass that an input and an output gradient make."""

    units: Callable[[str, Any, frozenset[str]], list[Unit]]
    observe: Callable[[Unit, Any, Tensor, Tensor, Batch], Pass]
    """Given all examples, since a norm is of all of them; the pass is of those that the batch keeps."""


REGISTRY: dict[type[nn.Module], Layer] = {}


def register(*types: type[nn.Module]) -> Callable[[Layer], Layer]:
    """Teach the registry how modules of `types` are matrices: `register(MyLinear)(Layer(units, observe))`."""

    def add(layer: Layer) -> Layer:
        for kind in types:
            REGISTRY[kind] = layer
        return layer

    return add


def find_layer(module: nn.Module) -> Layer | None:
    """The entry for this module's type, or for a base class whose `forward` it has not replaced by its own."""
    kind = next((kind for kind in type(module).__mro__ if kind in REGISTRY), None)
    return REGISTRY[kind] if kind is not None and type(module).forward is kind.forward else None


@dataclass(frozen=True)
class Batch:
    """How many examples a batch has, of how many, its first, statistics are taken, and in which precision."""

    size: int
    kept: int
    dtype: torch.dtype

    def first(self, tensor: Tensor, dim: int) -> Tensor:
        """The part of the examples kept, in the statistics' precision; `dim` may be folded with positions after it."""
        if self.kept < self.size:
            tensor = tensor.narrow(dim, 0, self.kept * (tensor.shape[dim] // self.size))
        return self.precise(tensor)

    def precise(self, tensor: Tensor) -> Tensor:
        """In the statistics' precision, unless it counts something."""
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def arrange(tensor: Tensor, batch: Batch, unit: Unit) -> Tensor:
    """`[*replicas, ..., features]` with the batch somewhere in front, as `[*replicas, kept, shared, features]`.

    Dimension 0 is the batch, except inside a Transformer layer that says otherwise; where its size disagrees,
    dimension 1 is tried, then a batch folded with positions into one dimension.
    """
    lead = len(unit.replicas)
    sizes = tensor.shape[lead:-1]
    if not sizes and batch.size == 1:
        return batch.precise(tensor).reshape(*tensor.shape[:-1], 1, 1, tensor.shape[-1])
    if len(sizes) > 1 and sizes[1] == batch.size and (unit.sequence_first or sizes[0] != batch.size):
        return batch.first(tensor, lead + 1).transpose(lead, lead + 1).flatten(lead + 1, -2)
    if sizes and sizes[0] == batch.size:
        tensor = batch.first(tensor, lead)
        return tensor.unsqueeze(-2) if len(sizes) == 1 else tensor.flatten(lead + 1, -2)
    if sizes and batch.size and sizes[0] % batch.size == 0:
        return batch.first(tensor, lead).reshape(*tensor.shape[:lead], batch.kept, -1, tensor.shape[-1])
    raise ValueError(
        f"layer {unit.name!r} saw a tensor of shape {tuple(tensor.shape)} while the loss has a batch of {batch.size}: "
        "its per-example gradients are not defined. Give the layer inputs with the batch in front, or freeze it."
    )


def _matrix_unit(
    name: str, module: nn.Module, trainable: frozenset[str], outputs: int, inputs: int, **more: Any
) -> list[Unit]:
    """The matrix [W | b] of a module with `weight` and `bias`, of which either may be frozen."""
    columns = inputs if "weight" in trainable else 0
    constant = "bias" in trainable
    if not columns and not constant:
        return []
    prefix = f"{name}." if name else ""
    slots = [Slot(f"{prefix}weight", 0, columns)] if columns else []
    if constant:
        slots.append(Slot(f"{prefix}bias", columns, columns + 1))
    layer = type(module).__name__
    return [Unit(name or layer, "matrix", outputs, columns + constant, tuple(slots), layer, constant=constant, **more)]


def _linear_units(name: str, module: nn.Linear, trainable: frozenset[str]) -> list[Unit]:
    return _matrix_unit(name, module, trainable, module.out_features, module.in_features, chainable=True)


def observe_linear(unit: Unit, module: Any, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    """The pass of y = W a + b with features last."""
    activations = inputs[..., : unit.inputs - unit.constant]
    return MatrixPass(arrange(activations, batch, unit), arrange(gradient, batch, unit), unit.constant)


register(nn.Linear)(Layer(_linear_units, observe_linear))


def _replicated_units(name: str, module: ReplicatedLinear, trainable: frozenset[str]) -> list[Unit]:
    return _matrix_unit(
        name,
        module,
        trainable,
        module.out_features,
        module.in_features,
        chainable=True,
        replicas=tuple(module.replicas),
    )


def _observe_replicated(unit: Unit, module: ReplicatedLinear, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    inputs = batch.precise(inputs).expand(*unit.replicas, *inputs.shape[-2:])
    return observe_linear(unit, module, inputs, gradient, batch)


register(ReplicatedLinear)(Layer(_replicated_units, _observe_replicated))


def _conv_units(name: str, module: Any, trainable: frozenset[str]) -> list[Unit]:
    inputs = module.in_channels // module.groups * math.prod(module.kernel_size)
    return _matrix_unit(name, module, trainable, module.out_channels // module.groups, inputs, groups=module.groups)


def _observe_conv(unit: Unit, module: Any, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    groups, dims = unit.groups, len(module.kernel_size)
    if inputs.dim() == dims + 1:
        inputs, gradient = inputs.unsqueeze(0), gradient.unsqueeze(0)
    if inputs.shape[0] % batch.size:
        raise ValueError(f"layer {unit.name!r} saw {inputs.shape[0]} images while the loss has a batch of {batch.size}")
    inputs, gradient, examples = batch.first(inputs, 0), batch.first(gradient, 0), batch.kept
    if unit.inputs > unit.constant:
        for kind in (ConvolutionPass, PatchedPass):
            if kind.applies(module, inputs, examples):
                return kind(module, inputs, gradient, unit.constant)
        activations = patches(module, inputs)
    else:
        activations = inputs.new_zeros(inputs.shape[0], math.prod(gradient.shape[2:]), 0)
    gradient = gradient.flatten(2).mT
    if inputs.shape[0] != examples:
        activations, gradient = (t.unflatten(0, (examples, -1)).flatten(1, 2) for t in (activations, gradient))
    if groups == 1:
        return MatrixPass(activations, gradient, unit.constant)
    # The channels of a group are consecutive in both, so a group is a leading dimension.
    activations, gradient = (t.unflatten(-1, (groups, -1)).movedim(-2, 0) for t in (activations, gradient))
    return MatrixPass(activations, gradient, unit.constant, grouped=True)


register(nn.Conv1d, nn.Conv2d, nn.Conv3d)(Layer(_conv_units, _observe_conv))


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.sparse or module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError(
            f"embedding {name!r}: sparse, max_norm and scale_grad_by_freq are not supported; switch them off"
        )


def _embedding_units(name: str, module: nn.Embedding, trainable: frozenset[str]) -> list[Unit]:
    if "weight" not in trainable:
        return []
    _check_embedding(name, module)
    slot = Slot(f"{name}.weight" if name else "weight", 0, module.embedding_dim)
    return [Unit(name or "Embedding", "embedding", module.num_embeddings, module.embedding_dim, (slot,), "Embedding")]


def _observe_embedding(unit: Unit, module: nn.Embedding, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    if module.padding_idx is not None:
        gradient = gradient.masked_fill((inputs == module.padding_idx).unsqueeze(-1), 0.0)
    if unbatched(module, inputs, batch.size):
        whole = EmbeddingPass(inputs.reshape(1, -1), batch.precise(gradient).flatten(0, -2).unsqueeze(0), unit.outputs)
        return SummedPass(whole.rows().squeeze(0), batch.kept)
    indices = arrange(inputs.unsqueeze(-1), batch, unit).squeeze(-1)
    return EmbeddingPass(indices, arrange(gradient, batch, unit), unit.outputs)


def unbatched(module: nn.Module, inputs: Tensor, batch: int) -> bool:
    """Whether this is a table of positions, looked up once for all examples, whose gradients come summed over them."""
    return perhaps_summed(module, inputs) and batch not in (inputs.shape[0], inputs.shape[-1])


def perhaps_summed(module: nn.Module, inputs: Tensor) -> bool:
    """Whether gradients may be summed over examples: a row of indices, even as long as the batch, may be positions."""
    return isinstance(module, nn.Embedding) and (inputs.dim() == 1 or (inputs.dim() == 2 and inputs.shape[0] == 1))


register(nn.Embedding)(Layer(_embedding_units, _observe_embedding))


def _norm_units(name: str, module: nn.Module, trainable: frozenset[str]) -> list[Unit]:
    held = [part for part in ("weight", "bias") if part in trainable]
    if not held:
        return []
    prefix = f"{name}." if name else ""
    size = getattr(module, held[0]).numel()
    # The prior of a scale is centred on 1, where the layer starts.
    slots = tuple(
        Slot(f"{prefix}{part}", column, column + 1, centre=float(part == "weight")) for column, part in enumerate(held)
    )
    layer = type(module).__name__
    return [Unit(name or layer, "elementwise", size, len(held), slots, layer)]


def _elementwise(unit: Unit, normalised: Tensor, gradient: Tensor) -> Pass:
    parts = [slot.parameter.rpartition(".")[-1] for slot in unit.slots]
    return ElementwisePass(normalised, gradient, "weight" in parts, "bias" in parts)


def _observe_features_last(unit: Unit, module: Any, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    dims = len(module.normalized_shape)
    inputs, gradient = (arrange(tensor.flatten(-dims), batch, unit) for tensor in (inputs, gradient))
    if isinstance(module, nn.RMSNorm):
        return _elementwise(unit, F.rms_norm(inputs, inputs.shape[-1:], None, module.eps), gradient)
    return _elementwise(unit, F.layer_norm(inputs, inputs.shape[-1:], None, None, module.eps), gradient)


def _running(module: Any, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """Running statistics, where there are any, in the statistics' precision."""
    mean, variance = module.running_mean, module.running_var
    return (None, None) if mean is None else (batch.precise(mean), batch.precise(variance))


def _observe_channels_first(unit: Unit, module: Any, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    inputs = batch.precise(inputs)
    if isinstance(module, nn.GroupNorm):
        normalised = F.group_norm(inputs, module.num_groups, None, None, module.eps)
    elif isinstance(module, nn.modules.instancenorm._InstanceNorm):
        own = module.training or not module.track_running_stats
        running, variance = (None, None) if own else _running(module, batch)
        normalised = F.instance_norm(inputs, running, variance, None, None, own, 0.0, module.eps)
    else:
        running, variance = (None, None) if module.training else _running(module, batch)
        normalised = F.batch_norm(inputs, running, variance, None, None, running is None, 0.0, module.eps)
    return _elementwise(
        unit, arrange(normalised.movedim(1, -1), batch, unit), arrange(gradient.movedim(1, -1), batch, unit)
    )


register(nn.LayerNorm, nn.RMSNorm)(Layer(_norm_units, _observe_features_last))
register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)(Layer(_norm_units, _observe_channels_first))
register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)(Layer(_norm_units, _observe_channels_first))


def find_units(model: nn.Module) -> tuple[list[Unit], dict[nn.Module, list[Unit]]]:
    """Every trainable parameter in exactly one unit, in the order of the modules; and the units of each layer.

    A parameter that several layers share, or that no registered layer owns, becomes a unit of its own without
    structure, with a note that says why.
    """
    owners: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{module_name}.{own}" if module_name else own)

    sequence_first = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        and not module.self_attn.batch_first
    )
    units: list[Unit] = []
    layers: dict[nn.Module, list[Unit]] = {}
    covered: set[int] = set()
    inside: str | None = None  # the parts of a registered layer (attention's out_proj) are that layer's business
    for module_name, module in model.named_modules():
        layer = None if inside is not None and module_name.startswith(inside) else find_layer(module)
        if layer is not None:
            inside = f"{module_name}." if module_name else ""
            own_parameters = dict(module.named_parameters())
            trainable = {
                own: parameter
                for own, parameter in own_parameters.items()
                if parameter.requires_grad and len(owners[id(parameter)]) == 1
            }
            found = layer.units(module_name, module, frozenset(trainable))
            # Attention knows its own order of dimensions.
            swapped = module_name.startswith(sequence_first) and not isinstance(module, nn.MultiheadAttention)
            layers[module] = [replace(unit, sequence_first=swapped) for unit in found]
            units += layers[module]
            held = {slot.parameter for unit in layers[module] for slot in unit.slots}
            covered |= {id(parameter) for own, parameter in trainable.items() if inside + own in held}
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in covered:
                covered.add(id(parameter))
                units.append(_other_unit(owners[id(parameter)], parameter, module))
    return units, layers


def _other_unit(owners: list[str], parameter: Tensor, module: nn.Module) -> Unit:
    layer = type(module).__name__
    if isinstance(module, nn.EmbeddingBag):
        _check_embedding(owners[0].rpartition(".")[0], module)
    if len(owners) > 1:
        note = f"shared by {', '.join(owners)}"
    elif find_layer(module) is not None:
        note = f"no structure known for this parameter of {layer}"
    elif any(kind in REGISTRY for kind in type(module).__mro__):
        note = f"{layer} has a forward of its own: register it to give it structure"
    else:
        note = f"no structure known for {layer}"
    scale = isinstance(module, nn.modules.batchnorm._NormBase) and owners[0].endswith("weight")  # SyncBatchNorm
    slot = Slot(owners[0], 0, 1, centre=float(scale))
    return Unit(owners[0], "other", parameter.numel(), 1, (slot,), layer, note=note)
