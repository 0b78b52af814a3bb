"""Table 2 of the paper and its reliability diagrams: image classification, above all CIFAR-10 with VGG16.

A cell is one training of one network. It keeps a checkpoint beside the results while it is at work, so that a run that
is stopped goes on where it was. Under `torchrun` the processes train each network together.
"""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from noisygrad.archive import clear_unfinished
from noisygrad.distributed import processes
from noisygrad.optim.generators import BETWEEN_RANKS
from noisygrad.training.history import EpochRecord, History
from noisygrad.training.loop import train
from noisygrad_paper.data.images import Images, load_images, load_out_of_distribution, subset
from noisygrad_paper.experiments import calibration
from noisygrad_paper.experiments.cells import Cell, Job, Report, device_name
from noisygrad_paper.experiments.changes import check_changes, named_after
from noisygrad_paper.experiments.configurations import BF16, CONFIGURATIONS, LEARNED_NORM, full_name, has
from noisygrad_paper.experiments.image_methods import (
    METHODS,
    PROBLEMS,
    Config,
    check_settings,
    make_trainer,
    optional,
    schedule,
    settings,
)
from noisygrad_paper.experiments.processes import mean_of_processes
from noisygrad_paper.networks import VGG16, ConvNet

EXPERIMENT = "classification"
VALIDATION = "classification-validation"
"""The same on training images held out: settings are chosen there, and the test images stay unseen."""
_HELD_OUT = 0.1
_SOME = 1000
"""So many training images say how well each draw of the weights fits them, and what its batch statistics are."""
DATA = ("cifar10", "mnist", "digits")


def plan(
    data: str,
    methods: Sequence[str] = METHODS,
    configurations: Sequence[str] = tuple(CONFIGURATIONS),
    *,
    seeds: int = 1,
    epochs: int | None = None,
    train_size: int | None = None,
    learned_norm: bool = False,
    bf16: bool = False,
    validation: bool = False,
    changes: Config | None = None,
) -> list[Job]:
    """One job for each method, configuration and seed, seed by seed.

    With `learned_norm` the scales and shifts of batch normalisation are learned, which the paper leaves at 1 and 0;
    with `bf16` the network computes in bfloat16, but weights, statistics and factors stay in float32. `validation`
    measures on a tenth of the training images, held out; for it alone there may be `changes`, which name the jobs.
    """
    if changes and not validation:
        raise ValueError("settings are chosen on images held out of the training part: ask for validation")
    problem = PROBLEMS[data]
    jobs = []
    for seed in range(seeds):
        for method in methods:
            for configuration in configurations:
                augment, batch_norm = has(configuration, "D"), has(configuration, "B")
                own = settings(method, configuration) | problem.settings.get(method, {})
                own |= problem.choices.get((method, configuration), {})
                check_changes(method, optional(method) | own, changes or {})
                if changes:
                    check_settings(method, own | changes)
                config: Config = {
                    "epochs": epochs or problem.epochs,
                    "batch_size": min(problem.batch_size, train_size or problem.batch_size),
                    "network": problem.network,
                    "augment": augment,
                    "batch_norm": batch_norm,
                    "learned_norm": learned_norm and batch_norm,
                    "train_size": train_size,
                    **own,
                    **(changes or {}),
                    **({"network_dtype": "bfloat16"} if bf16 else {}),
                    **({"validation": True} if validation else {}),
                }
                suffixes = ([LEARNED_NORM] if learned_norm and batch_norm else []) + ([BF16] if bf16 else [])
                name = full_name("/".join([method, *suffixes]), configuration)
                name = named_after(name, changes or {})
                jobs.append(Job(data=data, method=name, replicates=(seed,), config=config, cost=config["epochs"]))
    return jobs


def check_data(jobs: Sequence[Job], data_dir: str | None) -> None:
    """Load what the jobs need, once, so that missing files and impossible subsets are told before anything starts."""
    for name in {job.data for job in jobs}:
        images = load_images(name, data_dir)
        for job in jobs:
            for seed in job.replicates if job.data == name else ():
                _part_of(images, job.config, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is told by the jobs
            _out_of_distribution_images(name, data_dir)


def _part_of(images: Images, config: Config, seed: int) -> Images:
    """What a training with these settings is given."""
    if config.get("validation", False):
        images = held_out(images)
    return images if config["train_size"] is None else subset(images, config["train_size"], seed)


def run_job(
    job: Job,
    report: Report,
    *,
    data_dir: str | None = None,
    device: str = "cpu",
    checkpoints: str | None = None,
    checkpoint_every: int = 1,
) -> list[Cell]:
    """Train the network of a job's one seed and measure it on the test images."""
    start = time.perf_counter()
    config, (seed,) = job.config, job.replicates
    images = _part_of(load_images(job.data, data_dir), config, seed)
    # The ranks of a training have images of their own, and draw crops and mirror images of their own.
    torch.manual_seed(seed + BETWEEN_RANKS * processes().rank)
    if device.startswith("cuda"):
        # Convolutions round to TF32 as it is; so may products of matrices.
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    learning = Learning(job, seed, images, device)
    path = None if checkpoints is None else Path(checkpoints) / f"{_file_name(job, seed)}.safetensors"

    def on_epoch(record: EpochRecord) -> dict[str, float]:
        report(record.epoch / record.epochs, f"seed {seed}, epoch {record.epoch} of {record.epochs}")
        return {"test_accuracy": learning.test_accuracy(), **learning.losses()}

    others = _out_of_distribution_images(job.data, data_dir)  # before the training: nothing should be missing after it
    experiment = VALIDATION if config.get("validation", False) else EXPERIMENT
    try:
        history = learning.train(on_epoch, path, checkpoint_every)
        measuring = time.perf_counter()
        figures = learning.figures(history, others, lambda word: report(1.0, f"seed {seed}, measuring: {word}"))
    except ArithmeticError as error:  # a training that diverged is a result too
        seconds = time.perf_counter() - start
        without = job.cell(experiment, seed, {"loss": math.nan}, seconds=seconds, device=device_name(device))
        return [replace(without, error=str(error))]
    # The epochs before a stop count too.
    seconds = sum(history.seconds) + time.perf_counter() - measuring
    return [job.cell(experiment, seed, figures, seconds=seconds, device=device_name(device))]


def _out_of_distribution_images(data: str, data_dir: str | None) -> NDArray[np.uint8] | None:
    """Images of no class of the data set, where there are any; a word where they are missing."""
    if data != "cifar10":
        return None
    try:
        return load_out_of_distribution(data_dir)
    except FileNotFoundError as missing:
        warnings.warn(f"the AUROC of out-of-distribution images is left out: {missing}", stacklevel=2)
        return None


def clear_checkpoints(job: Job, folder: str) -> None:
    """Remove the checkpoints of a training whose cells are stored, and what a kill left of one that was written."""
    for seed in job.replicates:
        path = Path(folder) / f"{_file_name(job, seed)}.safetensors"
        path.unlink(missing_ok=True)
        clear_unfinished(path)


class Learning:
    """One network at work: its buffers, its data on the device, its method."""

    def __init__(self, job: Job, seed: int, images: Images, device: str) -> None:
        self.config, self.seed = job.config, seed
        self.data, self._method = job.data, job.method
        self._ranks = processes()
        self.device = torch.device(device)
        problem = PROBLEMS[job.data]
        # The same start on every device and on every rank.
        self.network = make_network(self.config, images, torch.Generator().manual_seed(seed)).to(self.device)
        # Convolutions are faster so, on a CPU too.
        self.network = self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._mean, self._std = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1) for values in (images.mean, images.std)
        )
        self.x_train, self.y_train, self.x_test, self.y_test = (
            torch.from_numpy(array).to(self.device)
            for array in (images.x_train, images.y_train, images.x_test, images.y_test)
        )
        self.batch_size = min(self.config["batch_size"], len(self.x_train))
        if self.batch_size % self._ranks.size:
            raise ValueError(
                f"batches of {self.batch_size} images cannot be shared out among {self._ranks.size} processes"
            )
        share = self.batch_size // self._ranks.size
        self._part = slice(self._ranks.rank * share, (self._ranks.rank + 1) * share)
        self._raw, self._labels = self.x_train[:share].clone(), self.y_train[:share].clone()
        self._inputs = self.normalise(self._raw.float() / 255.0).contiguous(memory_format=torch.channels_last)
        self._losses = torch.zeros(len(self.x_train) // self.batch_size, device=self.device)
        self._steps = 0
        self._padding, self._flip = (problem.padding, problem.flip) if self.config["augment"] else (0, False)
        self.model: nn.Module = DistributedDataParallel(self.network) if self._ranks.size > 1 else self.network
        self.trainer = make_trainer(
            job.method.partition(" ")[0].split("/")[0],
            self.config,
            self.model,
            num_data=len(self.x_train),
            steps_per_epoch=len(self.x_train) // self.batch_size,
            inputs=self._inputs,
            labels=self._labels,
            prepare=self._prepare,
            seed=self.seed,
        )

    def normalise(self, x: Tensor) -> Tensor:
        """From [0, 1] to what the network is given."""
        return (x - self._mean) / self._std

    def _prepare(self) -> None:
        images = self._raw
        if self._padding:
            images = random_crop(images, self._padding, flip=self._flip)
        self._inputs.copy_(self.normalise(images.float() / 255.0))

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        self._raw.copy_(x[self._part])
        self._labels.copy_(y[self._part])
        loss = mean_of_processes(self.trainer.step())
        self._losses[self._steps % len(self._losses)].copy_(loss.detach())
        self._steps += 1
        return loss

    def train(
        self, on_epoch: Callable[[EpochRecord], dict[str, float]], path: Path | None, checkpoint_every: int
    ) -> History:
        """All epochs, or those that a checkpoint leaves."""
        self.model.train()
        return train(
            self.trainer.optimizer,
            (self.x_train, self.y_train),
            epochs=self.config["epochs"],
            batch_size=self.batch_size,
            model=self.network,
            step=self._step,
            scheduler=schedule(self.trainer.optimizer, self.config),
            drop_last=True,
            seed=self.seed,
            on_epoch=on_epoch,
            progress=False,
            checkpoint=path,
            checkpoint_every=checkpoint_every,
            settings={"data": self.data, "method": self._method, **self.config},
        )

    def losses(self) -> dict[str, float]:
        """The median and the largest of the last epoch's; a few draws of the weights can rule their mean.

        SGD goes on with weights that are not numbers, so that is looked for here.
        """
        last = self._losses[(self._steps - 1) % len(self._losses)]
        if not all(bool(tensor.isfinite().all()) for tensor in (last, *self.network.parameters())):
            raise ArithmeticError("the training diverged: its last loss or its weights are not finite. Lower lr")
        return {"loss_median": float(self._losses.median()), "loss_largest": float(self._losses.max())}

    def test_accuracy(self) -> float:
        """Of the network of mean weights, in per cent."""
        return calibration.accuracy_of(self.network, self.x_test, self.y_test, self.normalise)

    def figures(
        self, history: History, others: NDArray[np.uint8] | None, say: Callable[[str], None]
    ) -> dict[str, float | list[float]]:
        """Everything a cell keeps; `say` is told what is under way."""
        posterior, samples = self.trainer.posterior(), self.config["test_samples"]
        say("test images")
        found = calibration.measured(posterior, self.x_test, self.y_test, self.normalise, samples)
        found["train_loss"] = list(history.loss)
        for name in ("loss_median", "loss_largest"):
            found[f"train_{name}"] = [each[name] for each in history.metrics]
        found["test_accuracy"] = [each["test_accuracy"] for each in history.metrics]
        found["epochs"] = [float(epoch) for epoch in range(1, history.epochs + 1)]
        found["step_ms"] = 1e3 * sum(history.seconds) / (history.epochs * (len(self.x_train) // self.batch_size))
        if samples > 1 and self.data == "cifar10":
            say("many draws")
            found |= calibration.by_draws(posterior, self.x_test, self.y_test, self.normalise)
            some = self.x_train[:_SOME], self.y_train[:_SOME]
            found["train_nll_of_draws"] = calibration.nll_of_draws(posterior, *some, self.normalise, samples)
        if samples > 1 and self.config["batch_norm"]:
            seen = self.x_train[:_SOME]
            found |= calibration.with_own_norm(posterior, self.x_test, self.y_test, self.normalise, samples, seen)
        if others is not None:
            say("out-of-distribution images")
            unknown = torch.from_numpy(others).to(self.device)
            found |= calibration.out_of_distribution(posterior, self.x_test, unknown, self.normalise, samples)
        if self.data in ("cifar10", "digits"):
            found |= calibration.under_corruption(posterior, self.x_test, self.y_test, self.normalise, samples, say=say)
        return found


def random_crop(images: Tensor, padding: int, *, flip: bool, generator: torch.Generator | None = None) -> Tensor:
    """Each image `[B, C, H, W]` moved by up to `padding` pixels each way, zeros coming in, and mirrored at random.

    The same as padding on all sides and cutting the original size out at a random place. Draws come from `generator`,
    or from torch's own for the device.
    """
    count, _, height, width = images.shape
    device = images.device

    def draw(high: int) -> Tensor:
        return torch.randint(high, (count, 1), device=device, generator=generator)

    padded = F.pad(images, (padding,) * 4)
    rows = draw(2 * padding + 1) + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, -1)
    if flip:
        columns = torch.where(draw(2) > 0, width - 1 - columns, columns)
    columns = columns + draw(2 * padding + 1)
    example = torch.arange(count, device=device)[:, None, None]
    return padded.movedim(1, -1)[example, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def held_out(images: Images) -> Images:
    """The training images alone, of which the last tenth stands for the test images."""
    kept = len(images.x_train) - max(1, round(_HELD_OUT * len(images.x_train)))
    return replace(
        images,
        x_train=images.x_train[:kept],
        y_train=images.y_train[:kept],
        x_test=images.x_train[kept:],
        y_test=images.y_train[kept:],
    )


def make_network(config: Config, images: Images, generator: torch.Generator) -> nn.Module:
    """The network of a cell, with the images' channels and size."""
    channels, size = images.x_train.shape[1], images.x_train.shape[-1]
    norm = {"batch_norm": config["batch_norm"], "learned_norm": config["learned_norm"]}
    if config["network"] == "VGG16":
        return VGG16(images.classes, **norm, generator=generator)
    return ConvNet(channels, images.classes, size, **norm, generator=generator)


def _file_name(job: Job, seed: int) -> str:
    """Of the checkpoint: other settings have another file, so that they cannot be mixed up."""
    words = json.dumps([job.data, job.method, seed, job.config, processes().size], sort_keys=True)
    mark = hashlib.sha256(words.encode()).hexdigest()[:8]
    return f"{job.data}-{job.method.replace('/', '-')}-{seed}-{mark}"
