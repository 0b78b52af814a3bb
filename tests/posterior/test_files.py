"""Files of a posterior that are damaged, of something else, or of another model."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import noisygrad as ng
from noisygrad.archive import write_archive
from noisygrad.posterior.loading import HEADER
from support.fitted_posterior import fitted, mlp, vector


def spoilt(path: Path, change: Callable[[dict, dict], object]) -> None:
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["noisygrad_posterior"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    write_archive(path, "posterior", header, tensors)


def unsigned(path: Path) -> None:
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = {"noisygrad_posterior": file.metadata()["noisygrad_posterior"]}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    safetensors.torch.save_file(tensors, path, metadata=metadata)


KINDS = (torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn)
"""Types that a file's numbers must not have: they would be cast without a word."""


def without_metadata(path: Path) -> None:
    header = json.dumps({"__metadata__": None, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


MISTAKES: dict[str, tuple[Callable[[Path], object], Callable[[], nn.Module], str]] = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-7]), mlp, "truncated"),
    "cut in its header": (lambda p: p.write_bytes(p.read_bytes()[:100]), mlp, "truncated"),
    "empty": (lambda p: p.write_bytes(b""), mlp, "truncated"),
    "no metadata": (without_metadata, mlp, "not a noisygrad posterior"),
    "random bytes": (lambda p: p.write_bytes(bytes(range(256)) * 9), mlp, "not a safetensors file"),
    "no checksum": (unsigned, mlp, "has no checksum"),
    "another file": (lambda p: safetensors.torch.save_file({"a": torch.ones(2)}, p), mlp, "not a noisygrad posterior"),
    "newer": (lambda p: spoilt(p, lambda header, _: header.update(format=99)), mlp, "format 99.*upgrade"),
    "format 0": (lambda p: spoilt(p, lambda header, _: header.update(format=0)), mlp, "no format number"),
    "format True": (lambda p: spoilt(p, lambda header, _: header.update(format=True)), mlp, "no format number"),
    "another model": (
        lambda p: None,
        lambda: nn.Sequential(*list(mlp())[:-1], nn.Linear(3, 1)),
        r"another model: parameter '5\.(weight|bias)'",
    ),
    "other layers": (
        lambda p: None,
        lambda: nn.Sequential(*list(mlp())[:3], nn.GroupNorm(3, 3), nn.Tanh(), Transposed(3, 2)),
        "another model: its layers differ",
    ),
    "other buffers": (lambda p: None, lambda: with_buffer(mlp()), "another model: its buffers differ"),
}


class Transposed(nn.Module):
    """Parameters of a Linear's names and shapes in a layer that is none."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(outputs, inputs))
        self.bias = nn.Parameter(torch.ones(outputs))


def with_buffer(model: nn.Module) -> nn.Module:
    model.register_buffer("more", torch.ones(2))
    return model


def filled(tensors: dict[str, torch.Tensor], name: str, value: float) -> None:
    tensors[name] = torch.full_like(tensors[name], value)


DAMAGES: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    **{
        f"no {name}": (lambda header, _, name=name: header.pop(name), f"posterior.safetensors is damaged.*lacks {name}")
        for name in HEADER
    },
    "unknown family": (lambda header, _: header.update(family="wavelet"), "family 'wavelet', which"),
    "no data": (lambda header, _: header.update(num_data=0), "num_data"),
    "a parameter in no group": (lambda header, _: header["groups"].popitem(), "group of every parameter"),
    "unknown likelihood": (lambda header, _: header["likelihood"].update(name="Cauchy"), "'Cauchy'.*register"),
    "unknown prior": (lambda header, _: header["blocks"][0].update(prior={}), "what prior the block '0' has"),
    **{
        f"no {name}": (lambda _, tensors, name=name: tensors.pop(name), f"damaged: it lacks the tensor '{name}'")
        for name in ("mean", "prior_mean", "statistics/0/inputs", "prior/5/outputs")
    },
    **{
        f"NaN in {name}": (lambda _, tensors, name=name: filled(tensors, name, math.nan), f"'{name}' has NaN")
        for name in ("mean", "prior_mean", "statistics/5/outputs", "prior/0/inputs", "likelihood/noise_rate")
    },
    "no rate": (lambda _, tensors: tensors.pop("likelihood/noise_rate"), "damaged: its likelihood"),
    "a short mean": (lambda _, tensors: tensors.update(mean=tensors["mean"][:-1].clone()), "'mean' is of shape"),
    **{
        f"{kind} in {name}": (
            lambda _, tensors, name=name, kind=kind: tensors.update({name: tensors[name].to(kind)}),
            f"damaged.*{name.rpartition('/')[2]}",
        )
        for name in ("mean", "prior_mean", "statistics/0/inputs", "prior/5/outputs", "likelihood/noise_rate")
        for kind in KINDS
    },
    "a large N": (lambda header, _: header.update(num_data=10**400), "damaged: its header makes no sense"),
    "a large λ": (lambda header, _: header.update(kl_weight=10**400), "damaged: its header makes no sense"),
    "a block that is none": (lambda header, _: header["blocks"].append(1), "damaged: its header makes no sense"),
    "a block without a name": (lambda header, _: header["blocks"].append({"name": []}), "its header makes no sense"),
    "a likelihood of numbers": (
        lambda header, _: header["likelihood"]["config"].update(noise_decay=10**400),
        "damaged: its likelihood",
    ),
    "a likelihood without a name": (lambda header, _: header["likelihood"].update(name=[]), "damaged: its likelihood"),
    "a prior that is a word": (
        lambda header, _: header["blocks"][0]["prior"].update(dict.fromkeys(header["blocks"][0]["prior"], "x")),
        "what prior the block '0' has",
    ),
    "a small prior": (lambda _, tensors: tensors.update({"prior/0/inputs": torch.ones(1)}), "'prior/0/inputs' is of"),
}
MISTAKES |= {
    name: (lambda path, change=change: spoilt(path, change), mlp, message)
    for name, (change, message) in DAMAGES.items()
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_files_leave_the_model_alone(name: str, tmp_path: Path) -> None:
    spoil, make, message = MISTAKES[name]
    path = tmp_path / "posterior.safetensors"
    fitted("kronecker", likelihood=ng.Gaussian())[0].save(path)
    spoil(path)
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        ng.load_posterior(path, model)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


class Masked(nn.Module):
    """A mask as a buffer, running statistics, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
        self.body[0].requires_grad_(False)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def masked_posterior() -> ng.Posterior:
    return ng.NoisyKFAC(Masked(), ng.Gaussian(), num_data=10).posterior()


NUMBERS = ("buffer/body.1.running_var", "buffer/mask", "frozen/body.0.weight", "frozen/body.0.bias")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_buffers_and_frozen_parameters_are_finite(name: str, value: float, tmp_path: Path) -> None:
    path, model = tmp_path / "posterior.safetensors", Masked()
    masked_posterior().save(path)
    spoilt(path, lambda _, tensors: tensors[name].view(-1)[0].fill_(value))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"damaged: '{name}' has NaN or infinite"):
        ng.load_posterior(path, model)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_buffers_and_frozen_parameters_are_of_the_models_kind(name: str, kind: torch.dtype, tmp_path: Path) -> None:
    path, model = tmp_path / "posterior.safetensors", Masked()
    masked_posterior().save(path)
    spoilt(path, lambda _, tensors: tensors.update({name: tensors[name].to(kind)}))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"{name} of another type"):
        ng.load_posterior(path, model)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_number_too_large_for_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    masked_posterior().save(path)
    spoilt(path, lambda _, tensors: tensors["buffer/body.1.running_var"].fill_(1e300))
    with pytest.raises(ValueError, match="running_var' has NaN or infinite"):
        ng.load_posterior(path, Masked().float())


def test_a_mask_of_the_models_own_may_be_infinite(tmp_path: Path) -> None:
    path, model = tmp_path / "posterior.safetensors", Masked()
    masked_posterior().save(path)
    ng.load_posterior(path, model)
    model.mask.zero_()
    with pytest.raises(ValueError, match="'buffer/mask' has NaN or infinite"):
        ng.load_posterior(path, model)


@pytest.mark.parametrize(
    "spoil", [lambda m: m.body[1].running_var.fill_(math.nan), lambda m: m.body[0].weight.fill_(math.inf)]
)
def test_what_could_not_be_read_back_is_not_written(spoil: Callable[[Masked], object], tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    masked_posterior().save(path)
    before = path.read_bytes()
    model = Masked()
    with torch.no_grad():
        spoil(model)
    with pytest.raises(ValueError, match="NaN or infinite entries: it is not written"):
        ng.NoisyKFAC(model, ng.Gaussian(), num_data=10).posterior().save(path)
    assert path.read_bytes() == before


def test_another_family_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    fitted("kronecker")[0].save(path)
    model = mlp().double()
    before = vector({n: p.detach().clone() for n, p in model.named_parameters()})
    with pytest.raises(ValueError, match="'kronecker', not 'full'"):
        ng.load_posterior(path, model, family="full")
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    with pytest.raises(FileNotFoundError):
        ng.load_posterior(tmp_path / "absent", model)
