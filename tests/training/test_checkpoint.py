import json
from collections import Counter

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import noisygrad as ng
from noisygrad.archive import write_archive
from noisygrad.networks import MLP
from noisygrad.training import CheckpointError, load_checkpoint, save_checkpoint
from support.compare import leaves


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
    with pytest.raises(CheckpointError, match="truncated"):
        load_checkpoint(path)


def test_missing_file(path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_checkpoint(path)


def test_other_safetensors_file(path):
    safetensors.torch.save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="not a noisygrad checkpoint"):
        load_checkpoint(path)


def test_newer_format(path):
    write_archive(path, "checkpoint", {"format": 99, "state": {}}, {"a": torch.ones(1)})
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


def test_another_width_with_batch_norm_changes_nothing(path):
    """Its running statistics are constants that numbers of the file are compared with."""
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.BatchNorm1d(n), nn.Linear(n, 1)) for n in (4, 5))
    saved, other = ({"model": m, "optimizer": ng.NoisyKFAC(m, ng.Gaussian(), num_data=8)} for m in (narrow, wide))
    save_checkpoint(path, **saved)
    assert_refused_unchanged(path, other, "another model: ")
    assert_refused_unchanged(path, {"model": wide}, "another model: ")


KINDS = [torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers_of_another_type_change_nothing(path, kind):
    """They would be cast without a word."""
    save_checkpoint(path, **trained(3))
    with safetensors.safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if file.get_tensor(name).is_floating_point()]  # noqa: SIM118
    assert len(names) > 20
    for name in names:
        save_checkpoint(path, **trained(3))
        spoilt(path, lambda _, tensors, name=name: tensors.update({name: tensors[name].to(kind)}))
        assert_refused_unchanged(path, trained(1), "another model|damaged")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_width_of_numbers_is_loaded(path, kind):
    save_checkpoint(path, model=nn.Linear(3, 2).to(kind))
    load_checkpoint(path, model=nn.Linear(3, 2))


def test_a_buffer_of_eight_bits_survives(path):
    model = nn.Linear(1, 1)
    model.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))
    save_checkpoint(path, model=model)
    load_checkpoint(path, model=model)


def test_another_family(path):
    model = MLP(2, (3,), 1)
    save_checkpoint(path, model=model, optimizer=ng.NoisyAdam(model, ng.Gaussian(), num_data=4))
    with pytest.raises(CheckpointError, match=r"does not fit the optimizer.*'diagonal'"):
        load_checkpoint(path, model=model, optimizer=ng.NoisyKFAC(model, ng.Gaussian(), num_data=4))


HEADERS = {
    "no state": {},
    "a list": {"state": [1]},
    "no extra": {"state": {"model": {}}},
    "extra is a number": {"state": {"extra": 3}},
    "a tensor that is not there": {"state": {"extra": {"a": {"\0tensor": "model/absent"}}}},
    "a tensor without a name": {"state": {"extra": {"a": {"\0tensor": [1]}}}},
    "keys that cannot be": {"state": {"extra": {"\0dict": [[[1], 2]]}}},
    "the model is a number": {"state": {"extra": {}, "model": 3}},
    "pairs that are none": {"state": {"extra": {"\0dict": [1, 2]}}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers_that_make_no_sense(path, header):
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    write_archive(path, "checkpoint", {"format": 1, **header}, {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path, model=model)
    assert torch.equal(model.weight, before)


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=8, seed=seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    for _ in range(seed):
        optimizer.step(lambda: (model(x), y))
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def states(parts):
    return leaves({name: part.state_dict() for name, part in parts.items()})


def assert_refused_unchanged(path, parts, match):
    before = states(parts)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path, **parts)
    after = states(parts)
    assert after.keys() == before.keys()
    assert all(torch.equal(a, before[k]) if isinstance(a, torch.Tensor) else a == before[k] for k, a in after.items())


class Stubborn:
    """Something with a state that cannot be taken up again, half of which it then has."""

    def __init__(self, value, error=RuntimeError):
        self.value, self.error = value, error

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        fails = state["value"] != self.value
        self.value = state["value"]
        if fails and self.value == "saved":
            raise self.error("no")


def test_all_or_nothing_is_loaded(path):
    saved = trained(3) | {"optimizer": Stubborn("saved")}
    save_checkpoint(path, **saved)
    assert_refused_unchanged(path, trained(1) | {"optimizer": Stubborn("mine")}, "does not fit the optimizer")
    parts = trained(1) | {"optimizer": Stubborn("mine", KeyboardInterrupt)}
    before = states(parts)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(path, **parts)
    assert parts["optimizer"].value == "mine"
    assert states(parts)["/scheduler/last_epoch"] == before["/scheduler/last_epoch"]


def spoilt(path, change):
    """The same file with other content and its right checksum."""
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["noisygrad_checkpoint"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header["state"], tensors)
    write_archive(path, "checkpoint", header, tensors)


def cut_generator(state, tensors):
    tensors["optimizer/generators/0"] = tensors["optimizer/generators/0"][:-8].clone()


SPOILT = {
    "steps are a word": lambda state, _: state["optimizer"].update(steps="three"),
    "no steps": lambda state, _: state["optimizer"].pop("steps"),
    "steps are not a number": lambda state, _: state["optimizer"].update(steps=float("nan")),
    "the rank is a word": lambda state, _: state["optimizer"].update(rank=None),
    "no generator": lambda state, _: state["optimizer"]["generators"].clear(),
    "another generator": lambda state, _: state["optimizer"]["generators"].update(
        {"1": state["optimizer"]["generators"].pop("0")}
    ),
    "a short generator": cut_generator,
    "lr is NaN": lambda state, _: state["optimizer"]["param_groups"][0].update(lr=float("nan")),
    "lr is a word": lambda state, _: state["optimizer"]["param_groups"][0].update(lr="0.1"),
    "no groups": lambda state, _: state["optimizer"].update(param_groups=3),
    "no order": lambda state, _: state["optimizer"].update(order=None),
    "the state is a list": lambda state, _: state.update(optimizer=[1]),
    "settings are a word": lambda state, _: state["optimizer"].update(settings="as usual"),
    **{
        f"{value} in {name}": lambda _, tensors, name=name, value=value: tensors[name].view(-1)[0].fill_(value)
        for name in (
            "optimizer/state/2/mean",
            "optimizer/state/0/0/statistics/inputs",
            "optimizer/state/0/momentum/average",
            "optimizer/likelihood/noise_rate",
            "model/0.weight",
            "model/1.running_var",
        )
        for value in (float("nan"), float("inf"))
    },
}


@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT)
def test_states_that_make_no_sense_change_nothing(path, change):
    save_checkpoint(path, **trained(3))
    spoilt(path, change)
    assert_refused_unchanged(path, trained(1), "damaged|does not fit")


@pytest.mark.parametrize("part", ["weight", "running_var"])
def test_what_is_not_finite_is_not_written(path, part):
    parts = trained(1)
    save_checkpoint(path, **parts)
    before = path.read_bytes()
    parts["model"].state_dict()[f"{'0' if part == 'weight' else '1'}.{part}"].fill_(float("nan"))
    with pytest.raises(CheckpointError, match="NaN or infinite entries: nothing is written"):
        save_checkpoint(path, **parts)
    assert path.read_bytes() == before


def test_a_mask_may_be_infinite(path):
    def masked():
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        return model

    save_checkpoint(path, model=masked())
    load_checkpoint(path, model=masked())
    other = masked()
    other.mask.zero_()
    assert_refused_unchanged(path, {"model": other}, "'model/mask' has NaN or infinite")
