"""A posterior read back from its file, for a model of the same architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from noisygrad.archive import converts, difference, not_finite, read_archive
from noisygrad.curvature.capture import unwrapped
from noisygrad.families import FAMILIES
from noisygrad.families.base import DampingMode, Prior, Statistics, TensorRecord
from noisygrad.likelihoods import Likelihood, UnknownLikelihoodError, by_name
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.faults import format_names
from noisygrad.posterior.posterior import FORMAT, Posterior
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import Structure, build_structure
from noisygrad.posterior.weights import FlatWeights

HEADER: dict[str, tuple[type, ...]] = {
    "family": (str,),
    "num_data": (int,),
    "kl_weight": (int, float),
    "damping_mode": (str,),
    "noise_bound": (int, float),
    "identity_share": (int, float),
    "likelihood": (dict,),
    "parameters": (dict,),
    "groups": (dict,),
    "noise": (list,),
    "blocks": (list,),
}
"""What the header must hold."""
MODES = get_args(DampingMode)


def load_posterior(path: str | Path, model: nn.Module, *, family: str | None = None) -> Posterior:
    """The posterior in a file, for a model of the same architecture, whose parameters and buffers it then sets.

    Raises ValueError, and leaves the model alone, for a file that is truncated, damaged or not a posterior, of a newer
    format, of another model, with NaN or infinite entries, or of another family than `family` where that is given.
    """
    header, tensors = read_archive(path, "posterior", FORMAT)
    model = unwrapped(model)
    try:
        likelihood, structure, statistics, priors, fixed = _read(path, header, tensors, model, family)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged: its header makes no sense ({error})") from error
    mean = FlatWeights(structure, tensors["mean"].to(priors.mean.device))
    with torch.no_grad():
        mean.write_parameters_()
        for own, tensor in fixed:
            own.copy_(tensor)
    return Posterior(
        model,
        likelihood,
        structure,
        mean.flat,
        statistics,
        priors,
        num_data=header["num_data"],
        kl_weight=header["kl_weight"],
        damping_mode=header["damping_mode"],
        noise_bound=header["noise_bound"],
        identity_share=header["identity_share"],
    )


def _read(
    path: str | Path, header: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module, family: str | None
) -> tuple[Likelihood, Structure, dict[str, Statistics], BlockPriors, list[tuple[Tensor, Tensor]]]:
    """What a posterior is made of, and the model's own tensors with those to be copied into them."""
    wrong = [name for name, kinds in HEADER.items() if not isinstance(header.get(name), kinds)]
    if wrong:
        raise ValueError(f"{path} is damaged: its header lacks {format_names(wrong)}")
    numbers = (header["num_data"], header["kl_weight"])
    if not all(0 < float(number) < math.inf for number in numbers) or header["damping_mode"] not in MODES:
        raise ValueError(f"{path} is damaged: num_data, kl_weight or damping_mode in its header make no sense")
    if not (0 <= header["noise_bound"] < math.inf and 0 <= header["identity_share"] <= 1):
        raise ValueError(f"{path} is damaged: noise_bound or identity_share in its header makes no sense")
    if header["family"] not in FAMILIES:
        raise ValueError(
            f"{path} holds a posterior of the family {header['family']!r}, which this noisygrad has not; "
            "register one of your own before you load (register_family)"
        )
    if family is not None and header["family"] != family:
        raise ValueError(f"{path} holds a posterior of the family {header['family']!r}, not {family!r}")
    own = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    if own != header["parameters"]:
        raise ValueError(f"{path} belongs to another model: parameter {difference(header['parameters'], own)}")
    buffers = {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    saved_buffers = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("buffer/")}
    if {name: buffer.shape for name, buffer in buffers.items()} != saved_buffers:
        raise ValueError(f"{path} belongs to another model: its buffers differ")
    if any(header["groups"].get(name) not in range(len(header["noise"])) for name in own):
        raise ValueError(f"{path} is damaged: its header does not tell the group of every parameter")
    structure = build_structure(model, header["family"], header["groups"].__getitem__, header["noise"])
    entries = {entry.get("name"): entry.get("prior") for entry in header["blocks"]}
    if [block.name for block in structure.blocks] != list(entries):
        raise ValueError(
            f"{path} belongs to another model: its layers differ, or layers of your own are not registered yet "
            "(register_layer)"
        )
    frozen = {f"frozen/{name}": parameter for name, parameter in structure.frozen.items()}
    if any(name not in tensors or tensors[name].shape != p.shape for name, p in frozen.items()):
        raise ValueError(f"{path} belongs to another model: its frozen parameters differ")
    fixed = buffers | frozen
    if other := [name for name, own in fixed.items() if not converts(tensors[name], own)]:
        raise ValueError(f"{path} belongs to another model, or is damaged: {format_names(other)} of another type")
    # As the model has them: a number may be too large for a narrower type.
    if bad := not_finite({name: tensors[name].to(own.dtype) for name, own in fixed.items()}, buffers):
        raise ValueError(f"{path} is damaged: {bad!r} has NaN or infinite entries")

    flat = torch.Size([*structure.replicas, structure.size])
    _check(path, "", tensors, {"mean": flat, "prior_mean": flat})
    first = next(iter(structure.parameters.values()))
    pairs = [(own, tensors[name]) for name, own in fixed.items()]
    tensors = {name: t if name.startswith("buffer/") else t.to(first.device) for name, t in tensors.items()}
    statistics, priors = dict[str, Statistics](), {}
    for block in structure.blocks:
        plain = block.prior(lambda name: 1.0, tensors["mean"])
        like = block.family.identity(plain)
        found = _check(path, f"statistics/{block.name}/", tensors, _shapes(like))
        statistics[block.name] = like.copy_(type(like).from_tensors(found, {}))
        priors[block.name] = _prior(path, block, plain, entries[block.name], tensors, like)
    noise = _part(tensors, "likelihood")
    if bad := not_finite(noise, {}):
        raise ValueError(f"{path} is damaged: {'likelihood/' + bad!r} has NaN or infinite entries")
    likelihood = _likelihood(path, header["likelihood"], noise, structure.replicas, tensors["mean"])
    return likelihood, structure, statistics, BlockPriors(tensors["prior_mean"], priors), pairs


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}/"): t for name, t in tensors.items() if name.startswith(f"{part}/")}


def _shapes(record: TensorRecord) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in record.tensors().items()}


def _check(
    path: str | Path, prefix: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """The tensors of these names behind the prefix; raises unless they are there, of these shapes, and finite."""
    found = {}
    for name, shape in shapes.items():
        tensor = tensors.get(prefix + name)
        if tensor is None:
            raise ValueError(f"{path} is damaged: it lacks the tensor {prefix + name!r}")
        if tensor.shape != shape:
            raise ValueError(
                f"{path} is damaged: {prefix + name!r} is of shape {list(tensor.shape)}, not {list(shape)}"
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{path} is damaged: {prefix + name!r} has numbers of the type {tensor.dtype}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{path} is damaged: {prefix + name!r} has NaN or infinite entries")
        found[name] = tensor
    return found


def _prior(
    path: str | Path,
    block: Block,
    plain: Prior,
    settings: object,
    tensors: Mapping[str, Tensor],
    statistics: Statistics,
) -> Prior:
    """The prior of a block, which is like a plain one or like what a posterior with such statistics becomes."""
    usual = {name: type(value) for name, value in plain.settings().items()}
    if not isinstance(settings, dict) or {name: type(value) for name, value in settings.items()} != usual:
        raise ValueError(f"{path} is damaged: its header does not tell what prior the block {block.name!r} has")
    fitted = not settings.get("diagonal", True)
    shapes = block.family.fitted_prior_shapes(statistics) if fitted else _shapes(plain)
    return type(plain).from_tensors(_check(path, f"prior/{block.name}/", tensors, shapes), settings)


def _likelihood(
    path: str | Path, entry: dict[str, Any], state: dict[str, Tensor], replicas: Sequence[int], like: Tensor
) -> Likelihood:
    try:
        likelihood = by_name(entry["name"]).from_config(entry["config"])
        likelihood.bind(replicas, like.device, like.dtype)
        own = likelihood.state_dict()
        if other := [name for name, tensor in state.items() if name in own and not converts(tensor, own[name])]:
            raise TypeError(f"{format_names(other)} of another type")
        likelihood.load_state_dict(state)
    except UnknownLikelihoodError as error:
        raise ValueError(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: its likelihood {entry!r} cannot be made ({error})") from error
    return likelihood
