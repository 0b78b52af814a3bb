"""A run that was stopped, saved and resumed is bit-equal to one that never stopped."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import noisygrad as ng
from support.compare import (
    OPTIMIZERS,
    assert_unchanged,
    batches,
    compare_optimizers,
    each_optimizer,
    leaves,
    make,
    mlp,
    snapshot,
    tensors_of,
    train,
)


def through_safetensors(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load: tensors in the file's body, all else as JSON in its header."""
    tensors, plain = {}, {}
    for path, leaf in leaves(state).items():
        assert isinstance(leaf, Tensor | int | float | str), (path, type(leaf))
        if isinstance(leaf, Tensor):
            tensors[path] = leaf.contiguous()
        else:
            plain[path] = leaf
    loaded = safetensors.torch.load(safetensors.torch.save(tensors))
    found: dict[str, Any] = loaded | json.loads(json.dumps(plain))

    def rebuild(like: Any, prefix: str) -> Any:
        if isinstance(like, dict):
            return {key: rebuild(value, f"{prefix}/{key}") for key, value in like.items()}
        if isinstance(like, list):
            return [rebuild(value, f"{prefix}/{index}") for index, value in enumerate(like)]
        return found[prefix]

    return rebuild(state, "")


def through_torch(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def schedule_for(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


CASES = {
    "every step": {},
    "stale factors": {"stats_every": 3, "factor_every": 4},
    "heavy ball, clipped": {"momentum_mode": "heavy_ball", "kl_clip": 1e-3, "momentum": 0.7},
    "damped": {"damping": 0.1, "factor_every": 4},
    "damped exactly": {"damping": 0.1, "damping_mode": "exact", "factor_every": 3},
    "groups": {"groups": {"2.*": {"noise": False, "damping": 0.3}}, "factor_every": 4},
    "point": {"noise": False},
}


RUNS = [
    *((kind, case, torch.float32) for kind in OPTIMIZERS for case in CASES),
    *((kind, "stale factors", torch.bfloat16) for kind in OPTIMIZERS),
]
RUNS = [run for run in RUNS if run[0] is ng.NoisyKFAC or run[1] != "damped exactly"]  # which no other family has


@pytest.mark.parametrize(("kind", "case", "dtype"), RUNS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_resumed_is_bit_equal(kind, case, dtype):
    options = CASES[case]
    data = batches(9, dtype=dtype)

    def begin(seed: int) -> tuple[nn.Module, Any, Any]:
        model = mlp(seed, dtype=dtype)
        optimizer = make(kind, model, ng.Gaussian(per_output=True), **options | {"seed": seed})
        return model, optimizer, schedule_for(optimizer)

    model, whole, schedule = begin(1)
    train(whole, model, data[:5], schedule)
    saved = [through_safetensors(part.state_dict()) for part in (model, whole, schedule)]
    train(whole, model, data[5:], schedule)

    other, resumed, other_schedule = begin(2)
    for part, state in zip((other, resumed, other_schedule), saved, strict=True):
        part.load_state_dict(state)
    train(resumed, other, data[5:], other_schedule)

    compare_optimizers(whole, resumed)
    assert {t.dtype for t in tensors_of(resumed.state_dict()).values()} == {torch.float32}
    assert next(other.parameters()).dtype == dtype


@each_optimizer
def test_state_survives_torch_save_and_is_a_copy(kind):
    model, data = mlp(), batches(4)
    optimizer = make(kind, model)
    train(optimizer, model, data[:2])
    state = optimizer.state_dict()
    before = snapshot(optimizer)
    loaded = through_torch(state)
    train(optimizer, model, data[2:])
    fresh_model = mlp(5)
    fresh = make(kind, fresh_model, seed=99)
    fresh_model.load_state_dict({k.removeprefix("/model/"): v for k, v in before.items() if k.startswith("/model/")})
    fresh.load_state_dict(loaded)
    assert_unchanged(before, fresh)
    fresh.load_state_dict(state)  # not the loaded copy: a later step must not have written into it
    assert_unchanged(before, fresh)


def test_a_state_that_was_loaded_is_not_written_into():
    model, data = mlp(), batches(3)
    optimizer = make(ng.NoisyKFAC, model, lr=torch.tensor(0.05))
    state = optimizer.state_dict()
    kept = {path: leaf.clone() if isinstance(leaf, Tensor) else leaf for path, leaf in leaves(state).items()}
    optimizer.load_state_dict(state)
    train(optimizer, model, data, schedule_for(optimizer))
    now = leaves(state)
    assert all(torch.equal(now[k], v) if isinstance(v, Tensor) else now[k] == v for k, v in kept.items())


def test_a_tensor_learning_rate_stays_the_same_tensor():
    model = mlp()
    lr = torch.tensor(0.05)
    optimizer = make(ng.NoisyAdam, model, lr=lr)
    state = optimizer.state_dict()
    lr.fill_(0.5)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == pytest.approx(0.05)


GROUPS = {"2.*": {"lr": 0.1}}
WRONG = {
    "family": lambda: make(ng.NoisyFull, mlp(), groups=GROUPS),
    "model": lambda: make(ng.NoisyKFAC, mlp(sizes=(3, 6, 2)), groups=GROUPS),
    "same shapes, other layers": lambda: make(ng.NoisyKFAC, nn.Sequential(nn.Identity(), *mlp()), groups={"3.*": {}}),
    "groups": lambda: make(ng.NoisyKFAC, mlp(), groups={"0.*": {"lr": 0.1}}),
    "number of groups": lambda: make(ng.NoisyKFAC, mlp()),
    "likelihood": lambda: make(ng.NoisyKFAC, mlp(), ng.Categorical(), groups=GROUPS),
    "noise of the likelihood": lambda: make(ng.NoisyKFAC, mlp(), ng.Gaussian(noise_prior=None), groups=GROUPS),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_state_of_another_kind_is_refused_before_anything_changes(wrong):
    model = mlp()
    optimizer = make(ng.NoisyKFAC, model, groups=GROUPS)
    train(optimizer, model, batches(2))
    other = wrong()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="state"):
        optimizer.load_state_dict(other.state_dict())
    assert_unchanged(before, optimizer)


def test_groups_of_equal_size_in_another_order_are_refused():
    sizes = (4, 4, 4, 4)
    one = make(ng.NoisyAdam, mlp(sizes=sizes), groups={"0.*": {"lr": 0.1}, "2.*": {"lr": 0.2}})
    two = make(ng.NoisyAdam, mlp(sizes=sizes), groups={"2.*": {"lr": 0.2}, "0.*": {"lr": 0.1}})
    before = snapshot(one)
    with pytest.raises(ValueError, match="param groups"):
        one.load_state_dict(two.state_dict())
    assert_unchanged(before, one)


SPOILT = {
    "without tensors": lambda s: s.pop("state"),
    "empty": lambda s: s.clear(),
    "without a learning rate": lambda s: s["param_groups"][0].pop("lr"),
    **{f"format {value!r}": lambda s, value=value: s.update(format=value) for value in (99, 3, 0, None, "4", True)},
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_what_is_not_a_state_is_refused(spoil):
    optimizer = make(ng.NoisyAdam, mlp())
    state, before = optimizer.state_dict(), snapshot(optimizer)
    spoil(state)
    with pytest.raises(ValueError, match="state"):
        optimizer.load_state_dict(state)
    assert_unchanged(before, optimizer)


def test_a_tensor_of_another_shape_for_the_learning_rate_is_refused():
    optimizer = make(ng.NoisyAdam, mlp(), lr=torch.tensor(0.05))
    state, before = optimizer.state_dict(), snapshot(optimizer)
    state["param_groups"][0]["lr"] = torch.tensor([0.05])
    with pytest.raises(ValueError, match=r"lr must be a number .* of shape \[1\]"):
        optimizer.load_state_dict(state)
    assert_unchanged(before, optimizer)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@each_optimizer
def test_every_tensor_of_a_state_must_be_finite(kind, value):
    model = mlp()
    optimizer = make(kind, model)
    train(optimizer, model, batches(2))
    state, before = optimizer.state_dict(), snapshot(optimizer)
    for tensor in (*tensors_of(state).values(), *state["likelihood"].values()):
        if tensor.is_floating_point():
            kept = tensor.clone()
            tensor.fill_(value)
            with pytest.raises(ValueError, match="state"):
                optimizer.load_state_dict(state)
            tensor.copy_(kept)
            assert_unchanged(before, optimizer)
    optimizer.load_state_dict(state)
