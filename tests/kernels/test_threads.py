"""Work side by side: every result in its place, whoever did it, and nothing left changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from noisygrad.kernels.threads import run_in_threads


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def works(count, seen):
    def work(index):
        seen.append((threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))
        return index * index

    return [lambda index=index: work(index) for index in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 50])
def test_results_come_in_order_each_from_one_thread(count):
    seen = []
    assert run_in_threads(works(count, seen)) == [index * index for index in range(count)]
    assert len(seen) == count
    assert torch.get_num_threads() == 3
    if count > 1:
        assert {threads for _, threads, _ in seen} == {1}
        assert {grad for *_, grad in seen} == {False}


def test_several_threads_take_part_and_the_caller_is_one():
    meeting = threading.Barrier(3)

    def meet():
        meeting.wait(timeout=30)  # passes only if three are here at the same time
        return threading.get_ident()

    assert len({*run_in_threads([meet] * 3), threading.get_ident()}) == 3


def test_one_after_the_other_where_asked():
    seen = []
    assert run_in_threads(works(4, seen), when=False) == [0, 1, 4, 9]
    assert {ident for ident, *_ in seen} == {threading.get_ident()}


@pytest.mark.parametrize("caller_fails", [True, False])
def test_a_failure_is_raised_once_all_is_quiet_and_nothing_more_is_begun(caller_fails):
    caller, meeting, begun, ended = threading.get_ident(), threading.Barrier(3), [], []

    def meet():
        meeting.wait(timeout=30)  # all three have a piece of work
        begun.append(0)
        if (threading.get_ident() == caller) is caller_fails:
            raise ArithmeticError("a piece")
        time.sleep(0.3)
        ended.append(0)

    with pytest.raises(ArithmeticError, match="a piece"):
        run_in_threads([meet] * 3 + [lambda: time.sleep(0.01) or begun.append(1)] * 200)
    assert len(ended) == (2 if caller_fails else 1)
    count = len(begun)
    time.sleep(0.1)
    assert len(begun) == count < 203
    assert torch.get_num_threads() == 3
    assert run_in_threads(works(3, [])) == [0, 1, 4]


INTERRUPTED = """
import os, signal, threading, time, torch
from noisygrad.kernels.threads import run_in_threads
torch.set_num_threads(2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has switched off for what runs behind it
meeting, ended = threading.Barrier(2), []

def meet():
    meeting.wait(timeout=30)
    if threading.current_thread() is threading.main_thread():
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return  # and wait for the other
    time.sleep(0.5)
    ended.append(0)

try:
    run_in_threads([meet, meet])
except KeyboardInterrupt:
    assert ended, "it was still at work"
    assert torch.get_num_threads() == 2
else:
    raise AssertionError("nothing was interrupted")
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_an_interrupted_caller_waits_for_its_helpers():
    subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, timeout=120)


def test_autocast_of_the_caller_is_nobodys():
    meeting = threading.Barrier(3)

    def meet():
        meeting.wait(timeout=30)
        return torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", torch.bfloat16):
        assert run_in_threads([meet] * 3) == [False] * 3
        assert torch.is_autocast_enabled("cpu")


def test_work_inside_work_is_done_by_the_same_thread():
    inner = run_in_threads([lambda: run_in_threads([threading.get_ident] * 4) for _ in range(6)])
    assert all(len(set(idents)) == 1 for idents in inner)


FORKED = """
import os, torch
from noisygrad.kernels.threads import run_in_threads
torch.set_num_threads(2)
assert run_in_threads([lambda: 1, lambda: 2]) == [1, 2]  # the helper is there
child = os.fork()
if child == 0:
    os._exit(0 if run_in_threads([lambda: 3, lambda: 4]) == [3, 4] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_process_has_helpers_of_its_own():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)
