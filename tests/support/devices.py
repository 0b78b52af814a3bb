"""What is made for GPUs, switched on for a CPU: there it gives the same numbers, only slower."""

from collections.abc import Collection

import pytest

from noisygrad.posterior import structure, weights


def follow_memory(monkeypatch: pytest.MonkeyPatch, devices: Collection[str]) -> None:
    """Flat vectors follow the parameters' memory, and copies are staged, on these kinds of device alone."""
    monkeypatch.setattr(structure, "DEVICES", devices)
    monkeypatch.setattr(weights, "DEVICES", devices)
