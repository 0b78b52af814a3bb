"""A checkpoint of `train` belongs to one run: what it must have in common with the run that takes it up."""

import pytest
import torch

from noisygrad.training import train
from noisygrad.training.checkpoint import CheckpointError
from support.toy_training import fresh, toy


def test_a_checkpoint_of_other_settings_or_more_epochs_is_refused_before_anything_changes(tmp_path):
    path = tmp_path / "run.safetensors"
    options = {"batch_size": 8, "checkpoint": path, "settings": {"seed": 3, "drops": [0.5], "batch_size": "small"}}
    train(fresh(), toy(), epochs=2, **options)
    assert train(fresh(), toy(), epochs=3, **options).epochs == 3  # the same names as ours do no harm
    for change, message in (
        ({"settings": {"seed": 4, "drops": [0.5], "batch_size": "small"}}, "seed = 3, this one has 4"),
        ({"settings": {"seed": 3, "batch_size": "small"}}, r"drops = \[0.5\], this one has None"),
        ({"epochs": 2}, "has 3 epochs, more than the 2"),
    ):
        optimizer = fresh()
        before = [parameter.detach().clone() for parameter in optimizer.model.parameters()]
        with pytest.raises(CheckpointError, match=message):
            train(optimizer, toy(), **({"epochs": 3} | options | change))
        assert all(map(torch.equal, optimizer.model.parameters(), before))
