"""More examples than `num_data` says there are: one warning, and none where examples are only given again."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset

import noisygrad as ng
from support.compare import batches, each_optimizer, make, mlp, take_step, train

SIZE = 6
"""Of a batch."""


def numbered(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "num_data" in str(one.message)]


@each_optimizer
@pytest.mark.parametrize("form", ["closure", "explicit"])
def test_a_batch_larger_than_the_training_set_is_warned_of_once(kind, form):
    model, data = mlp(), batches(4)
    optimizer = make(kind, model, num_data=SIZE - 1, stats_every=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in data:
            take_step(optimizer, model, batch, form)
    (message,) = numbered(caught)
    assert message.startswith(f"a batch has {SIZE} examples, but num_data={SIZE - 1}: ")
    assert "len(loader.dataset)" in message


def ordinary(case: str) -> None:
    """Trainings that see every example of a training set as large as one batch, perhaps again."""
    model, ((x, y), other) = mlp(), batches(2)
    optimizer = make(ng.NoisyKFAC, model, num_data=SIZE, mc_samples=3 if case == "samples" else 1)
    if case == "accumulation":
        for _ in range(3):
            for half in (slice(0, 3), slice(3, None)):
                with optimizer.sampled() as draw:
                    (draw.nll(model(x[half]), y[half]) / 2).backward()
            optimizer.step()
    elif case == "draws":
        for _ in range(3):
            with optimizer.sampled() as draw:
                draw.nll(model(x), y).backward()
        optimizer.step()
    elif case == "evaluation":
        with optimizer.sampled() as draw:
            draw.nll(model(x), y).backward()
            with torch.no_grad():
                draw.nll(model(torch.cat([x, other[0]])), torch.cat([y, other[1]]))
        optimizer.step()
    elif case == "padding":
        padded, counts = (torch.cat([one, one]) for one in (x, y)), torch.arange(2 * SIZE) < SIZE
        given, target = padded
        optimizer.step(lambda: (model(given), target, None, counts))
    else:
        train(optimizer, model, [(x, y)] * 3)


@pytest.mark.parametrize("case", ["plain", "samples", "accumulation", "draws", "evaluation", "padding"])
def test_examples_that_are_given_again_are_no_reason(case):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*num_data")
        ordinary(case)


class Stream(IterableDataset):
    """Twenty examples, which do not say how many they are."""

    def __iter__(self):
        return iter(data())


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randn(20, n, generator=generator, dtype=torch.float64) for n in (3, 2)))


SEEN = {
    "tensors": lambda: data().tensors,
    "a loader": lambda: DataLoader(data(), batch_size=4, shuffle=True),
    "batches": lambda: list(DataLoader(data(), batch_size=4)),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
}
FINE = {
    "a part": lambda: DataLoader(Subset(data(), range(10)), batch_size=4),
    "examples drawn again": lambda: DataLoader(
        Subset(data(), range(10)),
        batch_size=4,
        sampler=RandomSampler(range(10), replacement=True, num_samples=30, generator=torch.Generator().manual_seed(0)),
    ),
    "a sampler of a part": lambda: DataLoader(data(), batch_size=4, sampler=range(10)),
}


@pytest.mark.parametrize("case", SEEN)
@pytest.mark.parametrize("num_data", [10, 20])
def test_an_epoch_larger_than_the_training_set_is_warned_of_once(case, num_data):
    optimizer = make(ng.NoisyAdam, mlp(), num_data=num_data)
    given, options = SEEN[case](), {"batch_size": 4} if case == "tensors" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ng.train(optimizer, given, epochs=2, seed=0, progress=False, **options)
    messages = numbered(caught)
    assert len(messages) == (num_data < 20)
    assert all(message.startswith("an epoch has more than 10 examples, but num_data=10") for message in messages)
    assert {one.filename for one in caught if "num_data" in str(one.message)} <= {__file__}


@pytest.mark.parametrize("case", FINE)
def test_an_epoch_that_is_fine(case):
    optimizer = make(ng.NoisyAdam, mlp(), num_data=10)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*num_data")
        ng.train(optimizer, FINE[case](), epochs=2, seed=0, progress=False)
