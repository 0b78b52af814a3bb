"""Two processes under the usual frameworks make the steps of one process that accumulates what both have seen.

Or they are told what to do instead. Who reduces the gradients, and who divides the losses, differs from one to another.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any
from unittest import mock

import pytest
import torch

import noisygrad as ng
from noisygrad import distributed
from support.compare import OPTIMIZERS, batches, differences, each_optimizer, make, mlp, snapshot
from support.processes import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
from support.frameworks import (
    OWN,
    SHARED,
    STEPS,
    TOLERANCES,
    accelerated,
    assert_as_one,
    begin,
    expected,
    lit,
    parts,
    plain,
    refused,
)

SECONDS = 240


# What a rank does


def different_weights(rank: int) -> None:
    """Nobody has given the ranks the same weights."""
    model = mlp(rank)
    optimizer = make(ng.NoisyKFAC, model)
    x, y = parts(rank, 1)[0]
    optimizer.step(lambda: (model(x), y))


def drifting(rank: int) -> None:
    """A rate that differs: noticed where factors are refreshed."""
    model = mlp()
    optimizer = make(ng.NoisyKFAC, model, lr=0.05 * (1 + rank), factor_every=2)
    for x, y in parts(rank, 1):
        optimizer.step(lambda x=x, y=y: (model(x), y))


def different_models(rank: int) -> None:
    make(ng.NoisyKFAC, mlp(sizes=(3, 4 + rank, 2)))


def wrapped_late(rank: int) -> dict[str, Any]:
    """The first batches are the same on all ranks, so they do not tell whether somebody reduces."""
    model = mlp()
    optimizer = make(ng.NoisyKFAC, model, **SHARED | {"factor_every": 100, "stats_every": 1})
    for number, (x, y) in enumerate(parts(0, 1) + parts(rank, 1)):
        optimizer.step(lambda x=x, y=y: (model(x), y))
        assert optimizer.update.reduction._done is (None if number < STEPS else False)
    return snapshot(optimizer)


def skipped_by_one(rank: int) -> dict[str, Any]:
    """Nobody reduces, and one rank's GradScaler finds an infinity: no rank makes the step."""
    model = mlp(dtype=torch.float32)
    optimizer = make(ng.NoisyKFAC, model, **SHARED)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    steps = []
    for number, (x, y) in enumerate(parts(rank, 1, torch.float32)):
        before = optimizer.weights.mean.flat.clone()
        with optimizer.sampled() as draw:
            scaler.scale(draw.nll(model(x), y) * (float("inf") if number == rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()  # from now on the ranks have different scales
        steps.append(not torch.equal(before, optimizer.weights.mean.flat))
    return {**snapshot(optimizer), "moved": steps}


def alone(rank: int) -> dict[str, Any]:
    """Trainings of their own in one group of processes: different models, and only rank 0 makes a second one."""
    model = mlp(sizes=(3, 4 + rank, 2))
    optimizer = make(ng.NoisyKFAC, model, process_group="alone")
    for x, y in parts(rank, 1) if rank == 0 else ():
        optimizer.step(lambda x=x, y=y: (model(x), y))
    regressor = ng.NoisyRegressor(epochs=1)
    if rank == 0:
        regressor.fit(*(tensor.numpy() for tensor in parts(0, 1)[0]))
    return {"steps": optimizer.steps, "fitted": hasattr(regressor, "posterior_")}


WRAPS = ("DDP", "DDP module", "unused DDP", "replicate", "nothing")


def work(rank: int, folder: str) -> dict[str, Any]:
    """Everything that one of the two processes does."""
    begin(rank)
    results: dict[str, Any] = {}
    for kind in OPTIMIZERS:
        name = kind.__name__
        results |= {f"{wrap} {name}": plain(rank, kind, wrap) for wrap in WRAPS}
        for accumulated in (1, 2):
            for order in ("before", "after"):
                results[f"accelerate {order} {accumulated} {name}"] = accelerated(rank, kind, order, accumulated)
            results[f"lightning manual {accumulated} {name}"] = lit(rank, kind, "manual", accumulated)
        results[f"lightning closure 1 {name}"] = lit(rank, kind, "closure")
        results |= {f"{wrap} float32 {name}": plain(rank, kind, wrap, dtype=torch.float32) for wrap in WRAPS}
        for order in ("before", "after"):
            results[f"accelerate {order} 2 float32 {name}"] = accelerated(rank, kind, order, 2, torch.float32)
        results[f"lightning manual 2 float32 {name}"] = lit(rank, kind, "manual", 2, dtype=torch.float32)
    kfac = ng.NoisyKFAC
    results |= {
        "rare": plain(rank, kfac, "DDP module", factor_every=50),
        "automatic": lit(rank, kfac, "automatic"),
        "clipped": lit(rank, kfac, "automatic", gradient_clip_val=0.1),
        "accumulated": refused(lit, rank, kfac, "automatic", 2, accumulate_grad_batches=2),
        "weights": refused(different_weights, rank),
        "drift": refused(drifting, rank),
        "models": refused(different_models, rank),
        "late": wrapped_late(rank),
        "skipped": skipped_by_one(rank),
        "alone": alone(rank),
    }
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, tmp_path_factory.mktemp("frameworks"), SECONDS)


EQUAL = [
    *((wrap, 1) for wrap in WRAPS),
    *((f"accelerate {order} {accumulated}", accumulated) for order in ("before", "after") for accumulated in (1, 2)),
    *((f"lightning manual {accumulated}", accumulated) for accumulated in (1, 2)),
    ("lightning closure 1", 1),
]


@each_optimizer
@pytest.mark.parametrize(("name", "accumulated"), EQUAL)
def test_two_ranks_make_the_steps_of_one(name, accumulated, kind, ranks):
    first, second = (rank[f"{name} {kind.__name__}"] for rank in ranks)
    assert_as_one(first, second, expected(kind, accumulated), TOLERANCES[torch.float64])


@each_optimizer
@pytest.mark.parametrize(
    ("name", "accumulated"),
    [*EQUAL[:5], *((name, 2) for name in ("accelerate before 2", "accelerate after 2", "lightning manual 2"))],
)
def test_two_ranks_make_the_steps_of_one_in_float32(name, accumulated, kind, ranks):
    one = expected(kind, accumulated, torch.float32)
    for rank in ranks:
        mean = {path: leaf for path, leaf in rank[f"{name} float32 {kind.__name__}"].items() if path.endswith("/mean")}
        assert mean
        assert not differences(mean, {path: one[path] for path in mean}, TOLERANCES[torch.float32])
    assert not differences(*(rank[f"{name} float32 {kind.__name__}"] for rank in ranks), but=OWN)


def test_where_factors_are_refreshed_rarely_too(ranks):
    assert not differences(*(rank["rare"] for rank in ranks), but=OWN)


def test_automatic_optimisation_takes_the_empirical_fisher_of_all_ranks(ranks):
    model = mlp()
    optimizer = make(ng.NoisyKFAC, model, **SHARED)

    def loss(x, y):
        optimizer.zero_grad()
        value = (model(x) - y).square().sum(-1).mean()
        value.backward()
        return value

    for both in zip(parts(0, 1), parts(1, 1), strict=True):
        x, y = (torch.cat(halves) for halves in zip(*both, strict=True))
        with pytest.warns(UserWarning, match="empirical") if optimizer.steps == 0 else contextlib.nullcontext():
            optimizer.step(lambda x=x, y=y: loss(x, y))
    assert_as_one(*(rank["automatic"] for rank in ranks), snapshot(optimizer), 1e-10)


def test_automatic_optimisation_may_clip(ranks):
    assert not differences(*(rank["clipped"] for rank in ranks), but=OWN)
    assert differences(ranks[0]["clipped"], ranks[0]["automatic"], 1e-3)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("accumulated", "RuntimeError: there are gradients that were made, or changed, outside sampled"),
        ("weights", "RuntimeError: the ranks have different weights: they must start from the same"),
        ("drift", "RuntimeError: the ranks have different weights: .* with the same settings"),
        ("models", "ValueError: the processes of this group have different models"),
    ],
)
def test_what_cannot_be_right_is_refused_on_all_ranks(what, words, ranks):
    for rank in ranks:
        assert re.match(words, rank[what]["error"]), rank[what]["error"]


def test_equal_batches_do_not_tell_who_reduces(ranks):
    assert not differences(*(rank["late"] for rank in ranks), but=OWN)


def test_a_step_that_one_scaler_skips_is_skipped_by_all(ranks):
    assert [rank.pop("moved") for rank in (ranks[0]["skipped"], ranks[1]["skipped"])] == [[True, False, True]] * 2
    assert not differences(*(rank["skipped"] for rank in ranks), but=OWN)


def test_trainings_of_their_own_in_one_group(ranks):
    assert [rank["alone"] for rank in ranks] == [{"steps": STEPS, "fitted": True}, {"steps": 0, "fitted": False}]


def test_an_optimizer_made_before_the_process_group_is_refused():
    """As where it is made before `Accelerator()`."""
    model, ((x, y),) = mlp(), batches(1)
    together, alone = make(ng.NoisyKFAC, model), make(ng.NoisyKFAC, mlp(), process_group="alone")
    with mock.patch.object(distributed, "processes", return_value=distributed.Processes(0, 2)):
        with pytest.raises(RuntimeError, match="made before the process group"):
            together.step(lambda: (model(x), y))
        alone.step(lambda: (alone.model(x), y))
    together.step(lambda: (model(x), y))
