"""Work side by side: every result in its place, whoever did it, and nothing left changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from noisygrad.curvature.parallel import side_by_side


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
    assert side_by_side(works(count, seen)) == [index * index for index in range(count)]
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

    assert len({*side_by_side([meet] * 3), threading.get_ident()}) == 3


def test_one_after_the_other_where_asked():
    seen = []
    assert side_by_side(works(4, seen), when=False) == [0, 1, 4, 9]
    assert {ident for ident, *_ in seen} == {threading.get_ident()}


@pytest.mark.parametrize("bad", [0, 1, 19])
def test_a_failure_is_raised_after_all_is_quiet(bad):
    done = []

    def work(index):
        if index == bad:
            raise ArithmeticError(f"piece {index}")
        done.append(index)

    with pytest.raises(ArithmeticError, match=f"piece {bad}"):
        side_by_side([lambda index=index: work(index) for index in range(20)])
    assert torch.get_num_threads() == 3
    assert side_by_side(works(3, [])) == [0, 1, 4]


def test_work_inside_work_is_done_by_the_same_thread():
    inner = side_by_side([lambda: side_by_side([threading.get_ident] * 4) for _ in range(6)])
    assert all(len(set(idents)) == 1 for idents in inner)


FORKED = """
import os, torch
from noisygrad.curvature.parallel import side_by_side
torch.set_num_threads(2)
assert side_by_side([lambda: 1, lambda: 2]) == [1, 2]  # the helper is there
child = os.fork()
if child == 0:
    os._exit(0 if side_by_side([lambda: 3, lambda: 4]) == [3, 4] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_process_has_helpers_of_its_own():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)
