"""The layers of torch that the library knows: how each is a matrix, and its per-example gradients."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from noisygrad.curvature.convolution import ConvolutionPass, PatchedPass
from noisygrad.curvature.layout import is_shared
from noisygrad.curvature.passes import (
    Batch,
    ElementwisePass,
    EmbeddingPass,
    MatrixPass,
    Pass,
    SummedPass,
    arrange,
    batch_advice,
)
from noisygrad.curvature.registry import Layer, register_layer
from noisygrad.curvature.windows import patches
from noisygrad.families.units import Slot, Unit
from noisygrad.networks import ReplicatedLinear


def matrix_units(
    name: str, module: nn.Module, trainable: frozenset[str], outputs: int, inputs: int, **more: Any
) -> list[Unit]:
    """The matrix [W | b] of a module with `weight` and `bias`, as the one unit of a layer; either may be frozen.

    `outputs` and `inputs` are those of one group, without the constant's column. Empty where neither parameter is in
    `trainable`. `more` are further fields of the unit.
    """
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


def linear_units(name: str, module: Any, trainable: frozenset[str]) -> list[Unit]:
    """The unit of y = W x + b, for a `weight` of shape `[out, in]`."""
    outputs, inputs = module.weight.shape
    return matrix_units(name, module, trainable, outputs, inputs, chainable=True)


def observe_linear(unit: Unit, module: Any, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    """The pass of y = W a + b with features last."""
    activations = inputs[..., : unit.inputs - unit.constant]
    return MatrixPass(arrange(activations, batch, unit), arrange(gradient, batch, unit), unit.constant)


register_layer(nn.Linear, Layer(linear_units, observe_linear, builtin=True))


def _replicated_units(name: str, module: ReplicatedLinear, trainable: frozenset[str]) -> list[Unit]:
    outputs, inputs, replicas = module.out_features, module.in_features, tuple(module.replicas)
    return matrix_units(name, module, trainable, outputs, inputs, chainable=True, replicas=replicas)


def _observe_replicated(unit: Unit, module: ReplicatedLinear, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    inputs = batch.precise(inputs).expand(*unit.replicas, *inputs.shape[-2:])
    return observe_linear(unit, module, inputs, gradient, batch)


register_layer(ReplicatedLinear, Layer(_replicated_units, _observe_replicated, builtin=True))


def _conv_units(name: str, module: Any, trainable: frozenset[str]) -> list[Unit]:
    inputs = module.in_channels // module.groups * math.prod(module.kernel_size)
    return matrix_units(name, module, trainable, module.out_channels // module.groups, inputs, groups=module.groups)


def _observe_conv(unit: Unit, module: Any, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    groups, dims = unit.groups, len(module.kernel_size)
    if inputs.dim() == dims + 1:
        inputs, gradient = inputs.unsqueeze(0), gradient.unsqueeze(0)
    if inputs.shape[0] % batch.size:
        raise ValueError(
            f"layer {unit.name!r} saw {inputs.shape[0]} images while the loss has a batch of {batch.size}. "
            f"{batch_advice(batch, inputs.shape[0])}"
        )
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
    # The channels of a group are adjacent in both, so groups become a leading dimension.
    activations, gradient = (t.unflatten(-1, (groups, -1)).movedim(-2, 0) for t in (activations, gradient))
    return MatrixPass(activations, gradient, unit.constant, grouped=True)


_kind: type[nn.Module]
for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_layer(_kind, Layer(_conv_units, _observe_conv, builtin=True))


def check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise ValueError for options whose gradients are not sums over examples."""
    if module.sparse or module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError(
            f"embedding {name!r}: sparse, max_norm and scale_grad_by_freq are not supported; switch them off"
        )


def _embedding_units(name: str, module: nn.Embedding, trainable: frozenset[str]) -> list[Unit]:
    if "weight" not in trainable:
        return []
    check_embedding(name, module)
    slot = Slot(f"{name}.weight" if name else "weight", 0, module.embedding_dim)
    return [Unit(name or "Embedding", "embedding", module.num_embeddings, module.embedding_dim, (slot,), "Embedding")]


def _observe_embedding(unit: Unit, module: nn.Embedding, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    if module.padding_idx is not None:
        gradient = gradient.masked_fill((inputs == module.padding_idx).unsqueeze(-1), 0.0)
    if is_shared(module, inputs, batch):
        whole = EmbeddingPass(inputs.reshape(1, -1), batch.precise(gradient).flatten(0, -2).unsqueeze(0), unit.outputs)
        return SummedPass(whole.rows().squeeze(0), batch.kept)
    indices = arrange(inputs.unsqueeze(-1), batch, unit).squeeze(-1)
    return EmbeddingPass(indices, arrange(gradient, batch, unit), unit.outputs)


register_layer(nn.Embedding, Layer(_embedding_units, _observe_embedding, builtin=True))


def _norm_units(name: str, module: nn.Module, trainable: frozenset[str]) -> list[Unit]:
    held = [part for part in ("weight", "bias") if part in trainable]
    if not held:
        return []
    prefix = f"{name}." if name else ""
    size = getattr(module, held[0]).numel()
    # The prior of a scale is centred on 1, its initial value.
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


def _observe_channels_first(unit: Unit, module: Any, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    inputs = batch.precise(inputs)
    if isinstance(module, nn.GroupNorm):
        normalised = F.group_norm(inputs, module.num_groups, None, None, module.eps)
    else:
        instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)
        own = module.training or module.running_mean is None or (instance and not module.track_running_stats)
        mean, variance = (None if own else batch.precise(t) for t in (module.running_mean, module.running_var))
        normalise = F.instance_norm if instance else F.batch_norm
        normalised = normalise(inputs, mean, variance, None, None, own, 0.0, module.eps)
    return _elementwise(
        unit, arrange(normalised.movedim(1, -1), batch, unit), arrange(gradient.movedim(1, -1), batch, unit)
    )


for _kind in (nn.LayerNorm, nn.RMSNorm):
    register_layer(_kind, Layer(_norm_units, _observe_features_last, builtin=True))
_batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
for _kind in (*_batch_norms, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    register_layer(_kind, Layer(_norm_units, _observe_channels_first, builtin=True))
