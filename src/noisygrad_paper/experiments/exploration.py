"""Figure 3 of the paper: TRPO on sparse tasks, alone and with a bonus.

A job is a task, a condition and up to ten seeds, whose agents learn side by side: their models of the dynamics are
replicas of one batched network. Each agent has random numbers of its own, so that a seed begins alike under every
condition and whatever other seeds it runs with; after that, rounding alone tells a seed that ran alone from one that
did not. Needs the extra paper.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback

from noisygrad.kernels.threads import one_thread
from noisygrad.replicas.noisy import NoisySettings
from noisygrad_paper.baselines.bbb import BBBSettings
from noisygrad_paper.curiosity import (
    Bonus,
    Dynamics,
    DynamicsSettings,
    GainBonus,
    IntrinsicReward,
    ReplayPool,
    Transitions,
)
from noisygrad_paper.environments import TASKS
from noisygrad_paper.experiments import exploration_conditions as conditions
from noisygrad_paper.experiments.cells import Cell, Job, Report, device_name
from noisygrad_paper.experiments.changes import check_changes, named_after
from noisygrad_paper.exploration import MODELS, NoBonus, SquaredNorm, paper_trpo

_TOGETHER = 10
"""Seeds in a job: what is lost, at most, when a run is stopped."""
_BATCH = 5000
_FIRST_SEED = 100
"""Those before were used to choose the settings of the models."""
# Seconds of an iteration, for the estimate of the time left.
_COST = {conditions.ALONE: 0.25, conditions.NORM: 0.26}
_MODEL_COST = 0.45

Config = dict[str, Any]


def plan(
    tasks: Sequence[str],
    methods: Sequence[str],
    *,
    seeds: int | None = None,
    iterations: int | None = None,
    seed: int = 0,
    tuning: bool = False,
    changes: Config | None = None,
) -> list[Job]:
    """The jobs of a run, the cheap ones first.

    There are 10 `seeds` by default, and more of conditions that are compared; `seed` is the first. `tuning` is with
    seeds that the figure does not use; for it alone there may be `changes` of the models, which name the jobs.
    """
    if tuning and (seeds or 0) > _FIRST_SEED:
        raise ValueError(f"tuning has {_FIRST_SEED} seeds, since the figure has the next ones; got {seeds}")
    if changes and not tuning:
        raise ValueError("settings are chosen on seeds that the figure does not use: ask for tuning")
    for name, value in (("seeds", seeds), ("iterations", iterations)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    jobs = []
    for task in tasks:
        if task not in conditions.ITERATIONS:
            raise ValueError(f"there is no task {task!r}; there are {', '.join(conditions.ITERATIONS)}")
        for method in methods:
            config = _config(method, changes or {})
            config |= {"iterations": iterations or conditions.ITERATIONS[task], "batch": _BATCH, "seed": seed}
            config |= {"tuning": True} if tuning else {}
            count = seeds or conditions.usual_seeds(task, method)
            cost = config["iterations"] * _COST.get(method, _MODEL_COST)
            name = named_after(method, changes or {})
            for start in range(0, count, _TOGETHER):
                group = tuple(range(count)[start : start + _TOGETHER])
                jobs.append(Job(data=task, method=name, replicates=group, config=config, cost=cost))
    return sorted(jobs, key=lambda job: job.cost)


def _config(method: str, changes: Config | None = None) -> Config:
    """The settings of a condition: `{}` for TRPO alone; `changes` may name those of the bonus, the model or its fit."""
    known = (*conditions.METHODS, *conditions.MORE_METHODS)
    if method not in known:
        raise ValueError(f"there is no condition {method!r}; there are {', '.join(known)}")
    config: Config = {}
    if method != conditions.ALONE:
        config |= {"weight": 1e-4, "window": 10, "capacity": 100_000, "minimum": 500}
    if method not in (conditions.ALONE, conditions.NORM):
        covariance = "blockwise" if method.endswith(conditions.BLOCKWISE) else "exact"
        model = asdict(MODELS[method.removeprefix("TRPO+").removesuffix(conditions.BLOCKWISE)])
        config |= {"model": model, "samples": 10, "covariance": covariance}
    groups = [config, *([config["model"], config["model"]["fit"]] if "model" in config else [])]
    # Where two have a setting of one name, the outer one is meant.
    places = {name: group for group in reversed(groups) for name in group if not isinstance(group[name], dict)}
    check_changes(method, {name: group[name] for name, group in places.items()}, changes or {})
    for name, value in (changes or {}).items():
        places[name][name] = value
    if config.get("samples", 1) < 1 or config.get("covariance") not in (None, "exact", "blockwise"):
        raise ValueError(
            "samples must be at least 1 and covariance exact or blockwise; "
            f"got {config['samples']!r} and {config['covariance']!r}"
        )
    return config


def _settings(model: Config) -> DynamicsSettings:
    """Back from a configuration."""
    fit = NoisySettings if "family" in model["fit"] else BBBSettings
    return DynamicsSettings(**{**model, "fit": fit(**model["fit"]), "hidden": tuple(model["hidden"])})


def run_job(job: Job, report: Report) -> list[Cell]:
    """All seeds of a job, side by side."""
    start = time.perf_counter()
    iterations = job.config["iterations"]
    with one_thread():
        group = _Group(job)
        for number in range(iterations):
            group.iterate()
            report((number + 1) / iterations, f"iteration {number + 1} of {iterations}")
    experiment = conditions.TUNING if "tuning" in job.config else conditions.EXPERIMENT
    figures = (agent.metrics() for agent in group.agents)
    return job.cells(experiment, figures, seconds=time.perf_counter() - start, device=device_name("cpu"))


class _Group:
    """The agents of a job, and their models, which learn together."""

    def __init__(self, job: Job) -> None:
        self.dynamics: Dynamics | None = None
        first = 1000 * job.config["seed"] + (0 if "tuning" in job.config else _FIRST_SEED)
        seeds = [first + replicate for replicate in job.replicates]
        if "model" in job.config:
            observations = len(TASKS[job.data].largest_observation)
            self.dynamics = Dynamics(observations, 1, _settings(job.config["model"]), seeds)
        self.pools: list[ReplayPool] = []
        self.agents = [
            _Agent(job, replicate, seed, self._bonus(job, index, seed))
            for index, (replicate, seed) in enumerate(zip(job.replicates, seeds, strict=True))
        ]

    def _bonus(self, job: Job, index: int, seed: int) -> Bonus:
        config = job.config
        if "weight" not in config:
            return NoBonus()
        pool = ReplayPool(config["capacity"], config["minimum"], seed=seed)
        if self.dynamics is None:
            return SquaredNorm(pool)
        self.pools.append(pool)
        draws: Config = {"num_samples": config["samples"], "covariance": config["covariance"]}
        return GainBonus(self.dynamics, replica=index, pool=pool, train_every=None, **draws)

    def iterate(self) -> None:
        """A rollout and a step of the policy for each agent; then all models learn at once."""
        for agent in self.agents:
            agent.iterate()
        if self.dynamics is not None:
            start = time.process_time()
            self.dynamics.train(self.pools)
            share = (time.process_time() - start) / len(self.agents)
            for agent in self.agents:
                agent.seconds["model"] += share


class _Agent:
    def __init__(self, job: Job, replicate: int, seed: int, bonus: Bonus) -> None:
        self.replicate = replicate
        self.bonus = _Timed(bonus)
        self.seconds = dict.fromkeys(conditions.PARTS, 0.0)
        self._batch = job.config["batch"]
        self._random = _Randomness()
        options = {name: job.config[name] for name in ("weight", "window") if name in job.config}
        with self._random.own():
            self._algorithm = paper_trpo(
                job.data, intrinsic=IntrinsicReward(self.bonus, **options), batch=self._batch, seed=seed
            )

    def iterate(self) -> None:
        clock, before = _Clock(), self.bonus.seconds
        start = time.process_time()
        with self._random.own():
            self._algorithm.learn(self._batch, callback=clock, reset_num_timesteps=False)
        whole, bonus = time.process_time() - start, self.bonus.seconds - before
        self.seconds["rollout"] += clock.seconds
        self.seconds["bonus"] += bonus
        self.seconds["policy"] += whole - clock.seconds - bonus

    def metrics(self) -> dict[str, Any]:
        """Its learning curve, how well its model predicted, and seconds of an iteration by part."""
        returns = self._algorithm.returns
        found: dict[str, Any] = {"returns": returns, "area": float(np.mean(returns))}
        inner = self.bonus.inner
        if isinstance(inner, GainBonus):
            # Four digits, so that the curves do not fill the file.
            found["model_error"] = [float(f"{errors.model:.4g}") for errors in inner.errors]
            found["persistence_error"] = [float(f"{errors.persistence:.4g}") for errors in inner.errors]
        return found | {f"seconds_{part}": total / len(returns) for part, total in self.seconds.items()}


class _Timed(Bonus):
    """A bonus that says how long it took: processor seconds, which other programs do not change."""

    def __init__(self, inner: Bonus) -> None:
        self.inner = inner
        self.seconds = 0.0

    def measure(self, transitions: Transitions) -> NDArray[np.float64] | None:
        start = time.process_time()
        found = self.inner.measure(transitions)
        self.seconds += time.process_time() - start
        return found

    def learn(self, transitions: Transitions) -> None:
        start = time.process_time()
        self.inner.learn(transitions)
        self.seconds += time.process_time() - start


class _Clock(BaseCallback):
    """Processor seconds of the rollout alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def _on_rollout_start(self) -> None:
        self.seconds -= time.process_time()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.seconds += time.process_time()


class _Randomness:
    """What an agent finds in the global generators, which stable-baselines3 draws from."""

    def __init__(self) -> None:
        self._kept = _global_states()

    @contextmanager
    def own(self) -> Iterator[None]:
        """The agent's own numbers inside; outside everything is as before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        (for_torch, for_numpy, for_python), self._kept = self._kept, _global_states()
        torch.set_rng_state(for_torch)
        np.random.set_state(for_numpy)  # noqa: NPY002
        random.setstate(for_python)


def _global_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
