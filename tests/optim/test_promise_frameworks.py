"""Two processes under the usual frameworks make the steps of one process that accumulates what both have seen.

Or they are told what to do instead. Who reduces the gradients, and who divides the losses, differs from one to another.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import noisygrad as ng
from noisygrad import distributed
from support.compare import batches, differences, make, mlp, snapshot
from support.processes import run_ranks

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed._composable.replicate import replicate

SECONDS = 240
STEPS = 3
OWN = ("/generators/", "/optimizer/rank")
SHARED = {"same_draw_on_all_ranks": True, "kl_clip": 1e-2, "damping": 0.01, "factor_every": 2, "fisher": "exact"}
"""With the exact Fisher and the same draws no rank has numbers of its own."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-6}


def parts(rank: int, accumulated: int, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of this rank, `accumulated` for each step."""
    return [(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in batches(STEPS * accumulated, size=8, dtype=dtype)]


def expected(kind: Any, accumulated: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """One process: what both ranks have seen of a micro-batch is differentiated under one draw."""
    model = mlp(dtype=dtype)
    optimizer = make(kind, model, **SHARED)
    for number, both in enumerate(zip(parts(0, accumulated, dtype), parts(1, accumulated, dtype), strict=True)):
        with optimizer.sampled() as draw:
            for x, y in both:
                draw.nll(model(x), y).backward()
        if (number + 1) % accumulated == 0:
            optimizer.step()
    return snapshot(optimizer)


# What a rank does


def plain(rank: int, kind: Any, wrap: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Any]:
    """A loop of one's own: the optimiser is given one view of the model, and another is called."""
    inner = mlp(dtype=dtype)  # all ranks alike, but where DDP gives them the weights of rank 0
    if wrap == "replicate":
        given = called = replicate(inner)
    elif wrap == "nothing":
        given = called = inner
    else:
        wrapped = DistributedDataParallel(inner)
        given = wrapped if wrap == "DDP" else wrapped.module
        called = wrapped.module if wrap == "unused DDP" else wrapped
    optimizer = make(kind, given, **SHARED | options)
    for x, y in parts(rank, 1, dtype):
        with optimizer.sampled() as draw:
            draw.nll(called(x), y).backward()
        optimizer.step()
    return snapshot(optimizer)


def accelerated(
    rank: int, kind: Any, order: str, accumulated: int, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """The optimiser made before `prepare`, or of the model that it returns; losses are divided by accelerate."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    model: nn.Module = mlp(rank, dtype=dtype)  # DDP gives all ranks the weights of rank 0
    if order == "before":
        optimizer = make(kind, model, **SHARED)
        model, prepared = accelerator.prepare(model, optimizer)
    else:
        model = accelerator.prepare(model)
        optimizer = make(kind, model, **SHARED)
        prepared = accelerator.prepare(optimizer)
    assert isinstance(model, DistributedDataParallel)
    for x, y in parts(rank, accumulated, dtype):
        with accelerator.accumulate(model):
            with optimizer.sampled() as draw:
                accelerator.backward(draw.nll(model(x), y))
            prepared.step()
            prepared.zero_grad()
    return snapshot(optimizer)


class Module(lightning.LightningModule):
    """`form` says how a batch becomes a step."""

    def __init__(self, net: nn.Module, kind: Any, form: str, accumulated: int) -> None:
        super().__init__()
        self.net, self.kind, self.form, self.accumulated = net, kind, form, accumulated
        self.automatic_optimization = form == "automatic"

    def configure_optimizers(self) -> Any:
        self.optimizer = make(self.kind, self.net, **SHARED)
        return self.optimizer

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        if self.form == "automatic":
            return (self.net(x) - y).square().sum(-1).mean()
        optimizer = self.optimizers()
        if self.form == "closure":
            return optimizer.step(lambda: (self.net(x), y))
        with optimizer.sampled() as draw:
            self.manual_backward(draw.nll(self.net(x), y) / self.accumulated)
        return optimizer.step() if (index + 1) % self.accumulated == 0 else None


def lit(
    rank: int, kind: Any, form: str, accumulated: int = 1, *, dtype: torch.dtype = torch.float64, **trainer: Any
) -> dict[str, Any]:
    """Lightning's module holds the network, of which the optimiser is made before Lightning wraps it."""
    module = Module(mlp(rank, dtype=dtype), kind, form, accumulated)
    loader = DataLoader(parts(rank, accumulated, dtype), batch_size=None)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    found = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[TorchElasticEnvironment(), *trainer.pop("plugins", ())],
        max_epochs=1,
        use_distributed_sampler=False,
        **quiet,
        **trainer,
    )
    found.fit(module, loader)
    return snapshot(module.optimizer)


def refused(work: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The error that ends it."""
    try:
        work(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "none"}


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


KINDS = (ng.NoisyAdam, ng.NoisyKFAC, ng.NoisyBlockTridiagonal)
WRAPS = ("DDP", "DDP module", "unused DDP", "replicate", "nothing")
HALF = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))


def work(rank: int, folder: str) -> dict[str, Any]:
    """Everything that one of the two processes does."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    results: dict[str, Any] = {}
    for kind in KINDS:
        name = kind.__name__
        results |= {f"{wrap} {name}": plain(rank, kind, wrap) for wrap in WRAPS}
        for accumulated in (1, 2):
            for order in ("before", "after"):
                results[f"accelerate {order} {accumulated} {name}"] = accelerated(rank, kind, order, accumulated)
            results[f"lightning manual {accumulated} {name}"] = lit(rank, kind, "manual", accumulated)
        results[f"lightning closure 1 {name}"] = lit(rank, kind, "closure")
    kfac = ng.NoisyKFAC
    results |= {f"{wrap} float32": plain(rank, kfac, wrap, dtype=torch.float32) for wrap in WRAPS}
    for order in ("before", "after"):
        results[f"accelerate {order} 2 float32"] = accelerated(rank, kfac, order, 2, torch.float32)
    results |= {
        "rare": plain(rank, kfac, "DDP module", factor_every=50),
        "automatic": lit(rank, kfac, "automatic"),
        "automatic float32": lit(rank, kfac, "automatic", dtype=torch.float32),
        "manual float32": lit(rank, kfac, "manual", dtype=torch.float32),
        "bf16": lit(rank, kfac, "automatic", dtype=torch.float32, precision="bf16-mixed"),
        "clipped": lit(rank, kfac, "automatic", gradient_clip_val=0.1),
        "half": lit(rank, kfac, "manual", dtype=torch.float32, plugins=[HALF]),
        "accumulated": refused(lit, rank, kfac, "automatic", 2, accumulate_grad_batches=2),
        "half automatic": refused(lit, rank, kfac, "automatic", plugins=[HALF]),
        "half clipped": refused(lit, rank, kfac, "automatic", plugins=[HALF], gradient_clip_val=0.1),
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


def assert_as_one(ranks, name, one, tolerance):
    first, second = (rank[name] for rank in ranks)
    assert not differences(first, second, but=OWN)
    bases = ("/sampler.left", "/sampler.right", "/stepper.left", "/stepper.right")  # signs of eigenvectors
    assert not differences(first, one, tolerance, but=("/rank", *bases))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("name", "accumulated"), EQUAL)
def test_two_ranks_make_the_steps_of_one(name, accumulated, kind, ranks):
    assert_as_one(ranks, f"{name} {kind.__name__}", expected(kind, accumulated), TOLERANCES[torch.float64])


@pytest.mark.parametrize(("name", "accumulated"), [*EQUAL[:5], ("accelerate before 2", 2), ("accelerate after 2", 2)])
def test_two_ranks_make_the_steps_of_one_in_float32(name, accumulated, ranks):
    one = expected(ng.NoisyKFAC, accumulated, torch.float32)
    for rank in ranks:
        mean = {path: leaf for path, leaf in rank[f"{name} float32"].items() if path.endswith("/mean")}
        assert mean
        assert not differences(mean, {path: one[path] for path in mean}, TOLERANCES[torch.float32])
    assert not differences(*(rank[f"{name} float32"] for rank in ranks), but=OWN)


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
    assert_as_one(ranks, "automatic", snapshot(optimizer), 1e-10)


def test_automatic_optimisation_may_clip(ranks):
    assert not differences(*(rank["clipped"] for rank in ranks), but=OWN)
    assert differences(ranks[0]["clipped"], ranks[0]["automatic"], 1e-3)


@pytest.mark.parametrize(("what", "form"), [("half", "manual float32"), ("bf16", "automatic float32")])
def test_16_bit_is_near(what, form, ranks):
    """Manual optimisation under Lightning's GradScaler and autocast, automatic optimisation in bfloat16."""
    assert not differences(*(rank[what] for rank in ranks), but=OWN)
    means = [path for path in ranks[0][form] if path.endswith("/mean")]
    gaps = [float((ranks[0][what][path] - ranks[0][form][path]).abs().max()) for path in means]
    assert 1e-6 < max(gaps) < 1e-2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("accumulated", "RuntimeError: there are gradients that were made, or changed, outside sampled"),
        ("half automatic", "RuntimeError: step.. has nothing to work with: .* Gradients that were made outside"),
        ("half clipped", "RuntimeError: The current optimizer, NoisyKFAC, does not allow for gradient clipping"),
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
