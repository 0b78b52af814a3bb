"""Table 4 of the paper: active learning from twenty labelled points, against points chosen at random.

A job is a data set and a method. All its trials are trained at once as replicas, those that choose at random and those
that choose by variance side by side; after each of nine acquisitions every network is trained anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from noisygrad.kernels.threads import one_thread
from noisygrad.replicas.engine import Execution
from noisygrad_paper.baselines.hmc import HMCSettings
from noisygrad_paper.data import DataTable, load_table, standardised
from noisygrad_paper.experiments.cells import Cell, Job, Report, device_name
from noisygrad_paper.experiments.changes import check_changes, named_after
from noisygrad_paper.experiments.few_labels import (
    METHODS,
    Config,
    DrawnFit,
    FewLabelsMethod,
    FewPoints,
    Fitted,
    hamiltonian,
    trial,
)

EXPERIMENT = "active-learning"
TUNING = "active-learning-tuning"
"""The same on other trials, to choose settings by."""
TRIALS = 40
ACQUISITIONS = 9
_FIRST_FOR_TUNING = 1000
_PROTOCOL = ("seed", "acquisitions", "at_once")
"""What is no setting of a method."""
BATCH = "/batch"
"""A method with this suffix acquires three points at a time: those that tell most together."""
METHODS_HERE = ("PBP", "NNG-FFG", "NNG-MVG", "NNG-BlkTri", f"NNG-MVG{BATCH}", "HMC")
RANDOM, ACTIVE = "random", "active"
_SAMPLES = 1000
_TRAINING_SAMPLES = 4
"""Weight samples of a step, fewer than in the other experiment: there are eight times as many networks."""
_SAME = 1e-12
"""Variances closer than this, relative to their mean, are the same."""
_NO_VARIANCE = "the predictive variance is not finite"
_CHUNK = 500
"""So many points of the pool are looked at together."""
# Chosen on other trials (docs/reproduce-few-labels.md). The Gamma(6, 6) of the regressions says as much as twelve
# points, and with 29 of them leaves at least 0.29 of the target's variance to the noise.
_NOISE_PRIOR = [0.3, 0.3]
_HMC_NOISE_PRIOR = [1.0, 1.0]  # with 0.3, chains disagreed in every trial that was looked at (R̂ up to 1.11)
_KL_WEIGHT = {"NNG-FFG": 0.5, "NNG-MVG": 1.0, "NNG-BlkTri": 1.0}
# Naval's inputs are nearly collinear, and tell of the target in small components: with more, it is taken for noise.
_KL_WEIGHT_ON: dict[str, dict[str, float]] = {"naval": {"NNG-FFG": 0.01, "NNG-MVG": 0.1, "NNG-BlkTri": 0.1}}
# Shorter chains than those that others are judged by: they are run eighty at a time, ten times over.
_HMC = HMCSettings(chains=10, warmup=300, samples=150, thin=3, extensions=2)


def _method(name: str) -> FewLabelsMethod:
    name = name.split(" ", maxsplit=1)[0]  # what follows are the settings that are tuned
    return hamiltonian(_HMC) if name == "HMC" else METHODS[name.removesuffix(BATCH)]


def plan(
    data: Sequence[str],
    methods: Sequence[str],
    *,
    trials: int = TRIALS,
    epochs: int | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
    tuning: bool = False,
    changes: Config | None = None,
) -> list[Job]:
    """A job for each data set and method, HMC's first; its replicates are the trials.

    With `tuning` they are other trials; `changes` are other settings for them, and the jobs are named after those.
    """
    if changes and not tuning:
        raise ValueError("settings are chosen on trials that the table does not use: ask for tuning")
    jobs = []
    for name in data:
        trial(load_table(name, data_dir), 0, ACQUISITIONS)
        for method in methods:
            config = _method(method).config | {"seed": seed, "acquisitions": ACQUISITIONS}
            config["at_once"] = 3 if method.endswith(BATCH) else 1
            config |= _settings(method.removesuffix(BATCH), name, config)
            if epochs is not None and "epochs" in config:
                config |= {"epochs": epochs}
            own = {key: value for key, value in config.items() if key not in _PROTOCOL}
            check_changes(method, own, changes or {})
            config |= (changes or {}) | ({"tuning": True} if tuning else {})
            label = named_after(method, changes or {})
            jobs.append(Job(data=name, method=label, replicates=tuple(range(trials)), config=config))
    return sorted(jobs, key=lambda job: not job.method.startswith("HMC"))  # they take longest


def _settings(method: str, data: str, usual: Config) -> Config:
    """What is set otherwise than in the other experiment with few labels."""
    if "noise_prior" not in usual:
        return {}
    if method == "HMC":
        return {"noise_prior": _HMC_NOISE_PRIOR}
    kl_weight = (_KL_WEIGHT | _KL_WEIGHT_ON.get(data, {}))[method]
    samples = {"mc_samples": _TRAINING_SAMPLES, "test_samples": _SAMPLES}
    return {"noise_prior": _NOISE_PRIOR, "kl_weight": kl_weight} | samples


def run_job(job: Job, report: Report, *, data_dir: str | None = None, device: str = "cpu") -> list[Cell]:
    """All trials of a job, each with both ways to choose."""
    start = time.perf_counter()
    table = load_table(job.data, data_dir)
    with one_thread(device == "cpu"):
        first = _FIRST_FOR_TUNING if "tuning" in job.config else 0
        trials = [first + replicate for replicate in job.replicates]
        race = _Race(table, trials, job.config["seed"], job.config["at_once"])
        method = _method(job.method)
        rounds = job.config["acquisitions"] + 1
        figures: dict[str, list[Tensor]] = {"rmse": []}
        for number in range(rounds):

            def say(done: float, word: str, number: int = number) -> None:
                report((number + done) / rounds, f"round {number + 1} of {rounds}, {word}")

            fitted = _fit(method, race, job.config, device, say, number)
            figures["rmse"].append(race.rmse(fitted))
            for name, values in fitted.diagnostics().items():
                figures.setdefault(name, []).append(values.cpu())
            if number + 1 < rounds:
                race.acquire(fitted)
    found = {name: torch.stack(values, -1).unflatten(0, (2, -1)) for name, values in figures.items()}
    seconds = (time.perf_counter() - start) / len(job.replicates)
    return [
        job.cell(
            TUNING if "tuning" in job.config else EXPERIMENT,
            replicate,
            _figures(found, index),
            seconds=seconds,
            device=device_name(device),
            error=race.failures.get(trials[index]),
        )
        for index, replicate in enumerate(job.replicates)
    ]


def _fit(method: FewLabelsMethod, race: _Race, config: Config, device: str, say: Report, number: int) -> Fitted:
    # Both ways start from the same weights.
    seeds = [config["seed"] * 1_000_000 + 1000 * trial + number for trial in race.trials] * 2
    # The number of points changes from round to round, and compiling a step takes as long as a training.
    execution: Execution = "eager" if device == "cpu" else "captured"
    points = FewPoints(race.x[race.rows], race.y[race.rows], race.x[race.test], device, execution)
    return method.fit(points, seeds, config, say)


def _figures(found: dict[str, Tensor], index: int) -> dict[str, float | list[float]]:
    figures: dict[str, float | list[float]] = {}
    for way, values in zip((RANDOM, ACTIVE), found["rmse"][:, index], strict=True):
        figures[f"rmse_{way}"] = float(values[-1])
        figures[f"rmse_{way}_by_round"] = values.tolist()
    if "rhat" in found:
        figures["rhat"] = float(found["rhat"][:, index].max())
        figures["ess"] = float(found["ess"][:, index].min())
    return figures


class _Race:
    """Who has which labels: rows `[2T, N]`, first those who choose at random, then those who choose by variance."""

    def __init__(self, table: DataTable, trials: Sequence[int], seed: int, at_once: int) -> None:
        self.trials, self.at_once = trials, at_once
        chosen = [trial(table, number, ACQUISITIONS) for number in trials]
        self.rows = np.stack([each.labelled for each in chosen] * 2)
        self.test = np.stack([each.others for each in chosen] * 2)
        """[2T, 100]"""
        orders = [
            np.random.default_rng([seed, number]).permutation(each.pool)
            for number, each in zip(trials, chosen, strict=True)
        ]
        self.pools = orders * 2
        """Of each of the 2T, in an order that is the trial's own: choosing at random takes the first."""
        everything = np.arange(table.rows)
        data = standardised(table, [(everything, everything[:1])], by_all_rows=True)
        self.x, self.y = torch.from_numpy(data.x_train[0]), torch.from_numpy(data.y_train[0])
        self.scale = float(data.y_std[0])
        self.waiting: list[list[int]] = [[] for _ in trials]
        """Rows that those who choose by variance have chosen and not yet got."""
        self.failures: dict[int, str] = {}
        """What went wrong, by trial; it goes on at random, so that the others can."""

    def rmse(self, fitted: Fitted) -> Tensor:
        """On the test points, in the unit of the target, `[2T]`."""
        mean, _ = fitted.moments(self.x[self.test])
        errors = mean.cpu().double() - self.y[self.test].squeeze(-1)
        return errors.square().mean(-1).sqrt() * self.scale

    def acquire(self, fitted: Fitted) -> None:
        """A point of the pool for each: the first of its order, or the next that it has chosen."""
        half = len(self.trials)
        if not all(self.waiting):
            self.waiting = self._chosen(fitted)
        taken = [pool[0] for pool in self.pools[:half]] + [rows.pop(0) for rows in self.waiting]
        self.pools = [pool[pool != row] for pool, row in zip(self.pools, taken, strict=True)]
        self.rows = np.concatenate([self.rows, np.array(taken)[:, None]], axis=1)

    def _chosen(self, fitted: Fitted) -> list[list[int]]:
        """Rows of the pool for each of those who choose: that of the largest variance, or a batch."""
        half = len(self.trials)
        variance = self._variances(fitted)
        if self.at_once == 1:
            places = variance.argmax(-1, keepdim=True).tolist()
        else:
            assert isinstance(fitted, DrawnFit)
            pools = enumerate(self.pools[half:], start=half)
            places = [fitted.batch(self.x[pool], network, self.at_once) for network, pool in pools]
        return [[int(pool[k]) for k in some] for pool, some in zip(self.pools[half:], places, strict=True)]

    def _variances(self, fitted: Fitted) -> Tensor:
        """Of every point of the pools of those who choose, `[T, pool]`; a trial that they tell nothing has failed."""
        only = slice(len(self.trials), None)
        pools = np.stack(self.pools[only])
        parts = np.array_split(pools, -(-pools.shape[1] // _CHUNK), axis=1)
        variance = torch.cat([fitted.moments(self.x[part], only)[1].cpu() for part in parts], -1)
        spread = variance.amax(-1) - variance.amin(-1)
        for place in (~(spread > _SAME * variance.mean(-1))).nonzero().flatten().tolist():
            why = "the predictive variance is the same for the whole pool: there is nothing to choose by"
            self.failures.setdefault(
                self.trials[place], why if bool(variance[place].isfinite().all()) else _NO_VARIANCE
            )
        return variance
