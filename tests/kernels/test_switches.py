"""A setting that several threads need: the first switches it, the last switches it back."""

import threading

import pytest

from noisygrad.kernels.switches import Switch


def counted():
    state = {"value": "usual", "turned": 0}

    def turn():
        before = state["value"]
        state["value"] = "other"
        state["turned"] += 1
        return lambda: state.update(value=before)

    return state, Switch(turn)


def test_one_inside_another():
    state, switch = counted()
    with switch.on():
        with switch.on():
            assert state == {"value": "other", "turned": 1}
        assert state["value"] == "other"
    assert state == {"value": "usual", "turned": 1}


def test_an_exception_switches_back():
    state, switch = counted()
    with pytest.raises(ValueError, match="no"), switch.on():
        raise ValueError("no")
    assert state["value"] == "usual"


def test_threads_that_leave_in_the_order_in_which_they_came():
    state, switch = counted()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with switch.on():
            inside.set()
            leave.wait(10)
        seen.append(state["value"])

    seen: list[str] = []
    thread = threading.Thread(target=other)
    with switch.on():
        thread.start()
        assert inside.wait(10)
    assert state["value"] == "other"  # the other one is still there
    leave.set()
    thread.join()
    assert seen == ["usual"]
