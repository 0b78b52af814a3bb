"""Parameters that an optimiser cannot train are refused by name when it is made."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import noisygrad as ng
from support.compare import batches, make, train


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=torch.complex128)

    def forward(self, x):
        return self.inner(x.to(torch.complex128)).abs()


def test_complex_parameters_are_refused_by_name_unless_they_are_frozen():
    model, ((x, y),) = nn.Sequential(Complex(), nn.Linear(2, 2).double()), batches(1)
    with pytest.raises(ValueError, match=r"^0\.inner\.weight, 0\.inner\.bias: complex"):
        make(ng.NoisyKFAC, model)
    model[0].requires_grad_(False)
    before = model[0].inner.weight.clone()
    train(make(ng.NoisyKFAC, model), model, [(x, y)])
    assert torch.equal(model[0].inner.weight, before)


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import noisygrad as ng

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
ways = {
    "FSDP2": lambda model: fully_shard(model, mesh=mesh),
    "tensor parallel": lambda model: parallelize_module(model, mesh, {"0": ColwiseParallel()}),
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
}
for name, way in ways.items():
    model = way(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    try:
        ng.NoisyKFAC(model, ng.Gaussian(), num_data=10)
    except ValueError as error:
        print(name, error)
model = ways["tensor parallel"](nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
model[0].requires_grad_(False)
optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10)
optimizer.step(lambda: (model(torch.randn(5, 3)), torch.randn(5, 2)))
print("frozen", optimizer.steps)
"""


def test_parameters_that_are_shared_out_are_refused_by_name():
    command = [sys.executable, "-W", "ignore", "-c", SHARDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    *refused, frozen = done.stdout.splitlines()
    names = [line.split(": parameters that are shared out")[0] for line in refused]
    prefix = "_fsdp_wrapped_module."
    assert names == [
        "FSDP2 0.weight, 0.bias, 1.weight, 1.bias",
        "tensor parallel 0.weight, 0.bias",
        f"FSDP1 {prefix}0.weight, {prefix}0.bias, {prefix}1.weight, {prefix}1.bias",
    ]
    assert frozen == "frozen 1"
