"""Every optimiser and the engine of replicas still give the numbers of before: draws, means, posteriors, to 1e-9.

Where a change of results is meant, `golden_make.py` writes the numbers anew.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.golden_make import load, save
from support.golden_runs import RUNS, Arrays, record

TOLERANCE = 1e-9
"""Of the largest number of an array."""
TINY = 1e-13
STORED = load()


def differences(run: str, found: Arrays, stored: Arrays) -> list[str]:
    """What two records of a run differ in, each with the run's and the array's name; NaN differs from everything."""
    faults = [f"{run}: {name!r} is no longer recorded" for name in stored.keys() - found.keys()]
    faults += [f"{run}: {name!r} is not among the stored numbers" for name in found.keys() - stored.keys()]
    for name in sorted(stored.keys() & found.keys()):
        now, then = found[name], stored[name]
        if now.shape != then.shape:
            faults.append(f"{run}: {name!r} has shape {now.shape} and had {then.shape}")
            continue
        largest = float(np.abs(then).max())
        gap = float(np.abs(now - then).max())
        if not gap <= TOLERANCE * largest + TINY:
            faults.append(f"{run}: {name!r} differs by {gap:.2e}, of at most {largest:.2e}")
    return sorted(faults)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_before(run):
    assert differences(run, record(run), STORED[run]) == []


def test_every_run_is_stored_and_every_stored_run_is_made():
    assert list(STORED) == list(RUNS)
    assert all(arrays for arrays in STORED.values())


@pytest.mark.parametrize(("run", "seen"), [("NoisyKFAC attention", "means"), ("engine full", "state mean")])
def test_a_rate_changed_in_its_sixth_digit_is_seen(run, seen):
    faults = differences(run, record(run, lr=lambda lr: lr * (1 + 1e-6)), STORED[run])
    assert any(f"{run}: {seen!r} differs" in fault for fault in faults)


@pytest.mark.parametrize("spoil", ["missing", "more", "shape", "value", "nan"])
def test_what_is_not_the_same_is_reported(spoil):
    stored = {"mean": np.array([1.0, -4.0]), "kl": np.array(0.0)}
    found = {name: array.copy() for name, array in stored.items()}
    assert differences("run", {**found, "mean": found["mean"] + 3e-9}, stored) == []
    if spoil == "missing":
        del found["mean"]
    elif spoil == "more":
        found["mean of all"] = found["mean"]
    elif spoil == "shape":
        found["mean"] = found["mean"][:, None]
    else:
        found["mean"][0] += 5e-9 if spoil == "value" else np.nan
    [fault] = differences("run", found, stored)
    assert fault.startswith("run: 'mean")


def test_numbers_come_back_as_they_were_stored(tmp_path):
    runs = {"one": {"a": np.arange(6.0).reshape(2, 3), "b": np.array(0.1)}, "two": {"a": np.zeros((0, 2))}}
    save(runs, tmp_path / "numbers.npz")
    again = load(tmp_path / "numbers.npz")
    assert list(again) == ["one", "two"]
    for run, arrays in runs.items():
        assert list(again[run]) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(again[run][name], array, strict=True)
