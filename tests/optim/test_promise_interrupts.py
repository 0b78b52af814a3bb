"""A step is a transaction: whatever ends it, everything is as before its first draw or as after it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import noisygrad as ng
from noisygrad.algorithm.step import MOMENTUM_MODES, GradientAverage
from noisygrad.optim.draw import Interrupts
from support.compare import (
    assert_unchanged,
    batches,
    compare_optimizers,
    differences,
    each_optimizer,
    make,
    mlp,
    snapshot,
    take_step,
    train,
)
from support.interrupted import FORMS, Case, Count, interrupted

EACH = 6
FORM = pytest.mark.parametrize("form", ["closure", "explicit"])


@each_optimizer
@pytest.mark.parametrize("by_process", [False, True], ids=["a timer's", "another process's"])
def test_signals_at_random_moments(kind: Any, by_process: bool) -> None:
    """`python tests/support/interrupted.py` tries larger networks, and more often."""
    count = Count()
    random.seed(f"{kind.__name__} {by_process}")
    for form in FORMS:
        interrupted(partial(Case, kind, form), EACH, by_process=by_process, count=count)
    assert not count.faults, count.faults
    assert count.inside == EACH * len(FORMS)
    assert count.found["as before the step"]


class StopError(Exception):
    """What a handler raises."""


def interrupted_here() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def stopping() -> Any:
    """SIGUSR1 raises `StopError`."""

    def stop(*_: object) -> None:
        raise StopError

    before = signal.signal(signal.SIGUSR1, stop)
    yield stop
    assert signal.getsignal(signal.SIGUSR1) is stop, "the user's handler is back"
    signal.signal(signal.SIGUSR1, before)


PLACES = {
    "the draw": ("begin_draw", "transaction"),
    "factors": ("refresh_", "covariance"),
    "the solve": ("solve", "covariance"),
    "the noise": ("update_noise_", "likelihood"),
    "the mean's way into the model": ("show_mean_", "weights"),
}


def ended_in(place: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """From now on something happens once that piece of a step is done."""
    name, owner = PLACES[place]
    target = getattr(optimizer, owner)
    real = getattr(target, name)

    def ended(*arguments: Any, **keywords: Any) -> Any:
        result = real(*arguments, **keywords)
        if name != "show_mean_" or optimizer.update.moved is not None:  # the step's, not a draw's
            action()
        return result

    monkeypatch.setattr(target, name, ended)


@each_optimizer
@FORM
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("raised", [MemoryError, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_what_fails_is_taken_back_or_finished(kind, form, place, raised, monkeypatch):
    """An error may come anywhere, and so may an exception from another thread."""
    models, data = [mlp(), mlp()], batches(4)
    optimizer, twin = (make(kind, model, damping=0.1) for model in models)
    for each, model in zip((optimizer, twin), models, strict=True):
        train(each, model, data[:2])
    before = snapshot(optimizer)

    def fail() -> None:
        monkeypatch.undo()
        raise raised

    ended_in(place, optimizer, monkeypatch, fail)
    with pytest.raises(raised):
        take_step(optimizer, models[0], data[2], form)
    if place == "the mean's way into the model":
        take_step(twin, models[1], data[2], form)
        compare_optimizers(optimizer, twin)
    else:
        assert_unchanged(before, optimizer)
        for each, model in zip((optimizer, twin), models, strict=True):
            train(each, model, data[2:])
        compare_optimizers(optimizer, twin)


@FORM
@pytest.mark.parametrize("place", PLACES)
def test_signals_wait_for_the_end_of_a_step(form, place, monkeypatch):
    models, data = [mlp(), mlp()], batches(3)
    optimizer, twin = (make(ng.NoisyKFAC, model) for model in models)
    for each, model in zip((optimizer, twin), models, strict=True):
        train(each, model, data[:2])
    before = snapshot(twin)
    take_step(twin, models[1], data[2], form)
    ended_in(place, optimizer, monkeypatch, interrupted_here)
    with pytest.raises(StopError):
        take_step(optimizer, models[0], data[2], form)
    now = snapshot(optimizer)
    assert not differences(now, before) or not differences(now, snapshot(twin))
    assert optimizer.accumulated.draws == 0


def test_a_long_refresh_can_be_interrupted_between_its_blocks(monkeypatch):
    model, (batch,) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model)
    before, made = snapshot(optimizer), []
    real = optimizer.covariance._factorise

    def factorise(block: Any, damping: float) -> Any:
        interrupted_here()
        made.append(block)
        return real(block, damping)

    monkeypatch.setattr(optimizer.covariance, "_factorise", factorise)
    with pytest.raises(StopError):
        train(optimizer, model, [batch])
    assert len(made) == 1 < len(optimizer.covariance.blocks)
    monkeypatch.undo()
    assert_unchanged(before, optimizer)


@FORM
def test_the_mean_is_back_before_what_a_handler_raises_goes_on(form):
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model)
    before = snapshot(optimizer)
    seen = {}

    def output() -> torch.Tensor:
        try:
            interrupted_here()
        except StopError:
            seen.update({f"/model/{name}": tensor.clone() for name, tensor in model.state_dict().items()})
            raise
        return model(x)

    def attempt() -> None:
        if form == "closure":
            optimizer.step(lambda: (output(), y))
        with optimizer.sampled() as draw:
            draw.nll(output(), y).backward()

    with pytest.raises(StopError):
        attempt()
    assert seen
    assert all(torch.equal(tensor, before[name]) for name, tensor in seen.items())
    assert_unchanged(before, optimizer)


def test_a_handler_that_raises_nothing_disturbs_nothing(monkeypatch):
    models, data = [mlp(), mlp()], batches(3)
    plain, disturbed = (make(ng.NoisyKFAC, model) for model in models)
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append(disturbed.weights.current is not None))
    for place in PLACES:
        ended_in(place, disturbed, monkeypatch, lambda: signal.raise_signal(signal.SIGUSR2))
    for x, y in data:
        take_step(plain, models[0], (x, y), "explicit")
        with disturbed.sampled() as draw:
            signal.raise_signal(signal.SIGUSR2)
            draw.nll(models[1](x), y).backward()
        disturbed.step()
    signal.signal(signal.SIGUSR2, before)
    assert {True, False} == set(heard)
    compare_optimizers(plain, disturbed)


def test_an_exception_of_a_handler_that_was_caught_inside():
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model)
    before = snapshot(optimizer)
    context = optimizer.sampled()
    draw = context.__enter__()
    with pytest.raises(StopError):
        interrupted_here()
    with pytest.raises(RuntimeError, match="draw is over"):
        draw.nll(model(x), y)
    with pytest.raises(RuntimeError, match="given up when a signal came"):
        context.__exit__(None, None, None)
    assert_unchanged(before, optimizer)
    take_step(optimizer, model, (x, y), "explicit")


def test_two_optimizers_that_draw_at_once():
    models, data = [mlp(), mlp(1)], batches(2)
    optimizers = [make(ng.NoisyKFAC, model) for model in models]
    before = [snapshot(optimizer) for optimizer in optimizers]
    with pytest.raises(StopError), optimizers[0].sampled(), optimizers[1].sampled():
        interrupted_here()
    for optimizer, state in zip(optimizers, before, strict=True):
        assert_unchanged(state, optimizer)
    first, second = (optimizer.sampled() for optimizer in optimizers)
    draws = first.__enter__(), second.__enter__()
    for draw, model, (x, y) in zip(draws, models, data, strict=True):
        draw.nll(model(x), y).backward()
    first.__exit__(None, None, None)  # not in the usual order
    second.__exit__(None, None, None)
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.step()
        train(optimizer, model, data)


def test_a_handler_of_the_users_set_inside_stays(stopping):
    model, ((x, y),) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model)
    chained = []
    with optimizer.sampled() as draw:
        inner = signal.getsignal(signal.SIGUSR1)
        mine = lambda *given: chained.append(given) or inner(*given)  # noqa: E731
        signal.signal(signal.SIGUSR1, mine)
        draw.nll(model(x), y).backward()
    assert signal.getsignal(signal.SIGUSR1) is mine
    optimizer.step()
    assert signal.getsignal(signal.SIGUSR1) is mine
    with pytest.raises(StopError):
        interrupted_here()
    assert chained
    signal.signal(signal.SIGUSR1, stopping)


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_process_handles_its_signals_itself():
    optimizer = make(ng.NoisyKFAC, mlp())
    with optimizer.sampled() as draw:
        child = os.fork()
        if child == 0:
            try:
                interrupted_here()
            except StopError:
                os._exit(0 if draw.is_open else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_who_asks_again_after_a_while_is_heard(monkeypatch):
    """A likelihood of the user's own that never returns can be stopped, and nothing is left of it."""
    monkeypatch.setattr("noisygrad.optim.draw.PATIENCE", 0.01)
    model, (batch,) = mlp(), batches(1)
    optimizer = make(ng.NoisyKFAC, model)
    before = snapshot(optimizer)

    def for_ever(*_: object) -> None:
        interrupted_here()
        time.sleep(0.02)
        while True:
            interrupted_here()

    monkeypatch.setattr(optimizer.likelihood, "update_noise_", for_ever)
    with pytest.raises(StopError):
        train(optimizer, model, [batch])
    monkeypatch.undo()
    assert_unchanged(before, optimizer)


def thrown_into(thread: threading.Thread, error: type[BaseException]) -> None:
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error)) == 1


@FORM
def test_an_exception_thrown_into_another_thread(form):
    """There are no signals there; whatever it hits, the next use finds everything as before or as after."""
    models, data = [mlp(), mlp()], batches(2)
    optimizer, twin = (make(ng.NoisyKFAC, model) for model in models)
    for each, model in zip((optimizer, twin), models, strict=True):
        train(each, model, data[:1])
    rng, ended = random.Random(0), set()

    def work() -> None:
        with contextlib.suppress(StopError):
            take_step(optimizer, models[0], data[1], form)
            while True:
                time.sleep(0.001)

    for _ in range(40):
        before, states = snapshot(twin), [generator.get_state() for generator in twin.generators]
        seconds = -time.perf_counter()
        take_step(twin, models[1], data[1], form)
        seconds += time.perf_counter()
        after = snapshot(twin)
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(rng.random() * 3 * seconds)
        thrown_into(thread, StopError)
        thread.join()
        optimizer.zero_grad()  # it may have come between the draw and the step
        now = snapshot(optimizer)
        ended.add(is_before := not differences(before, now, but=("generators",)))
        assert is_before or not differences(after, now)
        if is_before:
            for generator, state in zip(optimizer.generators, states, strict=True):
                generator.set_state(state)
            take_step(optimizer, models[0], data[1], form)
            compare_optimizers(optimizer, twin)
    assert ended == {True, False}


def test_a_lost_context_is_given_up_at_the_next_use():
    """As an exception from another thread leaves it that comes before the first line of `__exit__`."""
    model, data = mlp(), batches(2)
    optimizer = make(ng.NoisyKFAC, model)
    before = snapshot(optimizer)
    context = optimizer.sampled()
    context.__enter__()
    with pytest.raises(RuntimeError, match="nested"), optimizer.sampled():
        pass
    del context
    assert not optimizer.transaction.is_drawing()
    assert_unchanged(before, optimizer)
    train(optimizer, model, data)


def test_a_mode_that_fails_after_it_has_said_what_to_keep(monkeypatch):
    class Failing(GradientAverage):
        name = "failing"
        fails = False

        def of_step(self, step, groups, mask):
            if self.fails:
                self.keep(self.average, torch.full_like(self.average, torch.nan))
                raise ZeroDivisionError
            return step

    monkeypatch.setitem(MOMENTUM_MODES, "failing", Failing)
    model, data = mlp(), batches(3)
    optimizer = make(ng.NoisyKFAC, model, momentum_mode="failing")
    train(optimizer, model, data[:1])
    before = snapshot(optimizer)
    optimizer.algorithm.momentum.fails = True
    with pytest.raises(ZeroDivisionError):
        train(optimizer, model, data[1:2])
    optimizer.algorithm.momentum.fails = False
    assert_unchanged(before, optimizer)
    train(optimizer, model, data[1:])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_signals_that_come_while_handlers_are_put_back():
    """Both wait: the first raises, and the second is not lost."""
    heard: list[int] = []

    def raising(number: int, _: object) -> None:
        heard.append(number)
        raise StopError

    before = signal.signal(signal.SIGUSR1, raising), signal.signal(signal.SIGUSR2, raising)
    given_up = []
    interrupts = Interrupts(lambda: given_up.append(interrupts.release()))
    interrupts.hold()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    assert heard == []
    for _ in range(2):
        with pytest.raises(StopError):
            interrupts.release()
    interrupts.release()
    assert sorted(heard) == sorted([signal.SIGUSR1, signal.SIGUSR2])
    assert signal.getsignal(signal.SIGUSR2) is raising
    signal.signal(signal.SIGUSR1, before[0])
    signal.signal(signal.SIGUSR2, before[1])
