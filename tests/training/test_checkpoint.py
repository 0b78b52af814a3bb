import json
from collections import Counter

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import noisygrad as ng
from noisygrad.networks import MLP
from noisygrad.training import CheckpointError, load_checkpoint, save_checkpoint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


def test_extra_survives(path):
    extra = {
        "numbers": [1, 2.5, True, None, float("inf")],
        "tuple": (1, ("a", 2)),
        "by number": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0)}},
        "both": {1: "int", "1": "str"},
        "tensors": {"bool": torch.tensor([True]), "bf16": torch.ones(2, dtype=torch.bfloat16), "none": torch.ones(0)},
        "counter": Counter({2: 1, 4: 2}),
        "numpy": np.float64(0.25),
        "empty": {},
    }
    save_checkpoint(path, extra=extra)
    found = load_checkpoint(path)
    tensors, expected = found.pop("tensors"), extra.pop("tensors")
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert found == extra
    assert isinstance(found["tuple"][1], tuple)
    assert isinstance(found["counter"], Counter)


def test_keys_that_read_alike_keep_their_tensors(path):
    save_checkpoint(path, extra={"a": {1: torch.tensor(1), "1": torch.tensor(2)}, "a/1": torch.tensor(3)})
    found = load_checkpoint(path)
    assert found["a"][1] == 1
    assert found["a"]["1"] == 2
    assert found["a/1"] == 3


def test_shared_and_strided_tensors(path):
    base = torch.arange(6.0).reshape(2, 3)
    save_checkpoint(path, extra={"base": base, "transposed": base.T, "row": base[1]})
    found = load_checkpoint(path)
    assert torch.equal(found["transposed"], base.T)
    assert torch.equal(found["row"], base[1])


def test_plain_torch_states(path):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])

    def advance(model, optimizer, scheduler):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()

    one, other = make(), make()
    advance(*one)
    save_checkpoint(path, model=one[0], optimizer=one[1], scheduler=one[2])
    load_checkpoint(path, model=other[0], optimizer=other[1], scheduler=other[2])
    for _ in range(3):
        advance(*one)
        advance(*other)
    assert torch.equal(one[0].weight, other[0].weight)
    assert one[1].param_groups[0]["lr"] == other[1].param_groups[0]["lr"]
    assert other[1].param_groups[0]["betas"] == (0.8, 0.9)


def test_nothing_is_pickled(path):
    save_checkpoint(path, model=nn.Linear(3, 2), extra={"note": "hello"})
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["noisygrad_checkpoint"])
        assert sorted(file.keys()) == ["model/bias", "model/weight"]
    assert header["state"]["extra"] == {"note": "hello"}


@pytest.mark.parametrize("bad", [object(), {"deep": [lambda: 0]}, {(1, 2): 3}])
def test_what_cannot_be_saved_is_named_and_the_old_file_stays(path, bad):
    save_checkpoint(path, extra={"kept": 1})
    with pytest.raises(TypeError, match="extra/bad"):
        save_checkpoint(path, extra={"bad": bad})
    assert load_checkpoint(path) == {"kept": 1}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_interrupted_writing_leaves_the_old_file(path, monkeypatch):
    save_checkpoint(path, extra={"kept": 1})

    def fail(handle):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(path, extra={"kept": 2})
    assert load_checkpoint(path) == {"kept": 1}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file(path, keep):
    save_checkpoint(path, model=nn.Linear(3, 2))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        load_checkpoint(path)


def test_missing_file(path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_checkpoint(path)


def test_other_safetensors_file(path):
    safetensors.torch.save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="not a noisygrad checkpoint"):
        load_checkpoint(path)


def test_newer_format(path):
    header = json.dumps({"format": 99, "state": {}})
    safetensors.torch.save_file({"a": torch.ones(1)}, path, metadata={"noisygrad_checkpoint": header})
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(path)


def test_absent_part(path):
    save_checkpoint(path, extra={})
    with pytest.raises(CheckpointError, match="holds no state of the model"):
        load_checkpoint(path, model=nn.Linear(1, 1))


def test_another_model_changes_nothing(path):
    save_checkpoint(path, model=nn.Linear(3, 2))
    other = nn.Linear(3, 4)
    before = other.weight.clone()
    with pytest.raises(CheckpointError, match=r"'bias' is \(2,\) in the file and \(4,\) here"):
        load_checkpoint(path, model=other)
    assert torch.equal(other.weight, before)


def test_another_family(path):
    model = MLP(2, (3,), 1)
    save_checkpoint(path, model=model, optimizer=ng.NoisyAdam(model, ng.Gaussian(), num_data=4))
    with pytest.raises(CheckpointError, match=r"does not fit the optimizer.*'diagonal'"):
        load_checkpoint(path, model=model, optimizer=ng.NoisyKFAC(model, ng.Gaussian(), num_data=4))
