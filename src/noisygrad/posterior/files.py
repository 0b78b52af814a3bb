"""A posterior in one safetensors file: tensors by name, everything else as JSON in the header. Nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from noisygrad.archive import write_archive
from noisygrad.likelihoods import check_saveable
from noisygrad.posterior.blocks import Block

if TYPE_CHECKING:
    from noisygrad.posterior.posterior import Posterior

FORMAT = 1


def save_posterior(posterior: Posterior, path: str | Path) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    check_saveable(posterior.likelihood)  # what could not be read back is not written
    structure = posterior.structure
    tensors: dict[str, Tensor] = {"mean": posterior._mean.flat, "prior_mean": posterior.priors.mean}
    blocks = []
    for block in structure.blocks:
        prior = posterior.priors.blocks[block.name]
        for part, found in (
            ("statistics", posterior.statistics[block.name].tensors()),
            ("prior", prior.tensors()),
        ):
            tensors |= {f"{part}/{block.name}/{name}": tensor for name, tensor in found.items()}
        blocks.append({"name": block.name, "prior": prior.settings(), "size": block.size})
    tensors |= {f"likelihood/{name}": tensor for name, tensor in posterior.likelihood.state_dict().items()}
    tensors |= {f"buffer/{name}": tensor for name, tensor in posterior._buffers.items()}
    tensors |= {f"frozen/{name}": parameter for name, parameter in structure.frozen.items()}
    header = {
        "format": FORMAT,
        "family": posterior.family,
        "num_data": posterior.num_data,
        "kl_weight": posterior.kl_weight,
        "damping_mode": posterior.damping_mode,
        "likelihood": {"name": type(posterior.likelihood).__name__, "config": posterior.likelihood.config()},
        "parameters": {name: list(shape) for name, shape in structure.shapes.items()},
        "groups": {slot.parameter: b.group for b in structure.blocks for u in b.units for slot in u.slots},
        "noise": _noise_by_group(structure.blocks),
        "blocks": blocks,
    }
    write_archive(path, "posterior", header, tensors)


def _noise_by_group(blocks: list[Block]) -> list[bool]:
    noise = [True] * (max(block.group for block in blocks) + 1)
    for block in blocks:
        noise[block.group] = block.noise
    return noise
