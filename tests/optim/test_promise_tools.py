"""What torch's own tools for checkpoints find in an optimiser."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import noisygrad as ng
from support.compare import assert_unchanged, batches, each_optimizer, make, mlp, snapshot, tensors_of, train

GROUPS = {"2.*": {"lr": 0.01}, "0.*": {"momentum": 0.5}}


@each_optimizer
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["one group", "groups"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_distributed_checkpoint_names_every_parameter(kind, groups, steps):
    """The groups lie in another order than the layers: torch numbers parameters group after group."""
    model = mlp()
    optimizer = make(kind, model, groups=groups)
    train(optimizer, model, batches(steps))
    before = snapshot(optimizer)
    found = get_optimizer_state_dict(model, optimizer)
    assert_unchanged(before, optimizer)
    parameters = dict(model.named_parameters())
    assert found["state"].keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(found["state"][name]["mean"], parameter)
        for record in ("momentum/average", "prior_mean"):
            assert found["state"][name][record].shape == parameter.shape
    names = {id(parameter): name for name, parameter in parameters.items()}
    assert [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups] == [
        group["params"] for group in found["param_groups"]
    ]
    assert sum(map(len, found["state"].values())) == len(tensors_of(optimizer.state_dict()))
    blocks = {path for own in found["state"].values() for path in own if "/statistics/" in path}
    assert {path.split("/")[0] for path in blocks} == {block.name for block in optimizer.structure.blocks}


@each_optimizer
def test_every_parameter_knows_its_blocks(kind):
    model = mlp()
    optimizer = make(kind, model)
    assert optimizer.state.keys() == set(model.parameters())
    of_name = {block.name: block for block in optimizer.structure.blocks}
    for name, parameter in model.named_parameters():
        (block,) = optimizer.state[parameter]["blocks"]
        assert name in {slot.parameter for unit in of_name[block].units for slot in unit.slots}


def test_what_such_a_checkpoint_leaves_out_is_said_when_it_is_loaded():
    """It has neither the generators nor the likelihood's noise: a run resumed from it would be another run."""
    model = mlp()
    optimizer = make(ng.NoisyKFAC, model)
    train(optimizer, model, batches(2))
    found = get_optimizer_state_dict(model, optimizer)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"generators, likelihood, .* missing.*save optimizer.state_dict\(\) whole"):
        set_optimizer_state_dict(model, optimizer, found)
    assert_unchanged(before, optimizer)
