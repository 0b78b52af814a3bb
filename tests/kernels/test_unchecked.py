"""Whether matrices are checked is decided by each thread for itself and for those that work for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from noisygrad.kernels.factorisation import FactorisationError, capturing, deferred, inverse_root, unchecked
from noisygrad.kernels.threads import run_in_threads

INDEFINITE = torch.tensor([[1e-4, 0.0], [0.0, -1.0]])


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_thread_inside_leaves_the_checks_of_others_on():
    with unchecked(), ThreadPoolExecutor(1) as other:
        inverse_root(INDEFINITE, 0.0)  # nothing is raised here
        with pytest.raises(FactorisationError):
            other.submit(inverse_root, INDEFINITE, 0.0).result()


def test_checks_are_on_after_two_threads_that_overlapped():
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first():
        with unchecked():
            first_is_in.set()
            assert second_is_in.wait(30)
        first_is_out.set()

    def second():
        assert first_is_in.wait(30)
        with unchecked():
            second_is_in.set()
            assert first_is_out.wait(30)
            assert capturing()  # which the first one's leaving does not end
        return capturing()

    with ThreadPoolExecutor(2) as threads:
        done = threads.submit(first), threads.submit(second)
        done[0].result()
        assert done[1].result() is False
        assert threads.submit(capturing).result() is False
    assert not capturing()
    with pytest.raises(FactorisationError):
        inverse_root(INDEFINITE, 0.0)


def test_the_checks_are_what_they_were_after_an_error():
    def fail(when):
        with unchecked(when):
            assert capturing()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail(True)
    assert not capturing()
    with unchecked():
        with pytest.raises(ArithmeticError):
            fail(False)
        assert capturing()


def test_helpers_of_a_thread_are_as_it_is(three_threads):
    def each(work):
        """By the caller and both helpers, as they wait for one another."""
        meeting = threading.Barrier(3)

        def meet():
            meeting.wait(timeout=30)
            return work()

        return run_in_threads([meet] * 3)

    with unchecked():
        assert each(capturing) == [True] * 3
    assert each(capturing) == [False] * 3
    bad = torch.full((2, 2), torch.nan)
    with deferred() as failures:
        each(lambda: inverse_root(bad, 0.5))
    assert [bool(failure) for failure in failures] == [True] * 3
    with pytest.raises(FactorisationError):
        each(lambda: inverse_root(bad, 0.5))
    assert len(failures) == 3
