"""Trainings of one of two processes under the usual frameworks, and of the one process that they should equal."""

from __future__ import annotations

import os
import warnings
from typing import Any

import accelerate
import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from support.compare import batches, differences, make, mlp, snapshot

STEPS = 3
OWN = ("/generators/", "/optimizer/rank")
SHARED = {"same_draw_on_all_ranks": True, "kl_clip": 1e-2, "damping": 0.01, "factor_every": 2, "fisher": "exact"}
"""With the exact Fisher and the same draws no rank has numbers of its own."""
MAX_NORM = 0.05
"""Gradients are larger."""
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


def expected_half(kind: Any, accumulated: int, framework: str, *, clip: bool) -> dict[str, Any]:
    """One process after its first step under a GradScaler: later ones would round other numbers to 16 bits."""
    model = mlp(dtype=torch.float32)
    optimizer, scaler = make(kind, model, **SHARED), new_scaler()
    halves = zip(*(parts(rank, accumulated, torch.float32)[:accumulated] for rank in (0, 1)), strict=True)
    for both in halves:
        with optimizer.sampled() as draw:
            for x, y in both:
                with torch.autocast("cpu", torch.float16, cache_enabled=False):
                    output = model(x)
                    if framework == "lightning":  # all of a step
                        scaler.scale(draw.nll(output, y) / (2 * accumulated)).backward()
                if framework == "accelerate":  # the model, which returns 32 bits
                    scaler.scale(draw.nll(output.float(), y) / (2 * accumulated)).backward()
    if clip:
        optimizer.unscale_(scaler)
        assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM
    scaler.step(optimizer)
    return snapshot(optimizer)


# What a rank does


def begin(rank: int) -> None:
    """What a launcher tells a process."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


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


def accelerator(accumulated: int, half: bool = False) -> Any:
    """A new one; with `half` it does on a CPU what it does on a GPU for `mixed_precision="fp16"`, which it refuses."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    made = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    if half:
        made.state._mixed_precision, made.native_amp, made.scaler = "fp16", True, new_scaler()
    return made


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8)


def accelerated(
    rank: int,
    kind: Any,
    order: str,
    accumulated: int,
    dtype: torch.dtype = torch.float64,
    *,
    half: bool = False,
    clip: str = "nothing",
) -> dict[str, Any]:
    """The optimiser made before `prepare`, or of the model that it returns; losses are divided by accelerate."""
    own = accelerator(accumulated, half)
    model: nn.Module = mlp(rank, dtype=dtype)  # DDP gives all ranks the weights of rank 0
    if order == "before":
        optimizer = make(kind, model, **SHARED)
        model, prepared = own.prepare(model, optimizer)
    else:
        model = own.prepare(model)
        optimizer = make(kind, model, **SHARED)
        prepared = own.prepare(optimizer)
    assert isinstance(model, DistributedDataParallel)
    first = None
    for x, y in parts(rank, accumulated, dtype):
        with own.accumulate(model):
            with optimizer.sampled() as draw:
                own.backward(draw.nll(model(x), y))
            if own.sync_gradients and clip == "accelerate":
                own.clip_grad_norm_(model.parameters(), MAX_NORM)
            elif own.sync_gradients and clip == "torch":
                optimizer.unscale_(own.scaler)
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            prepared.step()
            prepared.zero_grad()
        first = snapshot(optimizer) if first is None and optimizer.steps == 1 else first
    return {"first": first, "last": snapshot(optimizer)} if half else snapshot(optimizer)


class Module(lightning.LightningModule):
    """`form` says how a batch becomes a step, `clip` who clips."""

    def __init__(self, net: nn.Module, kind: Any, form: str, accumulated: int, clip: str) -> None:
        super().__init__()
        self.net, self.kind, self.form, self.accumulated, self.clip = net, kind, form, accumulated, clip
        self.automatic_optimization = form == "automatic"
        self.first: dict[str, Any] | None = None

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
        if (index + 1) % self.accumulated:
            return None
        if self.clip == "lightning":
            self.clip_gradients(optimizer, MAX_NORM)
        elif self.clip == "torch":
            self.optimizer.unscale_(self.trainer.precision_plugin.scaler)
            nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        loss = optimizer.step()
        self.first = self.first or snapshot(self.optimizer)
        return loss


def lit(
    rank: int,
    kind: Any,
    form: str,
    accumulated: int = 1,
    *,
    dtype: torch.dtype = torch.float64,
    half: bool = False,
    clip: str = "nothing",
    **trainer: Any,
) -> dict[str, Any]:
    """Lightning's module holds the network, of which the optimiser is made before Lightning wraps it."""
    module = Module(mlp(rank, dtype=dtype), kind, form, accumulated, clip)
    loader = DataLoader(parts(rank, accumulated, dtype), batch_size=None)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    found = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[TorchElasticEnvironment(), *[MixedPrecision("16-mixed", "cpu", new_scaler())] * half],
        max_epochs=1,
        use_distributed_sampler=False,
        **quiet,
        **trainer,
    )
    found.fit(module, loader)
    return {"first": module.first, "last": snapshot(module.optimizer)} if half else snapshot(module.optimizer)


# How a test compares


def assert_as_one(
    first: dict[str, Any], second: dict[str, Any], one: dict[str, Any], tolerance: float, but: tuple[str, ...] = ()
) -> None:
    """Both ranks are equal bit for bit, and equal to one process within the tolerance."""
    assert not differences(first, second, but=OWN)
    bases = ("/sampler.left", "/sampler.right", "/stepper.left", "/stepper.right")  # signs of eigenvectors
    assert not differences(first, one, tolerance, but=("/rank", *bases, *but))


def refused(work: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The error that ends it."""
    try:
        work(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "none"}
