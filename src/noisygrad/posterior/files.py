"""A posterior in one safetensors file: tensors by name, everything else as JSON in the header. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from noisygrad.archive import write_archive
from noisygrad.families.base import DampingMode, Statistics
from noisygrad.likelihoods import Likelihood, check_saveable
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import Structure

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PosteriorFile:
    """What a file of a posterior holds."""

    structure: Structure
    mean: Tensor
    statistics: Mapping[str, Statistics]
    priors: BlockPriors
    likelihood: Likelihood
    buffers: Mapping[str, Tensor]
    num_data: int
    kl_weight: float
    damping_mode: DampingMode

    def write(self, path: str | Path) -> None:
        """Write atomically: a reader sees the old file or the whole new one."""
        check_saveable(self.likelihood)  # what could not be read back is not written
        tensors: dict[str, Tensor] = {"mean": self.mean, "prior_mean": self.priors.mean}
        blocks = []
        for block in self.structure.blocks:
            prior = self.priors.blocks[block.name]
            for part, found in (
                ("statistics", self.statistics[block.name].tensors()),
                ("prior", prior.tensors()),
            ):
                tensors |= {f"{part}/{block.name}/{name}": tensor for name, tensor in found.items()}
            blocks.append({"name": block.name, "prior": prior.settings(), "size": block.size})
        tensors |= {f"likelihood/{name}": tensor for name, tensor in self.likelihood.state_dict().items()}
        tensors |= {f"buffer/{name}": tensor for name, tensor in self.buffers.items()}
        tensors |= {f"frozen/{name}": parameter for name, parameter in self.structure.frozen.items()}
        header = {
            "format": FORMAT,
            "family": self.structure.family.name,
            "num_data": self.num_data,
            "kl_weight": self.kl_weight,
            "damping_mode": self.damping_mode,
            "likelihood": {"name": type(self.likelihood).__name__, "config": self.likelihood.config()},
            "parameters": {name: list(shape) for name, shape in self.structure.shapes.items()},
            "groups": {slot.parameter: b.group for b in self.structure.blocks for u in b.units for slot in u.slots},
            "noise": _noise_by_group(self.structure.blocks),
            "blocks": blocks,
        }
        write_archive(path, "posterior", header, tensors)


def _noise_by_group(blocks: list[Block]) -> list[bool]:
    noise = [True] * (max(block.group for block in blocks) + 1)
    for block in blocks:
        noise[block.group] = block.noise
    return noise
