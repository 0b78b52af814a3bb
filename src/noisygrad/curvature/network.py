"""The units of a whole network: every trainable parameter is in exactly one."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from noisygrad.curvature.layers import check_embedding
from noisygrad.curvature.registry import REGISTRY, find_layer
from noisygrad.families.units import Slot, Unit


def find_units(model: nn.Module) -> tuple[list[Unit], dict[nn.Module, list[Unit]]]:
    """All units, in the order of the modules, and the units of each layer; a parameter is in exactly one.

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
    inside: str | None = None  # a registered layer holds its own parts, too (attention's out_proj)
    for module_name, module in model.named_modules():
        layer = None if inside is not None and module_name.startswith(inside) else find_layer(module)
        if layer is not None:
            inside = f"{module_name}." if module_name else ""
            trainable = {
                own: parameter
                for own, parameter in module.named_parameters()
                if parameter.requires_grad and len(owners[id(parameter)]) == 1
            }
            found = layer.units(module_name, module, frozenset(trainable))
            if not layer.builtin:
                _check_units(module_name, module, found, trainable)
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
        check_embedding(owners[0].rpartition(".")[0], module)
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


def _check_units(name: str, module: nn.Module, units: Sequence[Unit], trainable: dict[str, Tensor]) -> None:
    """Raise ValueError where the units of a user's layer do not hold its parameters."""
    layer = f"layer {name!r} ({type(module).__name__})"
    for unit in units:
        if [slot.start for slot in unit.slots] + [unit.inputs] != [0] + [slot.stop for slot in unit.slots]:
            columns = ", ".join(f"{slot.parameter} [{slot.start}, {slot.stop})" for slot in unit.slots)
            raise ValueError(
                f"{layer}: the slots of unit {unit.name!r} must be its columns 0 to {unit.inputs}, one after another; "
                f"got {columns or 'none'}"
            )
        for slot in unit.slots:
            own = slot.parameter.removeprefix(f"{name}.") if name else slot.parameter
            if own not in trainable:
                known = ", ".join(f"{name}.{own}" if name else own for own in trainable) or "none"
                raise ValueError(
                    f"{layer}: unit {unit.name!r} has a slot for {slot.parameter!r}, which is not a trainable "
                    f"parameter of its own; there are {known}. Name only those in `trainable`, with the module's name"
                )
            part = slot.of(trainable[own], len(unit.replicas))
            if part.numel() != math.prod(unit.replicas) * unit.rows * (slot.stop - slot.start):
                raise ValueError(
                    f"{layer}: the slot for {slot.parameter!r} has {unit.rows} × {slot.stop - slot.start} numbers, "
                    f"but the parameter is of shape {tuple(part.shape)}. A slot is as many columns of its unit's "
                    "matrix as the parameter has numbers for each row"
                )
