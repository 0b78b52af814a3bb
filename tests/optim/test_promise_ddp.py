"""Two processes under DistributedDataParallel equal one process that accumulates what both have seen.

The two processes are started once; they run every scenario and leave their results in a file each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import noisygrad as ng
from noisygrad.algorithm import stacks
from support.compare import OPTIMIZERS, batches, differences, each_optimizer, make, mlp, snapshot
from support.processes import run_ranks

SECONDS = 100
OWN = ("/generators/", "/optimizer/rank")
"""What ranks do not share."""
OPTIONS = {"kl_clip": 1e-2, "stats_every": 1, "factor_every": 2, "damping": 0.01}
FLOORED = {"fisher": "exact", "fisher_floor": 0.5}


def halves(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:rows], x[rows:]


def distributed_training(rank: int, kind: Any, rows: int = 4, **options: Any) -> dict[str, Any]:
    """Five steps on this rank's part of each batch."""
    model = DistributedDataParallel(mlp(rank))  # DDP gives all ranks the weights of rank 0
    optimizer = make(kind, model, **OPTIONS | options)
    for x, y in batches(5, size=8):
        with optimizer.sampled() as draw:
            draw.nll(model(halves(x, rows)[rank]), halves(y, rows)[rank]).backward()
        optimizer.step()
    return snapshot(optimizer)


def work_shared_out(rank: int) -> list[str]:
    """Which blocks this rank factorises in one refresh."""
    model = DistributedDataParallel(mlp())
    optimizer = make(ng.NoisyKFAC, model)
    done: list[str] = []
    factorise = optimizer.covariance._factorise
    optimizer.covariance._factorise = lambda block, damping: (done.append(block.name), factorise(block, damping))[1]
    x, y = batches(2)[rank]
    optimizer.step(lambda: (model(x), y))
    return done


def changed_damping(rank: int, stacked: bool) -> dict[str, Any]:
    """Steps before and after the damping is switched on: what `solve` gives on this rank, and what is right."""
    stacks.DEVICES = {"cpu"} if stacked else set()
    model = DistributedDataParallel(mlp())
    optimizer = make(ng.NoisyKFAC, model, damping=0.0)
    for number, (x, y) in enumerate(batches(6, size=8)):
        if number == 3:
            optimizer.param_groups[0]["damping"] = 0.1
        optimizer.step(lambda x=x, y=y: (model(halves(x, 4)[rank]), halves(y, 4)[rank]))
    stacks.DEVICES = {"cuda"}
    factors, gradient = optimizer.covariance, torch.ones_like(optimizer.weights.mean.flat)
    truth = torch.zeros_like(gradient)
    for block in factors.blocks:
        statistics = factors.statistics[block.name].with_identity(factors.identity_share)
        precision = statistics.factorise(factors.priors[block.name], 0.1, "factored")
        block.write_(truth, precision.solve(block.vector(gradient)))
    return {"solved": factors.solve(gradient), "truth": truth, "mean": optimizer.weights.mean.flat.clone()}


def failure(rank: int, what: str) -> dict[str, Any]:
    """Rank 1 fails in its second step; returns what each rank sees, and whether the step after it works."""
    model = DistributedDataParallel(mlp())
    optimizer = make(ng.NoisyKFAC, model)
    x, y = batches(2)[rank]
    optimizer.step(lambda: (model(x), y))
    before = snapshot(optimizer)
    bad = x
    factorise = optimizer.covariance._factorise
    if rank == 1 and what == "NaN":
        bad = torch.full_like(x, float("nan"))
    if rank == 1 and what == "factorisation":
        optimizer.covariance._factorise = _refuse
    try:
        optimizer.step(lambda: (model(bad), y))
        error = "none"
    except (ArithmeticError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    after = snapshot(optimizer)
    optimizer.covariance._factorise = factorise
    optimizer.step(lambda: (model(x), y))
    return {"error": error, "changed": list(differences(before, after, but=OWN)), "next": snapshot(optimizer)}


def skipped(rank: int, kind: Any) -> dict[str, Any]:
    """A GradScaler skips a step in which rank 1 has seen a bad batch, and so bad statistics: what has changed."""
    model = DistributedDataParallel(mlp())
    optimizer = make(kind, model, factor_every=5)
    data = batches(3, size=8)
    for x, y in data[:2]:
        optimizer.step(lambda x=x, y=y: (model(halves(x, 4)[rank]), halves(y, 4)[rank]))
    before = snapshot(optimizer)
    x, y = data[2]
    with optimizer.sampled() as draw:
        bad = float("nan") if rank == 1 else 1.0
        draw.nll(model(bad * halves(x, 4)[rank]), halves(y, 4)[rank]).backward()
    optimizer.found_inf = torch.ones(1)
    optimizer.step()
    del optimizer.found_inf
    return {"changed": list(differences(before, snapshot(optimizer), but=OWN))}


def _refuse(block: Any, damping: float) -> Any:
    raise ng.FactorisationError(f"layer {block.name}: made to fail", 1e30)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.never, self.last = (
            nn.Linear(*s).double() for s in ((3, 4), (4, 4), (4, 4), (4, 2))
        )

    def forward(self, x: torch.Tensor, long: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.rare(x)) if long else x)


def unused_on_one_rank(rank: int, kind: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Branching(), find_unused_parameters=True)
    optimizer = make(kind, model)
    for x, y in batches(3, size=8):
        optimizer.step(lambda x=x, y=y: (model(halves(x, 4)[rank], rank == 1), halves(y, 4)[rank]))
    return snapshot(optimizer)


def resumed(rank: int) -> dict[str, Any]:
    """Rank 0 alone saves; both load its file. And each rank loads what it saved itself."""
    model = DistributedDataParallel(mlp())
    optimizer = make(ng.NoisyKFAC, model)
    own = optimizer.state_dict()
    box = [own]
    dist.broadcast_object_list(box, src=0)
    optimizer.load_state_dict(box[0])
    of_rank_0 = optimizer.generators[0].get_state()
    optimizer.load_state_dict(own)
    return {"rank 0": of_rank_0, "own": optimizer.generators[0].get_state(), "saved": own["generators"]["0"]}


def stopped(rank: int, folder: str) -> dict[str, Any]:
    """A training by `train` that never stopped, and one that was taken up again by other optimisers."""
    found = {}
    for name, stops in (("whole", [4]), ("in parts", [2, 4])):
        for epochs in stops:
            torch.manual_seed(epochs)
            model = DistributedDataParallel(mlp())
            optimizer = make(ng.NoisyKFAC, model, seed=5)
            ((x, y),) = batches(1, size=8)
            mine = halves(x, 4)[rank], halves(y, 4)[rank]
            path = Path(folder) / f"{name}.safetensors"
            ng.train(optimizer, mine, epochs=epochs, batch_size=2, seed=3, progress=False, checkpoint=path)
        found[name] = snapshot(optimizer)
    return found


def work(rank: int, folder: str) -> dict[str, Any]:
    """Everything that one of the two processes does."""
    results: dict[str, Any] = {}
    for kind in OPTIMIZERS:
        name = kind.__name__
        results[f"same {name}"] = distributed_training(rank, kind, fisher="exact", same_draw_on_all_ranks=True)
        results[f"different {name}"] = distributed_training(rank, kind)
        results[f"uneven {name}"] = distributed_training(rank, kind, 5, fisher="exact", same_draw_on_all_ranks=True)
        results[f"unused {name}"] = unused_on_one_rank(rank, kind)
        results[f"skipped {name}"] = skipped(rank, kind)
    results["floored"] = distributed_training(rank, ng.NoisyEKFAC, 5, **FLOORED, same_draw_on_all_ranks=True)
    results["shared out"] = work_shared_out(rank)
    results["resumed"] = resumed(rank)
    results["stopped"] = stopped(rank, folder)
    for stacked in (False, True):
        results[f"damping {stacked}"] = changed_damping(rank, stacked)
    for what in ("NaN", "factorisation"):
        results[f"failure {what}"] = failure(rank, what)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, tmp_path_factory.mktemp("ddp"), SECONDS)


def assert_close(mine, theirs, but=()):
    eigenbases = ("–4/factors/stepper.left", "–4/factors/stepper.right", "sampler.left", "sampler.right")
    found = differences(mine, theirs, 1e-10, but=(*but, "/rank", *eigenbases))
    assert not found, found


@each_optimizer
@pytest.mark.parametrize(("name", "rows"), [("same", 4), ("uneven", 5)])
def test_the_same_draw_equals_accumulating(kind, name, rows, ranks):
    model = mlp()
    optimizer = make(kind, model, fisher="exact", **OPTIONS)
    for x, y in batches(5, size=8):
        with optimizer.sampled() as draw:
            for part_x, part_y in zip(halves(x, rows), halves(y, rows), strict=True):
                draw.nll(model(part_x), part_y).backward()
        optimizer.step()
    expected = snapshot(optimizer)
    for rank in ranks:
        assert_close(rank[f"{name} {kind.__name__}"], expected)


def test_a_floor_in_an_eigenbasis_equals_accumulating(ranks):
    model = mlp()
    optimizer = make(ng.NoisyEKFAC, model, **OPTIONS | FLOORED)
    for x, y in batches(5, size=8):
        with optimizer.sampled() as draw:
            for part_x, part_y in zip(halves(x, 5), halves(y, 5), strict=True):
                draw.nll(model(part_x), part_y).backward()
        optimizer.step()
    expected = snapshot(optimizer)
    for rank in ranks:
        found = differences(rank["floored"], expected, 1e-9, but=OWN)  # bases may differ: see `docs/families.md`
        assert not [name for name in found if name.startswith("/model") or name.endswith("/mean")], found
    assert not differences(*(rank["floored"] for rank in ranks), but=OWN)


@each_optimizer
def test_different_draws_equal_two_contexts(kind, ranks):
    model = mlp()
    optimizer = make(kind, model, **OPTIONS)
    (generator,) = optimizer.generators
    states = [torch.Generator().manual_seed(11 + offset).get_state() for offset in (0, 1_000_003)]
    for x, y in batches(5, size=8):
        for rank, part in enumerate(zip(halves(x, 4), halves(y, 4), strict=True)):
            generator.set_state(states[rank])
            with optimizer.sampled() as draw:
                draw.nll(model(part[0]), part[1]).backward()
            states[rank] = generator.get_state()
        optimizer.step()
    expected = snapshot(optimizer)
    for rank, state in zip(ranks, states, strict=True):
        found = rank[f"different {kind.__name__}"]
        assert_close(found, expected, but=("/generators/",))
        assert torch.equal(found["/optimizer/generators/0"], state)


@each_optimizer
@pytest.mark.parametrize("scenario", ["same", "different", "uneven", "unused"])
def test_ranks_are_bit_equal(kind, scenario, ranks):
    one, two = (rank[f"{scenario} {kind.__name__}"] for rank in ranks)
    assert not differences(one, two, but=OWN)
    draws = [rank["/optimizer/generators/0"] for rank in (one, two)]
    assert torch.equal(*draws) == (scenario in {"same", "uneven"})


def test_a_layer_that_only_one_rank_used_is_learned_by_both(ranks):
    found = ranks[0]["unused NoisyKFAC"]
    assert found["/optimizer/state/0/updates"] == 3
    never, rare = (
        next(leaf for path, leaf in found.items() if path.endswith(f"/{name}/statistics/outputs"))
        for name in ("never", "rare")
    )
    assert not never.any()  # after three updates by nothing
    assert rare.diagonal().max() > 1e-3


@pytest.mark.parametrize("stacked", [False, True])
def test_a_change_of_damping_reaches_the_blocks_of_all_ranks(ranks, stacked):
    for rank in ranks:
        found = rank[f"damping {stacked}"]
        torch.testing.assert_close(found["solved"], found["truth"], rtol=1e-9, atol=1e-12)
    assert torch.equal(*(rank[f"damping {stacked}"]["mean"] for rank in ranks))


def test_factorisation_is_shared_out(ranks):
    one, two = (rank["shared out"] for rank in ranks)
    assert one
    assert two
    assert sorted(one + two) == ["0", "2", "4"]


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("NaN", "NonFiniteError: ", "NonFiniteError: "),
        ("factorisation", "RuntimeError: another rank failed", "FactorisationError: layer"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_both(what, first, second, ranks):
    one, two = (rank[f"failure {what}"] for rank in ranks)
    assert one["error"].startswith(first)
    assert two["error"].startswith(second)
    if what == "NaN":
        assert one["changed"] == two["changed"] == []
    assert not differences(one["next"], two["next"], but=OWN)


@each_optimizer
def test_a_skipped_step_takes_no_bad_statistics_from_another_rank(kind, ranks):
    for rank in ranks:
        assert rank[f"skipped {kind.__name__}"]["changed"] == ["/optimizer/steps"]


def test_ranks_that_load_the_state_of_rank_0_still_draw_apart(ranks):
    one, two = (rank["resumed"] for rank in ranks)
    assert torch.equal(one["rank 0"], one["saved"])
    assert not torch.equal(one["rank 0"], two["rank 0"])
    for rank in (one, two):
        assert torch.equal(rank["own"], rank["saved"])


def test_a_training_that_was_stopped_is_one_that_was_not_on_every_rank(ranks):
    one, two = (rank["stopped"] for rank in ranks)
    for rank in (one, two):
        assert not differences(rank["whole"], rank["in parts"])
    assert not differences(one["whole"], two["whole"], but=OWN)
    assert differences(one["whole"], two["whole"]), "the ranks draw apart"
