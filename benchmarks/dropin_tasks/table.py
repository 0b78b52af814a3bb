"""The comparison, from the file of results alone: every task, paired by seed, and what share of them is level."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .methods import ADAMW, NOISY
from .results import Key

Records = Mapping[Key, Mapping[str, Any]]
PLAIN = "adamw-1e-3"
TUNED = "adamw tuned"
IVON = "ivon"
TOLERANCE = 0.01
"""Nats, or share of the rival's figure, whichever is larger: what counts as level."""


@dataclass(frozen=True)
class Pairing:
    """One method beside a rival on one task, over the seeds that both have."""

    ours: float
    rival: float
    seeds: int

    @property
    def level(self) -> bool:
        """Whether ours is at most a trifle worse; what broke is level with nothing, and anything with what broke."""
        if not math.isfinite(self.ours):
            return False
        return not math.isfinite(self.rival) or self.ours - self.rival <= max(TOLERANCE, TOLERANCE * abs(self.rival))

    @property
    def ahead(self) -> bool:
        """Whether ours has the lower mean."""
        return math.isfinite(self.ours) and not self.ours >= self.rival


def figure(record: Mapping[str, Any], name: str) -> float:
    """A figure of a training; infinite for one that broke or gave no number."""
    value = float(record.get(name, math.inf))
    return math.inf if math.isnan(value) else value


def mean(records: Iterable[Mapping[str, Any]], name: str) -> float:
    """Of a figure over trainings; infinite where one of them broke."""
    return statistics.fmean(figure(record, name) for record in records)


class Results:
    """The trainings with the same variation of their tasks, by task and method."""

    def __init__(self, records: Records, variation: str = "") -> None:
        self.runs: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
        for (task, name, seed), record in records.items():
            method, at, rest = name.partition("@")
            if at + rest == variation:
                self.runs.setdefault(task, {}).setdefault(method, {})[seed] = record

    def ours(self) -> list[str]:
        """Our methods in the order in which they were run."""
        names = dict.fromkeys(method for methods in self.runs.values() for method in methods)
        return [name for name in names if name.split("[")[0] in NOISY]

    def tuned(self, task: str) -> str | None:
        """AdamW's learning rate with the lowest mean nll on the validation rows; None unless all rates were run."""
        runs = self.runs.get(task, {})
        if not all(name in runs for name in ADAMW):
            return None
        seeds = set.intersection(*(set(runs[name]) for name in ADAMW))
        if not seeds:
            return None
        return min(ADAMW, key=lambda name: mean((runs[name][seed] for seed in seeds), "validation_nll"))

    def name_of(self, rival: str, task: str) -> str | None:
        """The method that a rival is on a task."""
        return self.tuned(task) if rival == TUNED else rival

    def pairing(self, task: str, method: str, rival: str, name: str = "nll") -> Pairing | None:
        """Both figures over the seeds that both have; None where they share none."""
        runs, other = self.runs.get(task, {}), self.name_of(rival, task)
        if other is None or method not in runs or other not in runs:
            return None
        seeds = runs[method].keys() & runs[other].keys()
        if not seeds:
            return None
        ours, theirs = (mean((runs[one][seed] for seed in sorted(seeds)), name) for one in (method, other))
        return Pairing(ours, theirs, len(seeds))

    def over(self, task: str, method: str | None, name: str) -> float | None:
        """A method's mean over all its seeds."""
        runs = self.runs.get(task, {}).get(method or "", {})
        return mean(runs.values(), name) if runs else None


def number(value: float | None) -> str:
    """A figure in eight characters."""
    if value is None:
        return "-"
    return "broke" if not math.isfinite(value) else f"{value:.4f}" if abs(value) < 1000 else f"{value:.2g}"


def marks(results: Results, task: str, method: str) -> str:
    """Three marks: level with AdamW at 1e-3, level with tuned AdamW, ahead of IVON."""
    plain, tuned, ivon = (results.pairing(task, method, rival) for rival in (PLAIN, TUNED, IVON))
    verdicts = (is_level(plain), is_level(tuned), is_ahead(ivon))
    return "".join("?" if verdict is None else "+" if verdict else "-" for verdict in verdicts)


def is_level(pair: Pairing | None) -> bool | None:
    """`level`, or None where the two share no training."""
    return None if pair is None else pair.level


def is_ahead(pair: Pairing | None) -> bool | None:
    """`ahead`, or None where the two share no training."""
    return None if pair is None else pair.ahead


def share(verdicts: Iterable[bool | None]) -> str:
    """How many are true of those that are known."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return f"{sum(known)}/{len(known)}"


def comparison(records: Records, tasks: Sequence[str], variation: str = "") -> str:
    """The whole table as text."""
    results = Results({key: record for key, record in records.items() if key[0] in tasks}, variation)
    ours = results.ours()
    widths = [max(15, len(name) + 2) for name in ours]
    heads = "".join(f"{name:>{width}}" for name, width in zip(ours, widths, strict=True))
    lines = [f"{'nll on test rows':28}{PLAIN:>12}{'tuned':>10} {'rate':6}{IVON:>10}{heads}"]
    for task in (name for name in tasks if name in results.runs):
        tuned = results.tuned(task)
        plain, best, ivon = (number(results.over(task, name, "nll")) for name in (PLAIN, tuned, IVON))
        cells = "".join(
            f"{number(results.over(task, name, 'nll')) + ' ' + marks(results, task, name):>{width}}"
            for name, width in zip(ours, widths, strict=True)
        )
        rate = (tuned or "").removeprefix("adamw-")
        lines.append(f"{task:28}{plain:>12}{best:>10} {rate:6}{ivon:>10}{cells}")
    lines.append("marks: level with AdamW at 1e-3, level with tuned AdamW, ahead of IVON; ? where it was not run")
    return "\n".join([*lines, "", *(summary(results, tasks, name) for name in ours)])


def summary(results: Results, tasks: Sequence[str], method: str) -> str:
    """What share of the tasks a method is level on, and how often it broke."""
    mine = [task for task in tasks if method in results.runs.get(task, {})]
    runs = [record for task in mine for record in results.runs[task][method].values()]

    def level(rival: str) -> str:
        return share(is_level(results.pairing(task, method, rival)) for task in mine)

    def below(name: str, sign: float) -> str:
        known = [
            results.pairing(task, method, PLAIN, name)
            for task in mine
            if any(name in record for record in results.runs[task].get(PLAIN, {}).values())
        ]
        return share(math.isfinite(p.ours) and sign * (p.ours - p.rival) < 0 for p in known if p is not None)

    ahead = share(is_ahead(results.pairing(task, method, IVON)) for task in mine)
    times = [p.ours / p.rival for t in mine if (p := results.pairing(t, method, PLAIN, "ms_per_step"))]
    slower = [ratio for ratio in times if math.isfinite(ratio)]
    cost = f", step {statistics.median(slower):.1f} × AdamW's" if slower else ""
    return (
        f"{method}: level with {PLAIN} {level(PLAIN)}, with tuned AdamW {level(TUNED)}, ahead of IVON {ahead}, "
        f"ECE below {PLAIN}'s {below('ece', 1.0)}, AUROC above {below('auroc', -1.0)}, "
        f"broke {sum('broke' in run for run in runs)}/{len(runs)}, "
        f"diverged {sum(bool(run.get('diverged')) for run in runs)}/{len(runs)}{cost}"
    )
