"""Twenty splits trained together against one after the other: ratios measured in one run.

    python benchmarks/replicas.py [--data yacht] [--rounds 5] [--output results/benchmark-replicas-cpu.json]

NNG-MVG with the paper's settings (10 weight samples, statistics and factors at every step): the splits as replicas of
one batched network, the same engine with one replica, and the public optimiser `NoisyKFAC` on an ordinary MLP. Rounds
are interleaved; the figure is the median time of an epoch. Compiling is timed apart: it happens once in a run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import noisygrad as ng
from noisygrad.replicas.engine import ReplicaGenerators, compiler_available, train_replicas
from noisygrad.replicas.noisy import NoisyLearner, NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad.versions import versions
from noisygrad_paper.data import load_table, splits_of, standardised

BATCH, HIDDEN, EPOCHS = 10, 50, 1000


class Clock:
    """Times each epoch of a training that goes on for as long as it is asked to."""

    def __init__(self, epoch: Callable[[], None]) -> None:
        start = time.perf_counter()
        epoch()
        self.first = time.perf_counter() - start
        self._epoch = epoch
        self.times: list[float] = []

    def round(self) -> None:
        start = time.perf_counter()
        self._epoch()
        self.times.append(time.perf_counter() - start)

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


def together(x: Tensor, y: Tensor, execution: str) -> Callable[[], None]:
    """An epoch of all replicas of x `[R, N, d]`; the compiled step is kept from one epoch to the next."""
    replicas, num_data, inputs = x.shape
    streams = ReplicaGenerators.of(range(replicas))
    learner = NoisyLearner(
        Perceptrons((inputs, HIDDEN, 1)), ng.Gaussian(), NoisySettings(), num_data=num_data, generators=streams.start
    )
    running = _Epochs(lambda on_epoch: train_replicas(
        learner, x, y, epochs=10**9, batch_size=BATCH, streams=streams, execution=execution, on_epoch=on_epoch
    ))  # fmt: skip
    return running.next


class _Epochs:
    """A training in a generator's clothes: `next` returns when another epoch is done."""

    def __init__(self, training: Callable[[Callable[[int], None]], None]) -> None:
        import threading

        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)

        def pause(epoch: int) -> None:
            self._done.release()
            self._go.acquire()

        def work() -> None:
            self._go.acquire()
            training(pause)

        threading.Thread(target=work, daemon=True).start()

    def next(self) -> None:
        self._go.release()
        self._done.acquire()


def public(x: Tensor, y: Tensor) -> Callable[[], None]:
    """An epoch of one training, x `[N, d]`, through the optimiser that a user meets."""
    model = ng.networks.MLP(x.shape[-1], (HIDDEN,), 1)
    optimizer = ng.NoisyKFAC(
        model, ng.Gaussian(), num_data=len(x), lr=0.01, fisher_decay=0.999, kl_weight=1.0, prior_variance=1.0,
        momentum=0.9, mc_samples=10, stats_every=1, factor_every=1, seed=0,
    )  # fmt: skip

    def epoch() -> None:
        order = torch.randperm(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            optimizer.step(lambda rows=rows: (model(x[rows]), y[rows]))

    return epoch


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="yacht")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    execution = "compiled" if compiler_available() else "eager"
    splits = standardised(load_table(arguments.data), splits_of(arguments.data))
    x, y = (torch.from_numpy(part).float() for part in (splits.x_train, splits.y_train))
    count = len(x)
    clocks = {
        f"{count} replicas": Clock(together(x, y, execution)),
        "one replica": Clock(together(x[:1], y[:1], execution)),
        "NoisyKFAC": Clock(public(x[0], y[0])),
    }
    for clock in clocks.values():
        clock.round()
        clock.times.clear()
    for _ in range(arguments.rounds):
        for clock in clocks.values():
            clock.round()
    base = clocks[f"{count} replicas"].seconds
    record: dict[str, object] = {
        "data": arguments.data,
        "execution": execution,
        "threads": arguments.threads,
        "processor": platform.machine(),
        "versions": versions(),
        "epochs": EPOCHS,
        "methods": {},
    }
    print(f"{arguments.data}, {count} splits, {execution} step, threads: {arguments.threads}\n")
    print(f"{'':<14}{'an epoch':>12}{'all splits':>14}{'ratio':>8}{'first epoch':>14}")
    for name, clock in clocks.items():
        times = 1 if name.endswith("replicas") else count
        row = {"epoch": clock.seconds, "all_splits": clock.seconds * times, "first_epoch": clock.first}
        row["ratio"] = row["all_splits"] / base
        record["methods"][name] = row  # type: ignore[index]
        print(
            f"{name:<14}{1e3 * row['epoch']:>9.1f} ms{1e3 * row['all_splits']:>11.1f} ms{row['ratio']:>8.2f}"
            f"{row['first_epoch']:>12.1f} s"
        )
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
