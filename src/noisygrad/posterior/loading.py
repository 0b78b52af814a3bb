"""A posterior read back from its file, for a model of the same architecture."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from noisygrad.archive import read_archive
from noisygrad.curvature.capture import unwrapped
from noisygrad.families.base import Prior
from noisygrad.likelihoods import by_name
from noisygrad.posterior.files import FORMAT
from noisygrad.posterior.posterior import Posterior
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import Block, Family, build_structure
from noisygrad.posterior.weights import FlatWeights


def load_posterior(path: str | Path, model: nn.Module, *, family: Family | None = None) -> Posterior:
    """The posterior in a file, for a model of the same architecture, whose parameters and buffers it then sets.

    Raises ValueError, and leaves the model alone, for a file that is truncated or not a posterior, of a newer format,
    of another model, or of another family than `family` where that is given.
    """
    header, tensors = read_archive(path, "posterior", FORMAT)
    if family is not None and header["family"] != family:
        raise ValueError(f"{path} holds a posterior of the family {header['family']!r}, not {family!r}")
    model, _ = unwrapped(model)
    own = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    if own != header["parameters"]:
        raise ValueError(f"{path} belongs to another model: {_difference(header['parameters'], own)}")
    buffers = dict(model.named_buffers())
    saved_buffers = {name.removeprefix("buffer/"): t for name, t in tensors.items() if name.startswith("buffer/")}
    if {n: b.shape for n, b in buffers.items()} != {n: b.shape for n, b in saved_buffers.items()}:
        raise ValueError(f"{path} belongs to another model: its buffers differ")
    structure = build_structure(model, header["family"], header["groups"].__getitem__, header["noise"])
    if [block.name for block in structure.blocks] != [entry["name"] for entry in header["blocks"]]:
        raise ValueError(f"{path} belongs to another model: its layers differ")
    frozen = {name: tensors.get(f"frozen/{name}") for name in structure.frozen}
    if any(t is None or t.shape != structure.frozen[name].shape for name, t in frozen.items()):
        raise ValueError(f"{path} belongs to another model: its frozen parameters differ")

    first = next(iter(structure.parameters.values()))
    tensors = {name: t if name.startswith("buffer/") else t.to(first.device) for name, t in tensors.items()}
    likelihood = by_name(header["likelihood"]["name"]).from_config(header["likelihood"]["config"])
    likelihood.bind(structure.replicas, first.device, tensors["mean"].dtype)
    likelihood.load_state_dict(
        {n.removeprefix("likelihood/"): t for n, t in tensors.items() if n.startswith("likelihood/")}
    )
    statistics, priors = {}, {}
    for block, entry in zip(structure.blocks, header["blocks"], strict=True):
        statistics[block.name] = block.identity(tensors["mean"].dtype, first.device)
        statistics[block.name].copy_(type(statistics[block.name]).from_tensors(_part(tensors, "statistics", block), {}))
        priors[block.name] = _prior_type(block).from_tensors(_part(tensors, "prior", block), entry["prior"])
    with torch.no_grad():
        FlatWeights(structure, tensors["mean"]).write_parameters_()
        for name, buffer in buffers.items():
            buffer.copy_(saved_buffers[name])
        for name, parameter in structure.frozen.items():
            parameter.copy_(tensors[f"frozen/{name}"])
    return Posterior(
        model,
        likelihood,
        structure,
        tensors["mean"],
        statistics,
        BlockPriors(tensors["prior_mean"], priors),
        num_data=header["num_data"],
        kl_weight=header["kl_weight"],
        damping_mode=header["damping_mode"],
    )


def _part(tensors: dict[str, Tensor], part: str, block: Block) -> dict[str, Tensor]:
    prefix = f"{part}/{block.name}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _prior_type(block: Block) -> type[Prior]:
    return type(block.prior(lambda name: 1.0, torch.float32, torch.device("cpu")))


def _difference(theirs: dict[str, list[int]], ours: dict[str, list[int]]) -> str:
    for name in theirs.keys() | ours.keys():
        if theirs.get(name) != ours.get(name):
            return f"parameter {name!r} is {theirs.get(name, 'absent')} in the file and {ours.get(name, 'absent')} here"
    return "the order of parameters differs"
