"""Training that is interrupted by real signals at random moments: `python tests/support/interrupted.py --number 10000`.

After each interrupt all that an optimiser knows, with the model's parameters and buffers, is compared bit for bit with
what it was before the step and with what it is after the step of a twin that nobody interrupts. Then training goes on,
and must end in that state.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import noisygrad as ng
from noisygrad.training import CapturedStep
from support.compare import OPTIMIZERS, differences, snapshot

FORMS = ("closure", "several draws of a closure", "contexts", "accumulation", "a fresh pass", "a loss", "captured")
SIZES = ("small", "medium")
LATE = "(too late)"
HELPER = """
import os, sys, time
for line in sys.stdin:
    end = time.perf_counter() + float(line)
    while time.perf_counter() < end:
        pass
    os.kill(os.getppid(), 2)
"""


class Sender:
    """Sends this process a signal after a delay: SIGINT from another process, or SIGALRM from a timer."""

    def __init__(self, *, by_process: bool) -> None:
        command = [sys.executable, "-S", "-c", HELPER]
        self._helper = subprocess.Popen(command, stdin=subprocess.PIPE, text=True) if by_process else None
        self.signal = signal.SIGINT if by_process else signal.SIGALRM

    def after(self, delay: float) -> None:
        """Send one."""
        if self._helper is None:
            signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
        else:
            assert self._helper.stdin is not None
            self._helper.stdin.write(f"{delay}\n")
            self._helper.stdin.flush()

    def close(self) -> None:
        """No more of them."""
        if self._helper is not None:
            self._helper.communicate()


@contextlib.contextmanager
def sender(*, by_process: bool) -> Iterator[Sender]:
    """A sender, whose signal raises KeyboardInterrupt inside, wherever it comes."""
    made = Sender(by_process=by_process)
    before = signal.signal(made.signal, signal.default_int_handler)
    try:
        yield made
    finally:
        made.close()
        signal.signal(made.signal, before)


@dataclass
class Case:
    """A training of one optimiser, in one form."""

    kind: Any
    form: str
    size: str = "small"
    device: str = "cpu"

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        classes = 2
        wide, hidden, batch = (3, 4, 6) if self.size == "small" else (48, 96, 32)
        if self.size == "medium" and self.kind is ng.NoisyFull:
            wide, hidden = 16, 24
        # On a GPU running statistics are not taken back.
        norm = nn.BatchNorm1d(hidden) if self.device == "cpu" else nn.LayerNorm(hidden)
        body = [nn.Linear(wide, hidden), norm, nn.Tanh()] + [nn.Linear(hidden, hidden), nn.ReLU()] * (
            self.size != "small"
        )
        self.model, shape = nn.Sequential(*body, nn.Linear(hidden, classes)).to(self.device), (batch, wide)
        settings: dict[str, Any] = {"stats_every": 2, "factor_every": 3, "lr": 1e-2, "kl_clip": 1e-2, "seed": 3}
        if self.form == "several draws of a closure":
            settings |= {"mc_samples": 2, "momentum_mode": "heavy_ball"}
        if self.form == "a fresh pass":
            settings |= {"fisher_pass": "fresh", "damping": 0.1}
        if self.form == "contexts":
            settings |= {"groups": {"0.*": {"lr": 1e-3}}, "damping": 0.1}
        self.optimizer = self.kind(self.model, ng.Gaussian(), num_data=100, **settings)
        self.draws = 3 if self.form == "accumulation" else 1
        self._x = torch.randn(8, *shape).to(self.device)
        self._y = torch.randn(8, batch, classes).to(self.device)
        self._place = self._x[0].clone(), self._y[0].clone()
        self._captured = CapturedStep(self.optimizer, lambda: (self.model(self._place[0]), self._place[1]))

    def iterate(self, number: int) -> None:
        """One step, with its draws; those that are there already are not made again."""
        x, y = self._x[number % 8], self._y[number % 8]
        if self.form in {"contexts", "accumulation"}:
            for _ in range(self.draws - self.optimizer.accumulated.draws):
                with self.optimizer.sampled() as draw:
                    draw.nll(self.model(x), y).backward()
            self.optimizer.step()
        elif self.form == "captured":
            self._place[0].copy_(x)
            self._place[1].copy_(y)
            self._captured()
        elif self.form == "a loss":
            self.optimizer.step(lambda: self._differentiated(x, y))
        else:
            self.optimizer.step(lambda: (self.model(x), y))

    def _differentiated(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        return loss

    def left_behind(self) -> list[str]:
        """What is not as it should be where nobody trains, and no state tells."""
        modules = list(self.model.modules())
        wrong = {
            "a draw": self.optimizer.weights.current is not None,
            "a hook": any("forward" in vars(module) for module in modules),
            "evaluation mode": not all(module.training for module in modules),
            "no gradients": not torch.is_grad_enabled(),
            "a handler": any(
                "noisygrad" in type(signal.getsignal(number)).__module__ for number in signal.valid_signals()
            ),
        }
        if self.optimizer.accumulated.draws == 0:
            wrong["a gradient"] = any(p.grad is not None for p in self.model.parameters())
        return [name for name, is_so in wrong.items() if is_so]


@dataclass
class Count:
    """How interrupts ended."""

    found: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def inside(self) -> int:
        """How many came while a step was made."""
        return sum(self.found.values()) - self.found[LATE] - self.found["another way"] - self.found["stuck"]

    def add(self, ending: str, fault: str = "") -> None:
        """Count one."""
        self.found[ending] += 1
        if fault:
            self.faults.append(f"{ending}: {fault}")
            print(self.faults[-1], file=sys.stderr, flush=True)


def interrupt(case: Case, twin: Case, number: int, send: Callable[[float], None], span: float, count: Count) -> float:
    """One step of both, of which the first is interrupted at a random moment of `span`; returns the twin's time."""
    before = snapshot(case.optimizer)
    start = time.perf_counter()
    twin.iterate(number)
    taken = time.perf_counter() - start
    after = snapshot(twin.optimizer)
    done = False
    try:
        send(random.random() * span)
        case.iterate(number)
        done = True
        while True:
            time.sleep(0.001)
    except KeyboardInterrupt:
        pass
    left, pending = case.left_behind(), case.optimizer.accumulated.draws
    now = snapshot(case.optimizer)
    from_before, from_after = differences(before, now), differences(after, now)
    if left:
        count.add("left behind", f"{case.kind.__name__}, {case.form}: {left}")
    elif not from_after:
        count.add(LATE if done else "as after the step")
    elif not from_before and not pending:
        count.add("as before the step")
    elif pending and all("generators" in name or "running" in name or "num_batches" in name for name in from_before):
        count.add("between two contexts")
    else:
        weights = [name for name in from_before if name.startswith("/model")]
        kind = "drawn weights" if weights and all(name in from_after for name in weights) else "half a step"
        count.add(kind, f"{case.kind.__name__}, {case.form}, {pending} pending: {sorted(from_before)[:6]}")
    try:
        if from_after:
            case.iterate(number)
        if wrong := differences(after, snapshot(case.optimizer)):
            count.add("another way", f"{case.kind.__name__}, {case.form}: {sorted(wrong)[:6]}")
    except Exception as error:
        count.add("stuck", f"{case.kind.__name__}, {case.form}: {error!r}")
    return taken


def interrupted(case: Callable[[], Case], number: int, *, by_process: bool, count: Count) -> None:
    """Interrupt steps of a training this many times: signals that come after a step do not count."""
    times: collections.deque[float] = collections.deque([0.005], maxlen=20)
    wanted, faults = count.inside + number, -1
    with warnings.catch_warnings(), sender(by_process=by_process) as made:
        warnings.simplefilter("ignore")
        while count.inside < wanted:
            if faults != len(count.faults):
                faults = len(count.faults)
                torch.set_grad_enabled(True)
                trained, twin, step = case(), case(), 0
            if step < 16:  # what a first step prepares
                trained.iterate(step)
                twin.iterate(step)
            else:
                span = 1.1 * sorted(times)[len(times) // 2]
                times.append(interrupt(trained, twin, step, made.after, span, count))
            step += 1


def main() -> None:
    """Print how many interrupts ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.set_num_threads(1)
    cases = list(itertools.product(OPTIMIZERS, FORMS, SIZES, (False, True)))
    total = Count()
    for index, (kind, form, size, by_process) in enumerate(cases):
        number = arguments.number // len(cases) + (index < arguments.number % len(cases))
        interrupted(partial(Case, kind, form, size, arguments.device), number, by_process=by_process, count=total)
        print(f"{index + 1} of {len(cases)}: {dict(total.found)}", file=sys.stderr, flush=True)
    print(f"{total.inside:7} interrupts of steps")
    for ending, number in total.found.most_common():
        print(f"{number:7} {ending}")
    sys.exit(bool(total.faults))


if __name__ == "__main__":
    main()
